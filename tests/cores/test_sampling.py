"""Sampling parameters and logprobs from Dispatch to the router, over both cores; and an attempt that goes on for another."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from connector.transport import BlocksLanded, NotifyArrived
from engine.fake_runner import expected_logprobs, expected_tokens
from node import events as ev
from node.sampling import to_logprobs_message, to_sampling_params
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey
from tests.cores.nodes import VOCAB_SIZE, Decode, commit, only
from tests.cores.pair import Heard, Pair

PROMPT = list(range(1, 15))  # chunks of 8 and 6
MAX_TOKENS = 14
SEED = 99
EVERYTHING = pb.Sampling(
    temperature=0.7,
    max_tokens=MAX_TOKENS,
    stop_token_ids=range(0, VOCAB_SIZE, 3),
    top_k=9,
    top_p=0.9,
    min_p=0.01,
    presence_penalty=0.5,
    frequency_penalty=0.25,
    repetition_penalty=1.1,
    min_tokens=11,
    logit_bias=[pb.LogitBias(token_id=3, bias=1.5)],
    num_logprobs=2,
    prompt_logprobs=True,
)
PLAIN = pb.Sampling(temperature=0.7, max_tokens=MAX_TOKENS)


def dispatch(sampling: pb.Sampling, generated: list[int], attempt: int = 0, seed: int = SEED) -> pb.Dispatch:
    return pb.Dispatch(
        request_id="r",
        attempt=attempt,
        branches=[pb.Branch(seed=seed, generated_token_ids=generated)],
        prompt_token_ids=PROMPT,
        sampling=sampling,
    )


def right_tokens(sampling: pb.Sampling, seed: int = SEED) -> list[int]:
    """The whole completion, up to and with its first stop token."""
    params = to_sampling_params(sampling, seed)
    tokens = expected_tokens(PROMPT, (), params, sampling.max_tokens, VOCAB_SIZE)
    stops = [index for index, token_id in enumerate(tokens) if token_id in params.stop_token_ids]
    return tokens[: stops[0] + 1] if stops else tokens


def right_logprobs(token_id: int, position: int) -> pb.TokenLogprobs:
    return to_logprobs_message(expected_logprobs(token_id, position, 2, VOCAB_SIZE))


def check_completion(heard: Heard, tokens: list[int], first_index: int) -> None:
    assert not heard.errors
    said = heard.by_index()
    assert [said[index][0] for index in sorted(said)] == tokens[first_index:]
    assert sorted(said) == list(range(first_index, len(tokens)))
    for index, (token_id, logprobs) in said.items():
        assert logprobs == right_logprobs(token_id, len(PROMPT) + index)


@pytest.mark.covers("A02")
def test_each_token_comes_with_its_logprobs_and_the_prompts_once_with_the_first_batch() -> None:
    heard = Pair().complete(dispatch(EVERYTHING, []))
    tokens = right_tokens(EVERYTHING)
    assert len(tokens) > EVERYTHING.min_tokens
    check_completion(heard, tokens, 0)
    (first,) = heard.of_sender
    assert list(first.prompt_logprobs) == [right_logprobs(token_id, at) for at, token_id in enumerate(PROMPT) if at]
    repeat = heard.of_receiver[0]
    assert (repeat.first_index, list(repeat.token_ids), list(repeat.logprobs)) == (0, tokens[:1], list(first.logprobs))
    assert not any(batch.prompt_logprobs for batch in heard.of_receiver)


@pytest.mark.covers("A02")
def test_who_asks_for_no_logprobs_gets_none() -> None:
    heard = Pair().complete(dispatch(PLAIN, []))
    assert [token for token, _ in heard.by_index().values()] == right_tokens(PLAIN)
    for batch in (*heard.of_sender, *heard.of_receiver):
        assert not batch.logprobs and not batch.prompt_logprobs


@pytest.mark.covers("R09", "R08", "A02")
def test_an_attempt_cut_anywhere_goes_on_with_the_same_tokens_and_logprobs(fresh_seed: int) -> None:
    """Penalties and min_tokens count what the earlier attempt said, on the prefill node and behind the handoff."""
    draw = random.Random(fresh_seed)
    for _ in range(4):
        seed = draw.getrandbits(64)
        tokens = right_tokens(EVERYTHING, seed)
        pair = Pair()
        for cut in range(len(tokens)):
            heard = pair.complete(dispatch(EVERYTHING, tokens[:cut], attempt=cut, seed=seed))
            check_completion(heard, tokens, cut)
            assert len(heard.of_sender[0].prompt_logprobs) == len(PROMPT) - 1, "each attempt may be the first to tell"
        assert pair.prefill.pool.counts().used == pair.decode.pool.counts().used == 0


@pytest.mark.covers("A02")
def test_the_sentence_ends_where_it_stops_on_either_node() -> None:
    """min_tokens reaches over the handoff: index 0 is the prefill node's."""
    token = expected_tokens(PROMPT, (), to_sampling_params(PLAIN, SEED), 1, VOCAB_SIZE)[0]
    stopping = pb.Sampling(temperature=0.7, max_tokens=MAX_TOKENS, stop_token_ids=[token])
    heard = Pair().complete(dispatch(stopping, []))
    assert [batch.finish for batch in heard.of_sender] == [pb.FINISH_STOP] and not heard.of_receiver
    stopping.min_tokens = 1
    heard = Pair().complete(dispatch(stopping, []))
    assert heard.of_sender[0].finish == pb.FINISH_UNSPECIFIED and list(heard.of_sender[0].token_ids) != [token]


def _two_logprobs(message: pb.Commit) -> None:
    message.sampling.num_logprobs = 1
    message.branches[0].logprobs.extend([pb.TokenLogprobs(logprob=-1.0)] * 2)


def _missing_logprobs(message: pb.Commit) -> None:
    message.sampling.num_logprobs = 1


def _unasked_logprobs(message: pb.Commit) -> None:
    message.branches[0].logprobs.add(logprob=-1.0)


def _wrong_bias(message: pb.Commit) -> None:
    message.sampling.logit_bias.add(token_id=VOCAB_SIZE)


def _no_number(message: pb.Commit) -> None:
    message.sampling.repetition_penalty = float("nan")


@pytest.mark.covers("H05")
@pytest.mark.parametrize("spoil", [_two_logprobs, _missing_logprobs, _unasked_logprobs, _wrong_bias, _no_number])
def test_a_commit_whose_sampling_or_logprobs_are_wrong_starts_nothing(spoil: Callable[[pb.Commit], None]) -> None:
    decode, key = Decode(), AttemptKey("r", 0, 0)
    lease = decode.reserve(key, PROMPT[:7], 4).lease
    decode.core.receive(BlocksLanded(lease.lease_id, (0, 1), 128, "prefill-0"), 1.0)
    message = pb.DataMessage.FromString(commit(key, lease, PROMPT[:7], 9, 4))
    spoil(message.commit)
    actions = list(decode.core.receive(NotifyArrived("link", message.SerializeToString()), 1.0))
    assert only(actions, ev.AnswerCommit).message.answer.HasField("error")
    assert decode.scheduler.num_running == 0 and ev.Count("commits_refused") in actions
