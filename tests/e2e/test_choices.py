"""Several choices of one prompt: the tokens of requests of their own, for the price of one prefill and one handoff."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from engine.kv_memory import KvMemory
from engine.model_config import read_model_config
from tests.e2e.cluster import Cluster, started_cluster
from tests.e2e.test_serving import wait_until_nothing_is_held
from tests.thorough import only_thorough

BLOCK_SIZE = 16
NUM_CHOICES = 5


def complete(cluster: Cluster, **fields: Any) -> list[dict[str, Any]]:
    """The choices of a completion."""
    body = {"model": "llama-tiny", "max_tokens": 40, "temperature": 1.0, "ignore_eos": True, "return_token_ids": True}
    with cluster.client() as client:
        response = client.post("/v1/completions", json=body | fields)
    assert response.status_code == 200, response.text
    choices: list[dict[str, Any]] = response.json()["choices"]
    return choices


def kv_bytes_received(cluster: Cluster) -> int:
    """By all nodes together."""
    return sum(sum(cluster.state(node)["kv_bytes_received"].values()) for node in cluster.nodes)


@pytest.mark.covers("A02", "D07", "H02")
@pytest.mark.parametrize("transport", [pytest.param("shm", marks=only_thorough), "zmq"])
def test_choices_cross_as_one_and_equal_requests_of_their_own(
    tiny_model: Path, tmp_path: Path, transport: str, fresh_seed: int
) -> None:
    rng = random.Random(fresh_seed)
    flags = ("--max-num-seqs", "8", "--num-blocks", "512", "--max-model-len", "1024", "--transport", transport)
    block_bytes = KvMemory(read_model_config(tiny_model), BLOCK_SIZE, 1, "fp32").bytes.shape[1]
    with started_cluster(tiny_model, tmp_path, *flags) as cluster:
        for num_tokens in (5, 64, 131):
            prompt = [rng.randrange(256) for _ in range(num_tokens)]
            before = kv_bytes_received(cluster)
            choices = complete(cluster, prompt=prompt, n=NUM_CHOICES, seed=rng.getrandbits(60))
            num_full, tail = divmod(num_tokens, BLOCK_SIZE)
            num_blocks = num_full + (NUM_CHOICES if tail else 0)
            assert kv_bytes_received(cluster) - before == num_blocks * block_bytes
            assert len({tuple(choice["completion_token_ids"]) for choice in choices}) == NUM_CHOICES
            for choice in choices:
                (alone,) = complete(cluster, prompt=prompt, seed=choice["seed"])
                assert alone["completion_token_ids"] == choice["completion_token_ids"], choice["index"]
        many = complete(cluster, prompt=prompt, n=16, seed=3)  # more than a decode node has slots
        assert [choice["index"] for choice in many] == list(range(16))
        assert len({tuple(choice["completion_token_ids"]) for choice in many}) == 16
        wait_until_nothing_is_held(cluster)
