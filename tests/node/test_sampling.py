"""Sampling parameters from the wire to the engine: every field, once, and what is left out is off."""

from __future__ import annotations

import pytest

from engine.plan import Grammar, SamplingParams, TokenLogprobs
from node.sampling import to_logprobs_message, to_sampling_params
from proto import baton_pb2 as pb

OFF = SamplingParams(temperature=0.0, seed=7)


@pytest.mark.covers("A02")
def test_a_message_without_fields_asks_for_nothing() -> None:
    assert to_sampling_params(pb.Sampling(max_tokens=4), seed=7) == OFF
    assert not OFF.has_penalties


@pytest.mark.covers("A02")
@pytest.mark.parametrize("field", [field.name for field in pb.Sampling.DESCRIPTOR.fields if field.name != "max_tokens"])
def test_every_field_of_the_message_arrives_and_changes_nothing_else(field: str) -> None:
    given: dict[str, object] = {
        "stop_token_ids": [3, 4],
        "logit_bias": [pb.LogitBias(token_id=3, bias=-2.5)],
        "prompt_logprobs": True,
        "num_logprobs": 0,  # not absent: each token's own
        "top_p": 0.5,
        "repetition_penalty": 1.5,
        "grammar": pb.Grammar(kind=pb.Grammar.REGEX, text="a+", is_compact=True, end_token_ids=[5]),
    }
    told = {
        "stop_token_ids": frozenset({3, 4}),
        "logit_bias": ((3, -2.5),),
        "grammar": Grammar("regex", "a+", True, (5,)),
    }
    params = to_sampling_params(pb.Sampling(**{field: given.get(field, 1)}), seed=7)  # type: ignore[arg-type]
    right = told.get(field, given.get(field, 1))
    for name in SamplingParams.__dataclass_fields__:
        assert getattr(params, name) == (right if name == field else getattr(OFF, name))


@pytest.mark.covers("A02")
def test_logprobs_cross_the_wire_unchanged() -> None:
    logprobs = TokenLogprobs(-0.5, ((3, -0.25), (0, -7.75)))
    message = pb.TokenLogprobs.FromString(to_logprobs_message(logprobs).SerializeToString())
    assert message.logprob == -0.5 and [(top.token_id, top.logprob) for top in message.top] == [(3, -0.25), (0, -7.75)]
