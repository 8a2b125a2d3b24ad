"""Circuit breaking: a node that keeps failing is left alone for a while, then tried with one attempt. Pure.

    Closed ──so many requests in a row fail──> Open ──its time is over, one attempt placed──> Probing
       ^                                        ^                                             │  │  │
       └──────────────an attempt succeeds───────┼─────────────────────────────────────────────┘  │  │
                                                ├──fails: twice as long─────────────────────────-┘  │
                                                └──ends and says nothing: at once again─────────────┘

What counts is requests, not attempts: one that no node can serve takes none out of service. A node is known here by its name, so
that one that dies at every start is one that fails. Its success, an attempt that it has handed over or begun to decode, closes the
circuit in every state. Refusals for want of room are no failures. That a role without any other node uses the least bad one is
waiting.py's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeVar

from proto.attempt_key import BranchKey

_MAX_NODES: Final = 1024  # whose failures are remembered; names of nodes that never come back are forgotten so


@dataclass(frozen=True, slots=True)
class Closed:
    """In use."""

    failed: frozenset[str] = frozenset()  # what failed there since its last success: request ids, losses


@dataclass(frozen=True, slots=True)
class Open:
    """Left alone; from `until` on one attempt may try it."""

    until: float
    trips: int  # since its last success


@dataclass(frozen=True, slots=True)
class Probing:
    """One attempt tries it."""

    key: BranchKey
    trips: int


Tripped = Open | Probing
Circuit = Closed | Tripped
_Kept = TypeVar("_Kept", Closed, Tripped)
CLOSED: Final = Closed()


@dataclass(frozen=True, slots=True)
class BreakerTiming:
    """When a circuit opens, and for how long."""

    num_failures: int = 5  # requests in a row
    first_s: float = 1.0
    longest_s: float = 60.0

    def until(self, now: float, trips: int) -> float:
        """The end of the `trips`-th time in a row."""
        most_s: float = self.first_s * 2 ** min(trips - 1, 20)
        return now + min(most_s, self.longest_s)


def after_failure(circuit: Circuit, what: str, now: float, timing: BreakerTiming) -> Circuit:
    """An attempt failed at the node, or the node itself did."""
    match circuit:
        case Closed(failed):
            failed |= {what}
            return Closed(failed) if len(failed) < timing.num_failures else Open(timing.until(now, 1), 1)
        case Probing(_, trips):
            return Open(timing.until(now, trips + 1), trips + 1)
        case Open():
            return circuit  # of an attempt from before, or of one that had no choice


def after_placing(circuit: Circuit, key: BranchKey, now: float) -> Circuit:
    """An attempt is sent to the node."""
    return Probing(key, circuit.trips) if isinstance(circuit, Open) and circuit.until <= now else circuit


def after_leaving(circuit: Circuit, key: BranchKey, now: float) -> Circuit:
    """A branch is there no more, and neither success nor failure was told before."""
    return Open(now, circuit.trips) if isinstance(circuit, Probing) and circuit.key == key else circuit


def is_avoided(circuit: Circuit, now: float) -> bool:
    """Whether nobody should be sent there now."""
    return isinstance(circuit, Probing) or (isinstance(circuit, Open) and now < circuit.until)


class Breakers:
    """The circuits of all nodes, by name."""

    def __init__(self, timing: BreakerTiming) -> None:
        self._timing = timing
        # By name, each in one of them at most; who is in neither has not failed since its last success. Those that are left alone
        # are few, and asked for at every event; those that failed once may be all that a network ever had.
        self._failed: dict[str, Closed] = {}
        self._tripped: dict[str, Tripped] = {}
        self._roles: dict[str, int] = {}  # in which each was listed last

    def listed(self, name: str, role: int) -> None:
        """Note the role in which a node is to be used: what it failed at in another one is not held against it."""
        if self._roles.pop(name, role) != role:
            self.succeeded(name)  # or as good as that
        elif len(self._roles) >= _MAX_NODES:
            del self._roles[next(iter(self._roles))]
        self._roles[name] = role

    def failed(self, name: str, what: str, now: float) -> bool:
        """Note a failure; True if it opened the circuit."""
        before = self._circuit(name)
        after = after_failure(before, what, now, self._timing)
        self._put(name, after)
        return isinstance(after, Open) and not isinstance(before, Open)

    def succeeded(self, name: str) -> bool:
        """Note a success; True if it closed the circuit."""
        self._failed.pop(name, None)
        return self._tripped.pop(name, None) is not None

    def placed(self, name: str, key: BranchKey, now: float) -> None:
        """Note that an attempt is sent there."""
        if (circuit := self._tripped.get(name)) is not None:
            self._put(name, after_placing(circuit, key, now))

    def left(self, name: str, key: BranchKey, now: float) -> None:
        """Note that a branch is there no more."""
        if (circuit := self._tripped.get(name)) is not None:
            self._put(name, after_leaving(circuit, key, now))

    def avoided(self, now: float) -> list[str]:
        """The nodes that should get no work now, the least bad first."""
        if not self._tripped:
            return []
        found: list[tuple[int, float, str]] = []
        for name, circuit in self._tripped.items():
            if is_avoided(circuit, now):
                found.append((circuit.trips, circuit.until if isinstance(circuit, Open) else now, name))
        return [name for *_, name in sorted(found)]

    def first_rest_end(self, now: float) -> float | None:
        """When the next of them may be tried again."""
        ends = [circuit.until for circuit in self._tripped.values() if isinstance(circuit, Open)]
        return min((until for until in ends if until > now), default=None)

    def state(self, name: str) -> str:
        """For /metrics: "closed", "open", "probing"."""
        return type(self._circuit(name)).__name__.lower()

    def _circuit(self, name: str) -> Circuit:
        return self._tripped.get(name) or self._failed.get(name, CLOSED)

    def _put(self, name: str, circuit: Circuit) -> None:
        if isinstance(circuit, Closed):
            _keep(self._failed, name, circuit)
        else:
            self._failed.pop(name, None)
            _keep(self._tripped, name, circuit)


def _keep(circuits: dict[str, _Kept], name: str, circuit: _Kept) -> None:
    if name not in circuits and len(circuits) >= _MAX_NODES:
        del circuits[next(iter(circuits))]
    circuits[name] = circuit
