"""How much room admission leaves: the formulas, number by number."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from random import Random

import numpy as np
import pytest

from engine.reserve import Reserve, ReserveConfig, ReservePolicy, make_reserve

CONFIG = ReserveConfig("ratio")


def num_blocks(reserve: Reserve, remaining: Sequence[int]) -> int:
    return reserve.num_blocks(np.array(remaining))


@pytest.mark.covers("S03")
def test_after_a_preemption_the_ratio_is_the_share_that_was_really_said_with_a_margin() -> None:
    random = Random(3)
    for _ in range(200):
        block_size, n_decode = random.choice((1, 16, 64)), random.randint(1, 64)
        limits = [random.randint(1, 9000) for _ in range(n_decode)]
        generated = [random.randint(0, limit) for limit in limits]
        reserve = make_reserve(CONFIG, block_size)
        reserve.preempted(sum(generated), sum(limits), n_decode)
        assert reserve.value == min(0.7, (sum(generated) + 16 * block_size * n_decode) / (sum(limits) + 1))


@pytest.mark.covers("S03")
def test_a_ratio_after_a_preemption_is_never_above_the_initial_one() -> None:
    reserve = make_reserve(ReserveConfig("ratio", init_ratio=0.4), 16)
    reserve.preempted(99, 100, 1)
    assert reserve.value == 0.4


@pytest.mark.covers("S04")
def test_the_ratio_falls_in_equal_steps_to_its_floor_and_stays() -> None:
    reserve = make_reserve(CONFIG, 16)
    values = []
    for _ in range(700):
        reserve.stepped()
        values.append(reserve.value)
    for number, value in enumerate(values[:599], 1):
        assert value == pytest.approx(0.7 - number * (0.7 - 0.098) / 600)
    assert values[600:] == [0.098] * 100


@pytest.mark.covers("S04")
def test_a_ratio_that_a_preemption_put_below_the_floor_does_not_rise() -> None:
    reserve = make_reserve(CONFIG, 16)
    reserve.preempted(0, 100_000, 1)
    below = reserve.value
    reserve.stepped()
    assert reserve.value == below < CONFIG.min_ratio


@pytest.mark.covers("S03", "S05")
def test_what_is_reserved_is_the_clipped_share_of_each_that_runs_in_whole_blocks() -> None:
    reserve = make_reserve(ReserveConfig("ratio", clip_max_new_tokens=100), 16)
    remaining = (0, 1, 16, 99, 100, 101, 5000)
    by_hand = sum(ceil(min(tokens, 100) * 0.7 / 16) for tokens in remaining)
    assert num_blocks(reserve, remaining) == by_hand == 0 + 1 + 1 + 5 + 5 + 5 + 5


@pytest.mark.covers("S05")
@pytest.mark.parametrize("policy", ["ratio", "fixed", "none", "full"])
def test_who_said_more_than_the_limit_needs_nothing(policy: ReservePolicy) -> None:
    reserve = make_reserve(ReserveConfig(policy), 16)
    reserve.preempted(100, 50, 1)
    assert num_blocks(reserve, (-1, -5000, 0)) == 0


@pytest.mark.covers("S06")
def test_the_fixed_policy_is_relaxed_until_a_preemption_then_sixteen_blocks_each_and_less_with_every_step() -> None:
    reserve = make_reserve(ReserveConfig("fixed"), 16)
    reserve.stepped()
    assert reserve.value == 0 and num_blocks(reserve, (500, 500)) == 0
    reserve.preempted(100, 1000, 2)
    assert num_blocks(reserve, (500, 500)) == 32
    for number in range(1, 641):
        reserve.stepped()
        assert reserve.value == pytest.approx(16 - 0.025 * number, abs=1e-9)
    reserve.stepped()
    assert reserve.value == 0 and num_blocks(reserve, (500,)) == 0


@pytest.mark.parametrize(
    "numbers",
    [{"init_ratio": 1.1}, {"min_ratio": 0.8}, {"min_ratio": -0.1}, {"decay_steps": 0}, {"clip_max_new_tokens": 0}],
)
def test_numbers_that_make_no_sense_are_refused(numbers: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must be|at least"):
        ReserveConfig("ratio", **numbers)  # type: ignore[arg-type]
