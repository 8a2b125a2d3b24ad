"""The simulation can fail: it finds bugs that are planted for it, one by each invariant.

A planted bug is a piece of production code that does not do its work. Seeds are tried in order until one finds it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest

from tests.sim.outcome import Outcome, run_scenario
from tests.sim.planted import (
    Patch,
    a_lost_node_orphans_nobody,
    a_node_that_died_counts_twice,
    a_probe_that_says_nothing_probes_for_ever,
    a_rescheduled_answer_lacks_its_last_token,
    a_resumed_session_starts_behind_what_was_lost,
    a_routers_timers_are_late,
    another_model_goes_on,
    attempts_keep_their_numbers,
    blocks_are_free_before_the_last_step_is_read,
    budgets_are_one_short,
    ended_leases_are_quiet_at_once,
    promises_are_kept_for_ever,
    refused_attempts_count_as_failed,
    refused_branches_are_not_queued,
    repeats_are_taken,
    routers_overlook_evictions,
    senders_ignore_their_timers,
    sent_blocks_are_dropped_before_they_are_read,
    the_fence_admits_everything,
    the_queue_has_no_end,
    who_leaves_the_line_hears_nothing,
    writes_run_on_into_blocks_that_are_free,
)
from tests.sim.planted_kv import (
    a_fetch_ends_with_its_request,
    leaving_while_kv_is_fetched,
    over_a_lying_pool,
    what_did_not_come_counts_as_fetched,
    what_is_to_be_saved_is_not_kept,
)
from tests.sim.scenario import ClientPlan, Fault, Knobs, Scenario, draw_scenario
from tests.thorough import a_share

MAX_SEEDS = 120

# Where the search begins, to save time: the first of the seeds from 0 on that found it when this was written.
FIRST_SEEDS: dict[Callable[[Patch], None], int] = {
    promises_are_kept_for_ever: 39,
    writes_run_on_into_blocks_that_are_free: 68,
    sent_blocks_are_dropped_before_they_are_read: 5,
    the_fence_admits_everything: 5,
    senders_ignore_their_timers: 72,
    a_resumed_session_starts_behind_what_was_lost: 20,
    the_queue_has_no_end: 18,
    routers_overlook_evictions: 27,
    refused_branches_are_not_queued: 45,
    a_node_that_died_counts_twice: 6,
    a_rescheduled_answer_lacks_its_last_token: 11,
    refused_attempts_count_as_failed: 21,
    another_model_goes_on: 41,
}

BUGS: tuple[tuple[Callable[[Patch], None], str], ...] = (
    (repeats_are_taken, "gap or repeat|is wrong"),
    (promises_are_kept_for_ever, "promises"),
    (writes_run_on_into_blocks_that_are_free, "a write landed in block"),
    (sent_blocks_are_dropped_before_they_are_read, "will read block"),
    (blocks_are_free_before_the_last_step_is_read, "while a step with it is unread"),
    (the_fence_admits_everything, "cancelled or released here"),
    (senders_ignore_their_timers, "timer|do not end|does not move"),
    (a_resumed_session_starts_behind_what_was_lost, "nothing had struck it|do not end|does not end|came behind|wrong"),
    (a_lost_node_orphans_nobody, "do not end|does not end|not whole|struck"),
    (refused_branches_are_not_queued, "queued of|do not end|does not end"),
    (the_queue_has_no_end, "a request came to"),
    (a_routers_timers_are_late, "after its deadline"),
    (routers_overlook_evictions, "knows other blocks than"),
    (ended_leases_are_quiet_at_once, "a write landed in block"),
    (budgets_are_one_short, "retries some are left|what it has is lost"),
    (a_node_that_died_counts_twice, "retries some are left"),
    (a_rescheduled_answer_lacks_its_last_token, "are not all that came"),
    (a_probe_that_says_nothing_probes_for_ever, "probes with no attempt"),
    (refused_attempts_count_as_failed, "nothing had struck it|retries some are left"),
    (another_model_goes_on, "is wrong"),
    (who_leaves_the_line_hears_nothing, "owes"),
    (attempts_keep_their_numbers, "do not end|does not end|nothing had struck it|cannot act on"),
    (what_did_not_come_counts_as_fetched, "is wrong"),
    (a_fetch_ends_with_its_request, "a fetch writes into block|and fetches"),
    (what_is_to_be_saved_is_not_kept, "is to be saved and is|saved under another's key"),
)


def leaving_while_kv_is_written(seed: int) -> Scenario:
    """Long prompts, little at a time, over a network that keeps them waiting; every client leaves in the middle of it."""
    rng = random.Random(seed)
    clients = tuple(
        ClientPlan(
            f"r{number}",
            1.0 + 0.1 * number,
            0,
            tuple(rng.randrange(11) for _ in range(40)),
            8,
            number,
            aborts_after_s=0.02 * (1 + (number + seed) % 10),
        )
        for number in range(10)
    )
    return Scenario(seed, Knobs(network="heavy", is_one_sided=True, max_batched_tokens=8), clients)


def leaving_while_a_node_is_probed(seed: int) -> Scenario:
    """A node fails now and then, and is left alone for it; clients leave soon, whoever's attempt tries the node next too."""
    rng = random.Random(seed)
    clients = tuple(
        ClientPlan(
            f"r{number}",
            1.0 + 0.1 * number,
            0,
            tuple(rng.randrange(11) for _ in range(20)),
            24,
            number,
            aborts_after_s=rng.uniform(0.02, 0.6),
        )
        for number in range(40)
    )
    knobs = Knobs(num_decode=2, breaker_failures=1, step_s=0.05, max_batched_tokens=8)
    return Scenario(seed, knobs, clients, tuple(Fault(at, "broken row", "decode-0") for at in (1.2, 2.5, 3.8)))


# What drawn seeds find too seldom.
SCENARIOS: dict[Callable[[Patch], None], Callable[[int], Scenario]] = {
    sent_blocks_are_dropped_before_they_are_read: leaving_while_kv_is_written,
    what_did_not_come_counts_as_fetched: over_a_lying_pool,
    a_fetch_ends_with_its_request: leaving_while_kv_is_fetched,
    a_probe_that_says_nothing_probes_for_ever: leaving_while_a_node_is_probed,
}


def first_failure(first_seed: int, draw: Callable[[int], Scenario]) -> Outcome:
    for seed in range(first_seed, first_seed + MAX_SEEDS):
        outcome = run_scenario(draw(seed))
        if outcome.error is not None:
            return outcome
    pytest.fail(f"nothing was found within {MAX_SEEDS} seeds from {first_seed} on")


@pytest.mark.parametrize(("plant", "found"), [pytest.param(*bug, id=bug[0].__name__) for bug in a_share(BUGS, 3)])
@pytest.mark.covers("C01")
def test_a_planted_bug_is_found(plant: Callable[[Patch], None], found: str, monkeypatch: Patch) -> None:
    plant(monkeypatch)
    outcome = first_failure(FIRST_SEEDS.get(plant, 0), SCENARIOS.get(plant, draw_scenario))
    assert outcome.error is not None and re.search(found, outcome.error), outcome.error
