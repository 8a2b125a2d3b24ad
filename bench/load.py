"""Sends requests at their instants, or so many at a time, and records what became of each.

Open loop: arrivals follow their own clock, and a late answer delays none of them. How much later than due the generator itself
began a request is recorded as its lag: where that is not small, the machine of the generator was the bottleneck. Requests are taken
from their iterator one ahead, while the loop would wait, so that making their text delays nobody's clock and holds no memory.
A `Halt` ends a run early: nothing more is sent, what is under way is given up, and both stand in the records.
"""

from __future__ import annotations

import asyncio
import math
import ssl
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from bench.completions import PATHS, AnswerReader, Asked, Record
from bench.http_exchange import BrokenAnswer, MalformedAnswer, Server, exchange

PATH: Final = PATHS["completions"]
INTERRUPTED: Final = "interrupted"
_TURN: Final = 64  # requests


class Watcher(Protocol):
    """Who is told how the run goes."""

    def begun(self) -> None:
        """One more request is under way."""

    def ended(self, record: Record) -> None:
        """One has ended, well or not."""


class Halt:
    """An early end of a run, which may never be asked for. Make and use it on the running loop."""

    def __init__(self) -> None:
        self._asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def ask(self) -> None:
        """End it; again: nothing more."""
        if not self._asked.done():
            self._asked.set_result(None)

    @property
    def is_asked(self) -> bool:
        """Whether it ends."""
        return self._asked.done()

    async def sleep(self, seconds: float) -> None:
        """So long at most."""
        await asyncio.wait({self._asked}, timeout=seconds)

    async def finish(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Wait until all have ended; if this is asked for, cancel them. A task's own exception is left to its group."""
        ended = asyncio.gather(*tasks, return_exceptions=True)
        waited: set[asyncio.Future[Any]] = {self._asked, ended}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if self.is_asked:
            for task in tasks:
                task.cancel()
        await ended


@dataclass(frozen=True, slots=True)
class Sender:
    """How each request is sent."""

    server: Server
    is_stream: bool
    timeout_s: float
    watcher: Watcher | None = None
    tls: ssl.SSLContext | None = None
    api_key: str | None = None
    path: str = PATH

    async def send(self, asked: Asked, record: Record) -> None:
        """Send one request and wait for its end, whatever that is: the record is filled, also when this is cancelled."""
        begun_at = time.monotonic()
        reader = AnswerReader(self.is_stream, begun_at)

        def on_connected(at: float) -> None:
            record.connect_s = at - begun_at

        request = self.server.post(self.path, asked.body, self.api_key)
        status: int | None = None
        try:
            async with asyncio.timeout(self.timeout_s):
                status = await exchange(self.server, request, reader.take, on_connected, self.tls)
        except TimeoutError:
            record.status, record.error = "timeout", f"no complete answer within {self.timeout_s:g} s"
        except OSError as error:
            record.status, record.error = "connect", str(error)
        except BrokenAnswer as error:
            record.status, record.error = "broken", str(error)
        except MalformedAnswer as error:
            record.status, record.error = "malformed", str(error)
        except asyncio.CancelledError:
            record.error = "given up when the run was ended"
            raise
        finally:
            record.end_s = time.monotonic() - begun_at
            if status is not None:
                reader.read(record, status)
            if self.watcher is not None:
                self.watcher.ended(record)

    def begin(self, asked: Asked, started_at: float, due_at: float) -> Record:
        """The record of a request that is sent now; instants by time.monotonic. Until it has ended it counts as interrupted."""
        if self.watcher is not None:
            self.watcher.begun()
        return Record(
            asked.index,
            asked.prompt_tokens,
            asked.output_tokens,
            arrival_s=due_at - started_at,
            lag_s=time.monotonic() - due_at,
            status=INTERRUPTED,
        )


async def run_open_loop(
    sender: Sender, asked: Iterable[Asked], offsets: Iterable[float], halt: Halt | None = None
) -> list[Record]:
    """Begin each request at its offset from now, ascending; the records of all that were begun, in the requests' order."""
    halt = halt or Halt()
    records: list[Record] = []
    started_at = time.monotonic()
    async with asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[None]] = []
        for each, offset in zip(asked, offsets, strict=True):
            due_at = started_at + offset
            if (wait_s := due_at - time.monotonic()) > 0:
                await halt.sleep(wait_s)
            elif len(tasks) % _TURN == 0:
                await asyncio.sleep(0)  # where all are due at once, the first ones' connecting goes on meanwhile
            if halt.is_asked:
                break
            records.append(sender.begin(each, started_at, due_at))
            tasks.append(group.create_task(_send_due(sender, each, records[-1], due_at)))
        if tasks:
            await halt.finish(tasks)
    return records


async def _send_due(sender: Sender, each: Asked, record: Record, due_at: float) -> None:
    """Those that are begun at once have each other's texts to wait for, which is lateness, too."""
    record.lag_s = time.monotonic() - due_at
    await sender.send(each, record)


async def run_closed_loop(
    sender: Sender,
    asked: Iterable[Asked],
    concurrency: int,
    halt: Halt | None = None,
    duration_s: float = math.inf,
) -> list[Record]:
    """Keep `concurrency` requests under way: the next one is due when one ends, so there is no lag to speak of.

    After `duration_s` nothing new is begun.
    """
    halt = halt or Halt()
    started_at = time.monotonic()
    waiting = iter(asked)
    records: list[Record] = []

    async def work() -> None:
        while not halt.is_asked and (now := time.monotonic()) - started_at < duration_s:
            each = next(waiting, None)
            if each is None:
                return
            records.append(sender.begin(each, started_at, now))
            await sender.send(each, records[-1])

    async with asyncio.TaskGroup() as group:
        await halt.finish([group.create_task(work()) for _ in range(concurrency)])
    return sorted(records, key=lambda record: record.index)
