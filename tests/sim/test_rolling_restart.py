"""Every node is drained and started anew, one after the other, under load: no request fails, and what runs is carried over."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from tests.sim.moving import NODES, knobs, restarts
from tests.sim.outcome import run_scenario
from tests.sim.scenario import Fault
from tests.thorough import IS_THOROUGH, a_share

NUM_CLIENTS = 30 if IS_THOROUGH else 20


@pytest.mark.parametrize("is_one_sided", [False, True], ids=["two-sided", "one-sided"])
@pytest.mark.parametrize("num_blocks", [24, 96], ids=["short of blocks", "room for all"])
@pytest.mark.covers("C07", "D08", "D10", "H15")
def test_a_rolling_restart_fails_no_request_and_computes_nothing_again_that_moves(
    is_one_sided: bool, num_blocks: int
) -> None:
    outcome = run_scenario(restarts(1, knobs(is_one_sided, num_blocks), NODES, NUM_CLIENTS))
    assert outcome.error is None, f"{outcome.error}\n{outcome.where}"
    counters = outcome.counters
    assert counters["client:finished"] == NUM_CLIENTS and counters["drained"] == len(NODES)
    assert counters["moved"] >= 3 and not counters["drains cut short"]
    assert bool(counters["recovered from PREEMPTED"]) == (num_blocks == 24)


FAULTS = (
    Fault(2.4, "lose ack", "decode-0", "decode-2"),
    Fault(2.4, "cut link", "decode-0", "decode-2"),
    Fault(2.4, "flip bit", "decode-0", "decode-2"),
    Fault(2.4, "lose calls", "decode-0", "decode-2", seconds=3.0),
    Fault(2.4, "partition", "decode-0", "decode-2", seconds=3.0),
    Fault(2.4, "power off", "decode-2", seconds=2.0, moment="lease"),
    Fault(2.4, "crash", "decode-0", seconds=1.0, moment="commit"),
    Fault(2.4, "crash", "router-1", seconds=1.0, moment="move"),
)


@pytest.mark.parametrize(
    ("fault", "is_one_sided"),
    a_share(list(product(FAULTS, (False, True))), 3),
    ids=lambda each: f"{each.kind} {each.who} {each.other}" if isinstance(each, Fault) else f"one-sided {each}",
)
@pytest.mark.covers("D10", "R04", "R10", "C01")
def test_whatever_breaks_a_move_its_stream_goes_on(fault: Fault, is_one_sided: bool) -> None:
    outcome = run_scenario(restarts(2, knobs(is_one_sided, 96), NODES[:1], 8, fault))
    assert outcome.error is None, f"{outcome.error}\n{outcome.where}"
    ends = {name for name, count in outcome.counters.items() if name.startswith("client:") and count}
    assert ends <= {"client:finished", "client:router lost", "client:pd_reschedule"} and outcome.counters[fault.kind]


# The connection breaks, and either end is told or not; or nothing gets through for less than a session's grace.
RESUMED = (
    *(Fault(2.4, "cut stream", "router-0", "decode-0", 0, number, "move") for number in range(4)),
    *(Fault(2.4, "cut stream", "router-0", "decode-0", 0, number, "commit") for number in range(4)),
    *(Fault(2.4, "cut stream", "router-0", "decode-1", 0, number, "activate") for number in range(4)),
    Fault(2.4, "one way", "decode-0", "router-0", 1.75, moment="move"),
    Fault(2.4, "one way", "router-0", "decode-0", 1.75, moment="commit"),
    Fault(2.4, "one way", "decode-1", "router-0", 1.75, moment="activate"),
    Fault(2.4, "partition", "router-0", "decode-1", 1.75, moment="activate"),
)


@pytest.mark.parametrize("fault", a_share(RESUMED, 2), ids=lambda fault: f"{fault} {fault.number}")
@pytest.mark.covers("D10", "R12")
def test_a_router_that_is_resumed_within_its_grace_during_a_move_loses_nothing_and_retries_nothing(
    fault: Fault,
) -> None:
    slow = replace(knobs(False, 96), step_s=0.1)
    outcome = run_scenario(restarts(2, slow, NODES[:1], 8, fault, gap_s=0.1))
    assert outcome.error is None, f"{outcome.error}\n{outcome.where}"
    counters = outcome.counters
    assert counters["sessions resumed"] >= 1 and counters["sessions lost"] == 2, (
        "each router loses the node that drained"
    )
    assert counters["client:finished"] == 8 and counters["moved"] >= 1 and counters["drained"] == 1
    assert not [name for name in counters if name.startswith("retries:")]
