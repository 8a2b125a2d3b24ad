"""The same 512 tokens, whoever computes them: one engine alone in this process, one node of each role, two of each.

Prompts and seeds are drawn afresh in each run and printed. A mismatch is a bug to find, never a tolerance.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from connector.nixl_agent import is_installed
from engine.plan import SamplingParams
from engine.sequence import SequenceSpec
from tests.e2e.cluster import Cluster, started_cluster
from tests.e2e.engine_alone import block_bytes, engine_alone

BLOCK_SIZE = 16
CHUNK_TOKENS = 64
MAX_TOKENS = 512
NUM_BLOCKS = 1200
MAX_MODEL_LEN = 1024
# Across block borders, chunk borders and both.
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 79, 96, 127, 128, 129, 150, 200)


@dataclass(frozen=True)
class Case:
    """One request."""

    prompt: tuple[int, ...]
    temperature: float
    seed: int


def draw_cases(seed: int) -> list[Case]:
    """20 prompts; every second one is sampled."""
    rng = random.Random(seed)
    return [
        Case(
            prompt=tuple(rng.randrange(256) for _ in range(length)),
            temperature=index % 2 * 1.0,
            seed=rng.getrandbits(63),
        )
        for index, length in enumerate(LENGTHS)
    ]


def alone(model_dir: Path, dtype: str, cases: list[Case]) -> list[list[int]]:
    """The oracle's tokens."""
    specs = [
        SequenceSpec(
            sequence_id=index,
            token_ids=case.prompt,
            num_generated=0,
            sampling=SamplingParams(case.temperature, case.seed),
            max_new_tokens=MAX_TOKENS,
            stop_token_ids=frozenset(),
            block_keys=(),
        )
        for index, case in enumerate(cases)
    ]
    engine = engine_alone(
        model_dir,
        dtype,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        chunk_tokens=CHUNK_TOKENS,
        max_model_len=MAX_MODEL_LEN,
    )
    tokens = engine.generate(specs)
    return [tokens[index] for index in range(len(cases))]


def through(cluster: Cluster, cases: list[Case]) -> list[list[int]]:
    """The same requests over HTTP, all at once."""
    with cluster.client() as client, ThreadPoolExecutor(len(cases)) as threads:

        def ask(case: Case) -> list[int]:
            body = {
                "model": client.get("/v1/models").json()["data"][0]["id"],
                "prompt": list(case.prompt),
                "max_tokens": MAX_TOKENS,
                "temperature": case.temperature,
                "seed": case.seed,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            answer = client.post("/v1/completions", json=body, timeout=280)
            assert answer.status_code == 200, answer.text
            token_ids: list[int] = answer.json()["choices"][0]["completion_token_ids"]
            return token_ids

        return list(threads.map(ask, cases))


def expected_kv_bytes(model_dir: Path, dtype: str, cases: list[Case]) -> int:
    """Every block of every prompt, once."""
    num_blocks = sum(-(-len(case.prompt) // BLOCK_SIZE) for case in cases)
    return num_blocks * block_bytes(model_dir, dtype, BLOCK_SIZE)


def total(states: list[dict[str, Any]], name: str) -> int:
    """A per-peer counter, over nodes and peers."""
    return sum(sum(state[name].values()) for state in states)


@pytest.mark.covers("D07", "H02", "H12", "M06", "P01")
@pytest.mark.parametrize(
    ("like", "dtype", "num_nodes", "transport"),
    [
        ("llama-tiny", "fp32", 1, "shm"),
        ("llama-tiny", "fp32", 1, "zmq"),
        ("llama-tiny", "bf16", 1, "shm"),
        ("llama-tiny", "bf16", 1, "zmq"),
        ("llama-tiny", "fp32", 2, "auto"),
        ("llama-tiny", "bf16", 1, "nixl"),
        ("qwen2-tiny", "bf16", 1, "zmq"),
        ("qwen3-tiny", "fp32", 1, "shm"),
        ("mistral-tiny", "bf16", 1, "shm"),
    ],
)
def test_a_cluster_gives_the_tokens_of_one_engine_alone(
    made_model: Callable[[str], Path],
    tmp_path: Path,
    like: str,
    dtype: str,
    num_nodes: int,
    transport: str,
    fresh_seed: int,
) -> None:
    if transport == "nixl" and not is_installed():
        pytest.skip("NIXL is not installed: pip install -c constraints.txt -e '.[nixl]'")
    tiny_model = made_model(like)
    cases = draw_cases(fresh_seed)[:: 1 if like == "llama-tiny" else 3]  # the other families differ in the model only
    expected = alone(tiny_model, dtype, cases)
    assert all(len(tokens) == MAX_TOKENS for tokens in expected)
    sizes = {
        "--prefill": num_nodes,
        "--decode": num_nodes,
        "--dtype": dtype,
        "--block-size": BLOCK_SIZE,
        "--num-blocks": NUM_BLOCKS,
        "--max-model-len": MAX_MODEL_LEN,
        "--max-num-batched-tokens": CHUNK_TOKENS,
        "--transport": transport,
    }
    flags = [str(word) for pair in sizes.items() for word in pair]
    with started_cluster(tiny_model, tmp_path, *flags) as cluster:
        apart = through(cluster, cases)
        prefill = [cluster.state(node) for node in cluster.nodes_of("prefill")]
        decode = [cluster.state(node) for node in cluster.nodes_of("decode")]
    for case, ours, theirs in zip(cases, apart, expected, strict=True):
        assert ours == theirs, f"prompt of {len(case.prompt)}, temperature {case.temperature}"
    assert all(state["bit_exact"] for state in prefill + decode)
    assert total(prefill, "kv_bytes_sent") == total(decode, "kv_bytes_received")
    assert total(decode, "kv_bytes_received") == expected_kv_bytes(tiny_model, dtype, cases)
    assert all(sum(state["kv_bytes_received"].values()) > 0 for state in decode), "a decode node got nothing"
    used = "shm" if transport == "auto" else transport  # all of it is one host
    for state in prefill:
        assert set(state["transport"]["links"].values()) == {used}
        assert state["transport"]["bytes_sent_over"][used] == sum(state["kv_bytes_sent"].values())
