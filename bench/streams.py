"""Streams that are watched while they come: each with its tokens, when each event came, and how it ended.

    Watched --start--> N streams under way --after_tokens: every one has said so much--> (a fault) --finish--> StreamRun

Not here: faults (recovery.py); load at a rate (load.py).
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from bench.http_exchange import BrokenAnswer, MalformedAnswer, Server, exchange
from bench.load import PATH

_TIMEOUT_S: Final = 300.0
_ID_PREFIX: Final = "cmpl-"


@dataclass(slots=True)
class StreamRun:
    """What became of one stream. Instants by time.monotonic."""

    prompt_tokens: int
    request_id: str = ""
    token_ids: list[int] = field(default_factory=list)
    events: list[tuple[float, int]] = field(default_factory=list)  # instant, tokens that came with it
    error: str = ""  # empty: it ended as it should, with [DONE]

    def longest_pause(self, since: float, until: float = math.inf) -> tuple[float, float]:
        """The instants before and after the longest time without a token that began by `until` and ended after `since`."""
        instants = [at for at, _ in self.events]
        pauses = [(a, b) for a, b in pairwise(instants) if b > since and a < until]
        return max(pauses, key=lambda pause: pause[1] - pause[0], default=(since, since))

    def tokens_before(self, instant: float) -> int:
        """How many had come by then."""
        return sum(number for at, number in self.events if at <= instant)


class _Reader:
    """Takes a stream's body as it comes; parses it when it has ended, since that would delay other streams' clocks."""

    def __init__(self, heard: asyncio.Event) -> None:
        self.num_events = 0
        self._heard = heard
        self._parts: list[tuple[bytes, float]] = []

    def take(self, data: bytes, now: float) -> None:
        self._parts.append((data, now))
        self.num_events += data.count(b"data:")
        self._heard.set()

    def read(self, run: StreamRun) -> None:
        """Fill the run from what came."""
        is_done, rest = False, b""
        for data, at in self._parts:
            *lines, rest = (rest + data).split(b"\n")
            for line in (line for line in lines if line.startswith(b"data:")):
                is_done = self._take_event(run, line[5:].strip(), at)
        if not is_done and not run.error:
            run.error = "the stream ended without [DONE]"

    def _take_event(self, run: StreamRun, data: bytes, at: float) -> bool:
        """True for the last one."""
        if data == b"[DONE]":
            return True
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            run.error = f"{event['error']['code']}: {event['error']['message']}"
            return False
        run.request_id = str(event["id"]).removeprefix(_ID_PREFIX)
        for choice in event["choices"]:
            token_ids = choice["completion_token_ids"]
            run.token_ids += token_ids
            if token_ids:
                run.events.append((at, len(token_ids)))
        return False


class Watched:
    """Streams that run at the same time. Make and use it on the running loop."""

    def __init__(self, server: Server, bodies: Sequence[dict[str, Any]]) -> None:
        """Each body is a completion's with token ids as its prompt."""
        self._server = server
        self._bodies = bodies
        self._heard = asyncio.Event()  # something came, or a stream has ended
        self._readers = [_Reader(self._heard) for _ in bodies]
        self._runs = [StreamRun(len(body["prompt"])) for body in bodies]
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, num_events: int) -> None:
        """Begin all of them, one as soon as the one before it is answered; returns when each has told so many events."""
        for index, reader in enumerate(self._readers):
            task = asyncio.create_task(self._run(index))
            task.add_done_callback(lambda _: self._heard.set())
            self._tasks.append(task)
            await self._until([reader], 1)
        await self._until(self._readers, num_events)

    async def finish(self) -> list[StreamRun]:
        """Wait for their ends, whatever those are."""
        await asyncio.gather(*self._tasks)
        return self._runs

    async def _until(self, readers: Sequence[_Reader], num_events: int) -> None:
        """Until these have told so many, or nothing runs any more."""
        while any(reader.num_events < num_events for reader in readers) and not all(t.done() for t in self._tasks):
            await self._heard.wait()
            self._heard.clear()

    async def _run(self, index: int) -> None:
        run, reader = self._runs[index], self._readers[index]
        fields = self._bodies[index] | {"stream": True, "return_token_ids": True}
        request = self._server.post(PATH, json.dumps(fields).encode())
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                status = await exchange(self._server, request, reader.take, lambda _: None, None)
            if status != 200:
                run.error = f"status {status}"
        except (TimeoutError, OSError, BrokenAnswer, MalformedAnswer) as error:
            run.error = f"{type(error).__name__}: {error}"
        reader.read(run)
