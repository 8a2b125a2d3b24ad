"""Placement by what the KV pool has, with real processes: nodes say what they stored there and how fast they read it, the router
reckons with it, and the node does what was expected.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

import pytest

from engine.byte_tokenizer import NUM_BYTES
from tests.e2e.role_by_role import RoleByRole, started_role_by_role, wait_until

BLOCK: Final = 16
PROMPT_BLOCKS: Final = 40
PREFILLS: Final = ("prefill-0", "prefill-1")
MAX_ROUNDS: Final = 20


def complete(cluster: RoleByRole, prompt: list[int]) -> None:
    fields = {"model": "llama-tiny", "prompt": prompt, "max_tokens": 2, "ignore_eos": True}
    answer = cluster.http.post(f"{cluster.url}/v1/completions", json=fields)
    assert answer.status_code == 200, answer.text


def wait_until_written(cluster: RoleByRole) -> None:
    cluster.wait_until_nothing_is_held(*cluster.nodes)
    wait_until("all is written", lambda: not any(cluster.state(n)["kv_pool"]["staging_blocks_used"] for n in PREFILLS))


def total(cluster: RoleByRole, name: str, label: str) -> int:
    return sum(cluster.state(node)["counters"][name][label] for node in PREFILLS)


@pytest.mark.covers("R02", "W02")
def test_a_prompt_that_only_the_pool_has_goes_where_it_is_fetched_and_the_router_had_reckoned_with_that(
    tiny_model: Path, tmp_path: Path, fresh_seed: int
) -> None:
    rng = random.Random(fresh_seed)
    sizes = ("--block-size", str(BLOCK), "--max-model-len", "1024", "--num-blocks", "64")  # of one prompt, and a half
    pool = ("--kv-pool", f"file://{tmp_path}/pool", "--save-finished-kv", "on")
    small_steps = ("--max-num-batched-tokens", "32")
    flags: dict[str, tuple[str, ...]] = {
        "router": (),
        "decode-0": sizes,
        **dict.fromkeys(PREFILLS, (*sizes, *small_steps, *pool)),
    }
    prompts = [[rng.randrange(NUM_BYTES) for _ in range(PROMPT_BLOCKS * BLOCK + 3)] for _ in range(6)]
    with started_role_by_role(tiny_model, tmp_path, flags) as cluster:
        with cluster.slow_steps(0.005):  # so that computing takes many times as long as reading
            for number in range(MAX_ROUNDS):
                for prompt in prompts:
                    complete(cluster, prompt)
                    wait_until_written(cluster)
                if number == 0:
                    assert total(cluster, "kv_pool_saves", "written") == len(prompts) * PROMPT_BLOCKS
                    assert cluster.metric("cache_index_pools") == 1, "both nodes use the same one"
                    # What is known of it cannot be told from what caches hold, but for what no cache has room for.
                    wait_until(
                        "the router knows of the pool",
                        lambda: cluster.metric("cache_index_keys") >= (len(prompts) - 1) * PROMPT_BLOCKS,
                    )
                if cluster.metric("pooled_tokens_total") >= PROMPT_BLOCKS * BLOCK // 2:
                    break
            else:
                raise AssertionError("never placed by what the pool has")
        assert total(cluster, "kv_pool_reads", "read") >= PROMPT_BLOCKS
