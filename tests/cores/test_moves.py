"""A running sequence goes to another node with its KV: the stream is that of one node, whatever happens on the way."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from node import events as ev
from proto import baton_pb2 as pb
from proto.attempt_key import BranchKey
from tests.cores.mixed import Mixed
from tests.cores.moving_world import MovingWorld, Stream, decode_nodes, dispatch_of
from tests.cores.nodes import ROUTER

PROMPT = [7, 1, 2, 3, 4, 5]
GREEDY: dict[str, Any] = {"max_tokens": 30}
SAMPLED: dict[str, Any] = {
    "max_tokens": 30,
    "temperature": 1.0,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.2,
    "min_tokens": 9,
    "stop_token_ids": [3],
    "num_logprobs": 2,
}


def say(world: MovingWorld, num_tokens: int) -> Stream:
    """The one stream has said so many tokens, or is over."""
    (stream,) = world.streams.values()
    while len(stream.token_ids) < num_tokens and not stream.end:
        assert world.do_something()
    return stream


@pytest.mark.covers("D08", "D10", "H02", "Q02")
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_tokens", range(1, 30))
def test_moved_at_any_point_it_says_what_it_would_have_said_and_no_token_is_computed_again(
    num_tokens: int, sampling: dict[str, Any]
) -> None:
    world = MovingWorld(*decode_nodes(2, num_blocks=32))
    world.start("decode-0", dispatch_of("r", PROMPT, **sampling))
    stream = say(world, num_tokens)
    world.drain("decode-0")
    world.run()
    assert stream.end == "finished" and stream.token_ids == stream.right_answer()
    assert world.nodes["decode-0"].is_drained
    if num_tokens < 16 and len(stream.token_ids) == 30:
        assert world.happened["moved"] == 1 and world.happened["blocks written"] >= 2
    if "num_logprobs" in sampling:
        assert len(stream.logprobs) == len(stream.token_ids)
    world.run_out()
    world.check_end()


@pytest.mark.covers("D08")
def test_it_decodes_on_while_its_blocks_are_written_and_stops_for_the_last_ones() -> None:
    world = MovingWorld(*decode_nodes(2, num_blocks=32))
    world.start("decode-0", dispatch_of("r", PROMPT, max_tokens=50))
    stream = say(world, 20)
    world.drain("decode-0")
    said = len(stream.token_ids)
    holder = world.nodes["decode-0"]
    while "SENDING" in str(holder.core.snapshot()["branches_moving"]) or not world.happened["blocks written"]:
        others = [step for step in world.steps() if step.name != "hub"]  # a slow link
        (others or world.steps())[0].do()
    assert len(stream.token_ids) > said + 2, "it said nothing while it was written"
    world.run()
    assert stream.end == "finished" and world.happened["moved"] == 1
    world.run_out()
    world.check_end()


@pytest.mark.covers("D08")
def test_the_longer_it_is_the_more_it_may_say_while_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link takes nothing until it has stopped by itself: an eighth of 400 tokens, where a short one has four blocks."""
    monkeypatch.setattr("tests.cores.nodes.MAX_MODEL_LEN", 1024)
    world = MovingWorld(*decode_nodes(2, num_blocks=300))
    world.start("decode-0", dispatch_of("r", PROMPT * 66, max_tokens=200))
    stream = say(world, 4)
    world.drain("decode-0")
    while others := [step for step in world.steps() if step.name != "hub"]:
        others[0].do()
    assert world.nodes["decode-0"].core.snapshot()["branches_moving"] == {"PAUSED": 1}
    assert 40 < len(stream.token_ids) < 60
    world.run()
    assert stream.end == "finished" and world.happened["moved"] == 1


@pytest.mark.covers("D08")
def test_however_slow_the_link_it_never_outgrows_its_reservation() -> None:
    """The link takes nothing until the sequence has stopped by itself."""
    world = MovingWorld(*decode_nodes(2, num_blocks=32))
    world.start("decode-0", dispatch_of("r", PROMPT, max_tokens=50))
    stream = say(world, 8)
    world.drain("decode-0")
    while others := [step for step in world.steps() if step.name != "hub"]:
        others[0].do()
    assert world.nodes["decode-0"].core.snapshot()["branches_moving"] == {"PAUSED": 1}
    assert 8 < len(stream.token_ids) < 40
    world.run()
    assert stream.end == "finished" and world.happened["moved"] == 1
    world.run_out()
    world.check_end()


@pytest.mark.covers("D10")
@pytest.mark.parametrize("answer", ["nowhere", "full", "lost call", "lost answer"])
def test_a_refused_move_decodes_on_and_is_asked_again_while_the_node_drains(answer: str) -> None:
    sizes = {"num_blocks": 32} if answer != "full" else {"num_blocks": 32, "num_slots": 1}
    world = MovingWorld(*decode_nodes(2, **sizes))
    world.start("decode-0", dispatch_of("r", PROMPT, max_tokens=40))
    if answer == "full":
        world.start("decode-1", dispatch_of("other", PROMPT, max_tokens=20))
    stream = world.streams[next(key for key in world.streams if key.request_id == "r")]
    while len(stream.token_ids) < 5:
        assert world.do_something()
    refused = []

    def refuse(stream: Stream) -> bool:
        refused.append(len(stream.token_ids))
        return answer != "nowhere" or len(refused) > 1

    world.has_target = refuse
    world.drain("decode-0")
    while len(refused) < 2 and not stream.end:
        names = [name for name, _, _ in world.calls]
        lost = {"lost call": "reserve", "lost answer": "reserve's answer"}.get(answer)
        if lost in names and len(refused) == 1:
            world.lose_call(names.index(lost))
        else:
            world.do_something()
        if world.now < 5:
            world.wait(0.02)
        world.check()
    assert len(refused) >= 2 and refused[1] > refused[0], "it did not decode on"
    world.run()
    assert stream.end == "finished" and stream.token_ids == stream.right_answer()
    world.run_out()
    world.check_end()


@pytest.mark.covers("D10", "R21")
@pytest.mark.parametrize("is_committed", [False, True])
def test_a_link_that_breaks_before_the_commit_leaves_it_here_and_behind_it_nobody_knows(is_committed: bool) -> None:
    world = MovingWorld(*decode_nodes(2, num_blocks=32))
    world.start("decode-0", dispatch_of("r", PROMPT, max_tokens=50))
    stream = say(world, 10)
    world.drain("decode-0", deadline=0.05)
    holder = world.nodes["decode-0"]
    until = "COMMITTED" if is_committed else "PAUSED"
    while until not in str(holder.core.snapshot()["branches_moving"]):
        others = [step for step in world.steps() if step.name != "hub"]  # a slow link
        (others or world.steps())[0].do()
    (link,) = world.hub.links()
    assert world.hub.cut(link)
    world.run()
    if is_committed:
        assert stream.is_unsure and not stream.end
        assert holder.core.snapshot()["branches"] == 0, "it never runs here again"
    else:
        assert not stream.is_unsure and world.happened["moves_failed"] == 1
        assert stream.end == "finished", "it went on here, and was done before the node had to end"
    world.run_out()
    world.check_end()


@pytest.mark.covers("D10")
def test_a_refused_commit_leaves_it_where_it_was() -> None:
    world = MovingWorld(*decode_nodes(2, num_blocks=32))
    world.start("decode-0", dispatch_of("r", PROMPT, max_tokens=40))
    stream = say(world, 10)
    world.drain("decode-0")
    holder, target = world.nodes["decode-0"], world.nodes["decode-1"]
    while "COMMITTED" not in str(holder.core.snapshot()["branches_moving"]):
        assert world.do_something()
    world.send_cancel("decode-1", stream.key._replace(attempt=stream.highest))
    world.run()
    assert world.happened["commits_refused"] + world.happened["moves_failed"] >= 1
    assert target.core.snapshot()["leases"] == 0
    world.wait(0.5)
    world.run()
    assert stream.end == "finished" and stream.token_ids == stream.right_answer()
    world.run_out()
    world.check_end()


@pytest.mark.covers("D08", "H06")
@pytest.mark.parametrize("how", ["cancel", "router lost", "deadline"])
@pytest.mark.parametrize("state", ["ASKED", "SENDING", "PAUSING", "PAUSED", "COMMITTED"])
def test_ended_at_any_point_of_a_move_it_leaves_nothing_at_either_node(state: str, how: str) -> None:
    world = MovingWorld(*decode_nodes(2, num_blocks=32))
    dispatch = dispatch_of("r", PROMPT, max_tokens=50)
    dispatch.ms_left = 5_000
    world.start("decode-0", dispatch)
    stream = say(world, 10)
    world.drain("decode-0")
    holder = world.nodes["decode-0"]
    while state not in str(holder.core.snapshot()["branches_moving"]):
        others = [step for step in world.steps() if step.name != "hub"]
        (others or world.steps())[0].do()
    match how:
        case "cancel":
            world.cancel(stream)
        case "router lost":
            world.lose_router()
        case "deadline":
            world.wait(5.0)
    world.run()
    world.run_out()
    assert stream.end in ("cancelled", "DEADLINE") or state == "COMMITTED"
    stream.end = stream.end or "unknown"
    world.check_end()


@pytest.mark.covers("D08", "R20")
def test_every_choice_moves_by_itself_oldest_first_and_few_at_once() -> None:
    world = MovingWorld(*decode_nodes(2, num_blocks=96, num_slots=8))
    world.start("decode-0", dispatch_of("r", PROMPT, num_branches=7, max_tokens=40, temperature=1.0))
    while min(len(stream.token_ids) for stream in world.streams.values()) < 6:
        assert world.do_something()
    world.drain("decode-0")
    while world.do_something():
        world.check()
        moving = world.nodes["decode-0"].core.snapshot()["branches_moving"]
        assert isinstance(moving, dict) and sum(moving.values()) <= 4
    assert all(stream.end == "finished" for stream in world.streams.values())
    assert world.happened["moved"] == 7
    world.run_out()
    world.check_end()


@pytest.mark.covers("D08")
def test_a_node_that_drains_takes_nothing_and_says_so() -> None:
    world = MovingWorld(*decode_nodes(2, num_blocks=32))
    world.drain("decode-1", deadline=1.0)
    assert world.nodes["decode-1"].is_drained, "there was nothing to wait for"
    world.start("decode-1", dispatch_of("late", PROMPT, max_tokens=5))
    world.run()
    assert next(iter(world.streams.values())).end == "DRAINING"
    world.start("decode-0", dispatch_of("r", PROMPT, max_tokens=20))
    stream = list(world.streams.values())[1]
    world.nodes["decode-1"].is_drained = False  # the router has not heard of it
    world.drain("decode-0", deadline=0.5)
    world.run()
    assert world.happened["reserve_refused_draining"] >= 1
    assert stream.end == "finished", "refused, it went on here"
    world.run_out()
    world.check_end()


@pytest.mark.covers("D08")
def test_at_the_deadline_what_is_left_ends_with_all_its_tokens() -> None:
    world = MovingWorld(*decode_nodes(1, num_blocks=32))
    world.start("decode-0", dispatch_of("r", PROMPT, max_tokens=40))
    stream = say(world, 10)
    world.drain("decode-0", deadline=1.0)
    world.wait(1.0)
    world.run()
    assert stream.end == "DRAINING" and world.nodes["decode-0"].is_drained
    world.run_out()
    world.check_end()


@pytest.mark.covers("D08", "D05")
def test_the_prefix_that_the_target_has_cached_is_not_sent_again() -> None:
    world = MovingWorld(*decode_nodes(2, num_blocks=32))
    long_prompt = PROMPT * 4
    world.start("decode-1", dispatch_of("before", long_prompt, max_tokens=2))
    world.run()
    world.start("decode-0", dispatch_of("r", long_prompt, max_tokens=20))
    while not (stream := list(world.streams.values())[1]).token_ids:
        assert world.do_something()
    world.drain("decode-0")
    world.run()
    assert stream.end == "finished" and world.happened["moved"] == 1
    assert 0 < world.happened["blocks written"] < len(long_prompt) // 4, "of 6 blocks of the prompt none was missing"
    world.run_out()
    world.check_end()


@pytest.mark.covers("D08")
def test_a_mixed_node_drains_as_a_decode_node_does() -> None:
    target = decode_nodes(1, num_blocks=32)[0]
    world = MovingWorld(Mixed(num_blocks=32), target)
    world.start("mixed-0", dispatch_of("r", PROMPT, max_tokens=40))
    stream = say(world, 10)
    world.drain("mixed-0")
    assert not world.has_drained("mixed-0")
    world.run()
    assert stream.end == "finished" and world.happened["moved"] == 1 and world.has_drained("mixed-0")
    world.run_out()
    world.check_end()


@pytest.mark.covers("D08", "Q02")
def test_who_is_queued_again_while_the_router_looks_for_a_target_stays_where_it_is() -> None:
    """Found by a seed of sim: the target comes for a sequence that has no blocks any more."""
    target = decode_nodes(1, num_blocks=32)[0]
    world = MovingWorld(Mixed(num_blocks=16, num_slots=2, policy="none"), target)
    world.start("mixed-0", dispatch_of("old", PROMPT, max_tokens=40))
    world.start("mixed-0", dispatch_of("young", PROMPT[::-1], max_tokens=40))
    node, young = world.nodes["mixed-0"], world.streams[BranchKey("young", 0)]
    while node.pool.counts().free > 1:
        assert world.do_something()
    world.drain("mixed-0")
    while not node.scheduler.is_waiting(young.key):
        node.to_router, unheard = deque(), node.to_router
        assert world.do_something()
        node.to_router = unheard + node.to_router
    world.run()
    assert world.happened["wants MOVE_DRAINING"] >= 2
    assert [stream.end for stream in world.streams.values()] == ["finished", "finished"]
    world.run_out()
    world.check_end()


@pytest.mark.covers("D08", "H06")
def test_a_node_is_not_drained_while_a_lease_may_be_given_that_it_must_give_back() -> None:
    world = MovingWorld(*decode_nodes(2, num_blocks=32))
    world.start("decode-0", dispatch_of("r", PROMPT, max_tokens=40))
    stream = say(world, 10)
    world.drain("decode-0")
    while "reserve's answer" not in [name for name, _, _ in world.calls]:
        assert world.do_something()
    world.cancel(stream)
    while others := [step for step in world.steps() if step.name != "call reserve's answer"]:
        others[0].do()
    assert world.nodes["decode-1"].core.snapshot()["leases"] == 0 and not world.has_drained("decode-0")
    world.run()
    assert world.has_drained("decode-0")
    world.run_out()
    world.check_end()


def test_an_answer_that_nobody_asked_for_changes_nothing() -> None:
    world = MovingWorld(*decode_nodes(2, num_blocks=32))
    world.start("decode-0", dispatch_of("r", PROMPT, max_tokens=10))
    stream = say(world, 3)
    move = pb.Move(key=stream.key.to_proto(), next_attempt=1, target=world.target("decode-1"))
    world.feed(world.nodes["decode-0"], ev.FromRouter(ROUTER, pb.RouterMessage(move=move)))
    world.run()
    assert stream.end == "finished" and world.happened["unexpected_events"] == 1 and not world.happened["moves_begun"]
