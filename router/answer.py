"""One request's way from the core to its HTTP handler: tokens as they come, then one end.

The core's shell puts, the handler takes; both run on the loop. What arrived while the handler was busy is taken together, so
a slow client gets fewer and larger chunks instead of a longer queue; the queue is bounded by the request's max_tokens.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from router.events import Failed, Finished, GenerationRequest


@dataclass(frozen=True, slots=True)
class ClientGone:
    """Nobody reads the answer any more."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """What only the log and the metrics want to know of a request."""

    at: float  # an instant of the loop's clock, in seconds
    client_request_id: str | None  # the client's own name for it


End = Finished | Failed | ClientGone


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens, at least one or an end; nothing follows an end."""

    token_ids: list[int]
    end: End | None


class Answer:
    """Handle of one request, from Submitted to its end."""

    __slots__ = ("_end", "_token_ids", "_waiter", "arrival", "first_token_at", "num_tokens", "request")

    def __init__(self, request: GenerationRequest, arrival: Arrival) -> None:
        self.request = request
        self.arrival = arrival
        self.first_token_at: float | None = None
        self.num_tokens = 0
        self._token_ids: list[int] = []
        self._end: End | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, token_ids: tuple[int, ...], now: float) -> None:
        """More tokens."""
        if self.first_token_at is None:
            self.first_token_at = now
        self.num_tokens += len(token_ids)
        self._token_ids += token_ids
        self._wake()

    def finish(self, end: End) -> None:
        """The end; of several only the first counts."""
        if self._end is None:
            self._end = end
            self._wake()

    async def take(self) -> Piece:
        """What is new; waits for it."""
        while not self._token_ids and self._end is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        token_ids, self._token_ids = self._token_ids, []
        return Piece(token_ids, self._end)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
