"""A failure becomes a short one: exactly, where the cause is known; and a planted bug's short run fails again, byte for byte."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sim.outcome import Outcome, run_scenario
from tests.sim.planted import Patch, promises_are_kept_for_ever, repeats_are_taken
from tests.sim.scenario import ClientPlan, Fault, Knobs, Scenario, draw_scenario
from tests.sim.shrink import Shrinker
from tests.thorough import a_share


def outcome_of(scenario: Scenario, error: str | None) -> Outcome:
    return Outcome(scenario, error, "", {}, 0, None)


def fails_for_two_reasons(scenario: Scenario) -> Outcome:
    """Only with client r7, asking for more than one choice, and with the pause of decode-1."""
    is_asked = any(plan.name == "r7" and plan.num_choices > 1 for plan in scenario.clients)
    is_paused = any(fault.kind == "pause" and fault.who == "decode-1" for fault in scenario.faults)
    return outcome_of(scenario, f"decode-1.{len(scenario.clients)} is wrong" if is_asked and is_paused else None)


def large_scenario() -> Scenario:
    clients = tuple(
        ClientPlan(f"r{number}", number / 10, 0, (1,) * 20, 9, number, num_choices=3, num_logprobs=2)
        for number in range(15)
    )
    faults = tuple(Fault(number / 10, "pause", f"decode-{number % 2}", seconds=number + 0.5) for number in range(1, 9))
    return Scenario(1, Knobs(num_routers=2, num_decode=2, network="heavy"), clients, faults)


@pytest.mark.covers("C02")
def test_what_does_not_matter_is_left_out_and_what_is_left_is_simple() -> None:
    shrunk = Shrinker(fails_for_two_reasons(large_scenario()), fails_for_two_reasons).shrink()
    assert [plan.name for plan in shrunk.clients] == ["r7"] and len(shrunk.faults) == 1
    plan, fault = shrunk.clients[0], shrunk.faults[0]
    assert (plan.num_choices, plan.num_logprobs, len(plan.prompt), plan.max_tokens) == (3, None, 5, 2)
    assert (fault.kind, fault.who, fault.seconds) == ("pause", "decode-1", 1.0)
    assert shrunk.knobs == Knobs(num_decode=2)  # the fault's host stays


@pytest.mark.covers("C02")
def test_a_run_that_fails_in_another_way_is_not_kept() -> None:
    def run(scenario: Scenario) -> Outcome:
        return outcome_of(scenario, "this" if len(scenario.clients) > 3 else "something else")

    assert len(Shrinker(run(large_scenario()), run).shrink().clients) == 4


@pytest.mark.covers("C02")
def test_no_more_runs_than_allowed() -> None:
    tried: list[Scenario] = []

    def run(scenario: Scenario) -> Outcome:
        tried.append(scenario)
        return outcome_of(scenario, "always")

    Shrinker(run(large_scenario()), run, max_runs=3).shrink()
    assert len(tried) == 1 + 3


# The first seed that is looked at: not every failure has a short form within so many runs.
@pytest.mark.parametrize(
    ("plant", "first_seed"), a_share([(repeats_are_taken, 0), (promises_are_kept_for_ever, 135)], 2)
)
@pytest.mark.covers("C02")
def test_a_planted_bug_shrinks_to_a_short_run_that_fails_the_same_way_each_time(
    plant: object, first_seed: int, monkeypatch: Patch
) -> None:
    assert callable(plant)
    plant(monkeypatch)
    outcomes = (run_scenario(draw_scenario(first_seed + number)) for number in range(200))
    failed = next(outcome for outcome in outcomes if outcome.error is not None)
    shrunk = Shrinker(failed, max_runs=80).shrink()
    first, second = (run_scenario(shrunk, is_traced=True) for _ in range(2))
    assert first.kind == failed.kind and str(first.trace) == str(second.trace)
    assert len(shrunk.clients) <= 4 and len(shrunk.faults) <= 1
    assert first.num_events < failed.num_events
    monkeypatch.undo()  # without the bug the short run holds
    assert run_scenario(replace(shrunk)).error is None
