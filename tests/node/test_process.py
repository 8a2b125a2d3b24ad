"""A node process from its flags to its exit code, on a real model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests import forked

TIMEOUT_S = 100
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}

# What a program begins with that makes a node: no process that stands still is given up for that.
PATIENCE = """
from functools import partial
import connector.accepting, connector.shm_sender, connector.zmq_options, connector.zmq_sender
import node.assembly, node.ending, node.handoff_client, node.incarnation, runtime.registry_client
connector.accepting._HELLO_S = connector.shm_sender._OPEN_S = connector.zmq_options.OPEN_S = connector.zmq_sender.OPEN_S = 60.0
connector.zmq_options.SILENCE_MS = 60_000
node.assembly.NodeLimits = partial(node.assembly.NodeLimits, rpc_timeout_s=60.0)
node.ending.WATCHERS_S = node.handoff_client.CONNECT_TIMEOUT_S = 60.0
node.incarnation.SessionTiming = lambda **_: runtime.session.SessionTiming(silence_s=100.0, grace_s=100.0)
runtime.registry_client._CALL_TIMEOUT_S = 60.0
"""
PATIENT_NODE = f"""{PATIENCE}
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))  # as systems begin with
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""

# A core that asks for a step that no scheduler would plan, or raises by itself: bugs, each in another place.
BUGGY_NODE = """
import sys
import time
from engine.plan import DecodeRow, Decodes, Plan
from node.config import NodeConfig
from node.events import RunStep
from node.process import run_node
from prefill_node.core import PrefillCore
from runtime.config import load

class BuggyCore(PrefillCore):
    def tick(self, now):
        if {where!r} == "core":
            raise LookupError("a bug in the core")
        if {where!r} == "callback":
            import asyncio
            asyncio.get_running_loop().call_soon(int, "a bug in a callback")
        if {where!r} == "step":
            return [RunStep(Plan(0, decodes=Decodes.of(DecodeRow(0, 99, 0, ()))))]
        return []

def make_core(parts):
    return BuggyCore(parts.identity, parts.limits, parts.scheduler, parts.pool, parts.fingerprint, parts.key_seed)

sys.exit(run_node("prefill", load(NodeConfig, "baton prefill", "", sys.argv[1:]), {{"prefill": make_core}}))
"""


def flags(model_dir: Path, *more: str) -> list[str]:
    nobody = "127.0.0.1:9"  # a port that no other test is given
    return ["--model", str(model_dir), "--router", nobody, "--threads", "1", "--num-blocks", "300", *more]


def run(room: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", room, *arguments]
    return forked.run(command, timeout=TIMEOUT_S)


@contextmanager
def running(room: str, arguments: list[str], ready_file: Path) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """A node that is ready, and its ready file's content; its log lies beside that file."""
    command = [sys.executable, "-c", PATIENT_NODE, room, *arguments, "--ready-file", str(ready_file)]
    log_file = ready_file.with_suffix(".log")
    with log_file.open("w") as log, forked.Popen(command, stderr=log, text=True) as process:
        try:
            while not ready_file.exists():
                assert process.poll() is None, log_file.read_text()
                time.sleep(0.01)  # another process makes the file
            yield process, json.loads(ready_file.read_text())
        finally:
            process.kill()


@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
def test_a_node_says_where_it_listens_shows_its_state_and_ends_with_0_on_sigterm(
    role: str, model_dir: Path, tmp_path: Path
) -> None:
    more = ("--block-size", "8", "--num-blocks", "40", "--max-model-len", "256")
    words = ["deploy.node_process", "mixed"] if role == "mixed" else [f"{role}_node"]
    arguments = [*words[1:], *flags(model_dir, *more)]
    with running(words[0], arguments, tmp_path / "ready.json") as (process, ready):
        assert set(ready) == {"node_id", "role", "http", "grpc", "pid"}
        assert (ready["role"], ready["pid"]) == (role, process.pid)
        assert httpx.get(f"http://{ready['http']}/health", timeout=TIMEOUT_S).status_code == 200
        unlisted = httpx.get(f"http://{ready['http']}/ready", timeout=TIMEOUT_S)
        assert unlisted.status_code == 503, "no registry has taken it: who replaces nodes one by one must not go on"
        state = httpx.get(f"http://{ready['http']}/state", timeout=TIMEOUT_S).json()
        assert (state["node_id"], state["role"], state["threads"]) == (ready["node_id"], role, 1)
        assert state["bit_exact"] is True
        assert state["blocks"] == {"free": 40, "cached": 0, "used": 0, "leased": 0, "quarantined": 0}
        assert (state["block_size"], state["max_model_len"]) == (8, 256)
        assert state["fingerprint"]["dtype"] == "fp32"
        assert (state["transport"]["transports"], state["transport"]["links"]) == (["shm", "zmq"], {})
        num_files, most = psutil.Process(process.pid).rlimit(psutil.RLIMIT_NOFILE)
        assert num_files == (1 << 16 if most == psutil.RLIM_INFINITY else min(1 << 16, most))
        host, port = ready["grpc"].split(":")
        socket.create_connection((host, int(port))).close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
def test_a_node_whose_launcher_has_died_ends_before_it_loads(role: str, model_dir: Path) -> None:
    """Loading takes seconds, in which it would compute for nobody."""
    command = [sys.executable, "-X", "importtime", "-m", "deploy.node_process", role, "--parent-pid", "1"]
    ended = subprocess.run(
        [*command, *flags(model_dir)], env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert ended.returncode == 2 and "--parent-pid 1: is not the process that started this one" in ended.stderr
    assert "node.config" in ended.stderr and "torch" not in ended.stderr and "grpc" not in ended.stderr


def test_what_can_be_seen_at_once_is_said_before_torch_is_loaded(model_dir: Path, tmp_path: Path) -> None:
    without_weights = tmp_path / "without_weights"
    without_weights.mkdir()
    shutil.copy(model_dir / "config.json", without_weights)
    for arguments, said in (
        (flags(tmp_path / "nothing"), "nothing/config.json does not exist: a model directory has one"),
        (flags(without_weights), "without_weights has no weights that can be loaded: no model.safetensors and no"),
        (flags(model_dir, "--tp", "3"), "--tp 3: the model's num_key_value_heads 2 cannot be cut into 3 equal parts"),
        (flags(model_dir, "--nonsense"), "--nonsense"),
        (flags(model_dir, "--ready-file", "/no/such/x"), "--ready-file /no/such/x: cannot be written: No such file"),
        (flags(model_dir, "--ready-file", str(tmp_path)), "cannot be written: Is a directory"),
    ):
        command = [sys.executable, "-X", "importtime", "-m", "prefill_node", *arguments]
        ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        imported, told = partition(ended.stderr.splitlines(), "import time:")
        assert ended.returncode == 2, told
        assert len(told) == 1 and told[0].startswith("baton prefill: ") and said in told[0], told
        assert not any(line.endswith((" torch", " grpc")) for line in imported), said


def partition(lines: Iterable[str], beginning: str) -> tuple[list[str], list[str]]:
    """Those that begin so, and the others."""
    parts: tuple[list[str], list[str]] = ([], [])
    for line in lines:
        parts[not line.startswith(beginning)].append(line)
    return parts


def test_what_the_user_can_mend_is_one_line_and_exit_code_2(model_dir: Path, tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        for arguments, named in (
            (flags(model_dir, "--num-blocks", "1"), "--num-blocks 1: 16 tokens"),
            (flags(model_dir, "--num-blocks", "1000000000"), "--num-blocks 1000000000"),
            (flags(model_dir, "--http-port", port), f"--http-port {port}"),
            (flags(model_dir, "--grpc-port", port), f"--grpc-port {port}"),
            (flags(model_dir, "--transport", "zmq", "--kv-port", port), f"--kv-port {port}"),
            (
                flags(model_dir, "--kv-pool", f"file://{tmp_path}/kv", "--kv-pool-staging-mib", str(1 << 30)),
                f"--kv-pool-staging-mib {1 << 30}: there is not so much memory here",
            ),
        ):
            result = run("prefill_node", arguments)
            assert result.returncode == 2, result.stderr
            assert named in result.stderr
            assert result.stderr.count("\n") == 1, result.stderr
            assert result.stderr.startswith("baton prefill: ")


@pytest.mark.parametrize("where", ["step", "core", "callback"])
def test_a_bug_ends_the_process_rather_than_hang_it(where: str, model_dir: Path) -> None:
    command = [sys.executable, "-c", BUGGY_NODE.format(where=where), *flags(model_dir)]
    result = forked.run(command, timeout=TIMEOUT_S)
    assert result.returncode == 1
    sign = {"step": "PlanError", "core": "a bug in the core", "callback": "a bug in a callback"}[where]
    assert sign in result.stderr
    assert result.stdout == ""
