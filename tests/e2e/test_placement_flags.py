"""The router's placement settings decide where requests really run, for each role by itself."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from router.placement import Draw
from tests.e2e.cluster import Cluster, started_cluster
from tests.e2e.test_serving import wait_until_nothing_is_held

NUM_REQUESTS = 16


def drawn_shares(seed: int) -> list[int]:
    """How many of the requests the policy `random` gives to each of two nodes, the fewest first: who is the first is open."""
    draw = Draw(seed)
    first = sum(draw.below(2) == 0 for _ in range(NUM_REQUESTS))
    return sorted([first, NUM_REQUESTS - first])


def shares(cluster: Cluster, role: str) -> list[int]:
    """How many attempts each node of a role has had, the fewest first."""
    states = [cluster.state(node) for node in cluster.nodes_of(role)]
    return sorted(sum(state["counters"]["attempts_ended"].values()) for state in states)


@pytest.mark.covers("R01")
def test_each_role_has_the_policy_that_it_was_given_and_draws_from_the_seed_given(
    tiny_model: Path, tmp_path: Path, fresh_seed: int
) -> None:
    rng = random.Random(fresh_seed)
    seed = next(each for each in iter(lambda: rng.getrandbits(63), None) if drawn_shares(each)[0] <= NUM_REQUESTS // 4)
    settings = tmp_path / "baton.toml"
    settings.write_text(
        f'[router]\nplacement_prefill = "round_robin"\nplacement_decode = "random"\nplacement_seed = {seed}\n'
    )
    flags = ("--prefill", "2", "--decode", "2", "--config", str(settings))
    with started_cluster(tiny_model, tmp_path, *flags) as cluster, cluster.client() as client:
        for _ in range(NUM_REQUESTS):
            fields = {"model": "llama-tiny", "prompt": "Once", "max_tokens": 2, "ignore_eos": True}
            assert client.post("/v1/completions", json=fields).status_code == 200
        wait_until_nothing_is_held(cluster)  # the last one's attempts have ended
        assert shares(cluster, "prefill") == [NUM_REQUESTS // 2] * 2
        assert shares(cluster, "decode") == drawn_shares(seed)
