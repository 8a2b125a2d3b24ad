"""Streams that go on by themselves, a token a step, for what takes a model's place behind a router (or in it).

Streams are in groups; a group says a token of each of its streams once a step, all at once, as a decode node's step does. Groups
are spread evenly over the step, and each says its tokens at an instant of its own: nodes share no clock. Whoever started the
process steers it by lines of JSON on its stdin, and asks there when each token was said: instants of time.monotonic, which all
processes of a host share. Not here: how a token is said.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bench.fine_timer import FineTimer

_TICK_S: Final = 0.001
_NEVER: Final = 1 << 30  # walks to one that looks further
_GOLDEN: Final = 0.618033988749895  # multiples of it, modulo 1, are spread evenly however many there are


@dataclass(slots=True, eq=False)
class Stream:
    """One completion under way."""

    name: str
    max_tokens: int
    asked_at: float
    handle: Any = None  # the speaker's own
    said_at: list[float] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """All of it has been said."""
        return len(self.said_at) >= self.max_tokens


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast streams go on."""

    step_ms: int = 10  # 0: as fast as the speaker lets them
    group: int = 8  # streams of one step, at most


@dataclass(slots=True, eq=False)
class _Group:
    kind: str
    due_at: float
    streams: list[Stream]


class Stepper:
    """All streams of one process. `say` gets a group's streams, each with its new token's instant noted already."""

    def __init__(self, say: Callable[[Sequence[Stream]], None], is_full: Callable[[], bool] = lambda: False) -> None:
        """`is_full`: whether whoever hears the tokens is behind; asked where no step sets the pace."""
        self._say = say
        self._is_full = is_full
        self._pace = Pace()
        self._groups: list[_Group] = []
        self._group_of: dict[str, _Group] = {}
        self._num_groups = 0  # that there ever were
        self._wake = asyncio.Event()
        self._log: list[Stream] = []

    def set_pace(self, pace: Pace) -> None:
        """From the next stream on; to be set while there is none."""
        self._pace = pace

    @property
    def group(self) -> int:
        """Streams of one step, at most."""
        return self._pace.group

    def note(self, stream: Stream) -> None:
        """Keep it for `taken`."""
        self._log.append(stream)

    def add(self, stream: Stream, kind: str = "") -> None:
        """Let a stream go on; streams of different kinds share no group."""
        group = next((g for g in self._groups if g.kind == kind and len(g.streams) < self._pace.group), None)
        if group is None:
            group = _Group(kind, first_due(self._num_groups, self._pace.step_ms / 1000, time.monotonic()), [])
            self._num_groups += 1
            self._groups.append(group)
        group.streams.append(stream)
        self._group_of[stream.name] = group
        self._wake.set()

    def remove(self, name: str) -> None:
        """End a stream before its time, if it is there."""
        group = self._group_of.pop(name, None)
        if group is not None:
            group.streams = [stream for stream in group.streams if stream.name != name]
            self._drop_if_empty(group)

    def taken(self) -> list[Stream]:
        """Every stream noted since the last time."""
        log, self._log = self._log, []
        return log

    async def run(self) -> None:
        """Step for ever."""
        timer = FineTimer()
        try:
            while True:
                if not self._groups:
                    self._wake.clear()
                    await self._wake.wait()
                elif self._pace.step_ms == 0:
                    await self._pour()
                else:
                    await self._step_those_due(timer)
        finally:
            timer.close()

    async def _pour(self) -> None:
        for group in list(self._groups):
            if self._is_full():
                await asyncio.sleep(_TICK_S)
            self._step(group)
        await asyncio.sleep(0)

    async def _step_those_due(self, timer: FineTimer) -> None:
        step_s, now = self._pace.step_ms / 1000, time.monotonic()
        for group in [group for group in self._groups if group.due_at <= now]:
            self._step(group)
            group.due_at = next_due(group.due_at, step_s, now)
        # Not beyond a tick: a group that comes meanwhile may be due before all others.
        await timer.sleep_until(min([now + _TICK_S, *(group.due_at for group in self._groups)]))

    def _step(self, group: _Group) -> None:
        now, streams = time.monotonic(), group.streams
        if not streams:
            return
        for stream in streams:
            stream.said_at.append(now)
        self._say(streams)
        if any(stream.is_over for stream in streams):
            for stream in streams:
                if stream.is_over:
                    self._group_of.pop(stream.name, None)
            group.streams = [stream for stream in streams if not stream.is_over]
            self._drop_if_empty(group)

    def _drop_if_empty(self, group: _Group) -> None:
        if not group.streams and group in self._groups:
            self._groups.remove(group)


def first_due(number: int, step_s: float, now: float) -> float:
    """When the group with this number steps first: behind `now`, at its own place in every step since the clock began."""
    place = number * _GOLDEN % 1
    return (math.floor(now / step_s - place) + 1 + place) * step_s if step_s else now


def next_due(due_at: float, step_s: float, now: float) -> float:
    """When a group that was due then steps next. Steps that are missed are left out, as if the clock had not been: were all late
    groups due at once, they would be so for ever after, and their tokens come in bursts of this process's making."""
    return due_at + step_s * max(1, math.ceil((now - due_at) / step_s))


async def obey(stepper: Stepper, told: dict[str, Any]) -> None:
    """Say `told` on stdout, then do what each line on stdin says, until it closes.

    Walks for cycles over more than what is young, which stop the process for milliseconds, are made between the streams alone, as
    the router does.
    """
    gc.set_threshold(gc.get_threshold()[0], _NEVER, _NEVER)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    _answer(told)
    while line := await reader.readline():
        asked = json.loads(line)
        if "pace" in asked:
            stepper.set_pace(Pace(**asked["pace"]))
            gc.collect()
            _answer({})
        else:
            _answer({each.name: [each.asked_at, each.said_at] for each in stepper.taken()})


def _answer(content: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(content, separators=(",", ":")) + "\n")
    sys.stdout.flush()
