"""A circuit of the KV pool that several threads ask and tell, by the monotonic clock. Its rules are connector/kv_breaker.py's."""

from __future__ import annotations

import logging
import time
from threading import Lock

from connector import kv_breaker as breaker
from node.measures import Measures
from runtime.logs import log_event

LOG = logging.getLogger(__name__)


class PoolCircuit:
    """One way of using the pool, "read" or "write": a full pool that takes nothing can be read all the same."""

    def __init__(self, side: str, timing: breaker.BreakerTiming, measures: Measures) -> None:
        self._side = side
        self._timing = timing
        self._measures = measures
        self._lock = Lock()
        self._circuit: breaker.Circuit = breaker.CLOSED

    @property
    def state(self) -> str:
        """ "closed", "open" or "probing"."""
        return type(self._circuit).__name__.lower()

    def would_let_through(self) -> bool:
        """Whether `ask` would allow a call now."""
        with self._lock:
            return breaker.lets_through(self._circuit, time.monotonic())

    def ask(self) -> bool:
        """Whether a call may be made; if so, one of the three below follows."""
        now = time.monotonic()
        with self._lock:
            if not breaker.lets_through(self._circuit, now):
                return False
            self._circuit = breaker.after_asking(self._circuit, now)
            return True

    def succeeded(self) -> None:
        """The call did what it should."""
        with self._lock:
            was_closed, self._circuit = isinstance(self._circuit, breaker.Closed), breaker.CLOSED
        if not was_closed:
            log_event(LOG, logging.INFO, "kv_pool_back", side=self._side)

    def failed(self, why: str) -> None:
        """The call failed, in one sentence without secrets."""
        with self._lock:
            before = self._circuit
            self._circuit = breaker.after_failure(before, time.monotonic(), self._timing)
            has_opened = isinstance(self._circuit, breaker.Open) and not isinstance(before, breaker.Open)
        if has_opened:
            self._measures.add("kv_pool_circuit_opened", self._side)
            log_event(LOG, logging.WARNING, "kv_pool_left_alone", side=self._side, reason=why)

    def said_nothing(self) -> None:
        """The call told nothing of the pool."""
        with self._lock:
            self._circuit = breaker.after_nothing(self._circuit, time.monotonic())
