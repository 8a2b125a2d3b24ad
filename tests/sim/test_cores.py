"""The production cores together, before the first socket: 100 requests through a cluster whose network a seed decides about."""

from __future__ import annotations

import random

import pytest

from router.events import Failed, Finished
from tests.sim.parts import Sizes
from tests.sim.world import BLOCK_SIZE, VOCAB_SIZE, World

NUM_REQUESTS = 100
HOSTILE = Sizes(
    p_lose_rpc=0.05,
    p_repeat_reserve=0.05,
    p_lose_answer=0.02,
    p_cut_link=0.001,
    p_flip=0.002,
    p_abort=0.002,
    p_stop=0.003,
)


def drive(world: World, num_requests: int = NUM_REQUESTS, num_open: int = 12) -> None:
    """Submit requests as fast as their predecessors end, then let everything end and every timer fire."""
    rng = random.Random(world.rng.random())
    shared = tuple(rng.randrange(VOCAB_SIZE) for _ in range(2 * BLOCK_SIZE))  # some prompts begin alike
    num_submitted = 0
    while num_submitted < num_requests or world.open_requests:
        if num_submitted < num_requests and len(world.open_requests) < num_open:
            prompt = (
                *(shared if rng.random() < 0.5 else ()),
                *(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 30))),
            )
            stop = (rng.randrange(VOCAB_SIZE),) if rng.random() < 0.5 else ()
            num_choices = rng.choice((1, 1, 1, 2, 3, 6))
            world.submit(prompt, rng.randint(1, 24), rng.choice((0.0, 1.0)), stop, num_choices)
            num_submitted += 1
        elif not world.step() and not world.pass_time():
            raise AssertionError(f"nothing can happen, yet {world.open_requests} are open")
    world.run()
    world.check_idle()


@pytest.mark.covers("S13", "P01", "P08", "D02", "Q08", "A02")
def test_a_hundred_requests_without_faults_all_end_right(fresh_seed: int) -> None:
    world = World(fresh_seed, Sizes())
    drive(world)
    for client in world.clients.values():
        assert isinstance(client.end, Finished), client.end
        assert client.end.token_ids == client.expected == tuple(client.received)
        assert client.end.finish_reason == client.expected_reason
    sent = [node.transport.snapshot()["kv_bytes_sent"] for node in world.nodes.values()]
    assert any(sent), "no KV crossed: nothing was handed over"


@pytest.mark.parametrize("number", range(20))
@pytest.mark.covers("H04", "H05", "H06", "H07", "H09", "H11", "R04", "R15", "R21", "P08", "D02", "S13")
def test_under_cancels_refusals_and_losses_every_request_ends_once_and_nothing_leaks(
    number: int, fresh_seed: int
) -> None:
    world = World(fresh_seed + number, HOSTILE)
    drive(world)
    for key, client in world.clients.items():
        if isinstance(client.end, Finished):
            assert client.end.token_ids == client.expected, key
            assert client.end.finish_reason == client.expected_reason
        else:
            assert client.end == "aborted" or isinstance(client.end, Failed), key
    finished = sum(isinstance(client.end, Finished) for client in world.clients.values())
    assert finished > len(world.clients) / 2, f"only {finished} of {len(world.clients)} choices were served"


@pytest.mark.covers("H06", "R21", "D01", "R12")
def test_every_fault_of_the_hostile_network_really_happens() -> None:
    """Over the fixed seeds each fault fires, and each answer to one is given."""
    faults: dict[str, int] = {}
    counters: dict[str, int] = {}
    for seed in range(8):
        world = World(seed, HOSTILE)
        drive(world)
        for name, count in world.faults.items():
            faults[name] = faults.get(name, 0) + count
        for name, count in world.counters.items():
            kind = name.split(":", 1)[-1]
            counters[kind] = counters.get(kind, 0) + count
    for fault in ("abort", "stop string", "lost rpc", "repeated reserve", "lost commit ack", "cut link", "flipped bit"):
        assert faults.get(fault), f"{fault} never fired: {faults}"
    for answer in (
        "reserve_refused_no_blocks",
        "reserve_refused_busy",
        "writes_refused_checksum",
        "ended:expired",
        "ended:released",
        "ended:cancelled",
        "retries:CHECKSUM",
        "retries:TRANSFER_FAILED",
        "repeated_batches:",
        "plans with several branches",
    ):
        assert counters.get(answer), f"{answer} never happened: {sorted(counters)}"
