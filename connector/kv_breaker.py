"""Circuit breaking of the KV pool: one that keeps failing is left alone for a while, then tried with one call. Pure.

    Closed ──so many failures in a row──> Open ──its time is over, one call is let through──> Probing
       ^                                   ^ ^                                               │  │  │
       └──────────────success──────────────┼─┼───────────────────────────────────────────────┘  │  │
                                           │ └──failure: twice as long──────────────────────────┘  │
                                           └──said nothing: the next call may try at once──────────┘

A call that succeeds closes the circuit in every state. A call may also say nothing of the pool: a look that finds blocks shows that
somebody answers, but whether they are there is known when they are read. `now` is an argument: no clock here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Closed:
    """In use."""

    num_failures: int = 0  # since the last success


@dataclass(frozen=True, slots=True)
class Open:
    """Left alone; from `until` on one call may try it."""

    until: float
    trips: int  # since the last success


@dataclass(frozen=True, slots=True)
class Probing:
    """One call tries it."""

    trips: int


Circuit = Closed | Open | Probing
CLOSED: Final = Closed()


@dataclass(frozen=True, slots=True)
class BreakerTiming:
    """When a circuit opens, and for how long."""

    num_failures: int = 5
    first_s: float = 1.0
    longest_s: float = 60.0

    def until(self, now: float, trips: int) -> float:
        """The end of the `trips`-th time in a row."""
        most_s: float = self.first_s * 2 ** min(trips - 1, 20)
        return now + min(most_s, self.longest_s)


def lets_through(circuit: Circuit, now: float) -> bool:
    """Whether a call may be made now."""
    match circuit:
        case Closed():
            return True
        case Open(until):
            return until <= now
        case Probing():
            return False


def after_asking(circuit: Circuit, now: float) -> Circuit:
    """A call is made, which lets_through allowed."""
    if not lets_through(circuit, now):
        raise ValueError(f"no call may be made: {circuit}")
    return Probing(circuit.trips) if isinstance(circuit, Open) else circuit


def after_failure(circuit: Circuit, now: float, timing: BreakerTiming) -> Circuit:
    """A call failed."""
    match circuit:
        case Closed(num_failures):
            is_enough = num_failures + 1 >= timing.num_failures
            return Open(timing.until(now, 1), 1) if is_enough else Closed(num_failures + 1)
        case Probing(trips):
            return Open(timing.until(now, trips + 1), trips + 1)
        case Open():
            return circuit  # a call from before


def after_nothing(circuit: Circuit, now: float) -> Circuit:
    """A call ended without a word on the pool, or was not made after all."""
    return Open(now, circuit.trips) if isinstance(circuit, Probing) else circuit
