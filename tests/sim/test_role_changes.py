"""Nodes take other roles under load: no request fails, what runs is carried over, and the pool goes on with what it holds."""

from __future__ import annotations

import pytest

from tests.sim.moving import changes, knobs
from tests.sim.outcome import run_scenario
from tests.sim.scenario import Fault

NUM_CLIENTS = 26
ALL_SIX = (
    ("decode-0", "prefill"),
    ("prefill-0", "decode"),
    ("decode-0", "mixed"),
    ("prefill-0", "mixed"),
    ("decode-0", "decode"),
    ("prefill-0", "prefill"),
)


@pytest.mark.parametrize(
    ("num_blocks", "is_one_sided"), [(24, True), (96, False)], ids=["short of blocks, one-sided", "room for all"]
)
@pytest.mark.covers("C11", "D08", "D10", "H15")
def test_all_six_changes_fail_no_request(num_blocks: int, is_one_sided: bool) -> None:
    outcome = run_scenario(changes(1, knobs(is_one_sided, num_blocks), ALL_SIX, NUM_CLIENTS, gap_s=0.5))
    assert outcome.error is None, f"{outcome.error}\n{outcome.where}"
    counters = outcome.counters
    assert counters["client:finished"] == NUM_CLIENTS and not counters["drains cut short"]
    assert {name for name in counters if name.startswith("role: ")} == {
        f"role: {before} to {after}"
        for before in ("prefill", "decode", "mixed")
        for after in ("prefill", "decode", "mixed")
        if before != after
    }
    assert counters["moved"] >= 2
    assert counters["dispatched: decode to decode"] == 0


FAULTS = (
    Fault(2.3, "lose ack", "decode-0", "decode-2"),
    Fault(2.3, "lose calls", "decode-0", "decode-2", seconds=3.0),
    Fault(2.3, "partition", "decode-0", "decode-1", seconds=3.0),
    Fault(2.3, "partition", "decode-0", "router-0", seconds=1.7),
    Fault(2.3, "one way", "decode-0", "router-1", seconds=6.0),
    Fault(2.3, "pause", "decode-0", seconds=2.5),
    Fault(2.3, "crash", "decode-0", seconds=1.0, moment="commit"),
    Fault(2.3, "drain", "decode-0", seconds=0.5),
    Fault(2.3, "crash", "router-1", seconds=1.0, moment="move"),
    Fault(2.0, "crash", "decode-0", seconds=1.0, moment="session up"),
)


@pytest.mark.parametrize("fault", FAULTS, ids=[f"{each.kind} {each.who} {each.other}".strip() for each in FAULTS])
@pytest.mark.covers("C11", "R04", "C01")
def test_whatever_breaks_a_change_no_stream_is_wrong_and_nothing_leaks(fault: Fault) -> None:
    outcome = run_scenario(changes(2, knobs(True, 96), ALL_SIX[:1], 8, fault))
    assert outcome.error is None, f"{outcome.error}\n{outcome.where}"
    ends = {name for name, count in outcome.counters.items() if name.startswith("client:") and count}
    assert ends <= {"client:finished", "client:router lost", "client:pd_reschedule"} and outcome.counters[fault.kind]
