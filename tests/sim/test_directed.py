"""Rows with a scenario of their own: lost answers to Commit, deadlines while something hangs, prompts that exceed the pool."""

from __future__ import annotations

import pytest

from tests.sim.outcome import run_scenario
from tests.sim.scenario import SLOW_STEP_S, ClientPlan, Fault, Knobs, Scenario
from tests.sim.world import World


def client(number: int, at: float = 1.0, **wanted: object) -> ClientPlan:
    plan = {
        "name": f"r{number}",
        "at": at,
        "router": 0,
        "prompt": (1, 2, 3, 4, number),
        "max_tokens": 9,
        "seed": number,
    }
    return ClientPlan(**{**plan, **wanted})  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.covers("R21")
def test_a_commit_whose_answer_is_lost_is_not_retried_and_the_stream_goes_on(seed: int) -> None:
    knobs = Knobs(num_decode=2, step_s=SLOW_STEP_S, lease_life_s=1.5)
    fault = Fault(0.5, "lose ack", "prefill-0", "decode-0")
    other = Fault(0.5, "lose ack", "prefill-0", "decode-1")
    outcome = run_scenario(Scenario(seed, knobs, (client(1, max_tokens=24),), (fault, other)))
    assert outcome.error is None, outcome.error
    assert outcome.counters["lose ack"] >= 1 and outcome.counters["client:finished"] == 1
    assert not [name for name in outcome.counters if name.startswith("retries:")]


HANGS = (
    Fault(1.05, "pause", "prefill-0", seconds=9.0),
    Fault(1.3, "pause", "decode-0", seconds=9.0),
    Fault(1.0, "partition", "prefill-0", "decode-0", seconds=9.0),
    Fault(1.0, "one way", "decode-0", "prefill-0", seconds=9.0),
    Fault(1.0, "lose calls", "prefill-0", "decode-0", seconds=9.0),
    Fault(1.3, "one way", "decode-0", "router-0", seconds=9.0),
)


@pytest.mark.parametrize("fault", HANGS, ids=[f"{fault.kind} {fault.who} {fault.other}".strip() for fault in HANGS])
@pytest.mark.covers("R17")
def test_whatever_hangs_a_request_ends_by_its_deadline_and_no_node_computes_on(fault: Fault) -> None:
    knobs = Knobs(step_s=SLOW_STEP_S, clock_spread=0.05)
    clients = tuple(client(number, max_tokens=24, timeout_s=2.5) for number in range(3))
    world = World(Scenario(7, knobs, clients, (fault,)))
    world.run()
    for each in world.clients[: len(clients)]:
        assert each.end in ("DEADLINE", "NODE_LOST", "finished") and each.ended_at <= each.deadline_at + 0.01
    assert world.kernel.counters["client:DEADLINE"] + world.kernel.counters["client:NODE_LOST"] > 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.covers("S02")
def test_prompts_that_together_exceed_every_pool_are_all_served(seed: int) -> None:
    """The other half of S02, running chunks that find no room, comes with preemption."""
    knobs = Knobs(num_blocks=12, num_slots=8, max_batched_tokens=8, max_model_len=48, num_prefill=1 + seed % 2)
    prompts = [tuple((number * 7 + at) % 11 for at in range(40)) for number in range(8)]  # 10 or 11 of 12 blocks each
    clients = tuple(client(number, prompt=prompt, max_tokens=1 + number) for number, prompt in enumerate(prompts))
    outcome = run_scenario(Scenario(seed, knobs, clients))
    assert outcome.error is None and outcome.counters["client:finished"] == len(clients), outcome.error


# Steps so slow that a drain begins in the middle of prompts, and that what runs would run beyond its deadline: who is asked for no
# place then, or not answered, is computed again at the end of it.
LONG = tuple(
    client(number, prompt=tuple((number * 7 + at) % 11 for at in range(24)), max_tokens=70) for number in range(2)
)


@pytest.mark.parametrize("at", [1.2, 2.6, 8.0])
@pytest.mark.parametrize("role", ["decode", "mixed"])
@pytest.mark.covers("D08", "D11")
def test_whose_prompts_are_computed_when_a_drain_begins_moves_too(role: str, at: float) -> None:
    roles = {"num_prefill": 0, "num_decode": 0, f"num_{role}": 2}
    sizes = {"num_slots": 8, "num_blocks": 96, "local_prefill_chunk": 8, "max_batched_tokens": 16}
    knobs = Knobs(**roles, **sizes, step_s=0.5, local_prefill_max_tokens=0)  # type: ignore[arg-type]
    outcome = run_scenario(Scenario(3, knobs, LONG, (Fault(at, "drain", f"{role}-0", seconds=0.3),)))
    assert outcome.error is None, outcome.error
    assert outcome.counters["client:finished"] == len(LONG)
    assert not [name for name in outcome.counters if name.startswith("retries:")]


@pytest.mark.covers("D08", "R19")
def test_who_was_refused_by_a_node_that_another_router_fills_moves_there_when_it_has_room() -> None:
    """Refusals are no moves, and there is one."""
    knobs = Knobs(num_routers=2, num_decode=2, num_slots=2, num_blocks=96, step_s=0.4, max_moves=1, reserve_wait_s=0.0)
    others = tuple(client(number, 1.6, router=1, max_tokens=24) for number in range(1, 4))
    drain = Fault(2.5, "drain", "decode-0", seconds=0.3)
    outcome = run_scenario(Scenario(5, knobs, (client(0, max_tokens=90), *others), (drain,)))
    counters = outcome.counters
    assert outcome.error is None, outcome.error
    assert counters["client:finished"] == 4 and counters["moves_refused"] > 1 and counters["moved"]
    assert counters["drained"] == 1 and not counters["drains cut short"]


@pytest.mark.covers("D10")
def test_who_gave_way_is_kept_for_another_node_beside_those_that_have_all_slots() -> None:
    """Its link is slow: the Commit is on its way while somebody else has its slot."""
    sizes = {"num_blocks": 14, "max_model_len": 48, "reserve_policy": "none", "reserves_for_running": False}
    gives_way = {"preempt_move_s": 5.0, "max_moves": 1000, "step_s": 0.02}
    knobs = Knobs(**sizes, **gives_way, num_routers=2, num_decode=2, num_slots=3)  # type: ignore[arg-type]
    prompts = [tuple((number * 7 + at + 5) % 11 for at in range(10)) for number in range(10)]
    clients = tuple(
        client(number, 1.0 + 0.1 * number, router=number % 2, prompt=prompt, max_tokens=34)
        for number, prompt in enumerate(prompts)
    )
    outcome = run_scenario(Scenario(5, knobs, clients, (Fault(1.2, "slow", "decode-0", "decode-1", 6.0),)))
    assert outcome.error is None, outcome.error
    assert outcome.counters["client:finished"] == len(clients) and outcome.counters["moved"]
