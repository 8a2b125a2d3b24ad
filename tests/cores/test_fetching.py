"""A prefill core that reads the KV pool, by example: who waits for what, for how long, and what is left behind."""

from __future__ import annotations

import numpy as np
import pytest

from engine.block_pool import BlockState
from node import events as ev
from prefill_node.fetch_cost import COLD_WAIT_S
from prefill_node.fetching import LOOK_AGAIN_S, LOOKS_FOR, PROBE_BLOCKS, PROBE_PAUSE_S
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey
from tests.cores.mixed import MIXED, Mixed
from tests.cores.nodes import BLOCK_SIZE, DECODE, ROUTER, only, reserve_request
from tests.cores.reading import STEP_S, Reading, keys_of, prompt_of

A, B, C, D, E = (AttemptKey(name, 0, 0) for name in "abcde")


@pytest.mark.covers("W07", "P02")
def test_of_a_prompt_whose_blocks_the_pool_has_only_the_tail_is_computed() -> None:
    node = Reading()
    node.dispatch(A, prompt_of(5))
    assert node.looks[0].keys == tuple(keys_of(prompt_of(5))) and not node.plans
    node.look_says(5)
    assert [key for key, _ in node.fetches[0].blocks] == keys_of(prompt_of(5))
    states = node.prefill.pool.snapshot()["states"]
    assert isinstance(states, tuple)
    assert {states[block_id] for _, block_id in node.fetches[0].blocks} == {BlockState.LEASED}
    node.fetch_brings(5)
    assert set(node.plans[0].arrived_block_ids) and node.step() == [(20, 1)]
    node.assert_empty()


@pytest.mark.covers("W07", "P02")
def test_only_what_the_prefix_cache_lacks_is_fetched_and_only_as_far_as_a_match_may_go() -> None:
    node = Reading()
    node.dispatch(A, prompt_of(2)[:-1])  # without the last token a match may use one block
    assert len(node.looks[0].keys) == 1
    node.look_says(0)
    assert node.run() == 8
    node.dispatch(B, prompt_of(4))
    assert node.looks[0].keys == tuple(keys_of(prompt_of(4))[2:])
    node.look_says(1)
    assert [key for key, _ in node.fetches[0].blocks] == keys_of(prompt_of(4))[2:3]
    node.fetch_brings(1)
    assert node.step() == [(12, 5)]
    node.assert_empty()


@pytest.mark.covers("W07", "P04")
def test_a_request_that_waits_for_the_pool_is_overtaken() -> None:
    node = Reading()
    node.dispatch(A, prompt_of(5))
    node.dispatch(B, [5, 6])
    assert node.step() == [(0, 2)], "B has nothing that the pool could have, and does not wait"
    node.look_says(5)
    node.dispatch(C, [7, 8])
    assert node.step() == [(0, 2)]
    node.fetch_brings(5)
    assert node.step() == [(20, 1)]
    node.assert_empty()


@pytest.mark.covers("W07")
def test_two_requests_with_one_beginning_fetch_it_once() -> None:
    node = Reading()
    node.dispatch(A, prompt_of(4))
    node.dispatch(B, [*prompt_of(4), 9, 9, 9, 9])  # one block more: it begins differently behind the fourth
    node.look_says(4)
    node.look_says(4)
    node.dispatch(C, prompt_of(4))
    assert len(node.fetches) == 1 and not node.looks, "C knows that what it needs is on its way"
    node.fetch_brings(4)
    assert [start for start, _ in node.step()] == [16, 16, 16] and not node.fetches
    node.assert_empty()


@pytest.mark.covers("W07")
def test_who_waited_for_anothers_blocks_then_asks_for_its_own() -> None:
    node = Reading()
    node.dispatch(A, prompt_of(4))
    node.look_says(4)
    longer = [*prompt_of(4)[:-1], *[9] * BLOCK_SIZE, 2]
    node.dispatch(B, longer)
    assert not node.looks
    node.fetch_brings(4)
    assert node.looks[0].keys == (keys_of(longer)[4],), "nobody has asked whether the pool has this one"
    node.look_says(1)
    node.fetch_brings(1)
    assert [start for start, _ in (*node.step(), *node.step())] == [16, 20]
    node.assert_empty()


@pytest.mark.covers("W07")
def test_who_goes_on_from_elsewhere_looks_again_for_what_is_being_saved_of_it_a_quarter_of_its_patience_long() -> None:
    node = Reading()
    node.warm_up()
    began_at = node.now
    whole = prompt_of(8)
    node.dispatch(A, whole[:20], generated=whole[20:])
    node.look_says(0)
    assert not node.plans and not node.looks
    node.wait(LOOK_AGAIN_S)
    node.look_says(3)
    node.fetch_brings(3)
    assert not node.plans and not node.looks, "more of it may come"
    node.wait(LOOK_AGAIN_S)
    assert node.looks[0].keys == tuple(keys_of(whole)[3:])
    node.look_says(2)
    node.fetch_brings(2)
    while not node.plans:
        node.wait(LOOK_AGAIN_S)
        if node.looks:
            node.look_says(0)
    patience_s = 8 * BLOCK_SIZE * STEP_S / 8
    assert node.now - began_at == pytest.approx(patience_s * LOOKS_FOR, abs=2 * LOOK_AGAIN_S)
    assert node.step()[0][0] == 20
    node.run()
    node.assert_empty()
    node.dispatch(B, [3] * 20)
    node.look_says(0)
    assert node.plans, "nothing is being saved of who is new"


@pytest.mark.covers("W07", "S12")
def test_a_long_prefix_comes_in_runs_of_a_quarter_of_the_pool_at_most_and_none_is_computed() -> None:
    node = Reading(num_blocks=16)
    node.dispatch(A, prompt_of(10))
    node.look_says(10)
    lengths = []
    while node.fetches:
        lengths.append(len(node.fetches[0].blocks))
        node.fetch_brings(lengths[-1])
    assert lengths == [4, 4, 2]
    assert node.step() == [(40, 1)]
    node.assert_empty()


@pytest.mark.covers("W08")
def test_what_the_pool_said_it_has_and_has_not_is_computed_and_not_asked_for_again() -> None:
    node = Reading()
    node.dispatch(A, prompt_of(6))
    node.dispatch(B, prompt_of(6))
    node.look_says(6)
    node.look_says(6)
    node.fetch_brings(2)
    assert not node.fetches and not node.looks
    assert node.step() == [(8, 8)]
    node.run()
    node.assert_empty()


@pytest.mark.covers("W08", "P06", "H07")
@pytest.mark.parametrize("has_answered_look", [False, True])
def test_a_request_waits_no_longer_than_computing_would_take_and_what_comes_late_serves_the_next_one(
    has_answered_look: bool,
) -> None:
    node = Reading()
    node.warm_up()
    began_at = node.now
    node.dispatch(A, prompt_of(6))  # 0.3 s of computing, nobody in front
    if has_answered_look:
        node.look_says(6)
    at = node.prefill.core.next_deadline()
    assert at is not None and at - began_at == pytest.approx(6 * BLOCK_SIZE * STEP_S / 8, rel=0.01)
    node.wait(at - node.now - 1e-6)
    assert not node.plans
    node.wait(2e-6)
    assert node.counts == ["kv_pool_too_late"] and node.plans[0].chunks[0].start == 0
    node.dispatch(B, prompt_of(7, 8))
    assert len(node.looks) + len(node.fetches) == 1 and node.snapshot["waiting_for_kv"] == 0, "the pool is stuck"
    assert node.counts == ["kv_pool_too_late"] * 2
    node.run()
    if has_answered_look:
        node.fetch_brings(6, 3.0)
    else:
        node.look_says(6)
    node.assert_empty()


@pytest.mark.covers("W08")
def test_a_request_waits_for_few_blocks_no_longer_than_computing_those_would_take() -> None:
    node = Reading()
    node.warm_up()
    began_at = node.now
    node.dispatch(A, prompt_of(6))
    node.look_says(1)
    assert node.prefill.core.next_deadline() == pytest.approx(began_at + BLOCK_SIZE * STEP_S / 8)


@pytest.mark.covers("W08")
def test_before_anything_was_computed_or_fetched_a_request_waits_a_quarter_of_a_second_at_most() -> None:
    node = Reading()
    node.dispatch(A, prompt_of(6))
    node.look_says(6)
    node.wait(COLD_WAIT_S - 1e-6)
    assert not node.plans
    node.wait(2e-6)
    assert node.plans
    node.fetch_brings(6, COLD_WAIT_S)
    node.run()
    node.assert_empty()


@pytest.mark.covers("W08")
def test_what_is_slower_than_computing_is_not_fetched_until_a_probe_finds_it_faster() -> None:
    node = Reading()
    node.warm_up(fetch_s=0.2)
    node.dispatch(A, prompt_of(10))
    assert node.counts == ["kv_pool_not_worth"] and node.plans and not node.looks, "nobody asks, nobody waits"
    node.run()
    node.now += PROBE_PAUSE_S
    node.dispatch(B, prompt_of(10, 3))
    assert node.counts[1:] == ["kv_pool_not_worth", "kv_pool_probes"] and node.plans, "nobody waits for a probe"
    assert len(node.looks[0].keys) == PROBE_BLOCKS
    node.look_says(0)
    node.run()
    node.dispatch(C, prompt_of(10, 4))
    assert node.counts[3:] == ["kv_pool_not_worth"], "the next one comes after a pause"
    node.run()
    node.now += PROBE_PAUSE_S
    node.dispatch(D, prompt_of(10, 5))
    node.look_says(PROBE_BLOCKS)
    assert len(node.fetches[0].blocks) == PROBE_BLOCKS
    node.fetch_brings(PROBE_BLOCKS, 1e-3)
    node.run()
    node.dispatch(E, prompt_of(10, 6))
    assert node.snapshot["waiting_for_kv"] == 1 and node.looks, "fetching is fast again, and it never finds out"


@pytest.mark.covers("W07")
def test_who_waits_in_the_queue_anyway_fetches_what_alone_it_would_compute_faster() -> None:
    node = Reading()
    node.warm_up(fetch_s=0.055)  # a block: 55 ms against 50 ms
    node.dispatch(A, prompt_of(2))
    assert node.counts == ["kv_pool_not_worth"]
    node.run()
    node.dispatch(B, [*range(3, 31), 3, 3, 3])  # 31 tokens in front of whoever comes now
    node.look_says(0)
    node.dispatch(C, prompt_of(2, 5))
    assert node.looks and node.snapshot["waiting_for_kv"] == 1


@pytest.mark.covers("S12")
def test_room_for_a_fetch_is_never_made_of_the_prefix_that_it_continues() -> None:
    node = Reading(num_blocks=16)
    node.dispatch(A, prompt_of(12))
    node.look_says(0)
    node.run()
    node.dispatch(B, prompt_of(3, 9))  # the rest of the pool: now the first prompt's blocks are the least recently used
    node.look_says(0)
    node.run()
    assert node.prefill.pool.counts().free <= 1
    whole = keys_of(prompt_of(14))
    assert all(node.prefill.pool.find(key) is not None for key in whole[:12])
    node.dispatch(C, prompt_of(14))
    node.look_says(2)
    assert [key for key, _ in node.fetches[0].blocks] == whole[12:]
    assert all(node.prefill.pool.find(key) is not None for key in whole[:12]), "evicted, and the fetch is of no use"
    node.fetch_brings(2)
    assert node.step() == [(56, 1)]
    node.assert_empty()


@pytest.mark.covers("S12", "P04")
@pytest.mark.parametrize("why", ["promised to who runs", "needed by who waits", "there is room"])
def test_a_fetch_takes_no_block_that_who_runs_or_waits_may_need(why: str) -> None:
    node = Reading(num_blocks=16)
    node.dispatch(A, prompt_of(13 if why == "promised to who runs" else 8))  # one block more, promised at its admission
    node.look_says(0)
    if why == "needed by who waits":
        node.dispatch(B, prompt_of(8, 3))  # 9 blocks where 7 are left
        node.look_says(0)
        assert node.prefill.scheduler.num_waiting == 1
    before = node.prefill.pool.num_available
    assert node.prefill.pool.counts().free > 6
    node.dispatch(C, prompt_of(3, 7))
    node.look_says(3)
    if why == "there is room":
        assert len(node.fetches[0].blocks) == 3 and node.prefill.pool.num_available == before - 3
    else:
        assert not node.fetches and node.prefill.pool.num_available == before
        assert node.counts == ["kv_pool_no_room"]


@pytest.mark.covers("P08", "P06", "H15")
@pytest.mark.parametrize("how", ["cancel", "deadline", "router lost", "drain", "retry"])
@pytest.mark.parametrize("is_fetching", [False, True])
def test_whatever_ends_a_request_that_waits_for_the_pool_nothing_of_it_is_left(how: str, is_fetching: bool) -> None:
    node = Reading()
    node.dispatch(A, prompt_of(5), ms_left=100)
    if is_fetching:
        node.look_says(5)
    match how:
        case "cancel":
            node.feed(ev.FromRouter(ROUTER, pb.RouterMessage(cancel=pb.Cancel(key=A.to_proto(), ms_left=60_000))))
        case "deadline":
            node.wait(0.2)
        case "router lost":
            node.feed(ev.RouterLost(ROUTER))
        case "drain":
            node.feed(ev.DrainAsked(10.0))
        case "retry":
            node.dispatch(A._replace(attempt=1), [3, 4])
            assert node.run() == 2
    codes = {"deadline": [pb.DEADLINE], "drain": [pb.DRAINING]}
    assert [error.code for error in node.errors] == codes.get(how, [])
    assert isinstance(node.ended[0], ev.Ended) and node.ended[0].key == A
    assert (node.snapshot["attempts"], node.snapshot["waiting_for_kv"]) == (0, 0)
    assert (how == "drain") == isinstance(node.ended[-1], ev.Drained)
    if is_fetching:
        assert node.prefill.pool.counts().leased == 5, "the reader may write into them"
        node.fetch_brings(5)
    else:
        node.look_says(5)
    assert not node.plans and not node.fetches
    node.assert_empty()


def test_a_prompt_whose_logprobs_are_wanted_is_not_looked_for() -> None:
    node = Reading()
    dispatch = pb.Dispatch(
        request_id="a",
        branches=[pb.Branch(seed=1)],
        prompt_token_ids=prompt_of(5),
        sampling=pb.Sampling(max_tokens=1, num_logprobs=1, prompt_logprobs=True),
        target=pb.Target(node=DECODE.to_proto(), grpc_address="decode-0:1"),
        ms_left=60_000,
    )
    node.feed(ev.FromRouter(ROUTER, pb.RouterMessage(dispatch=dispatch)))
    assert not node.looks and node.plans


def test_a_twin_that_was_computed_while_the_fetch_ran_stays_the_one_found() -> None:
    node = Reading()
    node.warm_up()
    node.dispatch(A, prompt_of(6))
    node.look_says(6)
    node.wait(1.0)  # it is computed now, and the fetch goes on
    node.run()
    found = [node.prefill.pool.find(key) for key in keys_of(prompt_of(6))]
    node.fetch_brings(6, 2.0)
    assert [node.prefill.pool.find(key) for key in keys_of(prompt_of(6))] == found
    node.assert_empty()


def to_another(prompt: list[int]) -> pb.Dispatch:
    """A mixed node computes it for a decode node."""
    return pb.Dispatch(
        request_id="a",
        branches=[pb.Branch(seed=1)],
        prompt_token_ids=prompt,
        sampling=pb.Sampling(max_tokens=1),
        target=pb.Target(node=DECODE.to_proto(), grpc_address="decode-0:1"),
        ms_left=60_000,
    )


@pytest.mark.covers("W07")
def test_the_prefill_half_of_a_mixed_node_reads_the_pool_too() -> None:
    node = Mixed(reads_kv_pool=True)
    prompt = prompt_of(4)
    look = only(node.send(to_another(prompt)), ev.LookInPool)
    assert node.identity is MIXED and not node.plans
    fetch = only(node.feed(ev.PoolLooked(look.look_id, 4)), ev.FetchBlocks)
    for _, block_id in fetch.blocks:
        kv = np.full(BLOCK_SIZE, prompt[0] + 1, np.int32)
        node.memory[block_id, : kv.nbytes] = kv.view(np.uint8)
    node.feed(ev.BlocksFetched(fetch.fetch_id, 4, 0.01))
    assert [chunk.start for chunk in node.plans[0].chunks] == [16]
    node.step()
    node.assert_empty()


@pytest.mark.covers("S12", "P04")
@pytest.mark.parametrize("is_somebody_in_line", [False, True])
def test_on_a_mixed_node_a_fetch_takes_no_room_while_somebody_waits_for_a_lease(is_somebody_in_line: bool) -> None:
    node = Mixed(num_blocks=20, policy="none", reads_kv_pool=True)

    def reserve(name: str, num_tokens: int) -> list[ev.Action]:
        request = reserve_request(AttemptKey(name, 0, 0), [3] * num_tokens, 4)
        request.to_incarnation, request.wait_ms = MIXED.incarnation, 10_000
        return node.feed(ev.ReserveAsked(ord(name), request))

    only(reserve("x", 40), ev.AnswerReserve)
    if is_somebody_in_line:
        assert not reserve("y", 40), "it finds room, and was to wait"
    look = only(node.send(to_another(prompt_of(2))), ev.LookInPool)
    actions = node.feed(ev.PoolLooked(look.look_id, 2))
    assert any(isinstance(action, ev.FetchBlocks) for action in actions) == (not is_somebody_in_line)
