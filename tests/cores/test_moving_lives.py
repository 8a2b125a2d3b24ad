"""Random lives of nodes that move what runs, with everything that can be lost on the way."""

from __future__ import annotations

from collections import Counter
from functools import cache
from random import Random
from typing import Any

import pytest

from engine.saving import SaveRules
from tests.cores.mixed import Mixed
from tests.cores.moving_world import MovingWorld, decode_nodes, dispatch_of
from tests.cores.nodes import Decode

NUM_SEEDS = 140


@pytest.mark.covers("D10", "D08", "H05", "H06", "H07", "Q02", "P08", "W01", "W09")
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_whatever_is_lost_there_is_one_owner_one_stream_and_no_block_left(seed: int) -> None:
    happened_in(seed)


@cache
def happened_in(seed: int) -> Counter[str]:
    """One life for both tests; it has ended well."""
    world = live(Random(seed))
    world.check_end()
    return world.happened


def live(random: Random) -> MovingWorld:
    """Some streams, nodes that drain, and everything that can be lost, in random order."""
    sizes: dict[str, Any] = {
        "num_blocks": random.choice((16, 24, 40)),
        "num_slots": random.randint(3, 8),
        "policy": random.choice(("ratio", "none", "full")),
        "saves": SaveRules(of_preempted=random.random() < 0.6, of_finished=random.random() < 0.3),
    }
    preempt_move_s = random.choice((0.0, 0.2, 0.2))
    resumes = random.random() < 0.3
    nodes: list[Decode | Mixed] = [
        *decode_nodes(random.randint(2, 3), preempt_move_s=preempt_move_s, resumes=resumes, **sizes)
    ]
    if random.random() < 0.3:
        nodes[0] = Mixed(identity=nodes[0].identity, role="mixed", **sizes)
    world = MovingWorld(*nodes)
    faults = random.choice((0.0, 0.05, 0.2))
    world.has_target = lambda stream: random.random() < 0.8
    for name in range(random.randint(2, 6)):
        sampling: dict[str, Any] = {"max_tokens": random.randint(10, 40), "temperature": random.choice((0.0, 1.0))}
        if random.random() < 0.5:
            sampling |= {"presence_penalty": 0.5, "num_logprobs": 1, "stop_token_ids": [3], "min_tokens": 5}
        prompt = [7] * random.choice((0, 4, 8)) + [random.randrange(32) for _ in range(random.randint(1, 9))]
        dispatch = dispatch_of(f"r{name}", prompt, random.choice((1, 1, 2)), **sampling)
        dispatch.ms_left = random.choice((300, 60_000, 60_000, 60_000))
        world.start(random.choice(list(world.nodes)), dispatch)
    to_drain = random.sample(list(world.nodes), random.randint(1, len(world.nodes) - 1))
    for _ in range(1500):
        if to_drain and random.random() < 0.02:
            world.drain(to_drain.pop(), world.now + random.choice((0.1, 5.0, 5.0)))
        if random.random() < faults:
            fault(world, random)
        elif random.random() < 0.03 or not world.do_something(random):
            world.wait(random.choice((0.001, 0.01, 0.1)))
        world.check()
        if all(stream.end for stream in world.streams.values()):
            break
    world.run_out()
    world.happened["saved"] += world.kv_pool.num_saves
    return world


def fault(world: MovingWorld, random: Random) -> None:
    match random.choice(("call",) * 6 + ("cut",) * 4 + ("answer",) * 4 + ("cancel", "router")):
        case "call" if world.calls:
            world.lose_call(random.randrange(len(world.calls)))
        case "cut" if world.hub.links():
            world.happened["cut"] += world.hub.cut(random.choice(world.hub.links()), random.randint(0, 2))
        case "answer" if world.hub.links():
            world.happened["answer lost"] += any(world.hub.drop_answer(link) for link in world.hub.links())
        case "cancel" if random.random() < 0.2:
            world.cancel(random.choice(list(world.streams.values())))
        case "router" if random.random() < 0.03:
            world.lose_router()


def test_everything_does_happen() -> None:
    wanted = (
        "moved, moves_refused, moves_failed, wants MOVE_DRAINING, wants MOVE_PREEMPTED, ended PREEMPTED, ended moved"
        ", saved, cut, answer lost, lost reserve, lost reserve's answer, lost release, ended DRAINING"
    )
    missing = {*wanted.split(", ")}
    for seed in range(NUM_SEEDS):
        missing -= {name for name, count in happened_in(seed).items() if count}
        if not missing:
            return
    pytest.fail(f"never happened: {missing}")
