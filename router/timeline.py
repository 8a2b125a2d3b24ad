"""One request as its client saw it: where its time went, and what happened to it on the way. Pure.

Every instant is of the router's clock, every part of a node's time a duration that the node measured itself (node/timing.py). No
two hosts' clocks meet: what lies between a node's parts and the router's own time is what remains, the way there and back.

    arrival --route--> core --queue--> Dispatch --(in vain: retry, queue)--> Dispatch --[node: queue, prefill]--> first token
             what remains of the last stretch: return                    all five together are the time to first token
    first token --[sender: reserve wait] [receiver: admit, first step]--> second token
             what remains: transfer (of a choice that is retried in between: return)

Sums hold by construction; that the parts are true is shown by tests that know better. Until a choice's second token its stretches
are added up as they end; after it only events are noted, so a token that is not the first or the second costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from proto import baton_pb2 as pb

MAX_EVENTS: Final = 256  # of a request; what comes behind is only counted
MAX_ATTEMPTS: Final = 64  # of a choice that are kept: the first, and the newest
ROUTE, QUEUE, RETRY, PREFILL, RETURN = "route", "queue", "retry", "prefill", "return"
RESERVE_WAIT, TRANSFER, ADMIT, FIRST_STEP = "reserve_wait", "transfer", "admit", "first_step"
TO_FIRST: Final = (ROUTE, QUEUE, RETRY, PREFILL, RETURN)
TO_SECOND: Final = (RESERVE_WAIT, TRANSFER, ADMIT, FIRST_STEP)
_MAX_CHUNKS: Final = 64  # kept of an attempt, whatever a node tells
_OF_NODES: Final = (QUEUE, PREFILL, RESERVE_WAIT, ADMIT, FIRST_STEP)  # as in pb.Timing
WELL: Final = frozenset({"stop", "length", "tool_calls"})  # reasons to finish at which nothing has gone wrong
HANDOVERS: Final = frozenset({"handoff", "move"})
MOVE_OFF: Final = "move_off"  # the end of a move that has come to nothing: what was to move has never been there


@dataclass(slots=True)
class Attempt:
    """One attempt of one choice, as the router knows it."""

    number: int
    kind: str  # how its prompt was to be computed (waiting.KINDS), or "move"
    sender: str  # node that computes the prompt, or holds the sequence
    receiver: str  # node that generates
    at: float  # Dispatch, or Move
    ended_at: float | None = None
    end: str | None = None  # PD Error code, finish reason, "moved", or MOVE_OFF
    parts: dict[str, float] = field(default_factory=dict)  # seconds, as its nodes told them
    chunk_ends: tuple[float, ...] = ()  # of the prefill, seconds from its beginning: of all chunks but the last

    @property
    def is_handed_over(self) -> bool:
        """Whether its KV goes from one node to another."""
        return self.kind in HANDOVERS


@dataclass(slots=True)
class Leg:
    """The time to a choice's first token, or from there to its second."""

    begins_at: float
    spent: list[tuple[str, float]] = field(default_factory=list)  # stretches that have ended, in their order
    ends_at: float | None = None
    attempt: Attempt | None = None  # that brought the token
    last_stretch: float = 0.0  # from the end of what is spent to the token
    is_dispatched: bool = False  # that attempt was begun within this leg

    @property
    def seconds(self) -> float | None:
        """All of it; None while it lasts."""
        return None if self.ends_at is None else max(self.ends_at - self.begins_at, 0.0)

    def parts(self) -> dict[str, float]:
        """What it is made of, in seconds: no part is negative, and they add up to `seconds`.

        Its beginning may be later than the instant that its stretches were measured from (the client got the first token late):
        so it is filled from its end.
        """
        total = self.seconds or 0.0
        parts: dict[str, float] = {}

        def take(name: str, wanted: float, most: float) -> float:
            taken = min(wanted, most)
            if taken > 0:
                parts[name] = parts.get(name, 0.0) + taken
            return max(taken, 0.0)

        last = min(self.last_stretch, total)
        told = {} if self.attempt is None else self.attempt.parts
        is_alone = self.attempt is not None and not self.attempt.is_handed_over
        names: tuple[str, ...] = (FIRST_STEP, ADMIT, RESERVE_WAIT)
        rest = TRANSFER
        if self.is_dispatched or self.attempt is None:
            names, rest = (PREFILL, QUEUE), RETURN
        elif is_alone:
            names, rest = (), FIRST_STEP
        left = last
        for name in names:
            left -= take(name, told.get(name, 0.0), left)
        take(rest, left, left)
        left = total - last
        for name, seconds in reversed(self.spent):
            left -= take(name, seconds, left)
        take(rest, left, left)
        return parts


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that happened to a request."""

    at: float
    what: str
    choice: int | None
    attempt: int | None
    nodes: tuple[str, ...]
    code: str


class Track:
    """One choice, until its end."""

    def __init__(self, choice: int, arrived_at: float, submitted_at: float) -> None:
        self.choice = choice
        self.to_first = Leg(arrived_at, [(ROUTE, submitted_at - arrived_at)])
        self.to_second: Leg | None = None
        self.attempts: dict[int, Attempt] = {}
        self.num_attempts = 0
        self.current: Attempt | None = None
        self._move: Attempt | None = None  # that has begun, and nobody knows yet what comes of it
        self.num_tokens = 0  # that were emitted, up to two
        self.finish_reason: str | None = None
        self._mark = submitted_at  # up to here the leg's time is spent

    @property
    def leg(self) -> Leg | None:
        """The one that lasts; None behind the second token."""
        leg = self.to_second or self.to_first
        return leg if leg.ends_at is None else None

    def begin(self, attempt: Attempt) -> None:
        """It was dispatched."""
        self._spend(QUEUE, attempt.at)
        self._add(attempt)
        if (leg := self.leg) is not None:
            leg.is_dispatched = True

    def move(self, attempt: Attempt) -> None:
        """It may go to another node; its current attempt goes on."""
        self.move_off(attempt.at)
        self.attempts[attempt.number] = self._move = attempt
        self.num_attempts += 1

    def moved(self, number: int, now: float) -> None:
        """It has gone there."""
        attempt = self.attempts.get(number)
        if attempt is not None:
            self._move = None if attempt is self._move else self._move
            self._end("moved", now)
            self.current = attempt

    def move_off(self, now: float) -> None:
        """The move that has begun, if one has, comes to nothing."""
        if self._move is not None:
            self._move.ended_at, self._move.end = now, MOVE_OFF
            self._move = None

    def fail(self, code: str, now: float) -> None:
        """Its attempt has come to nothing, and a move of it, too."""
        self.move_off(now)
        self._end(code, now)
        self.current = None
        self._spend(RETRY, now)
        if (leg := self.leg) is not None:
            leg.is_dispatched = False

    def emitted(self, num_tokens: int, now: float) -> bool:
        """Tokens left the core for the client; whether all is known that is to be."""
        for _ in range(min(num_tokens, 2 - self.num_tokens)):
            self.num_tokens += 1
            leg = self.leg
            if leg is None:
                break
            leg.ends_at, leg.attempt, leg.last_stretch = now, self.current, now - self._mark
            self._mark = now
            if leg is self.to_first:
                self.to_second = Leg(now)
        return self.num_tokens >= 2

    def written(self, num_tokens: int, now: float) -> None:
        """So many tokens are on their way to the client, since `now`: what it sees is later than what was emitted."""
        if num_tokens == 1:
            self._lengthen(self.to_first, now)
            if self.to_second is not None:
                self.to_second.begins_at = now
        elif self.to_second is not None:
            self._lengthen(self.to_second, now)

    def finish(self, reason: str, now: float) -> None:
        """It has its end."""
        self.move_off(now)
        self.finish_reason = reason
        self._end(reason, now)

    def _lengthen(self, leg: Leg, now: float) -> None:
        if leg.ends_at is not None:
            leg.last_stretch += now - leg.ends_at
            leg.ends_at = now

    def _end(self, end: str, now: float) -> None:
        if self.current is not None and self.current.ended_at is None:
            self.current.ended_at, self.current.end = now, end

    def _spend(self, name: str, now: float) -> None:
        if (leg := self.leg) is not None:
            leg.spent.append((name, now - self._mark))
            self._mark = now

    def _add(self, attempt: Attempt) -> None:
        self.num_attempts += 1
        self.attempts[attempt.number] = self.current = attempt
        if len(self.attempts) > MAX_ATTEMPTS:
            numbers = list(self.attempts)
            del self.attempts[numbers[1]]


class Record:
    """All that is kept of one request."""

    def __init__(
        self,
        request_id: str,
        client_id: str | None,
        num_prompt_tokens: int,
        num_choices: int,
        arrived_at: float,
        now: float,
    ) -> None:
        self.request_id = request_id
        self.client_id = client_id
        self.num_prompt_tokens = num_prompt_tokens
        self.num_completion_tokens = 0
        self.arrived_at = arrived_at
        self.tracks = [Track(choice, arrived_at, now) for choice in range(num_choices)]
        self.happenings: list[Happening] = []
        self.num_dropped = 0
        self.outcome: str | None = None
        self.ended_at: float | None = None

    @property
    def weight(self) -> int:
        """What it takes of the bound on all records."""
        return 1 + len(self.tracks)

    @property
    def first(self) -> Track:
        """The choice that had its first token first; without any the first one."""
        begun = [track for track in self.tracks if track.to_first.ends_at is not None]
        return min(begun, key=lambda track: track.to_first.ends_at or 0.0, default=self.tracks[0])

    @property
    def ended_well(self) -> bool | None:
        """Whether each of its choices did, which `mixed` does not say; None while it lives."""
        return None if self.outcome is None else all(track.finish_reason in WELL for track in self.tracks)

    def note(
        self,
        what: str,
        now: float,
        choice: int | None = None,
        attempt: int | None = None,
        nodes: Sequence[str] = (),
        code: str = "",
    ) -> None:
        """Something has happened."""
        if len(self.happenings) < MAX_EVENTS:
            self.happenings.append(Happening(now, what, choice, attempt, tuple(nodes), code))
        else:
            self.num_dropped += 1

    def parts(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """Of the choice that was first: the parts of the time to its first token, and to its second; none without one."""
        first, second = self.first.to_first, self.first.to_second
        to_first = {} if first.seconds is None else dict.fromkeys(TO_FIRST, 0.0) | first.parts()
        to_second = {} if second is None or second.seconds is None else dict.fromkeys(TO_SECOND, 0.0) | second.parts()
        return to_first, to_second

    def timed(self, timing: pb.Timing) -> None:
        """A node has told parts of an attempt's time; those of one that is not known any more are left out."""
        track = self.tracks[timing.key.choice] if timing.key.choice < len(self.tracks) else None
        attempt = None if track is None else track.attempts.get(timing.key.attempt)
        if attempt is not None:
            for name in _OF_NODES:
                if micros := getattr(timing, f"{name}_us"):
                    attempt.parts[name] = micros / 1_000_000
            if timing.chunk_end_us:
                attempt.chunk_ends = tuple(micros / 1_000_000 for micros in timing.chunk_end_us[:_MAX_CHUNKS])
