"""Sends requests at their instants, or so many at a time, and records what became of each.

Open loop: arrivals follow their own clock, and a late answer delays none of them. How much later than due the generator itself
began a request is recorded as its lag: where that is not small, the machine of the generator was the bottleneck.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from bench.completions import AnswerReader, Asked, Record
from bench.http_exchange import BrokenAnswer, MalformedAnswer, Server, exchange

PATH: Final = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Sender:
    """How each request is sent."""

    server: Server
    is_stream: bool
    timeout_s: float
    on_end: Callable[[Record], None] = lambda _record: None
    tls: ssl.SSLContext | None = None

    async def send(self, asked: Asked, started_at: float, due_at: float) -> Record:
        """Send one request and wait for its end, whatever that is; the instants are time.monotonic's."""
        begun_at = time.monotonic()
        record = Record(
            asked.index,
            asked.prompt_tokens,
            asked.output_tokens,
            arrival_s=due_at - started_at,
            lag_s=begun_at - due_at,
        )
        reader = AnswerReader(self.is_stream, begun_at)

        def on_connected(at: float) -> None:
            record.connect_s = at - begun_at

        request = self.server.post(PATH, asked.body)
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
        record.end_s = time.monotonic() - begun_at
        if status is not None:
            reader.read(record, status)
        self.on_end(record)
        return record


async def run_open_loop(sender: Sender, asked: Sequence[Asked], offsets: Sequence[float]) -> list[Record]:
    """Begin each request at its offset from now, ascending; the records in the requests' order."""
    started_at = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        sends: list[asyncio.Task[Record]] = []
        for each, offset in zip(asked, offsets, strict=True):
            due_at = started_at + offset
            if (wait_s := due_at - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            sends.append(tasks.create_task(sender.send(each, started_at, due_at)))
    return [send.result() for send in sends]


async def run_closed_loop(sender: Sender, asked: Sequence[Asked], concurrency: int) -> list[Record]:
    """Keep `concurrency` requests under way: the next one is due when one ends, so there is no lag to speak of."""
    started_at = time.monotonic()
    waiting = iter(asked)
    records: list[Record] = []

    async def work() -> None:
        for each in waiting:
            records.append(await sender.send(each, started_at, time.monotonic()))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(concurrency, len(asked))):
            tasks.create_task(work())
    return sorted(records, key=lambda record: record.index)
