"""Nodes of all roles together: a mixed one alone, as both halves of other pairs, and in pools where sequences give way."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from router.events import Finished
from router.waiting import KINDS
from tests.cores.mixed_world import MixedWorld
from tests.cores.nodes import MAX_MODEL_LEN, VOCAB_SIZE
from tests.thorough import IS_THOROUGH

NUM_REQUESTS = 30
NUM_SEEDS = 4 if IS_THOROUGH else 2


def drive(world: MixedWorld, num_open: int) -> None:
    """Submit requests as fast as their predecessors end, then let everything end and every timer fire."""
    rng = random.Random(world.random.random())
    num_submitted = 0
    while num_submitted < NUM_REQUESTS or world.open_requests:
        if num_submitted < NUM_REQUESTS and len(world.open_requests) < num_open:
            prompt = [5] * rng.choice((0, 8)) + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 24))]
            max_tokens = rng.randint(1, MAX_MODEL_LEN - len(prompt))
            penalty = rng.choice((0.0, 0.5))
            num_choices = rng.choice((1, 1, 1, 3))
            world.submit(prompt, max_tokens, num_choices, temperature=rng.choice((0, 1)), presence_penalty=penalty)
            num_submitted += 1
        elif rng.random() < 0.0005 and world.open_requests:
            world.abort(rng.choice(world.open_requests))
        else:
            assert world.step(), f"nothing can happen, yet {world.open_requests} are open"
    while world.step():
        pass
    world.check_idle()
    for client in world.clients.values():
        assert client.end == "aborted" or isinstance(client.end, Finished)
        assert client.end == "aborted" or tuple(client.received) == client.expected


@pytest.mark.covers("S10", "Q02", "P08")
@pytest.mark.parametrize(
    "names",
    [
        ("mixed-0",),
        ("mixed-0", "mixed-1"),
        ("mixed-0", "prefill-0", "decode-0"),
        ("mixed-0", "prefill-0"),
        ("mixed-0", "decode-0"),
        ("local-0",),
        ("local-0", "local-1"),
        ("prefill-0", "local-0", "local-1"),
        ("mixed-0", "local-0", "decode-0"),
    ],
    ids=" ".join,
)
def test_whoever_works_together_every_client_gets_its_tokens_and_nothing_is_left(
    names: tuple[str, ...], fresh_seed: int
) -> None:
    world = MixedWorld(fresh_seed, *names)
    drive(world, 12)
    assert world.happened["local"], world.happened
    absent = {"local_absent"} if names[0] != "local-0" else {"handoff", "mixed"}  # there is, or is not, who prefills
    assert not absent & {kind for kind in KINDS if world.happened[kind]}, world.happened


@pytest.mark.covers("D11", "R22", "S10", "Q02")
def test_decode_nodes_compute_prompts_short_ones_beside_handoffs_and_all_without_a_prefill_node() -> None:
    """Over fixed seeds: what gives way goes on elsewhere, whichever way its prompt was computed."""
    happened: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        world = MixedWorld(seed, *(("prefill-0", "local-0", "local-1") if seed % 2 else ("local-0", "local-1")))
        drive(world, 20)
        happened += world.happened
    assert all(happened[kind] for kind in ("handoff", "local_short", "local_absent", "ended:PREEMPTED")), happened
    num_branches = happened["local_prefills"]
    assert num_branches >= happened["local_short"] + happened["local_absent"] > happened["handoff"]


@pytest.mark.covers("S10", "S01", "Q02")
def test_a_mixed_node_is_every_half_of_a_pair_and_resumes_what_it_adopted() -> None:
    """Over fixed seeds everything that the test above is about does happen."""
    happened: Counter[str] = Counter()
    preemptions: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        world = MixedWorld(seed, "mixed-0", "prefill-0", "decode-0")
        drive(world, 20)
        happened += world.happened
        for name, node in world.nodes.items():
            preemptions[name] += node.scheduler.num_preempted
    pairs = ("local", "prefill to mixed", "prefill to decode", "mixed to decode")
    assert all(happened[pair] for pair in pairs), happened
    assert preemptions["mixed-0"] and preemptions["decode-0"] and not preemptions["prefill-0"], preemptions
    assert happened["ended:PREEMPTED"] == preemptions["decode-0"], "on a mixed node nobody's attempt ends of it"
