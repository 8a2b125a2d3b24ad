"""What a decode node may do with leases, written down as lists and searches: the model that the real core is held against.

Attempts have the tokens of their prompt only. Room is not modelled: whether a Reserve finds some is worked out from the pool
before it is asked (lease_world.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from connector.fence import MAX_REST_S, MIN_REST_S
from node.events import RouterId
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey, BranchKey

LIFE_S = 10.0
Code: TypeAlias = "pb.ErrorCode.ValueType"


@dataclass
class NaiveLease:
    """One lease, until no write can touch its blocks any more, or until nobody need be told why it ended."""

    lease_id: int
    keys: tuple[AttemptKey, ...]
    router: RouterId
    open: set[AttemptKey]
    missing: set[int]
    num_own: int  # blocks that are not the prefix cache's
    expires_at: float
    deadline: float
    state: str
    refusal: Code = pb.LEASE_EXPIRED
    choices: tuple[int, ...] = ()  # of its Commit, in that order

    @property
    def is_open(self) -> bool:
        return self.state in ("RESERVED", "FILLED")


@dataclass
class NaiveFloors:
    """Per branch the lowest attempt that is accepted, and until when."""

    floors: dict[BranchKey, tuple[int, float]] = field(default_factory=dict)
    refused: set[AttemptKey] = field(default_factory=set)

    def admits(self, key: AttemptKey) -> bool:
        return key.attempt >= self.floors.get(key.branch, (0, 0.0))[0]

    def was_refused(self, key: AttemptKey) -> bool:
        return key in self.refused and self.floors[key.branch][0] == key.attempt + 1

    def begin(self, key: AttemptKey, deadline: float) -> None:
        floor, until = self.floors.get(key.branch, (0, 0.0))
        self.floors[key.branch] = (max(floor, key.attempt), max(until, deadline + MIN_REST_S))
        self.refused -= {each for each in self.refused if each.branch == key.branch and each.attempt < key.attempt}

    def end(self, key: AttemptKey, deadline: float, now: float) -> None:
        if self.admits(key):
            self.floors[key.branch] = (key.attempt + 1, now + min(max(deadline - now, MIN_REST_S), MAX_REST_S))

    def tick(self, now: float) -> None:
        self.floors = {branch: (floor, until) for branch, (floor, until) in self.floors.items() if until > now}
        self.refused = {key for key in self.refused if key.branch in self.floors}


class NaiveLeases:
    """All leases, running branches and floors of one node."""

    def __init__(self) -> None:
        self.leases: dict[int, NaiveLease] = {}
        self.running: dict[AttemptKey, tuple[RouterId, float]] = {}  # -> router, deadline
        self.lingering: set[AttemptKey] = set()  # that the engine has not let go yet, the running ones among them
        self.floors = NaiveFloors()
        self.revoked: list[int] = []  # by this event, in order
        self.refused: list[Code] = []  # Commits of leases that this event ended
        self.ended: list[AttemptKey] = []  # by this event

    def begin_event(self) -> None:
        self.revoked, self.refused, self.ended = [], [], []

    def key(self, now: float) -> tuple[object, ...]:
        """All that decides what may come: two nodes with equal keys behave alike."""
        leases = []
        for each in self.leases.values():
            sets = (frozenset(each.open), frozenset(each.missing))
            leases.append(
                (each.keys, *sets, each.num_own, each.state, each.refusal, each.choices, each.expires_at - now)
            )
        floors = tuple(sorted((branch, floor, until - now) for branch, (floor, until) in self.floors.floors.items()))
        refused = tuple(sorted(filter(self.floors.was_refused, self.floors.refused)))
        return (tuple(leases), tuple(sorted(self.running)), floors, refused)

    # What is asked

    def holder(self, keys: Iterable[AttemptKey]) -> NaiveLease | None:
        """The lease that has one of these attempts open, the first of them first."""
        for key in keys:
            for lease in self.leases.values():
                if key in lease.open:
                    return lease
        return None

    def reserve(
        self, keys: tuple[AttemptKey, ...], deadline: float, now: float
    ) -> NaiveLease | Code | tuple[AttemptKey, ...]:
        """The lease that the attempt has, why it gets none, or the branches that may get one if there is room."""
        lease = self.holder(keys)
        if lease is not None and lease.keys == keys and lease.is_open:
            return lease
        admitted = tuple(key for key in keys if self.floors.admits(key))
        if lease is not None or any(key in self.lingering for key in keys):
            return pb.CANCELLED
        if not admitted:
            return pb.BUSY if any(map(self.floors.was_refused, keys)) else pb.CANCELLED
        for key in admitted:
            self.floors.begin(key, deadline)
            self.end_below(key, now)
        return admitted

    def no_room(self, admitted: Iterable[AttemptKey], deadline: float, now: float) -> None:
        for key in admitted:
            self.floors.end(key, deadline, now)
            self.floors.refused.add(key)

    def landed(self, lease_id: int, indices: Iterable[int], now: float) -> None:
        lease = self.leases.get(lease_id)
        if lease is not None and lease.state == "RESERVED":
            lease.missing -= set(indices)
            lease.expires_at = now + LIFE_S
            if not lease.missing:
                lease.state = "FILLED"

    def bad_write(self, lease_id: int, code: Code, now: float) -> None:
        lease = self.leases.get(lease_id)
        if lease is not None and lease.is_open:
            lease.refusal = code
        if lease is not None:
            self.give_up(lease, now)

    def renew(self, lease_id: int, now: float) -> bool:
        lease = self.leases.get(lease_id)
        if lease is None or not lease.is_open:
            return False
        lease.expires_at = now + LIFE_S
        return True

    def commit(self, lease_id: int, choices: Sequence[int], now: float) -> Code | None:
        """What the Commit is refused with at once; None: it is taken, or another one was."""
        lease = self.leases.get(lease_id)
        if lease is None:
            return pb.LEASE_EXPIRED
        if lease.state == "COMMITTED":
            return None
        if lease.state == "RESERVED":
            lease.refusal = pb.TRANSFER_FAILED
        if lease.is_open:
            for key in [key for key in lease.keys if key in lease.open and key.choice not in choices]:
                self.close(lease, key, now)
        if lease.state == "FILLED":
            lease.state, lease.choices = "COMMITTED", tuple(choices)
            self.revoked.append(lease_id)
            return None
        self.give_up(lease, now)
        return lease.refusal

    def cancel(self, key: AttemptKey, deadline: float, now: float) -> None:
        self.floors.end(key, deadline, now)
        self.end_below(key._replace(attempt=key.attempt + 1), now)

    def release(self, keys: Iterable[AttemptKey], deadline: float, now: float) -> None:
        for key in keys:
            self.floors.end(key, deadline, now)
            lease = self.holder((key,))
            if lease is not None and lease.is_open:
                self.give_up(lease, now)
            self.end_below(key, now)

    def router_lost(self, router: RouterId, now: float) -> None:
        for lease in [each for each in self.leases.values() if each.router == router]:
            self.give_up(lease, now)
        for key in [key for key, (of, _) in self.running.items() if of == router]:
            self.stop(key, now)

    def quiet(self, lease_id: int, now: float) -> list[AttemptKey]:
        """The attempts that run from now on."""
        lease = self.leases[lease_id]
        if lease.state == "COMMITTED":
            del self.leases[lease_id]
            by_choice = {key.choice: key for key in lease.keys}
            starting = [by_choice[choice] for choice in lease.choices if by_choice[choice] in lease.open]
            self.running |= dict.fromkeys(starting, (lease.router, lease.deadline))
            return starting
        lease.state = "RELEASED"
        if lease.refusal == pb.LEASE_EXPIRED:
            del self.leases[lease_id]
        return []

    def tick(self, now: float) -> list[AttemptKey]:
        """Fire what is due; the running attempts whose deadline has passed."""
        self.floors.tick(now)
        for lease in list(self.leases.values()):
            if lease.is_open and min(lease.expires_at, lease.deadline) <= now:
                self.give_up(lease, now)
            elif lease.state == "RELEASED" and lease.expires_at <= now:
                del self.leases[lease.lease_id]
        late = [key for key, (_, deadline) in self.running.items() if deadline <= now]
        for key in late:
            self.stop(key, now)
        return late

    # What follows

    def end_below(self, key: AttemptKey, now: float) -> None:
        def is_older(other: AttemptKey) -> bool:
            return other.branch == key.branch and other.attempt < key.attempt

        for lease in list(self.leases.values()):
            for older in filter(is_older, tuple(lease.open)):
                self.close(lease, older, now)
        for older in [each for each in self.running if is_older(each)]:
            self.stop(older, now)

    def close(self, lease: NaiveLease, key: AttemptKey, now: float) -> None:
        if lease.open == {key}:
            self.give_up(lease, now)
        else:
            self.end_branch(lease, key, now)

    def give_up(self, lease: NaiveLease, now: float) -> None:
        """The lease is over, unless it was before."""
        if lease.state in ("QUARANTINED", "RELEASED"):
            return
        if lease.state == "COMMITTED":
            self.refused.append(lease.refusal)
        else:
            self.revoked.append(lease.lease_id)
        lease.state = "QUARANTINED"
        for key in tuple(lease.open):
            self.end_branch(lease, key, now)

    def end_branch(self, lease: NaiveLease, key: AttemptKey, now: float) -> None:
        lease.open.discard(key)
        self.floors.end(key, lease.deadline, now)
        self.ended.append(key)

    def stop(self, key: AttemptKey, now: float) -> None:
        _, deadline = self.running.pop(key)
        self.floors.end(key, deadline, now)
        self.ended.append(key)
