"""How much each client may ask for: a bucket of requests and one of tokens by name, filled evenly over the minute. Pure.

    admit(request)  takes 1 of requests        or says how long until there is one
    take(prompt)    takes a prompt's tokens    or says how long until they are there
    owe(completion) takes what was generated, which nobody knew before: the bucket may be overdrawn
    hear(taken)     takes what another process of this router has let in, or generated, a moment ago

Several processes keep one bucket in as many copies: each tells the others what it has taken. What they take in the moment until
they hear of it is too much at once, and paid back: the copies are overdrawn.

A bucket holds a minute's worth: who has been quiet may ask for that much at once. So in any time t a client gets at most
limit × (1 + t / 60 s) requests; of tokens that many, besides what it had running. A prompt that is longer than the bucket is let in
when the bucket is full: else it would never be.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from router.api_keys import Client

What = Literal["requests", "tokens"]
MINUTE_S: Final = 60.0
_ROUNDING: Final = 1e-6  # of one request or token: sums of fractions are not exact


@dataclass(frozen=True, slots=True)
class Over:
    """The client must wait."""

    what: What
    limit: int  # a minute
    retry_after_s: float  # there is room then, if it asks for nothing else meanwhile


@dataclass(frozen=True, slots=True)
class Taken:
    """What was taken from a client's bucket."""

    name: str
    what: What
    amount: int
    limit: int  # a minute


@dataclass(slots=True)
class _Bucket:
    level: float
    at: float
    limit: int  # of the last to ask

    def fill(self, limit: int, now: float) -> None:
        """Let time pass; a clock that stands still or a limit that has shrunk does no harm."""
        gained = max(now - self.at, 0.0) * limit / MINUTE_S
        self.level, self.at, self.limit = min(self.level + gained, float(limit)), max(now, self.at), limit

    def is_full(self, now: float) -> bool:
        """It is as a new one would be."""
        self.fill(self.limit, now)
        return self.level > self.limit - _ROUNDING


class RateLimits:
    """The buckets of all clients that have limits; `now` is an instant of one clock that never goes back, in seconds."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, What], _Bucket] = {}

    def admit(self, client: Client, now: float) -> Over | None:
        """Take one request; over the limit nothing is taken."""
        return self._take(client.name, "requests", client.requests_per_minute, 1, now)

    def take(self, client: Client, num_tokens: int, now: float) -> Over | None:
        """Take a prompt's tokens; over the limit nothing is taken."""
        return self._take(client.name, "tokens", client.tokens_per_minute, num_tokens, now)

    def owe(self, client: Client, num_tokens: int, now: float) -> None:
        """Take what was generated."""
        if client.tokens_per_minute is not None:
            self._bucket(client.name, "tokens", client.tokens_per_minute, now).level -= num_tokens

    def hear(self, taken: Taken, now: float) -> None:
        """Take what another process took."""
        self._bucket(taken.name, taken.what, taken.limit, now).level -= taken.amount

    def keep(self, names: Iterable[str], now: float) -> None:
        """Forget whoever has none of these names and owes nothing: a file that missed one for a moment empties no debt."""
        known = frozenset(names)
        buckets = self._buckets.items()
        self._buckets = {key: bucket for key, bucket in buckets if key[0] in known or not bucket.is_full(now)}

    def __len__(self) -> int:
        return len(self._buckets)

    def _take(self, name: str, what: What, limit: int | None, amount: int, now: float) -> Over | None:
        if limit is None:
            return None
        bucket = self._bucket(name, what, limit, now)
        missing = min(amount, limit) - bucket.level
        if missing > _ROUNDING:
            return Over(what, limit, missing * MINUTE_S / limit)
        bucket.level -= amount
        return None

    def _bucket(self, name: str, what: What, limit: int, now: float) -> _Bucket:
        bucket = self._buckets.setdefault((name, what), _Bucket(float(limit), now, limit))
        bucket.fill(limit, now)
        return bucket
