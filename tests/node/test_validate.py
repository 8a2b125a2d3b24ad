"""No message of another process raises in the checks, and what they let through is sound."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.validate import (
    Bounds,
    cancel_problem,
    dispatch_problem,
    release_problem,
    renew_problem,
    reserve_problem,
)
from proto import baton_pb2 as pb

PREFILL = Bounds(role=pb.ROLE_PREFILL, vocab_size=100, max_model_len=32)
DECODE = Bounds(role=pb.ROLE_DECODE, vocab_size=100, max_model_len=32)

names = st.one_of(st.text(max_size=5), st.text("é", min_size=100, max_size=300))
u32 = st.one_of(st.integers(0, 40), st.integers(0, 2**32 - 1))
u64 = st.one_of(st.integers(0, 40), st.integers(0, 2**64 - 1))
tokens = st.lists(st.one_of(st.integers(0, 99), u32), max_size=40)
keys = st.builds(pb.AttemptKey, request_id=names, choice=u32, attempt=u32)
peers = st.builds(pb.PeerId, name=names, incarnation=u64)
branches = st.builds(pb.Branch, choice=u32, seed=u64, generated_token_ids=tokens)
samplings = st.builds(
    pb.Sampling, temperature=st.floats(width=32), max_tokens=u32, stop_token_ids=st.lists(u32, max_size=3)
)
dispatches = st.builds(
    pb.Dispatch,
    request_id=names,
    attempt=u32,
    branches=st.lists(branches, max_size=2),
    prompt_token_ids=tokens,
    sampling=samplings,
    target=st.builds(pb.Target, node=peers, grpc_address=names),
    ms_left=u64,
)
reserves = st.builds(
    pb.ReserveRequest,
    key=keys,
    sender=peers,
    router=peers,
    num_tokens=u32,
    max_total_tokens=u32,
    block_keys=st.lists(st.binary(max_size=33), max_size=3),
    ms_left=u64,
)


def good_dispatch() -> pb.Dispatch:
    return pb.Dispatch(
        request_id="r1",
        attempt=1,
        branches=[pb.Branch(choice=0, seed=7, generated_token_ids=[5, 0])],
        prompt_token_ids=[1, 2, 99],
        sampling=pb.Sampling(temperature=0.0, max_tokens=29, stop_token_ids=[2]),
        target=pb.Target(node=pb.PeerId(name="d0", incarnation=3), grpc_address="127.0.0.1:1"),
        ms_left=1,
    )


def good_reserve() -> pb.ReserveRequest:
    return pb.ReserveRequest(
        key=pb.AttemptKey(request_id="r1", choice=0, attempt=1),
        sender=pb.PeerId(name="p0", incarnation=2),
        router=pb.PeerId(name="router", incarnation=3),
        num_tokens=17,
        max_total_tokens=17,
        block_keys=[bytes(32)],
        ms_left=1,
    )


@pytest.mark.covers("A11")
@settings(deadline=None, max_examples=300)
@given(dispatches)
def test_a_dispatch_that_passes_fits_the_model_and_no_dispatch_raises(dispatch: pb.Dispatch) -> None:
    if dispatch_problem(dispatch, PREFILL) is not None:
        return
    (branch,) = dispatch.branches
    prompt, generated = dispatch.prompt_token_ids, branch.generated_token_ids
    assert all(token < 100 for token in [*prompt, *generated])
    assert 1 <= len(prompt) <= len(prompt) + dispatch.sampling.max_tokens <= 32
    assert len(generated) < dispatch.sampling.max_tokens
    assert math.isfinite(dispatch.sampling.temperature) and dispatch.sampling.temperature >= 0
    assert dispatch.ms_left > 0 and dispatch.target.node.incarnation and dispatch.target.grpc_address


@settings(deadline=None, max_examples=300)
@given(reserves)
def test_a_reserve_that_passes_is_in_order_and_no_reserve_raises(request: pb.ReserveRequest) -> None:
    if reserve_problem(request, DECODE) is not None:
        return
    assert 1 <= request.num_tokens <= request.max_total_tokens
    assert all(len(key) == 32 for key in request.block_keys) and len(request.block_keys) <= request.num_tokens
    assert request.key.request_id and request.sender.name and request.router.incarnation and request.ms_left


@settings(deadline=None, max_examples=100)
@given(keys, st.binary(max_size=17))
def test_the_other_messages_never_raise(key: pb.AttemptKey, secret: bytes) -> None:
    assert cancel_problem(pb.Cancel(key=key)) == release_problem(pb.ReleaseRequest(key=key), DECODE)
    problem = renew_problem(pb.RenewRequest(key=key, secret=secret), DECODE)
    assert problem is not None or len(secret) == 16


def test_sound_messages_pass() -> None:
    assert dispatch_problem(good_dispatch(), PREFILL) is None
    assert reserve_problem(good_reserve(), DECODE) is None


def test_a_message_for_the_other_role_is_refused_by_name() -> None:
    assert "ROLE_DECODE" in str(dispatch_problem(good_dispatch(), DECODE))
    assert "ROLE_PREFILL" in str(reserve_problem(good_reserve(), PREFILL))
    assert renew_problem(pb.RenewRequest(), PREFILL) is not None
    assert release_problem(pb.ReleaseRequest(key=good_reserve().key), PREFILL) is not None


def _no_branch(dispatch: pb.Dispatch) -> None:
    del dispatch.branches[:]


def _set(path: str, value: object) -> Callable[[pb.Dispatch], None]:
    *parents, last = path.split(".")

    def change(dispatch: pb.Dispatch) -> None:
        message: object = dispatch
        for parent in parents:
            message = getattr(message, parent)
        setattr(message, last, value)

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_no_branch, "branches"),
        (lambda d: d.branches.add(), "branches"),
        (lambda d: d.ClearField("prompt_token_ids"), "prompt_token_ids"),
        (lambda d: d.prompt_token_ids.append(100), "prompt_token_ids"),
        (lambda d: d.branches[0].generated_token_ids.append(100), "generated_token_ids"),
        (lambda d: d.prompt_token_ids.append(1), "max_model_len 32"),
        (_set("sampling.max_tokens", 2), "max_tokens"),
        (_set("sampling.max_tokens", 0), "max_tokens"),
        (_set("sampling.temperature", math.nan), "temperature"),
        (_set("sampling.temperature", math.inf), "temperature"),
        (_set("sampling.temperature", -0.5), "temperature"),
        (_set("request_id", ""), "request_id"),
        (_set("request_id", "x" * 257), "request_id"),
        (_set("ms_left", 0), "ms_left"),
        (_set("target.grpc_address", ""), "target.grpc_address"),
        (_set("target.node.incarnation", 0), "target.node.incarnation"),
        (lambda d: d.ClearField("target"), "target"),
        (lambda d: d.sampling.stop_token_ids.extend(range(2000)), "stop_token_ids"),
    ],
)
def test_the_sentence_names_the_field(change: Callable[[pb.Dispatch], None], named: str) -> None:
    dispatch = good_dispatch()
    change(dispatch)
    problem = dispatch_problem(dispatch, PREFILL)
    assert problem is not None
    assert named in problem
    assert "\n" not in problem
