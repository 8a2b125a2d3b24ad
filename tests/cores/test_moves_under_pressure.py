"""Who gives way to pressure goes to another node, or ends with all its tokens; what is too long for a message stays."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_node import mover
from decode_node.moving import MoveEvent, MoveRow, MoveState, step_move
from decode_node.running_branch import RunningBranch
from engine.sequence import Phase
from node.identity import NodeIdentity
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey, BranchKey
from tests.cores.mixed import Mixed
from tests.cores.moving_world import MovingWorld, decode_nodes, dispatch_of
from tests.cores.nodes import ROUTER, Decode
from tests.cores.test_moves import PROMPT, SAMPLED, say
from tests.thorough import IS_THOROUGH


def pressed(preempt_move_s: float, **sizes: Any) -> MovingWorld:
    """Two sequences at a node that cannot hold both to their ends, and one that can."""
    nodes = decode_nodes(2, num_blocks=16, num_slots=2, policy="none", preempt_move_s=preempt_move_s, **sizes)
    world = MovingWorld(*nodes)
    world.start("decode-0", dispatch_of("old", PROMPT, max_tokens=40))
    world.start("decode-0", dispatch_of("young", PROMPT[::-1], max_tokens=40))
    return world


@pytest.mark.covers("Q02", "D10", "R19")
def test_who_gives_way_goes_to_a_node_with_room_and_nothing_is_computed_again() -> None:
    world = pressed(0.25)
    world.run()
    assert world.nodes["decode-0"].scheduler.num_preempted == 1 and world.happened["moved"] == 1
    assert world.happened["wants MOVE_PREEMPTED"] == 1 and world.happened["local_prefills"] == 2
    assert all(stream.end == "finished" for stream in world.streams.values())
    world.run_out()
    world.check_end()


@pytest.mark.covers("Q02", "S17")
@pytest.mark.parametrize("why", ["nobody has room", "no answer", "off"])
def test_who_gives_way_and_finds_no_node_in_time_ends_with_all_its_tokens(why: str) -> None:
    world = pressed(0.0 if why == "off" else 0.25)
    world.has_target = lambda stream: why == "no answer"
    old, young = world.streams.values()
    while not young.end and world.do_something():
        if why == "no answer":
            world.calls.clear()
    if why == "no answer":
        assert not young.end and world.nodes["decode-0"].scheduler.snapshot()["phases"], "it is kept"
        world.wait(0.25)
        world.run()
    assert young.end == "PREEMPTED" and young.token_ids == young.right_answer()[: len(young.token_ids)]
    world.run()
    assert old.end == "finished", "its blocks are there for whom they were needed"
    assert world.happened["wants MOVE_PREEMPTED"] == (why != "off")
    if why == "no answer":
        return  # of its Reserve nobody will ever hear
    world.run_out()
    world.check_end()


@pytest.mark.covers("D10", "Q02")
def test_who_gave_way_on_its_way_and_whose_commit_is_refused_ends_with_all_its_tokens() -> None:
    """A mixed node resumes who gave way, but for who has no blocks any more: they went when the link had read them."""
    world = MovingWorld(Mixed(num_blocks=16, num_slots=2, policy="none"), decode_nodes(1, num_blocks=32)[0])
    world.start("mixed-0", dispatch_of("old", PROMPT, max_tokens=40))
    world.start("mixed-0", dispatch_of("young", PROMPT[::-1], max_tokens=40))
    node, young = world.nodes["mixed-0"], world.streams[BranchKey("young", 0)]
    world.has_target = lambda stream: stream is young
    while node.pool.counts().free > 4:
        assert world.do_something()
    world.drain("mixed-0")
    while "SURRENDERED" not in str(node.core.snapshot()["branches_moving"]):
        others = [
            step for step in world.steps() if step.name != "hub"
        ]  # a slow link: it gives way before it is through
        (others or world.steps())[0].do()
    assert node.scheduler.num_preempted == 1
    world.send_cancel("decode-0", young.key._replace(attempt=young.highest))
    world.run()
    assert not node.scheduler.knows(young.key) and world.happened["moves_failed"] == 1
    assert young.end == "PREEMPTED" and young.token_ids == young.right_answer()[: len(young.token_ids)]
    assert world.streams[BranchKey("old", 0)].end == "finished"
    world.run_out()
    world.check_end()


@pytest.mark.covers("D10", "H11")
def test_who_has_said_more_than_one_message_holds_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Commit that no link takes would close it, for all who share it."""
    monkeypatch.setattr(mover, "MAX_FRAME_BYTES", 2048)
    world = MovingWorld(*decode_nodes(2, num_blocks=32))
    world.start("decode-0", dispatch_of("r", PROMPT, **SAMPLED | {"num_logprobs": 20, "stop_token_ids": []}))
    stream = say(world, 8)
    world.drain("decode-0")
    world.run()
    assert stream.end == "finished" and stream.token_ids == stream.right_answer()
    assert world.happened["wants MOVE_DRAINING"] >= 1 and not world.happened["moved"] and not world.hub.links()
    world.run_out()
    world.check_end()


@given(
    num_prompt=st.integers(1, 300),
    num_said=st.integers(0, 60),
    num_logprobs=st.none() | st.integers(0, 20),
    token_id=st.sampled_from([0, 300, 150_000, (1 << 21) - 1]),
)
def test_a_commit_is_never_longer_than_was_reckoned(
    num_prompt: int, num_said: int, num_logprobs: int | None, token_id: int
) -> None:
    top = [pb.TopLogprob(token_id=token_id, logprob=-1.5)] * (num_logprobs or 0)
    branch = RunningBranch(
        key=AttemptKey("r" * 64, 127, 9),
        router=ROUTER,
        deadline=60.0,
        prompt_token_ids=(token_id,) * num_prompt,
        sampling=pb.Sampling(max_tokens=100, temperature=1.0, num_logprobs=num_logprobs),
        seed=(1 << 64) - 1,
        token_ids=[token_id] * num_said,
        first_index=0,
        times=None,
        logprobs=[] if num_logprobs is None else [pb.TokenLogprobs(logprob=-1.5, top=top)] * num_said,
    )
    commit = mover._commit(branch, 0.0)
    assert commit.ByteSize() + 200 <= mover._commit_bytes(branch, branch.num_tokens), "200: who it is, filled in later"


@pytest.mark.covers("D08", "D10", "S17")
def test_a_move_that_came_to_nothing_while_its_sequence_gave_way_on_a_node_that_resumes_it_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of lives of a mixed node that drains, short of blocks, while its links are cut: a few in a hundred come to that."""
    events: list[MoveEvent] = []

    def stepped(state: MoveState, event: MoveEvent) -> MoveRow:
        events.append(event)
        return step_move(state, event)

    monkeypatch.setattr(mover, "step_move", stepped)
    for seed in range(140, 175 if IS_THOROUGH else 158):
        random = Random(seed)
        node = Mixed(identity=NodeIdentity("mixed-0", 5), role="mixed", num_blocks=16, num_slots=6, policy="none")
        target = Decode(identity=NodeIdentity("decode-1", 6), num_blocks=60, num_slots=8, policy="none")
        world = MovingWorld(node, target)
        for number in range(5):
            prompt = [random.randrange(32) for _ in range(random.randint(1, 9))]
            world.start("mixed-0", dispatch_of(f"r{number}", prompt, 1, max_tokens=50, temperature=1.0))
        core: Any = node.core
        moves, is_draining = core._decode._running._mover._moves, False
        for _ in range(900):
            if not is_draining and random.random() < 0.03:
                world.drain("mixed-0", world.now + 1e6)
                is_draining = True
            drawn = random.random()
            if drawn < 0.03 and world.hub.links():
                is_cut = world.hub.cut(random.choice(world.hub.links()), random.randint(0, 2))
                world.happened.update(cut=int(is_cut))
            elif drawn < 0.05 or not world.do_something(random):
                world.wait(0.01)
            phases: Any = node.scheduler.snapshot()["phases"]
            staying = [key for key, move in moves.items() if move.state is MoveState.STAYING]
            assert not any(phases.get(key) is Phase.RUNNING_DECODE for key in staying), "nobody will ask for it again"
        world.run_out()
        world.check_end()
    assert MoveEvent.REQUEUED in events
