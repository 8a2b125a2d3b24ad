"""Bugs that are planted in moves and drains are found: by a node that drains under load, with a fault where it takes one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.sim.moving import NODES, knobs, restarts
from tests.sim.outcome import run_scenario
from tests.sim.planted_moves import (
    Patch,
    a_draining_node_asks_once,
    a_holder_decodes_on_behind_its_commit,
    a_holder_goes_on_when_its_commit_has_no_answer,
    a_lease_is_left_behind,
    a_move_that_fails_leaves_its_branch_stopped,
    a_node_has_drained_when_all_is_on_its_way,
    a_target_counts_as_taken_for_ever,
    a_target_counts_from_the_wrong_index,
    moving_blocks_are_free_before_the_link_has_read_them,
    old_attempts_are_believed,
)
from tests.sim.scenario import Fault, Scenario
from tests.thorough import IS_THOROUGH, a_share

MAX_SEEDS = 12


def draining(seed: int, *faults: Fault, network: str = "even", lease_life_s: float = 10.0) -> Scenario:
    """All that runs on one node moves to two others; half of the seeds have a one-sided transport."""
    sizes = replace(knobs(seed % 2 == 0, 96), step_s=0.1, network=network, lease_life_s=lease_life_s)
    return restarts(seed, sizes, NODES[:1], 10, *faults, gap_s=0.1)


def between(seed: int, kind: str, at: float, seconds: float = 0.0) -> list[Fault]:
    """The same to both ways that sequences go."""
    return [Fault(at, kind, "decode-0", other, seconds, seed % 3) for other in ("decode-1", "decode-2")]


def slow(seed: int) -> Scenario:
    """Writes take so long that sequences come to their ends meanwhile, or are stopped."""
    return draining(seed, *between(seed, "slow", 2.4, 8.0), network="jitter")


def cut(seed: int) -> Scenario:
    """The same, and the link breaks."""
    breaks = between(seed, "cut link", 3.0 + 0.3 * seed)
    return draining(seed, *between(seed, "slow", 2.4, 4.0), *breaks, network="jitter")


def unanswered(seed: int) -> Scenario:
    """The answers to Commits are lost, and not waited for until the streams are over."""
    return draining(seed, *between(seed, "lose ack", 2.4), lease_life_s=1.0)


def unheard(seed: int) -> Scenario:
    """Half of the calls, or of their answers, are."""
    return draining(seed, *between(seed, "lose calls", 2.4, 3.0))


def full(seed: int) -> Scenario:
    """Long streams, and nobody has room for those that are to go."""
    return restarts(seed, replace(knobs(False, 24), step_s=0.5), NODES[::2], 12)


BUGS: tuple[tuple[Callable[[Patch], None], Callable[[int], Scenario], str], ...] = (
    (a_target_counts_from_the_wrong_index, draining, "some are left"),
    (a_holder_decodes_on_behind_its_commit, draining, "is computed in attempts"),
    (a_lease_is_left_behind, slow, "does not drain"),
    (a_move_that_fails_leaves_its_branch_stopped, cut, "does not move"),
    (a_holder_goes_on_when_its_commit_has_no_answer, unanswered, "is computed in attempts"),
    (old_attempts_are_believed, unanswered, "is computed in attempts|nothing had struck"),
    (moving_blocks_are_free_before_the_link_has_read_them, slow, "will read block"),
    (a_target_counts_as_taken_for_ever, unheard, "still counts on|branches"),
    (a_node_has_drained_when_all_is_on_its_way, draining, "has drained"),
    (a_draining_node_asks_once, full, "does not move"),
)


@pytest.mark.parametrize("draw", [draining, slow, cut, unanswered, unheard, full])
@pytest.mark.covers("D10", "D08")
def test_without_a_planted_bug_these_runs_hold(draw: Callable[[int], Scenario]) -> None:
    for seed in range(2 if IS_THOROUGH else 1):
        outcome = run_scenario(draw(seed))
        assert outcome.error is None, f"{outcome.error}\n{outcome.where}"
        assert outcome.counters["moves_begun"] >= 2


@pytest.mark.parametrize(
    ("plant", "draw", "found"), [pytest.param(*bug, id=bug[0].__name__) for bug in a_share(BUGS, 3)]
)
@pytest.mark.covers("C01", "D10")
def test_a_bug_planted_in_moves_is_found(
    plant: Callable[[Patch], None], draw: Callable[[int], Scenario], found: str, monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    errors = (run_scenario(draw(seed)).error for seed in range(MAX_SEEDS))
    error = next((each for each in errors if each is not None), None)
    assert error is not None, f"nothing was found within {MAX_SEEDS} seeds"
    assert re.search(found, error), error
