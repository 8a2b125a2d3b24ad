"""Which fault comes when, drawn from a seed. Pure: performing them is faults.py.

At every instant one router, one node that prefills and one that decodes are untouched, so that every request can be answered: who
has no answer then was not merely unlucky.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

REGISTRY: Final = "redis"  # the party that nobody needs in order to serve
RECOVERY_S: Final = 3.0  # after a fault's end until a process counts as untouched: it is being found again
_PREFILLS: Final = ("prefill", "mixed")
_DECODES: Final = ("decode", "mixed")


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens to one or two processes and is undone after a while."""

    for_s: float  # until it is undone

    @property
    def parties(self) -> tuple[str, ...]:
        """The processes that it concerns."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class _OfOne(Fault):
    name: str

    @property
    def parties(self) -> tuple[str, ...]:
        return (self.name,)


class Kill(_OfOne):
    """SIGKILL; started again under its name and at its addresses."""


class Stop(_OfOne):
    """SIGSTOP, then SIGCONT: short ones are pauses, long ones are found by silence."""


class Replace(_OfOne):
    """SIGSTOP for good: another process is started under its name, then the old one wakes, and has to go: the registry says so."""


class Terminate(_OfOne):
    """SIGTERM, which a node answers by draining; started again."""


@dataclass(frozen=True, slots=True)
class ChangeRole(_OfOne):
    """`baton role` makes something else of a mixed node, and in the end a mixed one again."""

    role: str
    timeout_s: float  # until what runs is given up


class Unplug(_OfOne):
    """Its cable is out: nobody reaches it."""


@dataclass(frozen=True, slots=True)
class Cut(Fault):
    """Nothing passes between the two; both reach everybody else."""

    one: str
    other: str

    @property
    def parties(self) -> tuple[str, ...]:
        """Both."""
        return (self.one, self.other)


@dataclass(frozen=True, slots=True)
class Planned:
    """A fault and its instant."""

    at_s: float  # from the run's start
    fault: Fault

    @property
    def over_at_s(self) -> float:
        """When its processes count as untouched again."""
        return self.at_s + self.fault.for_s + RECOVERY_S


def draw_schedule(
    seed: int, names: Sequence[str], duration_s: float, gap_s: float, has_network: bool
) -> Iterator[Planned]:
    """Faults in the order of their instants, `gap_s` apart on average, the last one over by `duration_s`.

    `names` are those of a Fleet, and REGISTRY if its processes share one; without a network nobody is cut off.
    """
    rng = random.Random(seed)
    standing: list[Planned] = []
    at_s = 0.0
    while (at_s := at_s + rng.uniform(0.2, 1.8) * gap_s) < duration_s:
        standing = [each for each in standing if each.over_at_s > at_s]
        drawn = Planned(at_s, _draw(rng, names, has_network))
        touched = {party for each in (*standing, drawn) for party in each.fault.parties}
        busy = {party for each in standing for party in _needed(each.fault)}
        is_free = not busy & {*_needed(drawn.fault)}
        if is_free and drawn.over_at_s <= duration_s and can_serve(set(names) - touched):
            standing.append(drawn)
            yield drawn


def _needed(fault: Fault) -> tuple[str, ...]:
    """Whom nothing else may happen to meanwhile."""
    return (*fault.parties, REGISTRY) if isinstance(fault, Replace | ChangeRole) else fault.parties


def can_serve(names: set[str]) -> bool:
    """Whether these processes alone could answer a request."""
    roles = {name.partition("-")[0] for name in names}
    return "router" in roles and bool(roles & set(_PREFILLS)) and bool(roles & set(_DECODES))


def _draw(rng: random.Random, names: Sequence[str], has_network: bool) -> Fault:
    nodes = [name for name in names if name.startswith(("prefill", "decode", "mixed"))]
    name, node = rng.choice(names), rng.choice(nodes)
    draws: list[Callable[[], Fault]] = [
        lambda: Kill(rng.uniform(0, 4), name),
        lambda: Stop(rng.choice((rng.uniform(0.1, 1), rng.uniform(1, 3), rng.uniform(3, 8))), name),
        lambda: Replace(rng.uniform(2.5, 5), node),
        lambda: Terminate(rng.uniform(0, 4), node),
    ]
    if mixed := [name for name in nodes if name.startswith("mixed")]:
        role, timeout_s = rng.choice(("prefill", "decode")), rng.choice((0.0, 0.5, 5.0))
        draws.append(lambda: ChangeRole(rng.uniform(0.5, 6), rng.choice(mixed), role, timeout_s))
    if has_network:
        others = [each for each in (*names, *nodes) if each != node]
        draws += [
            lambda: Unplug(rng.uniform(0.3, 6), name),
            lambda: Cut(rng.uniform(0.3, 8), node, rng.choice(others)),
            lambda: Cut(rng.uniform(0.3, 8), node, rng.choice(others)),
        ]
    return rng.choice(draws)()
