"""Every node is drained and started anew, one after the other, under load: no request fails, and what runs is carried over."""

from __future__ import annotations

import random

import pytest

from tests.sim.outcome import run_scenario
from tests.sim.scenario import ClientPlan, Fault, Knobs, Scenario

NODES = ("decode-0", "prefill-0", "decode-1", "prefill-1", "decode-2")
NUM_CLIENTS = 30


def restarts(seed: int, knobs: Knobs, hosts: tuple[str, ...], num_clients: int, *faults: Fault) -> Scenario:
    rng = random.Random(seed)
    clients = tuple(
        ClientPlan(
            f"r{number}",
            1.0 + 0.2 * number,
            number % 2,
            tuple(rng.randrange(11) for _ in range(rng.randint(4, 30))),
            rng.randint(20, 60),
            rng.getrandbits(40),
            temperature=1.0,
            num_choices=rng.choice((1, 1, 2)),
            num_logprobs=rng.choice((None, 2)),
        )
        for number in range(num_clients)
    )
    drains = tuple(Fault(2.0 + 2.0 * number, "drain", host, seconds=0.3) for number, host in enumerate(hosts))
    return Scenario(seed, knobs, clients, (*drains, *faults))


def knobs(is_one_sided: bool, num_blocks: int) -> Knobs:
    return Knobs(
        num_routers=2,
        num_prefill=2,
        num_decode=3,
        num_blocks=num_blocks,
        num_slots=4 if num_blocks < 96 else 16,
        max_batched_tokens=32,
        step_s=0.05,
        is_one_sided=is_one_sided,
        reserve_policy="none",
        reserves_for_running=False,
        preempt_move_s=0.5,
    )


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


@pytest.mark.parametrize("is_one_sided", [False, True], ids=["two-sided", "one-sided"])
@pytest.mark.parametrize("fault", FAULTS, ids=[f"{each.kind} {each.who} {each.other}".strip() for each in FAULTS])
@pytest.mark.covers("D10", "R04", "R10", "C01")
def test_whatever_breaks_a_move_its_stream_goes_on(fault: Fault, is_one_sided: bool) -> None:
    outcome = run_scenario(restarts(2, knobs(is_one_sided, 96), NODES[:1], 8, fault))
    assert outcome.error is None, f"{outcome.error}\n{outcome.where}"
    ends = {name for name, count in outcome.counters.items() if name.startswith("client:") and count}
    assert ends <= {"client:finished", "client:router lost", "client:pd_reschedule"} and outcome.counters[fault.kind]
