"""Sampling parameters and logprobs: from what the wire says to what the engine takes, and back. The one place that knows both.

A message that is converted here has passed sampling_problem() (node/validate.py).
"""

from __future__ import annotations

from typing import Final, Literal

from engine.plan import Grammar, SamplingParams, TokenLogprobs
from proto import baton_pb2 as pb

Kind = Literal["json_schema", "regex", "ebnf", "structural_tag"]
GRAMMAR_KINDS: Final[dict[pb.Grammar.Kind.ValueType, Kind]] = {
    pb.Grammar.JSON_SCHEMA: "json_schema",
    pb.Grammar.REGEX: "regex",
    pb.Grammar.EBNF: "ebnf",
    pb.Grammar.STRUCTURAL_TAG: "structural_tag",
}


def to_grammar(grammar: pb.Grammar) -> Grammar:
    """The engine's form."""
    return Grammar(GRAMMAR_KINDS[grammar.kind], grammar.text, grammar.is_compact, tuple(grammar.end_token_ids))


def grammar_of(sampling: pb.Sampling) -> pb.Grammar | None:
    """The wire's form, where there is one."""
    return sampling.grammar if sampling.HasField("grammar") else None


def to_sampling_params(sampling: pb.Sampling, seed: int) -> SamplingParams:
    """The engine's form. What is 0 on the wire where the engine's "off" is 1 becomes 1."""
    return SamplingParams(
        temperature=sampling.temperature,
        seed=seed,
        top_k=sampling.top_k,
        top_p=sampling.top_p or 1.0,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty or 1.0,
        min_tokens=sampling.min_tokens,
        stop_token_ids=frozenset(sampling.stop_token_ids),
        logit_bias=tuple((entry.token_id, entry.bias) for entry in sampling.logit_bias),
        num_logprobs=sampling.num_logprobs if sampling.HasField("num_logprobs") else None,
        prompt_logprobs=sampling.prompt_logprobs,
        grammar=to_grammar(sampling.grammar) if sampling.HasField("grammar") else None,
    )


def to_logprobs_message(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    """The wire's form; the numbers are float32 already, so nothing is lost."""
    top = [pb.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in logprobs.top]
    return pb.TokenLogprobs(logprob=logprobs.logprob, top=top)
