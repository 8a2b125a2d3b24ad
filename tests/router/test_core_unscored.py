"""A finished answer whose prompt's logprobs died with their sender: another attempt brings them, and waits for nothing else."""

from __future__ import annotations

import pytest

from proto import baton_pb2 as pb
from router.events import Finished, SessionLost
from tests.router.core_world import CoreWorld, ref

SCORE = pb.TokenLogprobs(logprob=-1.0)
PROMPT = (1, 2, 3, 4)


def unscored_world(num_said: int = 3, finish: pb.FinishReason.ValueType = pb.FINISH_STOP) -> tuple[CoreWorld, str]:
    """Request a has said 7, 8 and 99, which ends it; its prefill node died with the logprobs, and the other one begins."""
    world = CoreWorld.with_nodes("p1", "p2", "d1", "d2")
    world.submit("a", prompt=PROMPT, num_logprobs=0, wants_prompt_logprobs=True)
    ((prefill, dispatch),) = world.dispatches("a")
    said = [7, 8, 99][:num_said]
    world.tokens_from(dispatch.target.node.name, "a", 0, said, finish, logprobs=[SCORE] * num_said)
    world.feed(SessionLost(ref(prefill), has_died=True))
    assert len(world.dispatches("a")) == 2
    return world, world.dispatches("a")[-1][0]


def score(world: CoreWorld, prefill: str, attempt: int) -> None:
    world.tokens_from(prefill, "a", 2, [99], attempt=attempt, logprobs=[SCORE], prompt_logprobs=[SCORE] * 3)


@pytest.mark.parametrize("code", [pb.NO_BLOCKS, pb.BUSY, pb.DRAINING])
@pytest.mark.covers("R10", "Q05")
def test_a_finished_answer_that_is_only_refused_asks_again_soon_and_pays_nothing(code: pb.ErrorCode.ValueType) -> None:
    world, prefill = unscored_world()
    for attempt in range(1, 4):
        refuser = world.dispatches("a")[-1][1].target.node.name
        world.error_from(prefill, "a", code, attempt, node_id=refuser, completion_token_ids=[7, 8])
        world.pass_time(0.2)
        world.join_all(refuser, incarnation=attempt + 1)
        assert [dispatch.attempt for _, dispatch in world.dispatches("a")] == list(range(attempt + 2))
    assert [what for name, what in world.counts if name == "retries"] == ["NODE_LOST"]
    score(world, prefill, 4)
    assert world.ends["a"] == Finished("a", "stop", (7, 8, 99))
    world.assert_nothing_is_left()


@pytest.mark.covers("R21")
def test_an_unanswered_commit_of_a_finished_answer_is_awaited_once() -> None:
    world, prefill = unscored_world()
    world.error_from(prefill, "a", pb.TRANSFER_FAILED, 1, commit_unanswered=True)
    world.pass_time(1.9)
    assert len(world.dispatches("a")) == 2
    world.pass_time(0.2)
    assert len(world.dispatches("a")) == 3, "what its sender has not told before this, nobody will"


@pytest.mark.covers("R21")
def test_what_the_receiver_ends_waits_for_logprobs_that_are_on_their_way() -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a", prompt=PROMPT, max_tokens=2, num_logprobs=0, wants_prompt_logprobs=True)
    world.tokens_from("d1", "a", 0, [7, 8], logprobs=[SCORE] * 2)
    world.error_from("d1", "a", pb.DRAINING, completion_token_ids=[7, 8])
    world.pass_time(1.0)
    assert len(world.dispatches("a")) == 1 and "a" not in world.ends
    world.tokens_from("p1", "a", 0, [7], logprobs=[SCORE], prompt_logprobs=[SCORE] * 3)
    assert world.ends["a"] == Finished("a", "length", (7, 8))
    world.assert_nothing_is_left()


@pytest.mark.covers("A10")
def test_a_stop_string_found_while_the_prompt_is_scored_again_stops_nobody_who_scores_it() -> None:
    world, prefill = unscored_world(2, pb.FINISH_UNSPECIFIED)
    world.sent.clear()
    world.stop("a", 1)
    assert not world.cancels("a")
    world.tokens_from(prefill, "a", 2, [9], attempt=1, logprobs=[SCORE], prompt_logprobs=[SCORE] * 3)
    assert world.ends["a"] == Finished("a", "stop", (7,))
    assert {attempt for _, attempt in world.cancels("a")} == {1}, "now it is"
    world.assert_nothing_is_left()
