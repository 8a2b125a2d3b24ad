"""Starts Baton's peers and Baton, all on loopback, each ready when its context is entered and gone when it is left.

While one is measured the others' processes are stopped (SIGSTOP), so that their idle threads take nothing; Baton's are not, for its
nodes would be taken for dead: they cost about a hundredth of a core. Not here: installing (peers_install.py), load (peers.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import httpx

from bench.cluster import Settings, started_cluster
from bench.free_port import free_port
from runtime.config import child_environment

START_LIMIT_S: Final = 400.0
_TCMALLOC: Final = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")

Weights = Literal["bf16", "int8"]


class PeerProblem(Exception):
    """A peer did not start; the message is one sentence with its last line."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What all are started for."""

    threads: int
    clients: int  # at once, at most
    max_model_len: int
    weights: Weights


@dataclass(frozen=True, slots=True)
class Peer:
    """A running server, or a program that is asked over its input."""

    name: str
    url: str  # "" of such a program
    process: subprocess.Popen[str] | None  # None: never stopped

    def send(self, number: signal.Signals) -> None:
        """To all its processes."""
        if self.process is not None:
            os.killpg(self.process.pid, number)


@contextmanager
def baton(model: Path, sizes: Sizes) -> Iterator[Peer]:
    """One mixed node behind a router."""
    blocks = sizes.clients * -(-sizes.max_model_len // 16)
    mixed: dict[str, int | str] = {
        "num_blocks": blocks + blocks // 2,  # prompts of a round stay cached, as the others' do
        "max_num_seqs": sizes.clients,
        "max_model_len": sizes.max_model_len,
        "weight_dtype": "int8" if sizes.weights == "int8" else "auto",
    }
    up: dict[str, int | str] = {"prefill": 0, "decode": 0, "mixed": 1, "threads": sizes.threads}
    roles: Mapping[str, Settings] = {"up": up, "mixed": mixed}
    with started_cluster(model, roles) as cluster:
        yield Peer("Baton", cluster.url, None)


@contextmanager
def vllm(envs: Path, model: Path, sizes: Sizes) -> Iterator[Peer]:
    """vLLM's CPU build; it has no weights of 8 bits without files of their own, so they are always bf16."""
    place, port = envs / "vllm", free_port()
    preload = [str(path) for path in (_TCMALLOC, place / "lib" / "libiomp5.so") if path.exists()]
    environment = child_environment() | {
        "LD_PRELOAD": ":".join(preload),
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "3",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{sizes.threads - 1}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [str(place / "bin" / "vllm"), "serve", str(model.absolute()), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "bfloat16", "--max-model-len", str(sizes.max_model_len), "--served-model-name", "m"]
    command += ["--max-num-seqs", str(sizes.clients)]
    with _server("vLLM", command, environment, port) as peer:
        yield peer


@contextmanager
def llama_cpp(envs: Path, model: Path, sizes: Sizes) -> Iterator[Peer]:
    """llama.cpp's server on the model as GGUF, in bf16 or q8_0."""
    place, port = envs / "llama", free_port()
    form = "q8_0" if sizes.weights == "int8" else "bf16"
    with tempfile.TemporaryDirectory(prefix="baton-peers-") as folder:
        gguf = Path(folder, f"{form}.gguf")
        converter = Path(__file__).with_name("peers_gguf.py")
        convert = [str(place / "bin" / "python"), str(converter), str(model), str(gguf), form]
        result = subprocess.run(convert, env=child_environment(), capture_output=True, text=True, check=False)
        if result.returncode:
            raise PeerProblem(f"llama.cpp: the model cannot be converted: {_last_line(result.stderr)}")
        context = sizes.clients * sizes.max_model_len
        command = [str(place / "bin" / "llama-server"), "-m", str(gguf), "--host", "127.0.0.1", "--port", str(port)]
        command += ["-t", str(sizes.threads), "-tb", str(sizes.threads), "-np", str(sizes.clients), "-c", str(context)]
        command += ["--no-webui"]
        with _server("llama.cpp", command, child_environment(), port) as peer:
            yield peer


@contextmanager
def transformers(model: Path, sizes: Sizes) -> Iterator[Peer]:
    """A program of ours (peers_transformers.py); asked by `answer_of`."""
    command = [sys.executable, "-m", "bench.peers_transformers", "--model", str(model.absolute())]
    command += ["--threads", str(sizes.threads)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=child_environment(),
        cwd=Path(__file__).parents[1],
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline().strip() != "ready":
                raise PeerProblem("transformers: did not start")
            yield Peer("transformers", "", process)
        finally:
            _kill(process)


def answer_of(peer: Peer, question: str) -> float:
    """Seconds. Raises PeerProblem."""
    assert peer.process is not None and peer.process.stdin is not None and peer.process.stdout is not None
    peer.process.stdin.write(f"{question}\n")
    peer.process.stdin.flush()
    line = peer.process.stdout.readline()
    if not line:
        raise PeerProblem(f"{peer.name}: ended at `{question}`")
    return float(line)


@contextmanager
def _server(name: str, command: list[str], environment: dict[str, str], port: int) -> Iterator[Peer]:
    url = f"http://127.0.0.1:{port}"
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log,
        subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
        ) as process,
    ):
        try:
            if not _is_up(process, url):
                log.seek(0)
                raise PeerProblem(f"{name} did not start: {_last_line(log.read())}")
            yield Peer(name, url, process)
        finally:
            _kill(process)


def _is_up(process: subprocess.Popen[str], url: str) -> bool:
    deadline = time.monotonic() + START_LIMIT_S
    with httpx.Client(trust_env=False, timeout=5) as client:
        while process.poll() is None and time.monotonic() < deadline:
            if _answers(client, f"{url}/health"):
                return True
            time.sleep(0.5)
    return False


def _answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # of a stopped one, too


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
