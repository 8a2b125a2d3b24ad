"""The copies that explorations work on: like `copy.deepcopy`'s, whatever a world is made of."""

from __future__ import annotations

import copy
import random
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.block_pool import BlockState
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey
from tests.copied import Copier


@dataclass(frozen=True, slots=True)
class Fixed:
    first: Any
    second: Any = 0


@dataclass(slots=True)
class Changing:
    first: Any
    second: Any = field(default_factory=list)


class Pair(NamedTuple):
    first: Any
    second: Any


class Plain:
    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain) and self.held == other.held

    __hash__ = None  # type: ignore[assignment]


fixed = st.recursive(
    st.one_of(
        st.integers(), st.text(max_size=2), st.none(), st.sampled_from(BlockState), st.just(AttemptKey("r", 0, 1))
    ),
    lambda inner: st.one_of(
        st.tuples(inner, inner),
        st.frozensets(inner, max_size=2),
        st.builds(Fixed, inner, inner),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=4,
)
things = st.recursive(
    fixed,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(fixed, inner, max_size=3),
        st.dictionaries(fixed, inner, max_size=3).map(OrderedDict),
        st.lists(inner, max_size=3).map(deque),
        st.sets(fixed, max_size=3),
        st.dictionaries(fixed, st.integers(), max_size=2).map(Counter),
        st.tuples(inner, inner),
        st.builds(Fixed, inner, inner),
        st.builds(Pair, inner, inner),
        st.builds(Changing, inner),
        st.builds(Plain, inner),
        st.just(pb.PeerId(name="n")),
    ),
    max_leaves=12,
)


def changeable_parts(thing: Any, found: dict[int, Any]) -> dict[int, Any]:
    """By id, everything in it that could change."""
    parts: list[Any] = []
    match thing:
        case Plain():
            parts = [thing.held]
        case Fixed() | Changing():
            parts = [thing.first, thing.second]
        case dict():
            parts = [*thing, *thing.values()]
        case list() | deque() | set() | tuple() | frozenset():
            parts = list(thing)
    if isinstance(thing, (list, dict, set, deque, Changing, Plain, pb.PeerId)):
        found[id(thing)] = thing
    for part in parts:
        changeable_parts(part, found)
    return found


@given(things)
def test_a_copy_equals_deepcopys_and_shares_nothing_that_can_change(thing: Any) -> None:
    copier = Copier()
    for _ in range(2):  # the second knows what is shared
        made = copier.copied([thing, thing])
        assert made == copy.deepcopy([thing, thing]) == [thing, thing] and type(made[0]) is type(thing)
        assert made[0] is made[1], "one thing became two"
        assert not changeable_parts(made, {}).keys() & changeable_parts(thing, {}).keys()


def test_cycles_counters_arrays_methods_and_generators_go_on_by_themselves() -> None:
    holder = Plain([count(3), np.arange(3), random.Random(1), deque([1, 2], maxlen=2)])
    holder.held += [holder, holder.__eq__]
    made = Copier().copied(holder)
    numbers, array, rng, kept, itself, method = made.held
    assert itself is made and method.__self__ is made and kept.maxlen == 2
    array[0] = 7
    assert (next(numbers), holder.held[1][0], next(holder.held[0])) == (3, 0, 3)
    assert rng.random() == holder.held[2].random()
