"""Placement by cache with real processes: a conversation's turns go where its prefix is, the nodes' own counts say so; a node that
is busy is left out; and what a process held is forgotten with it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from engine.byte_tokenizer import NUM_BYTES
from tests.e2e.role_by_role import RoleByRole, started_role_by_role, wait_until

BLOCK: Final = 16
TURN: Final = 5 * BLOCK  # tokens that a turn adds
PREFILLS: Final = ("prefill-0", "prefill-1")


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoleByRole]:
    sizes = ("--block-size", str(BLOCK), "--max-model-len", "1024", "--num-blocks", "512")
    flags = {
        "router": ("--placement-prefill", "cache_aware", "--cache-imbalance-tokens", "400"),
        "decode-0": sizes,
        **dict.fromkeys(PREFILLS, sizes),
    }
    with started_role_by_role(tiny_model, tmp_path_factory.mktemp("cache_aware"), flags) as running:
        yield running


def drawn(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(NUM_BYTES) for _ in range(num_tokens)]


def complete(cluster: RoleByRole, prompt: Sequence[int]) -> None:
    fields = {"model": "llama-tiny", "prompt": list(prompt), "max_tokens": 2, "ignore_eos": True}
    answer = cluster.http.post(f"{cluster.url}/v1/completions", json=fields)
    assert answer.status_code == 200, answer.text


def computed(cluster: RoleByRole) -> dict[str, int]:
    """Positions of prompts that each prefill node has computed, once nothing runs any more."""
    cluster.wait_until_nothing_is_held(*cluster.nodes)
    return {name: cluster.state(name)["counters"]["tokens_computed"]["prefill"] for name in PREFILLS}


def computed_by(cluster: RoleByRole, prompt: Sequence[int]) -> dict[str, int]:
    """Positions that each prefill node computes for this prompt; none: it is not in it."""
    wait_until_followed(cluster)
    before = computed(cluster)
    complete(cluster, prompt)
    return {name: number - before[name] for name, number in computed(cluster).items() if number != before[name]}


def wait_until_followed(cluster: RoleByRole) -> None:
    """Until the router knows as many blocks as the prefill nodes hold; only the last test lets two of them hold the same."""

    def is_followed() -> bool:
        held = sum(cluster.state(name)["blocks"]["cached"] for name in PREFILLS)
        known = (cluster.metric("cache_index_keys"), cluster.metric("cache_index_nodes_whole"))
        return known == (held, len(PREFILLS))

    wait_until("the router knows what is cached", is_followed)


@pytest.mark.covers("R02", "W02")
def test_the_turns_of_a_conversation_go_where_its_prefix_is_and_only_what_is_new_is_computed(
    cluster: RoleByRole, fresh_seed: int
) -> None:
    rng = random.Random(fresh_seed)
    talks = [drawn(rng, TURN) for _ in range(4)]
    homes = []
    for talk in talks:
        ((home, number),) = computed_by(cluster, talk).items()
        assert number == TURN
        homes.append(home)
    assert {*homes} == {*PREFILLS}, "what nobody has seen goes to both in turn"
    expected = cluster.metric("cached_tokens_total")
    for _ in range(2):
        for talk, home in rng.sample([*zip(talks, homes, strict=True)], len(talks)):
            expected += len(talk)
            talk += drawn(rng, TURN)
            assert computed_by(cluster, talk) == {home: TURN}
            assert cluster.metric("cached_tokens_total") == expected


@pytest.mark.covers("R02", "R13")
def test_what_a_process_held_is_forgotten_with_it(cluster: RoleByRole, fresh_seed: int) -> None:
    rng = random.Random(fresh_seed)
    talks = [drawn(rng, TURN) for _ in range(2)]
    homes = [next(iter(computed_by(cluster, talk))) for talk in talks]
    assert {*homes} == {*PREFILLS}
    lost = homes[0]
    cluster.kill(lost)
    cluster.restore()
    (other,) = {*PREFILLS} - {lost}
    wait_until(
        "its blocks are gone", lambda: cluster.metric("cache_index_keys") == cluster.state(other)["blocks"]["cached"]
    )
    for talk, home in zip(talks, homes, strict=True):
        talk += drawn(rng, TURN)
        ((node, number),) = computed_by(cluster, talk).items()
        assert number == (len(talk) if home == lost else TURN)
        assert node == other or home == lost


@pytest.mark.covers("R02")
def test_a_node_with_a_long_queue_is_left_out_whatever_it_holds(cluster: RoleByRole, fresh_seed: int) -> None:
    rng = random.Random(fresh_seed)
    talk = drawn(rng, 30 * BLOCK)
    ((home, _),) = computed_by(cluster, talk).items()
    (other,) = {*PREFILLS} - {home}
    wait_until_followed(cluster)
    before = computed(cluster)
    tails = [drawn(rng, 26 * BLOCK), drawn(rng, BLOCK)]
    with ThreadPoolExecutor(1) as clients:
        cluster.freeze(home)  # for less than what ends its session
        try:
            first = clients.submit(complete, cluster, [*talk, *tails[0]])  # 416 tokens to compute
            wait_until("it is placed", lambda: cluster.metric("node_prefilling", f'node="{home}"') == 1)
            complete(cluster, [*talk, *tails[1]])  # 16 tokens there, behind 416; 496 here
        finally:
            cluster.thaw(home)
        first.result()
    after = computed(cluster)
    assert after[other] - before[other] == len(talk) + len(tails[1])
    assert after[home] - before[home] == len(tails[0])
