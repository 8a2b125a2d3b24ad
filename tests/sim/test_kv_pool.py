"""The cluster over a KV pool: prompts are served from it, and whatever is wrong with it costs a recompute and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sim.outcome import Outcome, run_scenario
from tests.sim.planted_kv import one_beginning
from tests.sim.scenario import KV_POOL_FLAWS, Scenario


def run(scenario: Scenario) -> Outcome:
    outcome = run_scenario(scenario)
    assert outcome.error is None, f"seed {scenario.seed}: {outcome.error}\n{outcome.where}"
    ends = {name: count for name, count in outcome.counters.items() if name.startswith("client:")}
    assert ends == {"client:finished": 14}
    return outcome


@pytest.mark.covers("W07", "W02")
@pytest.mark.parametrize("seed", range(3))
def test_what_one_node_has_computed_the_others_fetch(seed: int) -> None:
    counters = run(one_beginning(seed)).counters
    assert counters["kv blocks fetched"] >= 3 * 14, "three nodes have not the beginning that another one computed"
    assert not counters["kv fetches short"]
    scenario = one_beginning(seed)
    without = replace(scenario, knobs=replace(scenario.knobs, kv_pool_flaws=None))
    assert not run(without).counters["kv looks"]


@pytest.mark.covers("W08")
@pytest.mark.parametrize("flaw", KV_POOL_FLAWS)
def test_a_pool_with_a_flaw_costs_a_recompute(flaw: str) -> None:
    shown = 0
    for seed in range(4):
        counters = run(one_beginning(seed, flaw)).counters
        assert counters["kv looks"]
        shown += counters[f"kv pool {flaw}"]
    assert shown, "the flaw never showed"


@pytest.mark.covers("W08")
def test_all_flaws_at_once() -> None:
    for seed in range(6):
        run(one_beginning(seed, *KV_POOL_FLAWS))
