"""What the cores have the KV pool store: who gives way and goes nowhere, who is done; and a node stays until it is copied."""

from __future__ import annotations

from typing import Any

import pytest

from engine.plan import BROKEN_ROW, NO_TOKEN, SamplingParams, SlotResult, StepResult
from engine.saving import SaveRules
from engine.sequence import SequenceSpec
from node import events as ev
from node.steps import saves_of
from proto.attempt_key import AttemptKey
from proto.block_key import block_keys
from tests.cores.copied_blocks import CopiedBlocks
from tests.cores.mixed import Mixed
from tests.cores.moving_world import MovingWorld, Stream, decode_nodes, dispatch_of
from tests.cores.nodes import BLOCK_SIZE, SEED, Prefill, only

PREEMPTED = SaveRules(of_preempted=True)
FINISHED = SaveRules(of_finished=True)
PROMPT = [7, 1, 2, 3, 4, 5]


def keys_of(token_ids: list[int]) -> set[bytes]:
    return set(block_keys(SEED, token_ids, BLOCK_SIZE))


def known(stream: Stream) -> list[int]:
    return [*stream.dispatch.prompt_token_ids, *stream.token_ids]


def pressed(saves: SaveRules, **how: Any) -> tuple[MovingWorld, Stream, Stream]:
    """Two streams where there is room for one: the younger gives way."""
    world = MovingWorld(*decode_nodes(2, num_blocks=16, policy="none", saves=saves, **how))
    for name in ("old", "young"):
        world.start("decode-0", dispatch_of(name, [int(name == "old"), *PROMPT], max_tokens=40))
    old, young = world.streams.values()
    return world, old, young


@pytest.mark.covers("W01", "W03", "W09", "Q02")
@pytest.mark.parametrize("why", ["nobody has room", "too late", "off"])
def test_who_gives_way_and_goes_nowhere_is_saved_with_all_that_it_said(why: str) -> None:
    world, old, young = pressed(PREEMPTED, preempt_move_s=0.0 if why == "off" else 0.25)
    world.has_target = lambda stream: why == "too late"
    asked = [stream.dispatch.SerializeToString(deterministic=True) for stream in (old, young)]
    while not young.end:
        if why == "too late" and world.calls:  # nobody answers Reserve in time
            world.calls.clear()
            world.wait(0.25)
        assert world.do_something()
    world.run()
    assert (old.end, young.end) == ("finished", "PREEMPTED")
    assert set(world.kv_pool.stored) == keys_of(known(young)[:-1]), "every full block, and nothing of anybody else"
    assert len(young.token_ids) > BLOCK_SIZE and world.kv_pool.num_saves == 1
    assert asked == [stream.dispatch.SerializeToString(deterministic=True) for stream in (old, young)]
    assert list(young.dispatch.prompt_token_ids) == [0, *PROMPT]
    if why != "too late":
        world.run_out()
        world.check_end()


@pytest.mark.covers("W01", "D10")
def test_who_goes_on_elsewhere_kv_and_all_is_not_saved() -> None:
    world, old, young = pressed(PREEMPTED, preempt_move_s=0.25)
    world.run()
    assert world.happened["moved"] == 1 and (old.end, young.end) == ("finished", "finished")
    assert not world.kv_pool.stored
    world.run_out()
    world.check_end()


@pytest.mark.covers("W01", "S10")
def test_on_a_mixed_node_who_gives_way_is_saved_and_goes_on() -> None:
    world = MovingWorld(Mixed(num_blocks=16, policy="none", saves=PREEMPTED))
    for name in ("old", "young"):
        world.start("mixed-0", dispatch_of(name, [int(name == "old"), *PROMPT], max_tokens=40))
    _, young = world.streams.values()
    world.run()
    assert {stream.end for stream in world.streams.values()} == {"finished"}
    saved, whole = set(world.kv_pool.stored), known(young)
    assert saved == keys_of(whole[: len(saved) * BLOCK_SIZE]) and len(saved) > len(PROMPT) // BLOCK_SIZE + 1
    world.check_end()


@pytest.mark.covers("W04")
def test_without_a_pool_nothing_is_asked_of_it() -> None:
    world, _, young = pressed(SaveRules())
    world.has_target = lambda stream: False
    world.run()
    assert young.end == "PREEMPTED" and not world.kv_pool.num_saves


@pytest.mark.covers("W01", "W02")
def test_who_is_done_is_saved_by_every_role_under_the_same_keys() -> None:
    right = MovingWorld(*decode_nodes(1, saves=FINISHED))
    mixed = MovingWorld(Mixed(saves=FINISHED))
    for world, name in ((right, "decode-0"), (mixed, "mixed-0")):
        world.start(name, dispatch_of("r", PROMPT, max_tokens=9))
        world.run()
        world.check_end()
    (stream,) = right.streams.values()
    assert set(right.kv_pool.stored) == set(mixed.kv_pool.stored) == keys_of(known(stream)[:-1])
    asked, _ = saved_by_a_prefill_node()
    assert {key for key, _ in asked.blocks} == keys_of(PROMPT)


def saved_by_a_prefill_node() -> tuple[ev.SaveBlocks, Prefill]:
    """A prompt with one token to be said: the whole request ends there."""
    prefill = Prefill(saves=FINISHED)
    runner = Mixed().runner
    actions = prefill.dispatch(AttemptKey("r", 0, 0), PROMPT, max_tokens=1)
    while plans := [action.plan for action in actions if isinstance(action, ev.RunStep)]:
        actions = list(prefill.core.receive(ev.StepDone(runner.run(plans[0])), 0.0))
    return only(actions, ev.SaveBlocks), prefill


@pytest.mark.covers("W08", "P02")
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_what_a_row_without_numbers_read_is_taken_out_of_the_pool_or_each_prompt_that_begins_like_it_fetches_it_again(
    num_chunks: int,
) -> None:
    prefill = Prefill(reads_kv_pool=True, saves=SaveRules(takes_out_broken=True))
    prompt = [3] * (2 * BLOCK_SIZE + 8 * num_chunks)
    keys = block_keys(SEED, prompt, BLOCK_SIZE)
    look = only(prefill.dispatch(AttemptKey("r", 0, 0), prompt, max_tokens=2), ev.LookInPool)
    fetch = only(list(prefill.core.receive(ev.PoolLooked(look.look_id, 2), 0.0)), ev.FetchBlocks)
    actions = list(prefill.core.receive(ev.BlocksFetched(fetch.fetch_id, 2, 0.1), 0.1))
    plans = [action.plan for action in actions if isinstance(action, ev.RunStep)]
    for number, plan in enumerate(plans, 1):
        assert not any(isinstance(action, ev.TakeOutBlocks) for action in actions)
        (row,) = plan.chunks
        answer = SlotResult(row.slot, row.generation, BROKEN_ROW if number == num_chunks else NO_TOKEN)
        actions = list(prefill.core.receive(ev.StepDone(StepResult.of(plan.step_id, (answer,))), 0.2))
    assert only(actions, ev.TakeOutBlocks).keys == tuple(keys[: 2 * num_chunks])
    assert not any(isinstance(action, ev.TakeOutBlocks) for action in prefill.core.tick(0.3)), "once"


@pytest.mark.covers("W08", "W04", "P02")
@pytest.mark.parametrize("has_pool", [True, False])
def test_a_decode_node_takes_out_what_it_broke_on_with_what_was_said_there(has_pool: bool) -> None:
    (node,) = decode_nodes(1, policy="none", saves=SaveRules(takes_out_broken=has_pool))
    prompt = [2] * (2 * BLOCK_SIZE)
    spec = SequenceSpec("s", tuple(prompt), 0, SamplingParams(0.0, 0), 9, frozenset(), ())
    assert node.scheduler.reserve_slots(1)
    node.scheduler.adopt(spec, node.pool.allocate(2), 0)
    said = [5, 6]
    for answered in (*said, BROKEN_ROW):
        plan = node.scheduler.plan()
        assert plan is not None
        (row,) = plan.decodes
        node.scheduler.complete(StepResult.of(plan.step_id, (SlotResult(row.slot, row.generation, answered),)))
    keys = tuple(block_keys(SEED, [*prompt, *said], BLOCK_SIZE))
    assert saves_of(node.scheduler) == ([ev.TakeOutBlocks(keys)] if has_pool else [])


@pytest.mark.covers("W01", "H15")
def test_a_prefill_node_has_drained_only_when_what_it_saves_is_copied() -> None:
    asked, prefill = saved_by_a_prefill_node()
    assert not prefill.core.receive(ev.DrainAsked(9.0), 1.0)
    assert prefill.core.receive(ev.BlocksStaged(asked.save_id, 1), 2.0) == [ev.Drained()]
    assert prefill.pool.counts().used == 0


@pytest.mark.covers("W01", "D08")
@pytest.mark.parametrize("role", ["decode", "mixed"])
def test_a_node_has_drained_only_when_what_it_saves_is_copied(role: str) -> None:
    world = MovingWorld(Mixed(saves=FINISHED) if role == "mixed" else decode_nodes(1, saves=FINISHED)[0])
    name = f"{role}-0"
    world.start(name, dispatch_of("r", PROMPT, max_tokens=9))
    while others := [step for step in world.steps() if step.name != "copy"]:
        others[0].do()
    world.drain(name)
    assert len(world.kv_pool.waiting) == 1 and not world.has_drained(name)
    world.run()
    assert world.has_drained(name) and len(world.kv_pool.stored) == (len(PROMPT) + 9 - 1) // BLOCK_SIZE
    world.check_end()


def test_a_copy_of_a_block_that_was_given_to_somebody_else_is_noticed() -> None:
    """The check that all worlds rely on."""
    parts = Mixed()
    with pytest.raises(AssertionError, match="does not hold what its key says"):
        pool = CopiedBlocks()
        pool.save(ev.SaveBlocks(0, ((block_keys(SEED, [1] * BLOCK_SIZE, BLOCK_SIZE)[0], 0),)), parts.memory, print)
        pool.copy(0)
