"""The cluster in a box: whatever a seed does to it, streams are right, nothing leaks, every request ends, and it serves again."""

from __future__ import annotations

from functools import cache
from itertools import permutations

import pytest

from router.waiting import KINDS
from tests.sim.outcome import Outcome, run_scenario
from tests.sim.scenario import FAULT_KINDS, KV_POOL_FLAWS, Scenario, draw_scenario
from tests.sim.shrink import Shrinker
from tests.thorough import IS_THOROUGH, examples

# Short ones in which everything happens that does in the hundred.
SEEDS = tuple(range(100)) if IS_THOROUGH else (4, 8, 35, 45, 47, 48, 55, 56, 57, 66, 68, 71, 76, 78, 82, 84, 86, 87)
NUM_FRESH = examples(10, 2)
ROLE_CHANGES = [f"role: {before} to {after}" for before, after in permutations(("prefill", "decode", "mixed"), 2)]


def report(outcome: Outcome) -> str:
    """The seed, the error, and the log of the shortest run found that fails like it."""
    shrunk = run_scenario(Shrinker(outcome, max_runs=150).shrink(), is_traced=True)
    seed = outcome.scenario.seed
    lines = [f"seed {seed}: {outcome.error}", outcome.where, f"replay: make sim SEED={seed}", "The shortest run found:"]
    return "\n".join([*lines, *shrunk.scenario.lines(), str(shrunk.trace)])


@cache
def outcome_of(seed: int) -> Outcome:
    """Of one run for all tests of this file; without its trace it is small."""
    return run_scenario(draw_scenario(seed))


def hold(seed: int) -> None:
    outcome = outcome_of(seed)
    if outcome.error is not None:
        pytest.fail(report(outcome), pytrace=False)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.covers("C01", "H04", "H05", "H06", "H07", "H08", "H09", "H11", "D02", "D05", "P08")
@pytest.mark.covers("Q05", "Q08", "R04", "R12", "R15", "R17", "R21", "S13")
def test_everything_holds_whatever_the_seed_does(seed: int) -> None:
    hold(seed)


@pytest.mark.parametrize("number", range(NUM_FRESH))
@pytest.mark.covers("C01")
def test_everything_holds_for_seeds_that_nobody_has_seen(number: int, fresh_seed: int) -> None:
    hold(fresh_seed + number)


def whole(scenario: Scenario) -> Scenario:
    """The same load, with nothing going wrong but what clients do."""
    return Scenario(scenario.seed, scenario.knobs, scenario.clients)


@pytest.mark.parametrize("seed", range(examples(12)))
@pytest.mark.covers("S13", "P01", "P08", "D02", "Q08", "A02", "H11")
def test_without_faults_every_request_is_served_in_full(seed: int) -> None:
    outcome = run_scenario(whole(draw_scenario(seed)))
    assert outcome.error is None, f"seed {seed}: {outcome.error}\n{outcome.where}"
    ends = {name for name, count in outcome.counters.items() if name.startswith("client:") and count}
    given_up = set() if draw_scenario(seed).knobs.retries else {"client:pd_reschedule"}
    assert ends <= {"client:finished", "client:aborted", "client:DEADLINE", "client:OVERLOADED"} | given_up


@pytest.mark.covers("C01", "H06", "R21", "D01", "R12")
def test_every_fault_really_strikes_and_every_answer_to_one_is_given() -> None:
    counters: dict[str, int] = {}
    for seed in SEEDS:
        for name, count in outcome_of(seed).counters.items():
            counters[name] = counters.get(name, 0) + count
    for name in (
        *FAULT_KINDS,
        *ROLE_CHANGES,
        "abort",
        "overtaken",
        "held up by a partition",
        "lost with a connection",
        "done after a pause",
        "loses a call",
        "loses an answer",
        "repeats a call",
        "work of dead routers looked for",
        "leases_expired",
        "commits_refused",
        "stale_refused",
        "stop string",
        "client:finished",
        "client:router lost",
        "client:NODE_LOST",
        "client:DEADLINE",
        "client:OVERLOADED",
        "sessions lost",
        "reserve_refused_no_blocks",
        "reserve_refused_busy",
        "writes_refused_checksum",
        "ended:released",
        "ended:cancelled",
        "retries:CHECKSUM",
        "retries:TRANSFER_FAILED",
        "repeated_batches:",
        "stale_messages:tokens",
        "plans with several branches",
        "preempted",
        "pd_errors:PREEMPTED",
        *(f"dispatches:{kind}" for kind in KINDS),
        "writes into quarantine",
        "dispatched to itself",
        "dispatched: mixed to decode",
        "dispatched: mixed to mixed",
        "dispatched: prefill to mixed",
        "recovered from CHECKSUM",
        "recovered from INTERNAL",
        "recovered from NODE_LOST",
        "recovered from PREEMPTED",
        "recovered from TRANSFER_FAILED",
        "outlived a decode node",
        "outlived a mixed node",
        "outlived a prefill node",
        "client:pd_reschedule",
        "resubmitted",
        "no heirs",
        "circuit closed to open",
        "circuit open to probing",
        "circuit probing to closed",
        "circuit probing to open",
        "drained: decode",
        "drained: mixed",
        "drained: prefill",
        "ended:DRAINING",
        "pd_errors:DRAINING",
        "retries:INTERNAL",
        "retries:NODE_LOST",
        "retries:PREEMPTED",
        "moved",
        "moves:begun",
        "moves:done",
        "moves:off",
        "moves:no_room",
        "moves_refused",
        "cached_tokens:",
        "index agrees",
        "kv saves",
        "kv blocks fetched",
        "kv fetches short",
        *(f"kv pool {flaw}" for flaw in KV_POOL_FLAWS),
        "kv_pool_too_late",
        "kv_pool_not_worth",
        "kv_pool_probes",
        "moves_failed",
        "sessions resumed",
    ):
        assert counters.get(name), f"{name} never happened: {sorted(counters)}"
