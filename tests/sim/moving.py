"""Scenarios in which sequences move: nodes that are drained, or take other roles, while clients ask for long answers."""

from __future__ import annotations

import random

from tests.sim.scenario import ClientPlan, Fault, Knobs, Scenario

NODES = ("decode-0", "prefill-0", "decode-1", "prefill-1", "decode-2")


def knobs(is_one_sided: bool, num_blocks: int) -> Knobs:
    """Two of the first, three of the second; who gives way is moved, too."""
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


def restarts(
    seed: int, knobs: Knobs, hosts: tuple[str, ...], num_clients: int, *faults: Fault, gap_s: float = 0.2
) -> Scenario:
    """These hosts are drained, two seconds apart from 2.0 s on, while so many clients ask, one after the other from 1.0 s on."""
    drains = tuple(Fault(2.0 + 2.0 * number, "drain", host, seconds=0.3) for number, host in enumerate(hosts))
    return Scenario(seed, knobs, _clients(seed, num_clients, gap_s), (*drains, *faults))


def changes(
    seed: int, knobs: Knobs, steps: tuple[tuple[str, str], ...], num_clients: int, *faults: Fault, gap_s: float = 0.2
) -> Scenario:
    """These hosts take these roles, two seconds apart, under the same load."""
    roles = tuple(
        Fault(2.0 + 2.0 * number, "role", host, role, seconds=0.01) for number, (host, role) in enumerate(steps)
    )
    return Scenario(seed, knobs, _clients(seed, num_clients, gap_s), (*roles, *faults))


def _clients(seed: int, number: int, gap_s: float) -> tuple[ClientPlan, ...]:
    rng = random.Random(seed)
    return tuple(
        ClientPlan(
            f"r{number}",
            1.0 + gap_s * number,
            number % 2,
            tuple(rng.randrange(11) for _ in range(rng.randint(4, 30))),
            rng.randint(20, 60),
            rng.getrandbits(40),
            temperature=1.0,
            num_choices=rng.choice((1, 1, 2)),
            num_logprobs=rng.choice((None, 2)),
        )
        for number in range(number)
    )
