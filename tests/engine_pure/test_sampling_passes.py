"""Sampling parameters and logprobs through the scheduler: what the runner is told, and what comes back of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.fake_runner import expected_logprobs
from engine.local_engine import LocalEngine
from engine.plan import SamplingParams, TokenLogprobs
from engine.sequence import SequenceSpec
from tests.engine_pure.checked_node import SIZES, CheckedNode, make_spec, right_answer
from tests.thorough import examples

samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    min_tokens=st.integers(0, 6),
    num_logprobs=st.sampled_from([None, 0, 3]),
    prompt_logprobs=st.booleans(),
)


def spec_of(
    name: str, prompt: list[int], generated: list[int], max_tokens: int, sampling: SamplingParams
) -> SequenceSpec:
    stops = frozenset({1, 2})
    base = make_spec(
        name,
        [*prompt, *generated],
        max_tokens - len(generated),
        SIZES,
        num_generated=len(generated),
        stop_token_ids=stops,
    )
    return replace(base, sampling=replace(sampling, stop_token_ids=stops))


def logprobs_from(first_position: int, token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
    return [
        expected_logprobs(token_id, position, num_top, SIZES.vocab_size)
        for position, token_id in enumerate(token_ids, first_position)
    ]


@pytest.mark.covers("R09", "A02")
@given(
    requests=st.lists(
        st.tuples(st.lists(st.integers(0, 6), min_size=1, max_size=24), st.integers(1, 12), samplings),
        min_size=1,
        max_size=6,
    ),
    cut=st.integers(0, 11),
)
@settings(max_examples=examples(60, 3))
def test_every_sequence_gets_its_own_tokens_and_logprobs_also_when_it_goes_on_elsewhere(
    requests: list[tuple[list[int], int, SamplingParams]], cut: int
) -> None:
    node = CheckedNode(SIZES)
    pairs = []
    for number, (prompt, max_tokens, sampling) in enumerate(requests):
        whole = spec_of(f"whole {number}", prompt, [], max_tokens, sampling)
        tokens = right_answer(whole, SIZES.vocab_size)
        generated = tokens[: min(cut, len(tokens) - 1)]  # nobody goes on behind the end
        pairs.append((whole, spec_of(f"rest {number}", prompt, generated, max_tokens, sampling)))
    specs = [spec for pair in pairs for spec in pair]
    got: dict[object, tuple[list[int], list[TokenLogprobs], list[TokenLogprobs]]] = {}
    for progress in LocalEngine(node.scheduler, node.runner).run(specs):
        token_ids, logprobs, of_prompt = got.setdefault(progress.sequence_id, ([], [], []))
        of_prompt += progress.prompt_logprobs
        if progress.token_id is not None:
            token_ids.append(progress.token_id)
        if progress.logprobs is not None:
            logprobs.append(progress.logprobs)
    for spec in specs:
        token_ids, logprobs, of_prompt = got[spec.sequence_id]
        num_prompt, num_top = len(spec.token_ids) - spec.num_generated, spec.sampling.num_logprobs
        assert token_ids == right_answer(spec, SIZES.vocab_size)
        assert logprobs == ([] if num_top is None else logprobs_from(len(spec.token_ids), token_ids, num_top))
        told = list(spec.token_ids[1:num_prompt]) if spec.sampling.prompt_logprobs else []
        assert of_prompt == logprobs_from(1, told, num_top or 0)
    for whole, rest in pairs:
        (tokens, logprobs, _), later = got[whole.sequence_id], got[rest.sequence_id]
        assert later[:2] == (tokens[rest.num_generated :], logprobs[rest.num_generated :])
    assert node.is_idle()


@pytest.mark.covers("A02")
def test_no_stop_token_comes_before_min_tokens() -> None:
    early = 0
    for seed in range(40):
        spec = spec_of("a", [seed % 7], [], 12, SamplingParams(1.0, seed))
        early += len(right_answer(spec, SIZES.vocab_size)) < 5
        longer = replace(spec, sampling=replace(spec.sampling, min_tokens=5))
        assert len(right_answer(longer, SIZES.vocab_size)) > 5
    assert early > 10, "nothing was there to be banned"


@pytest.mark.covers("A02", "P02")
def test_prompt_logprobs_ask_no_cache_but_fill_it() -> None:
    node = CheckedNode(SIZES)
    prompt = [1, 2, 3, 4, 5, 6, 0, 1, 2, 3]
    telling = SamplingParams(0.0, 0, num_logprobs=1, prompt_logprobs=True)
    starts = []
    for name, sampling in enumerate((telling, telling, SamplingParams(0.0, 0))):
        node.submit(replace(make_spec(name, prompt, 1, SIZES), sampling=sampling))
        plan = node.plan()
        assert plan is not None
        starts.append(plan.chunks[0].start)
        node.run_to_the_end()
    assert starts == [0, 0, 8]


@pytest.mark.covers("Q05")
def test_only_what_a_slot_needs_is_told_to_it() -> None:
    node = CheckedNode(SIZES)
    penalty = SamplingParams(0.0, 0, frequency_penalty=0.5)
    telling = SamplingParams(0.0, 0, prompt_logprobs=True)
    for name, sampling in enumerate((SamplingParams(0.0, 0), penalty, telling)):
        node.submit(spec_of(str(name), [3, 4, name], [6, 0], 4, sampling))
    plan = node.plan()
    assert plan is not None
    told = [(start.prompt_token_ids, start.generated_token_ids) for start in plan.starts]
    assert told == [((), ()), ((3, 4, 1), (6, 0)), ((3, 4, 2), ())]
    node.run_to_the_end()
