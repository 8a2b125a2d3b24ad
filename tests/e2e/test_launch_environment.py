"""`baton up` where variables are set that are for one process, that its flags take back, or that nobody reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from bench.free_port import free_port
from runtime.config import child_environment
from tests.e2e.cluster import HANDOFFS_ONLY, started_cluster
from tests.plain_http import NO_CERTIFICATES


def test_flags_win_over_variables_and_two_nodes_have_ports_of_their_own(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"KV_PORT": str(free_port()), "ADVERTISE": "192.0.2.1", "WORKERS": "2", "API_KEYS": str(tmp_path / "k")}
    for name, value in variables.items():
        monkeypatch.setitem(HANDOFFS_ONLY, f"BATON_{name}", value)
    flags = ("--workers", "1", "--api-keys", "none")
    with started_cluster(tiny_model, tmp_path, *flags) as cluster:
        assert len(cluster.nodes) == 2 and all(node["grpc"].startswith("127.0.0.1:") for node in cluster.nodes)
        assert not psutil.Process(cluster.router_pid).children()
        body = {"model": tiny_model.name, "prompt": "Once", "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60, verify=NO_CERTIFICATES)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("module", ["router", "decode_node"])
def test_a_process_logs_them_before_it_can_fail(module: str, tiny_model: Path) -> None:
    """At an address that is not here, with sizes that are too small."""
    command = [sys.executable, "-m", module, "--model", str(tiny_model)]
    command += ["--host", "192.0.2.1"] if module == "router" else ["--num-blocks", "1", "--router", "127.0.0.1:1"]
    environment = child_environment() | {"BATON_NUM_BLOCK": "9", "BATON_API_KEY": "sk-0123456789abcdef"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    told = [line.partition("unknown_variable ")[2] for line in done.stderr.splitlines() if "unknown_variable" in line]
    keys = ["name=BATON_API_KEY did_you_mean=BATON_API_KEYS"] if module == "router" else []
    assert done.returncode in (2, 75) and told == [*keys, "name=BATON_NUM_BLOCK did_you_mean=BATON_NUM_BLOCKS"], (
        done.stderr
    )


def test_baton_up_tells_the_terminal_and_no_child_repeats_it(tiny_model: Path, tmp_path: Path) -> None:
    with started_cluster(tiny_model, tmp_path, environment={"BATON_NUM_BLOCK": "9"}) as cluster:
        told = [line for line in cluster.lines if "unknown_variable" in line]
        assert told == ["baton up: warning: unknown_variable name=BATON_NUM_BLOCK did_you_mean=BATON_NUM_BLOCKS"]
        assert not any("unknown_variable" in each.read_text() for each in cluster.run_dir.glob("*.log"))
