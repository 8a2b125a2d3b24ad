"""Streams through a router, all the time so many, and what one window of that time shows: work done, CPU taken, tokens delayed.

A token's delay runs from the instant when whoever stands behind the router said it to the instant when the client read it: both
are time.monotonic's of one host. The window begins when the streams are spread evenly and ends before the last ones do, so that
neither start nor end is in it. Answers are parsed when the run is over, since that would delay others; for the same reason nothing
of the client's is collected meanwhile: it keeps every part of every answer, and a collection would walk over all of them.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Final

from bench.http_exchange import BrokenAnswer, MalformedAnswer, Server, exchange
from bench.load import PATH

_TIMEOUT_S: Final = 60.0
_TICKS_PER_S: Final = 100  # of /proc: USER_HZ, which Linux shows to every process as 100
_UTIME, _STIME = 11, 12  # fields of /proc/PID/stat behind the name, from 0

Said = Mapping[str, tuple[float, Sequence[float]]]  # a stream's name -> when it was asked for, when each token was said


def cpu_s(pid: int) -> float:
    """Processor time that a process and its living children have taken, all threads; in steps of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    own = (int(fields[_UTIME]) + int(fields[_STIME])) / _TICKS_PER_S
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    return own + sum(cpu_s(int(child)) for child in children)


def wait_s(pid: int) -> float:
    """For how long the first threads of a process and its living children were ready to run while somebody else had their cores."""
    waited_ns = int(Path(f"/proc/{pid}/schedstat").read_text(encoding="utf-8").split()[1])
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    return waited_ns / 1e9 + sum(wait_s(int(child)) for child in children)


@dataclass(slots=True, eq=False)
class Heard:
    """One request as its client saw it."""

    begun_at: float
    parts: list[tuple[bytes, float]] = field(default_factory=list)
    error: str = ""

    def tokens(self) -> tuple[str, list[float]]:
        """The stream's name, and when each token was read: a letter of text each. ValueError: it is no whole stream."""
        if self.error:
            raise ValueError(self.error)
        name, instants, is_done, rest = "", list[float](), False, b""
        for data, at in self.parts:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line == b"data: [DONE]":
                    is_done = True
                elif line.startswith(b"data: "):
                    event: dict[str, Any] = json.loads(line[6:])
                    if "error" in event:
                        raise ValueError(str(event["error"]))
                    name = event["id"].partition("-")[2]
                    instants += [at] * sum(len(choice["text"]) for choice in event["choices"])
        if not is_done:
            raise ValueError(f"the stream ended without [DONE]: {self.parts[-1:]}")
        return name, instants


@dataclass(frozen=True, slots=True)
class Shape:
    """One way to load a router."""

    streams: int  # under way at any time
    max_tokens: int  # of each
    step_ms: int  # between a stream's tokens; 0: as fast as can be
    window_s: float


@dataclass(frozen=True, slots=True)
class Window:
    """What happened in it."""

    seconds: float
    cpu_s: dict[str, float]  # by whose; "… waits": wait_s
    num_tokens: int  # said in it
    num_read: int  # by clients in it
    num_requests: int  # asked for in it
    delays_s: list[float]  # of each token said in it
    first_delays_s: list[
        float
    ]  # of each first token of a request begun in it, but for the time that it took behind the router

    @property
    def tokens_per_s(self) -> float:
        """As clients read them."""
        return self.num_read / self.seconds


async def run_window(
    server: Server, model: str, prompt: str, shape: Shape, read_cpu: Callable[[], dict[str, float]]
) -> tuple[list[Heard], float, float, dict[str, float]]:
    """Every request of the run, the window's beginning and end, and the CPU taken in it."""
    fields = {"model": model, "prompt": prompt, "max_tokens": shape.max_tokens, "stream": True}
    request = server.post(PATH, json.dumps(fields | {"ignore_eos": True, "temperature": 0}).encode())
    heard: list[Heard] = []
    spread_s = max(shape.max_tokens * shape.step_ms / 1000, 0.3)
    is_over = asyncio.Event()

    async def keep_one(index: int) -> None:
        await asyncio.sleep(spread_s * index / shape.streams)
        while not is_over.is_set():
            one = Heard(monotonic())
            heard.append(one)
            await _ask(server, request, one)
            if one.error:
                await asyncio.sleep(0.1)

    gc.collect()
    gc.disable()
    try:
        async with asyncio.TaskGroup() as tasks:
            for index in range(shape.streams):
                tasks.create_task(keep_one(index))
            await asyncio.sleep(1.2 * spread_s + 0.2)
            began_at, before = monotonic(), read_cpu()
            await asyncio.sleep(shape.window_s)
            ended_at, after = monotonic(), read_cpu()
            is_over.set()
    finally:
        gc.enable()
    return heard, began_at, ended_at, {name: after[name] - before[name] for name in after}


async def _ask(server: Server, request: bytes, one: Heard) -> None:
    def take(data: bytes, now: float) -> None:
        one.parts.append((data, now))

    try:
        async with asyncio.timeout(_TIMEOUT_S):
            status = await exchange(server, request, take, lambda _at: None, None)
        if status != 200:
            one.error = f"status {status}: {b''.join(part for part, _ in one.parts)[:200].decode('utf-8', 'replace')}"
    except (TimeoutError, OSError, BrokenAnswer, MalformedAnswer) as error:
        one.error = f"{type(error).__name__}: {error}"


def window_of(
    heard: Sequence[Heard], said: Said, began_at: float, ended_at: float, cpu: dict[str, float], max_tokens: int
) -> Window:
    """Reduce a run. ValueError: a stream was not what was said."""
    delays: list[float] = []
    firsts: list[float] = []
    num_requests = num_read = 0
    for one in heard:
        name, read_at = one.tokens()
        asked_at, said_at = said[name]
        if len(read_at) != max_tokens or len(said_at) != max_tokens:
            raise ValueError(f"{name}: {len(said_at)} tokens said, {len(read_at)} read, {max_tokens} asked for")
        num_requests += began_at <= asked_at < ended_at
        num_read += sum(began_at <= at < ended_at for at in read_at)
        delays += [b - a for a, b in zip(said_at, read_at, strict=True) if began_at <= a < ended_at]
        if began_at <= one.begun_at < ended_at:
            firsts.append(read_at[0] - one.begun_at - (said_at[0] - asked_at))
    return Window(ended_at - began_at, cpu, len(delays), num_read, num_requests, delays, firsts)
