"""The scheduler where a sequence changes nodes: blocks that are lent, slots that are reserved, sequences that are adopted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.sequence import Phase
from tests.engine_pure.checked_node import SIZES, CheckedNode, make_spec, phase_of, right_answer, rows_of


@pytest.mark.covers("P08")
@pytest.mark.parametrize("is_released_first", [True, False])
@pytest.mark.parametrize("is_aborted", [True, False])
def test_lent_blocks_stay_until_released_and_until_no_step_can_write_them(
    is_aborted: bool, is_released_first: bool
) -> None:
    node = CheckedNode(SIZES)
    spec = make_spec("a", [1, 2, 3, 4, 5], 9, SIZES, lends=True)
    spec = replace(spec, stop_token_ids=frozenset(right_answer(spec, SIZES.vocab_size)[:1]))
    node.submit(spec)
    with pytest.raises(ValueError, match="nothing to release"):
        node.scheduler.release("a")
    node.plan()
    node.plan()
    with pytest.raises(ValueError, match="nothing to release"):
        node.scheduler.release("a")
    if is_aborted:
        node.abort("a")
    else:
        node.complete()
    assert len(node.scheduler.block_ids("a")) == 2
    if is_released_first:
        assert node.scheduler.release("a")
    node.run_to_the_end()
    assert node.scheduler.num_free_slots == SIZES.num_slots
    if not is_released_first:
        assert node.pool.counts().used == 2 and len(node.scheduler.block_ids("a")) == 2
        assert node.scheduler.abort("a"), "known, and nothing changes"
        assert node.scheduler.release("a")
    assert node.is_idle()
    assert not node.scheduler.release("a")
    with pytest.raises(KeyError):
        node.scheduler.block_ids("a")


def test_only_lending_sequences_are_released() -> None:
    node = CheckedNode(SIZES)
    node.submit(make_spec("a", [1, 2, 3], 9, SIZES))
    node.plan()
    node.abort("a")
    with pytest.raises(ValueError, match="nothing to release"):
        node.scheduler.release("a")
    assert not node.scheduler.release("never seen")


@pytest.mark.covers("Q05")
def test_reserved_slots_are_kept_from_the_queue_and_adoption_takes_them() -> None:
    sizes = replace(SIZES, num_slots=2)
    node = CheckedNode(sizes)
    scheduler = node.scheduler
    assert scheduler.reserve_slots(1) and scheduler.reserve_slots(1) and not scheduler.reserve_slots(1)
    node.submit(make_spec("queued", [1, 2, 3], 2, sizes))
    assert node.plan() is None
    scheduler.unreserve_slots(1)
    assert scheduler.num_free_slots == 1
    plan = node.plan()
    assert plan is not None and scheduler.num_running == 1
    adopted = make_spec("adopted", [1, 2, 3, 4, 5, 6], 4, sizes, num_generated=1)
    node.pool.promise(1)
    node.adopt(adopted, node.pool.allocate(2), 1)
    assert scheduler.num_free_slots == 0 and scheduler.num_running == 2
    with pytest.raises(ValueError, match="of 1 slots to unreserve 0 are reserved"):
        scheduler.unreserve_slots(1)
    with pytest.raises(ValueError, match="no slot is reserved"):
        scheduler.adopt(make_spec("another", [1, 2], 1, sizes), [0], 0)


def test_an_adopted_sequence_goes_on_where_its_sender_stopped_and_is_in_the_prefix_cache_at_once() -> None:
    sender, receiver = CheckedNode(SIZES), CheckedNode(SIZES)
    first = make_spec("a", [1, 2, 3, 4, 5, 6], 1, SIZES, seed=11, lends=True)
    sender.submit(first)
    sender.run_to_the_end()
    spec = make_spec("a", [*first.token_ids, *sender.token_ids["a"]], 9, SIZES, seed=11, num_generated=1)
    leased = receiver.pool.lease(2)
    receiver.pool.promise(2)
    assert receiver.scheduler.reserve_slots(1)
    receiver.memory[leased] = sender.memory[list(sender.scheduler.block_ids("a"))]
    receiver.pool.commit_lease(leased)
    assert receiver.pool.find(spec.block_keys[0]) is None
    receiver.adopt(spec, leased, 2)
    assert receiver.pool.find(spec.block_keys[0]) == leased[0]
    assert phase_of(receiver, "a") is Phase.RUNNING_DECODE
    plan = receiver.plan()
    assert plan is not None and [row.new_block_ids for row in rows_of(plan)] == [tuple(leased)]
    receiver.run_to_the_end()
    assert receiver.token_ids["a"] == right_answer(spec, SIZES.vocab_size)
    assert receiver.is_idle()


def test_the_next_plan_of_all_tells_of_blocks_that_arrived_even_if_their_sequence_never_ran() -> None:
    """Their full blocks are in the prefix cache by then: whoever finds them there must find them on the device."""
    node = CheckedNode(SIZES)
    spec = make_spec("gone", list(range(1, 10)), 4, SIZES, num_generated=1)
    assert node.scheduler.reserve_slots(1)
    arrived = node.pool.lease(2)
    node.pool.commit_lease(arrived)
    node.adopt(spec, arrived, promise(node, 1))
    assert node.scheduler.abort("gone")
    node.scheduler.submit(make_spec("next", [*range(1, 9), 77], 2, SIZES))
    plans = [node.scheduler.plan(), node.scheduler.plan()]
    assert [plan and plan.arrived_block_ids for plan in plans] == [tuple(arrived), ()]


def test_an_adoption_that_does_not_cover_the_limit_is_refused_and_takes_nothing() -> None:
    node = CheckedNode(SIZES)
    assert node.scheduler.reserve_slots(1)
    block_ids = node.pool.allocate(2)
    with pytest.raises(ValueError, match="limit"):
        node.scheduler.adopt(make_spec("a", [1] * 8, 9, SIZES), block_ids, 1)
    with pytest.raises(ValueError, match="cannot hold the KV"):
        node.scheduler.adopt(make_spec("a", [1] * 10, 1, SIZES), block_ids, 1)
    assert node.scheduler.num_running == 0 and node.scheduler.num_free_slots == SIZES.num_slots - 1
    node.adopt(make_spec("a", [1] * 8, 9, SIZES), block_ids, node.pool.num_promised + promise(node, 2))
    node.abort("a")
    assert node.is_idle()


def promise(node: CheckedNode, num_blocks: int) -> int:
    node.pool.promise(num_blocks)
    return num_blocks
