"""One engine alone gives the right tokens, whatever its sizes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.fake_runner import FakeRunnerError
from engine.local_engine import LocalEngine
from engine.plan import DecodeRow, Decodes, Plan, SamplingParams, SlotStart, StepResult
from tests.engine_pure.checked_node import CheckedNode, Sizes, make_spec, right_answer
from tests.thorough import examples

PURE_MODULES = "block_pool, fake_runner, local_engine, plan, prefix_cache, scheduler, sequence"


def sizes() -> st.SearchStrategy[Sizes]:
    return st.builds(
        Sizes,
        num_blocks=st.integers(12, 40),
        block_size=st.sampled_from([4, 5, 16]),
        num_slots=st.integers(1, 6),
        max_batched_tokens=st.integers(6, 40),
        max_model_len=st.just(48),
        vocab_size=st.sampled_from([1, 3, 1000]),
        cache_generated=st.booleans(),
    )


@pytest.mark.covers("P01", "P02", "Q03")
@given(
    sizes=sizes(),
    shapes=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 18), st.none() | st.integers(0, 2**64 - 1)), max_size=9
    ),
    stops=st.frozensets(st.integers(0, 2), max_size=2),
)
@settings(deadline=None, max_examples=examples(60, 3))
def test_tokens_depend_on_nothing_but_the_sequence(
    sizes: Sizes, shapes: list[tuple[int, int, int | None]], stops: frozenset[int]
) -> None:
    node = CheckedNode(sizes)
    specs = [
        make_spec(index, [n % 3 for n in range(num_tokens)], max_new_tokens, sizes, seed=seed, stop_token_ids=stops)
        for index, (num_tokens, max_new_tokens, seed) in enumerate(shapes)
    ]
    tokens = LocalEngine(node.scheduler, node.runner).generate(specs)
    assert tokens == {spec.sequence_id: right_answer(spec, sizes.vocab_size) for spec in specs}
    assert node.is_idle()


def test_the_next_step_is_planned_before_the_results_of_the_last_one_are_read() -> None:
    node = CheckedNode(Sizes())

    depths: list[int] = []

    class Watch:
        """A runner that notes how many steps are in flight while it runs."""

        def run(self, plan: Plan) -> StepResult:
            depths.append(node.scheduler.steps_in_flight)
            return node.runner.run(plan)

    LocalEngine(node.scheduler, Watch()).generate([make_spec("a", [1], 4, node.sizes)])
    assert depths == [2, 2, 2, 1]


@pytest.mark.covers("P02")
@pytest.mark.parametrize("max_batched_tokens", [8, 32, 64])
def test_of_sequences_with_one_prompt_the_first_computes_it_and_the_others_find_it(max_batched_tokens: int) -> None:
    sizes = Sizes(num_blocks=64, block_size=4, num_slots=8, max_batched_tokens=max_batched_tokens, max_model_len=48)
    node = CheckedNode(sizes)
    specs = [make_spec(index, list(range(30)), 4, sizes, seed=index) for index in range(6)]
    tokens = LocalEngine(node.scheduler, node.runner).generate(specs)
    assert tokens == {spec.sequence_id: right_answer(spec, sizes.vocab_size) for spec in specs}
    assert node.scheduler.num_prompt_tokens == 30 + 5 * 2, "of the others two tokens each, behind the last full block"


def test_who_has_little_in_common_with_what_is_computed_waits_for_nobody() -> None:
    sizes = Sizes(num_blocks=64, block_size=4, num_slots=8, max_batched_tokens=64, max_model_len=48)
    node = CheckedNode(sizes)
    for index in range(2):
        node.scheduler.submit(make_spec(index, [*range(8), *[40 + index] * 20], 4, sizes))
    plan = node.scheduler.plan()
    assert plan is not None and len(plan.chunks) == 2


def test_a_batch_with_one_impossible_sequence_runs_nothing() -> None:
    node = CheckedNode(Sizes())
    specs = [make_spec("a", [1], 1, node.sizes), make_spec("b", [1] * 64, 1, node.sizes)]
    with pytest.raises(ValueError, match="max_model_len"):
        LocalEngine(node.scheduler, node.runner).generate(specs)
    assert node.scheduler.num_waiting == 0


def test_an_engine_whose_blocks_are_held_from_outside_says_so_instead_of_spinning() -> None:
    node = CheckedNode(Sizes())
    node.pool.lease(node.pool.num_blocks)
    with pytest.raises(RuntimeError, match="1 sequences cannot run"):
        LocalEngine(node.scheduler, node.runner).generate([make_spec("a", [1], 1, node.sizes)])


@pytest.mark.covers("Q03")
def test_the_fake_runner_notices_kv_that_is_missing_or_somebody_elses() -> None:
    """Also that of token 0, which a block of zeros would otherwise seem to hold."""
    for garbage in (0, 255):
        node = CheckedNode(replace(Sizes(), vocab_size=1000))
        spec = make_spec("a", [0] * 4, 9, node.sizes)
        node.submit(spec)
        node.plan()
        node.complete()
        node.memory[list(node.scheduler.block_ids("a"))[:1]] = garbage
        with pytest.raises(AssertionError):
            node.run_to_the_end()


START = SlotStart(slot=0, generation=1, sampling=SamplingParams(0.0, 0), next_index=0, last_token_id=1)


@pytest.mark.covers("Q05")
@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (Plan(1), "where 0 comes next"),
        (Plan(0, (START,), Decodes.of(DecodeRow(0, 2, 0, (0,)))), "not in generation 2"),
        (Plan(0, (START, START)), "from generation 1 to 1"),
        (Plan(0, (START,), Decodes.of(DecodeRow(0, 1, 4, (0,)))), "positions 4..5 in 1 blocks"),
        (
            Plan(0, (START,), Decodes.of(DecodeRow(0, 1, 0, (0,)), DecodeRow(0, 1, 1, ()))),
            "two rows or marks for one slot",
        ),
    ],
)
def test_the_fake_runner_refuses_a_plan_that_breaks_the_rules(plan: Plan, why: str) -> None:
    with pytest.raises(FakeRunnerError, match=why):
        CheckedNode(Sizes()).runner.run(plan)


def test_greedy_ignores_the_seed_and_sampling_does_not() -> None:
    node = CheckedNode(replace(Sizes(), vocab_size=1000))
    base = make_spec("a", [1, 2, 3], 8, node.sizes)
    greedy = [right_answer(replace(base, sampling=SamplingParams(0.0, seed)), 1000) for seed in (1, 2)]
    seeded = [right_answer(replace(base, sampling=SamplingParams(0.7, seed)), 1000) for seed in (1, 2)]
    assert greedy[0] == greedy[1]
    assert seeded[0] != seeded[1]


def test_the_pure_side_of_the_engine_loads_no_torch() -> None:
    program = f"import sys; from engine import {PURE_MODULES}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
