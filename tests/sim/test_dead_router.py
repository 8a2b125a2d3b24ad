"""A killed router: nodes free its work within the grace, and the other router's clients notice nothing (C09)."""

from __future__ import annotations

import pytest

from tests.sim.outcome import run_scenario
from tests.sim.planted import Patch, a_lost_router_is_not_noticed
from tests.sim.scenario import SLOW_STEP_S, ClientPlan, Fault, Knobs, Scenario

KNOBS = Knobs(num_routers=2, num_prefill=1, num_decode=1, step_s=SLOW_STEP_S, network="jitter", clock_spread=0.05)
CLIENTS = tuple(
    ClientPlan(f"r{at}", 1.0 + at / 10, at % 2, (1, 2, 3, at), 24, at, num_choices=1 + at // 2) for at in range(4)
)


def scenario(seed: int, kind: str) -> Scenario:
    return Scenario(seed, KNOBS, CLIENTS, (Fault(3.0, kind, "router-0", seconds=20.0),))


@pytest.mark.parametrize("kind", ["crash", "power off", "stop"])
@pytest.mark.covers("C09")
def test_nodes_free_a_dead_routers_work_within_the_grace_and_other_routers_go_on(kind: str) -> None:
    for seed in range(4):
        outcome = run_scenario(scenario(seed, kind))
        assert outcome.error is None, f"{outcome.error}\n{outcome.where}"
        counters = outcome.counters
        assert counters["client:router lost"] == 2 and counters["client:finished"] == 2
        assert (counters["ended:router lost"] > 0) == (kind != "stop")  # in order, it cancels them


@pytest.mark.parametrize("kind", ["crash", "power off"])
@pytest.mark.covers("C09")
def test_work_that_is_left_running_is_found(kind: str, monkeypatch: Patch) -> None:
    a_lost_router_is_not_noticed(monkeypatch)
    error = run_scenario(scenario(1, kind)).error
    assert error is not None and "still computes" in error
