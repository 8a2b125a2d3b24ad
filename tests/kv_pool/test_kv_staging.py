"""The slots of the staging buffer, driven at random against a naive model."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from node.kv_staging import Staging

NUM_SLOTS = 4
KEYS = [bytes([n]) for n in range(8)]


class Slots(RuleBasedStateMachine):
    """What each slot holds, in three plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.staging = Staging(NUM_SLOTS)
        self.filling: list[tuple[bytes, int]] = []
        self.waiting: list[tuple[bytes, int]] = []
        self.leaving: list[tuple[bytes, int]] = []

    @property
    def held(self) -> list[tuple[bytes, int]]:
        return self.filling + self.waiting + self.leaving

    @rule(key=st.sampled_from(KEYS))
    def begin(self, key: bytes) -> None:
        if key in {held for held, _ in self.held}:
            with pytest.raises(ValueError, match="already"):
                self.staging.begin(key)
            return
        slot = self.staging.begin(key)
        assert (slot is None) == (len(self.held) == NUM_SLOTS)
        if slot is not None:
            assert slot not in {used for _, used in self.held}
            self.filling.append((key, slot))

    @precondition(lambda self: self.filling)
    @rule(number=st.integers(0, NUM_SLOTS))
    def fill(self, number: int) -> None:
        key, slot = self.filling.pop(number % len(self.filling))
        self.staging.filled(slot)
        self.waiting.append((key, slot))

    @rule(most=st.integers(0, NUM_SLOTS + 1))
    def take(self, most: int) -> None:
        taken = self.staging.take(most)
        assert taken == self.waiting[:most]
        self.leaving += taken
        del self.waiting[:most]

    @rule(keys=st.sets(st.sampled_from(KEYS)))
    def drop(self, keys: set[bytes]) -> None:
        self.staging.drop(keys)
        self.waiting = [(key, slot) for key, slot in self.waiting if key not in keys]

    @precondition(lambda self: self.leaving)
    @rule(number=st.integers(0, NUM_SLOTS))
    def leave(self, number: int) -> None:
        _, slot = self.leaving.pop(number % len(self.leaving))
        self.staging.left(slot)
        with pytest.raises(KeyError):
            self.staging.left(slot)

    @invariant()
    def adds_up(self) -> None:
        held = {key for key, _ in self.held}
        assert len(held) == len(self.held) == self.staging.num_used
        assert all(self.staging.holds(key) == (key in held) for key in KEYS)
        assert self.staging.num_waiting == len(self.waiting)


TestSlots = pytest.mark.covers("W01")(Slots.TestCase)
