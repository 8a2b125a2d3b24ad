"""Tells in time that a host's certificates end: a line a day from a month before on, and a gauge for an alarm.

Sessions live on with what they were opened with, so nothing shows before the next handshake, of a node that was restarted, say;
then nobody is let in any more. Not here: taking up new files (credentials.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.credentials import Credentials
from runtime.logs import log_event
from runtime.session_driver import surface

_LOG: Final = logging.getLogger(__name__)
DAY_S: Final = 86_400.0
WARNED_S: Final = 30 * DAY_S  # before the end


class CertificateEnd(Collector):
    """The gauge; without certificates there is none."""

    def __init__(self, room: str, ends_at: Callable[[], float | None]) -> None:
        """`room`: router, node; `ends_at` as Credentials has it."""
        self._name = f"baton_{room}_certificate_ends_seconds"
        self._ends_at = ends_at

    def collect(self) -> Iterator[Metric]:
        """As of the files that are in use."""
        if (ends_at := self._ends_at()) is not None:
            text = "when tls.crt of --tls-dir ends, or ca.crt where that is earlier, in Unix time; not there without --tls-dir"
            yield GaugeMetricFamily(self._name, text, ends_at)

    def describe(self) -> Iterable[Metric]:
        """Nothing to collide with: each registry is its owner's."""
        return []


def watch_certificates(credentials: Credentials, started: AsyncExitStack) -> None:
    """Warn of their end, now and each day, as long as `started` is open."""
    task = asyncio.create_task(_keep_watching(credentials), name="end of the certificates")
    task.add_done_callback(surface)
    started.callback(task.cancel)


async def _keep_watching(credentials: Credentials) -> None:
    while True:
        warn_of_end(credentials.ends_at(), time.time())
        await asyncio.sleep(DAY_S)


def warn_of_end(ends_at: float | None, now: float) -> None:
    """Log a line if that is near, or past; both in Unix time."""
    if ends_at is not None and ends_at - now < WARNED_S:
        at = f"{datetime.fromtimestamp(ends_at, UTC):%Y-%m-%dT%H:%M}Z"
        log_event(_LOG, logging.WARNING, "certificate_ends", at=at, days_left=round((ends_at - now) / DAY_S, 1))
