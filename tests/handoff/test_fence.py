"""The fence floor against a naive model, and the two things that it must never do: forget early, or forget to make room."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.fence import FenceFloor
from proto.attempt_key import AttemptKey, BranchKey

BRANCHES = [BranchKey(f"r{n}", 0) for n in range(3)]
raises = st.tuples(st.sampled_from(BRANCHES), st.integers(0, 5), st.floats(0, 10))


@settings(deadline=None)
@given(st.lists(st.one_of(raises, st.floats(0, 3)), max_size=30))
@pytest.mark.covers("R04", "H05")
def test_a_floor_never_falls_before_its_time(events: list[tuple[BranchKey, int, float] | float]) -> None:
    fence = FenceFloor(max_branches=2)
    model: dict[BranchKey, tuple[int, float]] = {}
    now = 0.0
    for event in events:
        if isinstance(event, float):
            now += event
            fence.tick(now)
            model = {branch: (floor, until) for branch, (floor, until) in model.items() if until > now}
        else:
            branch, attempt, life = event
            is_kept = fence.raise_to(branch, attempt, now + life)
            assert is_kept == (branch in model or len(model) < 2)
            if is_kept:
                floor, until = model.get(branch, (0, 0.0))
                model[branch] = (max(floor, attempt), max(until, now + life))
                fence.tick(now)
                model = {b: (f, u) for b, (f, u) in model.items() if u > now}
        assert len(fence) == len(model)
        for branch in BRANCHES:
            floor = model.get(branch, (0, 0.0))[0]
            assert not floor or not fence.admits(AttemptKey(*branch, floor - 1))
            assert fence.admits(AttemptKey(*branch, floor))


@pytest.mark.covers("R04")
def test_a_full_table_refuses_new_branches_rather_than_forget_an_old_floor() -> None:
    fence = FenceFloor(max_branches=1)
    assert fence.raise_to(BRANCHES[0], 3, until=10.0)
    assert not fence.has_room(BRANCHES[1]) and not fence.raise_to(BRANCHES[1], 1, until=10.0)
    assert not fence.admits(AttemptKey(*BRANCHES[0], 2))
    assert fence.next_expiry() == 10.0
    fence.tick(10.0)
    assert fence.has_room(BRANCHES[1]) and fence.admits(AttemptKey(*BRANCHES[0], 0))
