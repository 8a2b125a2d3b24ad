"""What an error costs, and how long is waited: the rules of router/retry.py by themselves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proto import baton_pb2 as pb
from router.config import RouterConfig
from router.entrance import RouterCoreConfig
from router.events import NodeRef
from router.placement import Draw
from router.process import core_config
from router.retry import COST, PREEMPTIONS_PER_RETRY, Again, Cost, Over, Tries, culprit
from runtime.config import parse

CODES = [code for code in pb.ErrorCode.values() if code != pb.ERROR_UNSPECIFIED]
FINAL = {pb.INCOMPATIBLE, pb.DEADLINE, pb.INVALID}


def test_every_code_has_its_cost_or_is_final() -> None:
    assert set(CODES) - COST.keys() == FINAL


@pytest.mark.covers("R03")
def test_a_router_that_is_told_nothing_follows_three_failures_with_another_attempt_each() -> None:
    config = parse(RouterConfig, "baton router", "", ["--model", "m"], {})
    tries, draw = Tries(core_config(config, "", 0)), Draw(0)
    error = pb.PDError(code=pb.TRANSFER_FAILED, retryable=True)
    verdicts = [tries.after(error, True, draw, 0.0) for _ in range(4)]
    assert [verdict is Over.SPENT for verdict in verdicts] == [False, False, False, True]


@pytest.mark.covers("R03", "R07")
@pytest.mark.parametrize("num_preemptions", [0, 1, 31, 32, 33, 64, 95, 96])
def test_preemptions_cost_no_failure_its_attempt_before_there_is_one_of_them_for_each_part(
    num_preemptions: int,
) -> None:
    tries, draw = Tries(RouterCoreConfig(preempt_retry_count=3)), Draw(0)
    for _ in range(num_preemptions):
        assert isinstance(tries.after(pb.PDError(code=pb.PREEMPTED, retryable=True), True, draw, 0.0), Again)
    failure, num_paid = pb.PDError(code=pb.TRANSFER_FAILED, retryable=True), 0
    while isinstance(tries.after(failure, True, draw, 0.0), Again):
        num_paid += 1
        assert tries.retries_left == 3 - num_preemptions // PREEMPTIONS_PER_RETRY - num_paid
    assert num_paid == 3 - num_preemptions // PREEMPTIONS_PER_RETRY


@pytest.mark.covers("R03", "R07", "R19")
@given(
    st.lists(st.tuples(st.sampled_from(CODES), st.booleans(), st.integers(0, 5000), st.booleans()), max_size=60),
    st.integers(0, 3),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_budget_and_waits_are_as_a_plain_count_says(
    errors: Sequence[tuple[pb.ErrorCode.ValueType, bool, int, bool]], count: int, excludes: bool, seed: int
) -> None:
    config = RouterCoreConfig(preempt_retry_count=count, preempt_retry_exclude_decode=excludes)
    tries, draw = Tries(config), Draw(seed)
    spent = in_row = 0
    for code, is_retryable, retry_after_ms, is_at_decode in errors:
        error = pb.PDError(code=code, retryable=is_retryable, retry_after_ms=retry_after_ms)
        again = tries.after(error, is_at_decode, draw, 0.0)
        if code in FINAL or (not is_retryable and code != pb.CANCELLED):
            assert again is Over.FINAL
            continue
        price = {Cost.NOTHING: 0, Cost.PART: 1, Cost.RETRY: PREEMPTIONS_PER_RETRY}[COST[code]]
        if price and spent >= count * PREEMPTIONS_PER_RETRY:  # the last failure is paid for with what is left
            assert again is Over.SPENT
            continue
        spent += price
        assert isinstance(again, Again) and again.cost is COST[code]
        assert (again.held_s is None) == (is_at_decode and not excludes and price > 0)
        assert again.held_s is None or again.held_s <= config.max_refusal_wait_s
        if price < PREEMPTIONS_PER_RETRY:
            assert again.rest_s == 0.0
            assert again.held_s is None or again.held_s >= min(max(retry_after_ms / 1000, 0.05), 2.0)
        else:
            in_row += 1
            most_s = 0.0 if in_row == 1 else min(config.min_backoff_s * 2 ** (in_row - 2), config.max_backoff_s)
            assert most_s / 2 <= again.rest_s <= most_s


@pytest.mark.covers("R19")
def test_who_was_on_as_many_nodes_as_allowed_when_they_died_is_not_sent_to_another() -> None:
    tries = Tries(RouterCoreConfig(max_nodes_lost=2))
    lost = pb.PDError(code=pb.NODE_LOST, retryable=True)
    for name in ("d1", "d2"):
        assert isinstance(tries.after(lost, True, Draw(1), 0.0), Again)
        tries.saw_death(NodeRef(name, 1))
        tries.lost(NodeRef(name, 1), now=10.0 * int(name[1]))
        tries.lost(NodeRef("d3", 1), now=20.0)  # it is silent
    assert tries.after(lost, True, Draw(1), 0.0) is Over.SPENT, "somebody above may look at it"
    other = tries.after(pb.PDError(code=pb.CHECKSUM, retryable=True), True, Draw(1), 0.0)
    assert isinstance(other, Again), "other errors kill nobody"


@pytest.mark.covers("R19")
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.floats(0, 3)), max_size=12))
def test_deaths_count_once_in_pairs_that_are_found_together_and_losses_of_living_nodes_never(
    losses: list[tuple[int, bool, float]],
) -> None:
    """What kills whatever it is sent to kills one more than it may, however fast it is."""
    tries, now = Tries(RouterCoreConfig(one_event_s=2.5, preempt_retry_count=100)), 0.0
    events: list[list[float]] = []
    died: set[NodeRef] = set()
    for number, (name, has_died, gap_s) in enumerate(losses):
        now += gap_s
        node = NodeRef(f"d{name}", number if has_died else -1)  # who lives may be lost again and again
        if has_died:
            died.add(node)
            tries.saw_death(node)
            if events and len(events[-1]) == 1 and now <= events[-1][0] + 2.5:
                events[-1].append(now)
            else:
                events.append([now])
        tries.lost(node, now)
        tries.lost(node, now)  # the same again is nothing new
        assert tries.num_deaths == len(events)
        again = tries.after(pb.PDError(code=pb.NODE_LOST, retryable=True), True, Draw(1), 0.0)
        assert isinstance(again, Again) == (len(events) < 2)


@pytest.mark.covers("R06")
@pytest.mark.parametrize(("ran_s", "waits"), [(1.9, [0.05, 0.1, 0.2, 0.4]), (2.1, [0.05] * 4)])
def test_who_gave_way_after_running_well_is_not_held_off_for_what_happened_before(
    ran_s: float, waits: Sequence[float]
) -> None:
    tries, draw = Tries(RouterCoreConfig()), Draw(1)
    preempted = pb.PDError(code=pb.PREEMPTED, retryable=True)
    now, held = 0.0, []
    for _ in waits:
        tries.succeeded(now)
        again = tries.after(preempted, True, draw, now + ran_s)
        assert isinstance(again, Again)
        held.append(again.held_s)
        now += 10.0
    assert held == list(waits)


def test_who_failed_together_does_not_come_back_together() -> None:
    error, draw = pb.PDError(code=pb.CHECKSUM, retryable=True), Draw(1)
    rests = set()
    for _ in range(20):
        tries = Tries(RouterCoreConfig())
        tries.after(error, True, draw, 0.0)
        again = tries.after(error, True, draw, 0.0)
        assert isinstance(again, Again)
        rests.add(again.rest_s)
    assert len(rests) > 15


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("speaker", ["p", "d", "stranger"])
def test_whose_fault_it_is(code: pb.ErrorCode.ValueType, speaker: str) -> None:
    sender, receiver = NodeRef("p", 1), NodeRef("d", 1)
    of_the_speaker = code in (pb.NO_BLOCKS, pb.BUSY, pb.DRAINING, pb.PREEMPTED, pb.INTERNAL, pb.NODE_LOST)
    expected = sender if of_the_speaker and speaker == "p" else receiver
    assert culprit(pb.PDError(code=code, node_id=speaker), sender, receiver) == expected
