"""A decode node that computes prompts itself: what it owes to who holds leases there, and to routers when blocks run short."""

from __future__ import annotations

import pytest

from connector.transport import RevokeDone
from engine.fake_runner import expected_tokens
from node import events as ev
from node.sampling import to_sampling_params
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey, attempt_key
from tests.cores.mixed import Mixed, target_of
from tests.cores.nodes import DECODE, ROUTER, VOCAB_SIZE, only, reserve_request


def key(name: str, attempt: int = 0) -> AttemptKey:
    return AttemptKey(name, 0, attempt)


def decode_node(num_blocks: int = 16, max_batched_tokens: int = 16) -> Mixed:
    return Mixed(num_blocks, policy="none", max_batched_tokens=max_batched_tokens, role="decode", identity=DECODE)


def dispatch(
    name: str, prompt: list[int], max_tokens: int, attempt: int = 0, generated: tuple[int, ...] = ()
) -> pb.Dispatch:
    return pb.Dispatch(
        request_id=name,
        attempt=attempt,
        branches=[pb.Branch(choice=0, seed=1, generated_token_ids=generated)],
        prompt_token_ids=prompt,
        sampling=pb.Sampling(max_tokens=max_tokens),
        target=target_of(DECODE),
        ms_left=60_000,
    )


def ask(node: Mixed, name: str, num_tokens: int, wait_ms: int = 0, attempt: int = 0) -> list[ev.Action]:
    """A prefill node's Reserve."""
    request = reserve_request(key(name, attempt), list(range(num_tokens)), 4)
    request.wait_ms = wait_ms
    return node.feed(ev.ReserveAsked(ord(name), request))


def said(actions: list[ev.Action]) -> dict[str, list[int]]:
    """The tokens of each request; whatever this node says, it says as the attempt's owner."""
    tokens: dict[str, list[int]] = {}
    for action in actions:
        if isinstance(action, ev.ToRouter) and action.message.HasField("tokens"):
            assert action.message.tokens.from_receiver
            for branch in action.message.tokens.branches:
                tokens.setdefault(branch.key.request_id, []).extend(branch.token_ids)
    return tokens


@pytest.mark.covers("D11", "D01")
def test_no_lease_is_given_while_a_prompt_that_came_before_finds_no_room() -> None:
    node = decode_node(max_batched_tokens=64)
    assert node.send(dispatch("a", [1] * 24, 20)) == [ev.Count("local_prefills")]
    node.step()
    assert only(ask(node, "e", 4), ev.AnswerReserve).reply.HasField("lease"), "nobody waits"
    node.send(dispatch("b", [2] * 40, 20))  # ten blocks: more than a leaves
    node.step()
    assert node.scheduler.num_waiting == 1 and node.pool.num_available > 4
    refused = only(ask(node, "f", 4), ev.AnswerReserve).reply.error
    assert refused.code == pb.NO_BLOCKS and "before" in refused.message
    assert not [action for action in ask(node, "g", 4, wait_ms=5000) if isinstance(action, ev.AnswerReserve)]
    answers: list[ev.AnswerReserve] = []
    while not answers:
        answers = [action for action in node.step() if isinstance(action, ev.AnswerReserve)]
    assert answers[0].call_id == ord("g") and answers[0].reply.HasField("lease")
    assert not node.scheduler.num_waiting, "b has its room"


@pytest.mark.covers("D11", "Q02", "R06")
def test_a_prompt_computed_here_that_gives_way_goes_back_to_the_router_with_every_token_and_is_done_elsewhere() -> None:
    """Two that together need more than there is: one gives way, once, and another node draws what is left of it."""
    node, other = decode_node(), decode_node()
    prompts = {name: [1, 2, 3, 4, 5, 6, ord(name) % 9] for name in "ab"}
    for name, prompt in prompts.items():
        node.send(dispatch(name, prompt, 50))
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    errors: list[pb.PDError] = []
    while node.plans:
        actions = node.step()
        for name, new in said(actions).items():
            tokens[name] += new
        errors += [each.message.error for each in actions if isinstance(each, ev.ToRouter) and each.message.error.code]
    (error,) = errors
    assert (error.code, error.retryable, attempt_key(error.key)) == (pb.PREEMPTED, True, key("b"))
    assert 0 < len(tokens["b"]) < 50 and list(error.completion_token_ids) == tokens["b"], "all that it said, no more"
    node.assert_empty()
    other.send(dispatch("b", prompts["b"], 50, attempt=1, generated=tuple(error.completion_token_ids)))
    while other.plans:
        tokens["b"] += said(other.step()).get("b", [])
    for name, prompt in prompts.items():
        sampling = to_sampling_params(pb.Sampling(max_tokens=50), 1)
        assert tokens[name] == expected_tokens(prompt, (), sampling, 50, VOCAB_SIZE)


@pytest.mark.covers("D11", "R04", "H06")
def test_an_attempt_is_here_one_way_only_and_a_newer_one_ends_it_whichever_way_it_came() -> None:
    node = decode_node(40)
    lease = only(ask(node, "a", 5), ev.AnswerReserve).reply.lease
    assert node.send(dispatch("a", [1] * 5, 4)) == [ev.Count("stale_refused")], "it is leased for: its KV is on the way"
    actions = node.send(dispatch("a", [1] * 5, 40, attempt=1))
    assert only(actions, ev.RevokeLease).lease_id == lease.lease_id
    node.feed(RevokeDone(lease.lease_id))
    snapshot = node.core.snapshot()
    assert (snapshot["leases"], snapshot["local_branches"], snapshot["branches"]) == (0, 1, 0)
    assert only(ask(node, "a", 5, attempt=1), ev.AnswerReserve).reply.error.code == pb.CANCELLED
    assert only(ask(node, "a", 5, attempt=2), ev.AnswerReserve).reply.HasField("lease")
    assert node.core.snapshot()["local_branches"] == 0, "its sender computes it anew"
    assert node.send(dispatch("a", [1] * 5, 40, attempt=1)) == [ev.Count("stale_refused")]
    node.send(dispatch("b", [2] * 5, 40))
    ended = node.feed(ev.RouterLost(ROUTER))
    assert {(action.key.request_id, action.outcome) for action in ended if isinstance(action, ev.Ended)} >= {
        ("b", "router lost")
    }


@pytest.mark.covers("D08", "D11")
@pytest.mark.parametrize("num_tokens", [5, 40])
def test_who_drains_while_a_prompt_is_computed_asks_for_a_place_once_it_has_said_a_token(num_tokens: int) -> None:
    """A router knows of no holder before, and would not answer."""
    node = decode_node(40)
    node.send(dispatch("a", [1] * num_tokens, 20))
    actions = node.feed(ev.DrainAsked(25.0))
    words: list[str] = []
    while "wants_move" not in words:
        words += [str(each.message.WhichOneof("kind")) for each in actions if isinstance(each, ev.ToRouter)]
        actions = node.step()
    assert words.index("tokens") < words.index("wants_move")
