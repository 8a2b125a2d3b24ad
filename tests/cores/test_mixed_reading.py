"""A mixed node's own prompts wait for what the KV pool has of them, and whatever ends one meanwhile leaves nothing of it behind."""

from __future__ import annotations

import numpy as np
import pytest

from mixed_node.core import MAX_HELD
from node import events as ev
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey
from tests.cores.mixed import MIXED, Mixed, target_of
from tests.cores.nodes import BLOCK_SIZE, DECODE, ROUTER, only, reserve_request
from tests.cores.reading import prompt_of


def to_self(
    prompt: list[int], num_choices: int = 1, ms_left: int = 60_000, generated: tuple[int, ...] = ()
) -> pb.Dispatch:
    branches = [pb.Branch(choice=i, seed=i + 1, generated_token_ids=generated) for i in range(num_choices)]
    return pb.Dispatch(
        request_id="a",
        branches=branches,
        prompt_token_ids=prompt,
        sampling=pb.Sampling(max_tokens=3 + len(generated)),
        target=target_of(MIXED),
        ms_left=ms_left,
    )


def cancel(choice: int = 0) -> pb.Cancel:
    return pb.Cancel(key=AttemptKey("a", choice, 0).to_proto(), ms_left=60_000)


def fetch_brings(node: Mixed, fetch: ev.FetchBlocks, prompt: list[int], now: float = 0.0) -> list[ev.Action]:
    """The blocks' KV is what computing them would have written."""
    for _, block_id in fetch.blocks:
        kv = np.full(BLOCK_SIZE, prompt[0] + 1, np.int32)
        node.memory[block_id, : kv.nbytes] = kv.view(np.uint8)
    return node.feed(ev.BlocksFetched(fetch.fetch_id, len(fetch.blocks), 0.01), now)


def said_until_the_end(node: Mixed) -> dict[int, list[int]]:
    """The tokens of each choice."""
    said: dict[int, list[int]] = {}
    while node.plans:
        for action in node.step():
            for each in action.message.tokens.branches if isinstance(action, ev.ToRouter) else ():
                said.setdefault(each.key.choice, []).extend(each.token_ids)
    return said


@pytest.mark.covers("W07", "W02")
@pytest.mark.parametrize("num_choices", [1, 3])
def test_of_a_prompt_of_its_own_whose_blocks_the_pool_has_a_mixed_node_computes_the_tail(num_choices: int) -> None:
    prompt = prompt_of(4)
    alone = Mixed()
    alone.send(to_self(prompt, num_choices))
    expected = said_until_the_end(alone)
    assert len(expected) == num_choices

    node = Mixed(reads_kv_pool=True)
    look = only(node.send(to_self(prompt, num_choices)), ev.LookInPool)
    assert not node.plans
    fetch = only(node.feed(ev.PoolLooked(look.look_id, 4)), ev.FetchBlocks)
    assert not node.plans
    fetch_brings(node, fetch, prompt)
    assert {chunk.start for chunk in node.plans[0].chunks} == {16}
    assert said_until_the_end(node) == expected
    node.assert_empty()


def test_who_goes_on_here_with_what_it_said_elsewhere_reads_its_completion_too() -> None:
    prompt, generated = prompt_of(3), tuple(range(3, 9))
    node = Mixed(reads_kv_pool=True)
    look = only(node.send(to_self(prompt, generated=generated)), ev.LookInPool)
    assert len(look.keys) == (len(prompt) + len(generated) - 1) // BLOCK_SIZE > 3


def test_what_the_pool_lacks_or_brings_too_late_is_computed() -> None:
    node = Mixed(reads_kv_pool=True)
    look = only(node.send(to_self(prompt_of(4))), ev.LookInPool)
    node.feed(ev.PoolLooked(look.look_id, 0))
    assert [chunk.start for chunk in node.plans[0].chunks] == [0]
    node = Mixed(reads_kv_pool=True)
    only(node.send(to_self(prompt_of(4))), ev.LookInPool)
    deadline = node.core.next_deadline()
    assert deadline is not None
    node.keep_plans(node.core.tick(deadline))
    assert [chunk.start for chunk in node.plans[0].chunks] == [0]


@pytest.mark.covers("P08", "H15")
@pytest.mark.parametrize("how", ["cancel", "router lost", "drain"])
@pytest.mark.parametrize("is_fetching", [False, True])
def test_whatever_ends_a_prompt_that_waits_for_the_pool_nothing_of_it_is_left(how: str, is_fetching: bool) -> None:
    node, prompt = Mixed(reads_kv_pool=True), prompt_of(4)
    look = only(node.send(to_self(prompt)), ev.LookInPool)
    fetch = only(node.feed(ev.PoolLooked(look.look_id, 4)), ev.FetchBlocks) if is_fetching else None
    match how:
        case "cancel":
            actions = node.send(cancel())
        case "router lost":
            actions = node.feed(ev.RouterLost(ROUTER))
        case _:
            actions = node.feed(ev.DrainAsked(10.0))
    errors = [
        each.message.error.code for each in actions if isinstance(each, ev.ToRouter) and each.message.HasField("error")
    ]
    assert errors == ([pb.DRAINING] if how == "drain" else [])
    assert any(isinstance(each, ev.Drained) for each in actions) == (how == "drain")
    assert node.core.snapshot()["waiting_for_kv"] == 0
    if fetch is None:
        node.feed(ev.PoolLooked(look.look_id, 4))
    else:
        fetch_brings(node, fetch, prompt)
    assert not node.plans
    node.assert_empty()


@pytest.mark.covers("P06")
def test_of_choices_that_wait_together_only_those_that_were_cancelled_are_not_begun() -> None:
    node, prompt = Mixed(reads_kv_pool=True), prompt_of(4)
    look = only(node.send(to_self(prompt, 3)), ev.LookInPool)
    node.send(cancel(0))
    node.feed(ev.PoolLooked(look.look_id, 0))
    assert set(said_until_the_end(node)) == {1, 2}
    node.assert_empty()


def test_the_time_that_a_prompt_waited_for_the_pool_counts_towards_its_deadline() -> None:
    node = Mixed(reads_kv_pool=True)
    look = only(node.send(to_self(prompt_of(4), ms_left=100)), ev.LookInPool)
    node.feed(ev.PoolLooked(look.look_id, 0), 0.09)
    deadline = node.core.next_deadline()
    assert deadline is not None and 0.09 < deadline < 0.11


def test_a_dispatch_that_comes_twice_waits_once() -> None:
    node = Mixed(reads_kv_pool=True)
    look = only(node.send(to_self(prompt_of(4))), ev.LookInPool)
    assert node.send(to_self(prompt_of(4))) == [ev.Count("stale_refused")]
    node.feed(ev.PoolLooked(look.look_id, 0))
    assert len(said_until_the_end(node)[0]) == 3


@pytest.mark.covers("R04", "H06")
def test_an_attempt_that_waits_for_the_pool_on_its_way_elsewhere_is_begun_by_nobody_else_here() -> None:
    """No right router or sender asks for it; the scheduler would not know whose sequence it is."""
    node, prompt = Mixed(reads_kv_pool=True), prompt_of(4)
    elsewhere = to_self(prompt)
    elsewhere.target.CopyFrom(target_of(DECODE))
    look = only(node.send(elsewhere), ev.LookInPool)
    assert node.send(to_self(prompt)) == [ev.Count("stale_refused")]
    reserve = reserve_request(AttemptKey("a", 0, 0), prompt, 3)
    answer = only(node.feed(ev.ReserveAsked(1, reserve)), ev.AnswerReserve)
    assert answer.reply.error.code == pb.CANCELLED
    node.feed(ev.PoolLooked(look.look_id, 0))
    assert [chunk.start for chunk in node.plans[0].chunks] == [0]
    node.feed(ev.RouterLost(ROUTER))
    node.feed(ev.ReserveAnswered(AttemptKey("a", 0, 0), None))
    said_until_the_end(node)
    node.assert_empty()


@pytest.mark.covers("R04")
def test_what_is_computed_for_another_node_does_not_wait_here_for_the_pool_under_the_same_name() -> None:
    """No right router asks for both: it ended the node."""
    node, prompt = Mixed(reads_kv_pool=True), prompt_of(4)
    elsewhere = to_self(prompt)
    elsewhere.target.CopyFrom(target_of(DECODE))
    look = only(node.send(elsewhere), ev.LookInPool)
    node.feed(ev.PoolLooked(look.look_id, 0))
    assert node.plans
    assert node.send(to_self(prompt)) == [ev.Count("stale_refused")]


@pytest.mark.covers("R04")
@pytest.mark.parametrize("is_cancelled", [True, False])
def test_who_ended_while_it_waited_for_the_pool_and_comes_again_goes_on_once(is_cancelled: bool) -> None:
    """No right router asks so: it ended the node."""
    node, prompt = Mixed(reads_kv_pool=True), prompt_of(4)
    look = only(node.send(to_self(prompt)), ev.LookInPool)
    fetch = only(node.feed(ev.PoolLooked(look.look_id, 4)), ev.FetchBlocks)
    node.send(cancel()) if is_cancelled else node.feed(ev.RouterLost(ROUTER))
    node.send(to_self(prompt))  # waits for the same fetch
    fetch_brings(node, fetch, prompt)
    assert len(said_until_the_end(node).get(0, [])) == (0 if is_cancelled else 3)
    node.assert_empty()


@pytest.mark.covers("R04")
@pytest.mark.parametrize("first_choice", [0, 1])
def test_a_prompt_of_its_own_that_waits_for_the_pool_is_not_begun_for_another_node(first_choice: int) -> None:
    """No right router asks for both; two sequences of one name ended the node, and who waited was never forgotten."""
    node, prompt = Mixed(reads_kv_pool=True), prompt_of(4)
    before = to_self([9] * 17)
    before.request_id = "before"
    look_before = only(node.send(before), ev.LookInPool)  # whose answer is overdue by then: who comes new does not wait
    overdue_at = node.core.next_deadline()
    assert overdue_at is not None
    look = only(node.send(to_self(prompt, 2), overdue_at / 2), ev.LookInPool)
    node.keep_plans(node.core.tick(overdue_at))
    elsewhere = to_self(prompt, 2)
    del elsewhere.branches[:first_choice]
    elsewhere.target.CopyFrom(target_of(DECODE))
    assert node.send(elsewhere, overdue_at) == [ev.Count("stale_refused")]
    for each in (look, look_before):
        node.feed(ev.PoolLooked(each.look_id, 0), overdue_at)
    assert len(said_until_the_end(node)[1]) == 3
    node.assert_empty()


def test_no_more_wait_than_are_allowed_and_the_next_one_is_computed_at_once() -> None:
    node = Mixed(reads_kv_pool=True, num_blocks=600)
    for i in range(MAX_HELD):
        dispatch = to_self([i + 10] * 17)
        dispatch.request_id = f"r{i}"
        assert only(node.send(dispatch), ev.LookInPool)
    assert not node.plans
    node.send(to_self(prompt_of(4)))
    assert node.plans
