"""The fence floor against a naive model, and what it must never do: forget early, forget to make room, or keep for ever."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.fence import MAX_REST_S, MIN_REST_S, FenceFloor
from proto.attempt_key import AttemptKey, BranchKey

BRANCHES = [BranchKey(f"r{n}", 0) for n in range(3)]
moves = st.tuples(
    st.sampled_from(["begin", "end", "refuse"]), st.sampled_from(BRANCHES), st.integers(0, 5), st.floats(0, 200)
)


@settings(deadline=None)
@given(st.lists(st.one_of(moves, st.floats(0, 30)), max_size=30))
@pytest.mark.covers("R04", "H05")
def test_a_floor_stands_while_its_attempt_lives_and_for_a_bounded_rest(
    events: list[tuple[str, BranchKey, int, float] | float],
) -> None:
    fence = FenceFloor(max_branches=2)
    model: dict[BranchKey, tuple[int, float]] = {}
    refused: set[AttemptKey] = set()
    now = 0.0
    for event in events:
        if isinstance(event, float):
            now += event
        else:
            what, branch, attempt, life_s = event
            has_room = branch in model or len(model) < 2
            floor, until = model.get(branch, (0, 0.0))
            key, deadline = AttemptKey(*branch, attempt), now + life_s
            if what != "begin":
                if what == "end":
                    assert fence.end(key, deadline, now) == has_room
                else:
                    fence.refuse(key, deadline, now)
                    refused = {each for each in refused if each.branch != branch or not has_room}
                    refused |= {key} if has_room else set()
                if attempt >= floor:
                    floor, until = attempt + 1, now + min(max(deadline - now, MIN_REST_S), MAX_REST_S)
            else:
                assert fence.begin(key, deadline) == has_room
                refused = {each for each in refused if each.branch != branch or each.attempt >= attempt or not has_room}
                floor, until = max(floor, attempt), max(until, deadline + MIN_REST_S)
            if has_room:
                model[branch] = (floor, until)
        fence.tick(now)
        model = {branch: (floor, until) for branch, (floor, until) in model.items() if until > now}
        refused = {key for key in refused if key.branch in model}
        assert len(fence) == len(model)
        for branch in BRANCHES:
            floor = model.get(branch, (0, 0.0))[0]
            assert not floor or not fence.admits(AttemptKey(*branch, floor - 1))
            assert fence.admits(AttemptKey(*branch, floor))
            for attempt in range(6):
                key = AttemptKey(*branch, attempt)
                assert fence.was_refused(key) == (key in refused and attempt == floor - 1)


@pytest.mark.covers("R04")
def test_a_full_table_refuses_new_branches_rather_than_forget_an_old_floor() -> None:
    fence = FenceFloor(max_branches=1)
    assert fence.begin(AttemptKey(*BRANCHES[0], 3), deadline=100.0)
    assert not fence.has_room(BRANCHES[1]) and not fence.begin(AttemptKey(*BRANCHES[1], 1), deadline=10.0)
    assert not fence.admits(AttemptKey(*BRANCHES[0], 2))
    assert fence.next_expiry() == 100.0 + MIN_REST_S
    fence.tick(100.0 + MIN_REST_S)
    assert fence.has_room(BRANCHES[1]) and fence.admits(AttemptKey(*BRANCHES[0], 0))


def test_an_ended_attempt_gives_its_place_back_long_before_a_distant_deadline() -> None:
    """Else a node that serves a hundred requests a second would be BUSY with floors of finished ones."""
    fence = FenceFloor(max_branches=1)
    fence.begin(AttemptKey(*BRANCHES[0], 0), deadline=600.0)
    fence.end(AttemptKey(*BRANCHES[0], 0), deadline=600.0, now=5.0)
    fence.tick(5.0 + MAX_REST_S)
    assert fence.has_room(BRANCHES[1])


@pytest.mark.parametrize("ms_left", [60_000, 86_400_000])
def test_what_has_ended_is_remembered_no_longer_than_its_floor_however_distant_its_deadline(ms_left: int) -> None:
    fence = FenceFloor(max_branches=1024)
    most = 0
    for index in range(20_000):
        now = index / 10
        fence.tick(now)
        key = AttemptKey(f"r{index}", 0, 0)
        assert fence.begin(key, now + ms_left / 1000)
        assert fence.end(key, now + ms_left / 1000, now)
        most = max(most, len(fence))
        assert fence.num_entries <= 2 * len(fence) + 64
    assert most == 10 * MAX_REST_S
    fence.tick(now + MAX_REST_S)
    assert len(fence) == 0 and fence.admits(key)


def test_an_attempt_that_ends_at_its_deadline_is_still_fenced() -> None:
    fence = FenceFloor(max_branches=1)
    fence.begin(AttemptKey(*BRANCHES[0], 0), deadline=5.0)
    fence.end(AttemptKey(*BRANCHES[0], 0), deadline=5.0, now=5.0)
    fence.tick(5.0)
    assert not fence.admits(AttemptKey(*BRANCHES[0], 0))
