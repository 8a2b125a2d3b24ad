"""How many connections to a gRPC port were refused, reckoned from what gRPC's library tells. Pure; the shell is grpc_server.py.

The library says when a connection begins its TLS handshake, not of whom, and who makes a call. It says nothing of a handshake that
fails, so those are what is left: connections over which no call has come for PATIENCE_S. Members call at once, that is what they
connect for; the address that a call comes from tells whether its connection is a new one.

    begun ---- a call from an address that is not known ----> heard (the oldest, whichever it is: only the number matters)
      |
      '------- PATIENCE_S without one ----------------------> refused

While each member calls within PATIENCE_S, what is refused in the end is exactly what was not heard, in whatever order they come.
Both memories are bounded: over the bound, the oldest that waits is refused early, and the caller that was silent longest is
forgotten, whose next call then passes for a new connection's.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

PATIENCE_S: Final = (
    10.0  # many times what a handshake takes between members, whose own calls give up after a few seconds
)
MAX_WAITING: Final = 4096
MAX_CALLERS: Final = 4096


class Unheard:
    """The connections of one port. Each method says how many were refused since the last."""

    def __init__(
        self, patience_s: float = PATIENCE_S, max_waiting: int = MAX_WAITING, max_callers: int = MAX_CALLERS
    ) -> None:
        self._patience_s = patience_s
        self._max_waiting = max_waiting
        self._max_callers = max_callers
        self._waiting: deque[float] = deque()  # when each began, oldest first
        self._callers: OrderedDict[str, None] = OrderedDict()  # by address; who called last is last

    def begin(self, now: float) -> int:
        """A connection begins its handshake."""
        num_refused = self.tick(now)
        self._waiting.append(now)
        if len(self._waiting) > self._max_waiting:
            self._waiting.popleft()
            num_refused += 1
        return num_refused

    def call(self, address: str, now: float) -> int:
        """A call has come from this address (host and port)."""
        num_refused = self.tick(now)
        if address not in self._callers and self._waiting:
            self._waiting.popleft()
        self._callers[address] = None
        self._callers.move_to_end(address)
        if len(self._callers) > self._max_callers:
            self._callers.popitem(last=False)
        return num_refused

    def tick(self, now: float) -> int:
        """Time has passed."""
        num_refused = 0
        while self._waiting and self._waiting[0] + self._patience_s <= now:
            self._waiting.popleft()
            num_refused += 1
        return num_refused

    def next_deadline(self) -> float | None:
        """When the next one is refused, if nobody calls."""
        return self._waiting[0] + self._patience_s if self._waiting else None

    def snapshot(self) -> dict[str, int]:
        """How much is remembered; JSON-able."""
        return {"waiting": len(self._waiting), "callers": len(self._callers)}
