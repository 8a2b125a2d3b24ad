"""What bench.router compares: Baton's router before fake nodes, a peer before mock back ends, uvicorn alone, nothing at all.

Each side is a url for clients, the process ids that count as its own, and a process that says the tokens, which is told the pace
and asked when it said what. Whoever is measured has a core of its own where there are two; all the rest shares the other one.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from bench.cluster import BATON, ClusterProblem, environment_of_a_cluster
from bench.fleet import wait_until
from bench.free_port import free_port
from bench.http_exchange import Server
from bench.router_load import Said, cpu_s, wait_s
from bench.stepping import Pace

_START_S: Final = 60.0
_END_S: Final = 10.0


class Speaker:
    """A process that says tokens (bench.fake_node, bench.mock_backend, bench.sse_floor)."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.told = self._answer()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def set_pace(self, pace: Pace) -> None:
        """Of the streams that come."""
        self._ask({"pace": asdict(pace)})

    def said(self) -> Said:
        """What was said since the last time."""
        return {name: (asked_at, said_at) for name, (asked_at, said_at) in self._ask({"take": True}).items()}

    def _ask(self, what: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ClusterProblem(f"{shlex.join(map(str, self._process.args))} has ended")  # type: ignore[arg-type]
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass(frozen=True, slots=True)
class Side:
    """Something to send requests to."""

    name: str
    server: Server
    model: str
    speaker: Speaker
    pids: Sequence[int]  # of what is measured; their children count, too

    def read_cpu(self) -> dict[str, float]:
        """Of what is measured, of who says the tokens, and of this process; of the first and the last how long they waited, too."""
        own = time.process_time()
        waits = {"router waits": sum(map(wait_s, self.pids)), "client waits": wait_s(os.getpid())}
        return {"router": sum(map(cpu_s, self.pids)), "speaker": cpu_s(self.speaker.pid), "client": own, **waits}


@dataclass(frozen=True, slots=True)
class Cores:
    """Who runs where."""

    mine: tuple[int, ...]  # that we may use

    @staticmethod
    def split() -> Cores:
        """All that there are."""
        return Cores(tuple(sorted(os.sched_getaffinity(0))))

    def measured(self, number: int = 1) -> frozenset[int]:
        """The first so many are for what is measured: beside it nothing else runs on the first, if there are two."""
        return frozenset(self.mine[:number])

    @property
    def rest(self) -> frozenset[int]:
        """For everything else: all but the first."""
        return frozenset(self.mine[1:] or self.mine)

    @contextmanager
    def on(self, cores: frozenset[int]) -> Iterator[None]:
        """What is started within runs on these; this process then on those of the rest."""
        os.sched_setaffinity(0, cores)
        try:
            yield
        finally:
            os.sched_setaffinity(0, self.rest)


class Started:
    """Starts sides, and ends all of their processes with its context."""

    def __init__(self, cores: Cores, stack: ExitStack) -> None:
        self._cores = cores
        self._stack = stack
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-router-")))

    def floor(self) -> Side:
        """uvicorn and FastAPI alone."""
        speaker = self._speaker("bench.sse_floor", [], self._cores.measured())
        return Side("uvicorn", Server.parse(speaker.told["url"]), "m", speaker, [speaker.pid])

    def direct(self) -> Side:
        """The client before a mock back end: what the measurement itself adds."""
        speaker = self._speaker("bench.mock_backend", [], self._cores.rest)
        return Side("direct", Server.parse(speaker.told["url"]), "m", speaker, [speaker.pid])

    def baton(self, model: Path, workers: int, num_decodes: int, token_ids: Sequence[int], name: str) -> Side:
        """A router of so many processes, on as many cores, and its fake nodes."""
        flags = ["--workers", str(workers)] if workers > 1 else []
        ready = self._folder / f"{name}.ready.json"
        command = [BATON, "router", "--model", str(model.absolute()), "--port", "0", "--ready-file", str(ready)]
        command += ["--log-level", "warning", "--parent-pid", str(os.getpid()), *flags]
        router = self._process(name, command, self._cores.measured(workers))
        _wait(f"{name} listens", ready.exists, router, self._folder / f"{name}.log")
        told: dict[str, Any] = json.loads(ready.read_text(encoding="utf-8"))
        nodes = ["--router", told["registry"], "--decode", str(num_decodes)]
        nodes += ["--token-ids", ",".join(map(str, token_ids))]
        speaker = self._speaker("bench.fake_node", nodes, self._cores.rest)
        _wait_until_ok(f"{told['url']}/ready")
        return Side(name, Server.parse(told["url"]), model.absolute().name, speaker, [router.pid])

    def peer(self, command: str) -> Side:
        """Somebody else's router in PD mode before two mock back ends; `command` says {port}, {prefill} and {decode} (urls),
        and {spare} for another free port."""
        prefill = self._speaker("bench.mock_backend", ["--role", "prefill"], self._cores.rest)
        decode = self._speaker("bench.mock_backend", ["--role", "decode"], self._cores.rest)
        port, spare = free_port(), free_port()
        places = {"port": str(port), "spare": str(spare), "prefill": prefill.told["url"], "decode": decode.told["url"]}
        words = [word.format(**places) for word in shlex.split(command)]
        process = self._process("peer", words, self._cores.measured())
        url = f"http://127.0.0.1:{port}"

        def is_up() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        _wait("the peer listens", is_up, process, self._folder / "peer.log")
        _wait("the peer answers", lambda: _answers(url), process, self._folder / "peer.log")
        decode.said()  # forgotten: those were not measured
        return Side("peer", Server.parse(url), "m", decode, [process.pid])

    def _process(self, name: str, command: Sequence[str], cores: frozenset[int]) -> subprocess.Popen[str]:
        log = self._stack.enter_context((self._folder / f"{name}.log").open("w", encoding="utf-8"))
        with self._cores.on(cores):
            process = subprocess.Popen(
                command, stdout=log, stderr=log, text=True, env=environment_of_a_cluster(), cwd=self._folder
            )
        self._stack.callback(_end, process)
        return process

    def _speaker(self, module: str, flags: Sequence[str], cores: frozenset[int]) -> Speaker:
        command = [sys.executable, "-m", module, "--parent-pid", str(os.getpid()), *flags]
        with self._cores.on(cores):
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment_of_a_cluster()
            )
        self._stack.callback(_end, process)
        return Speaker(process)


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _wait(what: str, is_so: Callable[[], bool], process: subprocess.Popen[str], log: Path) -> None:
    def is_so_or_ended() -> bool:
        if process.poll() is not None:
            raise ClusterProblem(f"not so: {what}; it ended, its last words: {log.read_text(encoding='utf-8')[-500:]}")
        return is_so()

    wait_until(what, is_so_or_ended, _START_S)


def _answers(url: str) -> bool:
    body = {"model": "m", "prompt": "x", "max_tokens": 1, "stream": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=_END_S, trust_env=False)
    return answer.status_code == httpx.codes.OK


def _wait_until_ok(url: str) -> None:
    with httpx.Client(trust_env=False) as client:
        wait_until(f"{url} says 200", lambda: client.get(url).status_code == httpx.codes.OK, _START_S)
