"""No message of another process raises in the checks, and what they let through is sound."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.sampling import to_sampling_params
from node.validate import (
    Bounds,
    cancel_problem,
    dispatch_problem,
    release_problem,
    renew_problem,
    reserve_problem,
)
from proto import baton_pb2 as pb
from proto.bounds import is_address
from router.openai_types import CompletionBody, parse_body
from tests.thorough import examples

PREFILL = Bounds(role=pb.ROLE_PREFILL, vocab_size=100, max_model_len=32)
DECODE = Bounds(role=pb.ROLE_DECODE, vocab_size=100, max_model_len=32)

names = st.one_of(st.text(max_size=5), st.text("é", min_size=100, max_size=300))
u32 = st.one_of(st.integers(0, 40), st.integers(0, 2**32 - 1))
u64 = st.one_of(st.integers(0, 40), st.integers(0, 2**64 - 1))
tokens = st.lists(st.one_of(st.integers(0, 99), u32), max_size=40)
keys = st.builds(pb.AttemptKey, request_id=names, choice=u32, attempt=u32)
peers = st.builds(pb.PeerId, name=names, incarnation=u64)
branches = st.builds(pb.Branch, choice=u32, seed=u64, generated_token_ids=tokens)
floats = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(width=32))
samplings = st.builds(
    pb.Sampling,
    temperature=floats,
    max_tokens=u32,
    stop_token_ids=tokens,
    top_k=u32,
    top_p=floats,
    min_p=floats,
    presence_penalty=floats,
    frequency_penalty=floats,
    repetition_penalty=floats,
    min_tokens=st.one_of(st.just(0), u32),
    logit_bias=st.lists(st.builds(pb.LogitBias, token_id=st.integers(0, 101), bias=floats), max_size=3),
    num_logprobs=st.none() | u32,
    prompt_logprobs=st.booleans(),
)
dispatches = st.builds(
    pb.Dispatch,
    request_id=names,
    attempt=u32,
    branches=st.lists(branches, max_size=2),
    prompt_token_ids=tokens,
    sampling=samplings,
    target=st.builds(pb.Target, node=peers, grpc_address=st.one_of(st.just("127.0.0.1:1"), names)),
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


def grammar(**fields: Any) -> pb.Grammar:
    good: dict[str, Any] = {"kind": pb.Grammar.REGEX, "text": "a", "end_token_ids": [2]}
    return pb.Grammar(**(good | fields))


def good_reserve() -> pb.ReserveRequest:
    return pb.ReserveRequest(
        key=pb.AttemptKey(request_id="r1", choice=0, attempt=1),
        sender=pb.PeerId(name="p0", incarnation=2),
        router=pb.PeerId(name="router", incarnation=3),
        num_tokens=17,
        max_total_tokens=18,
        block_keys=[bytes(32)],
        ms_left=1,
    )


@pytest.mark.covers("A11")
@settings(deadline=None, max_examples=examples(300, 3))
@given(dispatches)
def test_a_dispatch_that_passes_fits_the_model_and_no_dispatch_raises(dispatch: pb.Dispatch) -> None:
    if dispatch_problem(dispatch, PREFILL) is not None:
        return
    (branch,) = dispatch.branches
    prompt, generated = dispatch.prompt_token_ids, branch.generated_token_ids
    assert all(token < 100 for token in [*prompt, *generated])
    assert 1 <= len(prompt) <= len(prompt) + dispatch.sampling.max_tokens <= 32
    assert len(generated) < dispatch.sampling.max_tokens
    params = to_sampling_params(dispatch.sampling, branch.seed)
    numbers = (params.temperature, params.min_p, params.presence_penalty, params.frequency_penalty)
    assert all(map(math.isfinite, numbers)) and params.temperature >= 0 and 0 <= params.min_p <= 1
    assert 0 < params.top_p <= 1 and 0 < params.repetition_penalty < math.inf
    assert len(dict(params.logit_bias)) == len(params.logit_bias) and all(abs(b) <= 100 for _, b in params.logit_bias)
    assert all(token < 100 for token in (*params.stop_token_ids, *dict(params.logit_bias)))
    assert params.num_logprobs is None or params.num_logprobs <= 20
    assert dispatch.ms_left > 0 and dispatch.target.node.incarnation and is_address(dispatch.target.grpc_address)


@settings(deadline=None, max_examples=examples(300, 3))
@given(reserves)
def test_a_reserve_that_passes_is_in_order_and_no_reserve_raises(request: pb.ReserveRequest) -> None:
    if reserve_problem(request, DECODE) is not None:
        return
    assert 1 <= request.num_tokens < request.max_total_tokens
    assert all(len(key) == 32 for key in request.block_keys) and len(request.block_keys) <= request.num_tokens
    assert request.key.request_id and request.sender.name and request.router.incarnation and request.ms_left


@settings(deadline=None, max_examples=examples(100, 3))
@given(keys, st.binary(max_size=17))
def test_the_other_messages_never_raise(key: pb.AttemptKey, secret: bytes) -> None:
    assert cancel_problem(pb.Cancel(key=key)) == release_problem(pb.ReleaseRequest(key=key), DECODE)
    problem = renew_problem(pb.RenewRequest(key=key, secret=secret), DECODE)
    assert problem is not None or len(secret) == 16


def test_sound_messages_pass() -> None:
    assert dispatch_problem(good_dispatch(), PREFILL) is None
    assert reserve_problem(good_reserve(), DECODE) is None


def test_the_logprobs_of_a_prompt_fit_into_a_message() -> None:
    dispatch, bounds = good_dispatch(), Bounds(role=pb.ROLE_PREFILL, vocab_size=100, max_model_len=300_000)
    dispatch.sampling.num_logprobs = 20
    dispatch.prompt_token_ids[:] = [1] * 12_484  # 21 each
    assert dispatch_problem(dispatch, bounds) is None
    dispatch.sampling.prompt_logprobs = True
    assert "prompt_logprobs: 262164" in str(dispatch_problem(dispatch, bounds))
    del dispatch.prompt_token_ids[0]
    assert dispatch_problem(dispatch, bounds) is None


@pytest.mark.covers("A11")
def test_a_node_takes_as_many_biases_as_a_router_lets_in() -> None:
    dispatch, bounds = good_dispatch(), Bounds(role=pb.ROLE_PREFILL, vocab_size=2000, max_model_len=32)
    body = {"model": "m", "prompt": "x", "logit_bias": {str(token_id): 1 for token_id in range(1024)}}
    let_in = parse_body(CompletionBody, json.dumps(body).encode()).logit_bias
    dispatch.sampling.logit_bias.extend(pb.LogitBias(token_id=int(name), bias=bias) for name, bias in let_in.items())
    assert dispatch_problem(dispatch, bounds) is None


def test_a_mixed_node_takes_what_either_role_takes() -> None:
    mixed = Bounds(role=pb.ROLE_MIXED, vocab_size=100, max_model_len=32)
    assert dispatch_problem(good_dispatch(), mixed) == dispatch_problem(good_dispatch(), PREFILL) is None
    assert reserve_problem(good_reserve(), mixed) == reserve_problem(good_reserve(), DECODE) is None
    renewal = pb.RenewRequest(key=good_reserve().key, secret=bytes(16))
    assert renew_problem(renewal, mixed) == renew_problem(renewal, DECODE) is None
    assert release_problem(pb.ReleaseRequest(key=good_reserve().key), mixed) is None


@pytest.mark.covers("D11")
def test_a_decode_node_takes_a_dispatch_to_itself_only_and_only_if_it_computes_prompts() -> None:
    dispatch = good_dispatch()
    itself = pb.PeerId(name=dispatch.target.node.name, incarnation=dispatch.target.node.incarnation)
    mine = Bounds(pb.ROLE_DECODE, vocab_size=100, max_model_len=32, local_prefill=itself)
    assert dispatch_problem(dispatch, mine) is None
    dispatch.target.node.incarnation += 1
    assert "ROLE_DECODE" in str(dispatch_problem(dispatch, mine)), "it hands nothing over, not even to its successor"


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
        (_set("target.grpc_address", "ipv4:999.1.1.1:1"), "target.grpc_address: 'ipv4:999.1.1.1:1', must be host:port"),
        (_set("target.grpc_address", "?a:1"), "target.grpc_address: '?a:1', must be host:port"),
        (_set("target.grpc_address", "host:65536"), "target.grpc_address: 'host:65536', must be host:port"),
        (_set("target.node.incarnation", 0), "target.node.incarnation"),
        (lambda d: d.ClearField("target"), "target"),
        (lambda d: d.sampling.stop_token_ids.extend([1] * 2000), "stop_token_ids: 2001"),
        (lambda d: d.sampling.stop_token_ids.append(100), "stop_token_ids: 100 is not below"),
        (lambda d: d.sampling.grammar.MergeFrom(grammar(kind=9)), "grammar.kind: 9, none that"),
        (lambda d: d.sampling.grammar.MergeFrom(grammar(text="")), "grammar.text: 0 bytes, must be from 1"),
        (lambda d: d.sampling.grammar.MergeFrom(grammar(text="é" * 40_000)), "grammar.text: 80000 bytes"),
        (lambda d: d.sampling.grammar.MergeFrom(grammar(end_token_ids=[])), "grammar.end_token_ids: 0, must be from 1"),
        (
            lambda d: d.sampling.grammar.MergeFrom(grammar(end_token_ids=[100])),
            "grammar.end_token_ids: 100 is not below",
        ),
        (_set("sampling.top_p", 1.01), "top_p"),
        (_set("sampling.top_p", math.nan), "top_p"),
        (_set("sampling.min_p", -0.01), "min_p"),
        (_set("sampling.presence_penalty", 2.01), "presence_penalty"),
        (_set("sampling.presence_penalty", math.nan), "presence_penalty"),
        (_set("sampling.frequency_penalty", -math.inf), "frequency_penalty"),
        (_set("sampling.repetition_penalty", -1.0), "repetition_penalty"),
        (_set("sampling.repetition_penalty", math.inf), "repetition_penalty"),
        (_set("sampling.min_tokens", 30), "min_tokens: 30 is above max_tokens 29"),
        (_set("sampling.num_logprobs", 21), "num_logprobs"),
        (lambda d: d.sampling.logit_bias.add(token_id=100), "logit_bias: 100 is not below"),
        (lambda d: d.sampling.logit_bias.add(token_id=1, bias=math.nan), "logit_bias: nan"),
        (lambda d: d.sampling.logit_bias.add(token_id=1, bias=100.5), "logit_bias: 100.5"),
        (lambda d: d.sampling.logit_bias.extend([pb.LogitBias(token_id=1)] * 2), "twice"),
        (lambda d: d.sampling.logit_bias.extend([pb.LogitBias(token_id=1)] * 1025), "logit_bias: 1025 entries"),
    ],
)
def test_the_sentence_names_the_field(change: Callable[[pb.Dispatch], None], named: str) -> None:
    dispatch = good_dispatch()
    change(dispatch)
    problem = dispatch_problem(dispatch, PREFILL)
    assert problem is not None
    assert named in problem
    assert "\n" not in problem
