"""The simulation can fail: it finds bugs that are planted for it, one by each invariant.

A planted bug is a piece of production code that does not do its work. Seeds are tried in order until one finds it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.sim.outcome import Outcome, run_scenario
from tests.sim.planted import (
    Patch,
    a_lost_node_orphans_nobody,
    a_resumed_session_starts_behind_what_was_lost,
    a_routers_timers_are_late,
    blocks_are_free_before_the_last_step_is_read,
    promises_are_kept_for_ever,
    refused_branches_are_not_queued,
    repeats_are_taken,
    senders_ignore_their_timers,
    sent_blocks_are_dropped_before_they_are_read,
    the_fence_admits_everything,
    the_queue_has_no_end,
    writes_run_on_into_blocks_that_are_free,
)
from tests.sim.scenario import draw_scenario

MAX_SEEDS = 120

# Where the search begins, to save time: the first of the seeds from 0 on that found it when this was written.
FIRST_SEEDS: dict[Callable[[Patch], None], int] = {
    senders_ignore_their_timers: 42,
    writes_run_on_into_blocks_that_are_free: 18,
    a_resumed_session_starts_behind_what_was_lost: 20,
}

BUGS: tuple[tuple[Callable[[Patch], None], str], ...] = (
    (repeats_are_taken, "gap or repeat|is wrong"),
    (promises_are_kept_for_ever, "promises"),
    (writes_run_on_into_blocks_that_are_free, "a write landed in block"),
    (sent_blocks_are_dropped_before_they_are_read, "will read block"),
    (blocks_are_free_before_the_last_step_is_read, "while a step with it is unread"),
    (the_fence_admits_everything, "cancelled or released here"),
    (senders_ignore_their_timers, "timer|do not end"),
    (a_resumed_session_starts_behind_what_was_lost, "nothing had struck it|do not end|does not end|came behind|wrong"),
    (a_lost_node_orphans_nobody, "do not end|does not end|not whole|struck"),
    (refused_branches_are_not_queued, "queued of|do not end|does not end"),
    (the_queue_has_no_end, "a request came to"),
    (a_routers_timers_are_late, "after its deadline"),
)


def first_failure(first_seed: int) -> Outcome:
    for seed in range(first_seed, first_seed + MAX_SEEDS):
        outcome = run_scenario(draw_scenario(seed))
        if outcome.error is not None:
            return outcome
    pytest.fail(f"nothing was found within {MAX_SEEDS} seeds from {first_seed} on")


@pytest.mark.parametrize(("plant", "found"), BUGS, ids=[plant.__name__ for plant, _ in BUGS])
@pytest.mark.covers("C01")
def test_a_planted_bug_is_found(plant: Callable[[Patch], None], found: str, monkeypatch: Patch) -> None:
    plant(monkeypatch)
    outcome = first_failure(FIRST_SEEDS.get(plant, 0))
    assert outcome.error is not None and re.search(found, outcome.error), outcome.error
