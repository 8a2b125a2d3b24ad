"""The same 512 tokens, whoever computes them: one engine alone in this process, nodes of both roles over each transport.

Prompts and seeds are drawn afresh in each run and printed. A mismatch is a bug to find, never a tolerance.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import pytest

from connector.nixl_agent import is_installed
from engine.plan import SamplingParams
from engine.sequence import SequenceSpec
from tests.e2e.engine_alone import block_bytes, engine_alone
from tests.e2e.role_by_role import started_role_by_role
from tests.thorough import IS_THOROUGH, only_thorough

BLOCK_SIZE = 16
CHUNK_TOKENS = 64
MAX_TOKENS = 512
NUM_BLOCKS = 1200
MAX_MODEL_LEN = 1024
# Across block borders, chunk borders and both.
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 79, 96, 127, 128, 129, 150, 200)
TRANSPORTS: Final = ("shm", "zmq", "nixl")
TWO_TO_TWO: Final = ("prefill-0", "prefill-1", "decode-shm", "decode-zmq")
needs_nixl: Final = pytest.mark.skipif(
    not is_installed(), reason="NIXL is not installed: pip install -c constraints.txt -e '.[nixl]'"
)


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


def through(url: str, cases: list[Case]) -> list[list[int]]:
    """The same requests over HTTP, all at once."""
    with (
        httpx.Client(base_url=url, timeout=280, trust_env=False) as client,
        ThreadPoolExecutor(len(cases)) as threads,
    ):

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
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            token_ids: list[int] = answer.json()["choices"][0]["completion_token_ids"]
            return token_ids

        return list(threads.map(ask, cases))


def expected_kv_bytes(model_dir: Path, dtype: str, cases: list[Case]) -> int:
    """Every block of every prompt, once."""
    num_blocks = sum(-(-len(case.prompt) // BLOCK_SIZE) for case in cases)
    return num_blocks * block_bytes(model_dir, dtype, BLOCK_SIZE)


def transport_of(node: str) -> str:
    """The one that a node is named after, if it is."""
    name = node.partition("-")[2]
    return name if name in TRANSPORTS else "auto"


@pytest.mark.covers("D07", "H02", "H12", "M06", "P01")
@pytest.mark.parametrize(
    ("like", "dtype", "nodes"),
    [
        ("llama-tiny", "fp32", TWO_TO_TWO),
        ("llama-tiny", "bf16", TWO_TO_TWO),
        pytest.param("llama-tiny", "bf16", ("prefill-nixl", "decode-nixl"), marks=needs_nixl),
        ("mistral-tiny", "bf16", ("prefill-0", "decode-shm")),
        pytest.param("qwen2-tiny", "bf16", ("prefill-0", "decode-zmq"), marks=only_thorough),
        pytest.param("qwen3-tiny", "fp32", ("prefill-0", "decode-shm"), marks=only_thorough),
    ],
    ids=["llama-fp32", "llama-bf16", "llama-bf16-nixl", "mistral-bf16", "qwen2-bf16", "qwen3-fp32"],
)
def test_a_cluster_gives_the_tokens_of_one_engine_alone(
    made_model: Callable[[str], Path], tmp_path: Path, like: str, dtype: str, nodes: tuple[str, ...], fresh_seed: int
) -> None:
    """What goes to a decode node goes over the transport that it is named after."""
    tiny_model = made_model(like)
    cases = draw_cases(fresh_seed)[:: 1 if nodes == TWO_TO_TWO and (dtype == "fp32" or IS_THOROUGH) else 3]
    expected = alone(tiny_model, dtype, cases)
    assert all(len(tokens) == MAX_TOKENS for tokens in expected)
    sizes = {
        "--dtype": dtype,
        "--block-size": BLOCK_SIZE,
        "--num-blocks": NUM_BLOCKS,
        "--max-model-len": MAX_MODEL_LEN,
        "--max-num-batched-tokens": CHUNK_TOKENS,
    }
    words = [str(word) for pair in sizes.items() for word in pair]
    flags: dict[str, list[str]] = {"router": []} | {name: [*words, "--transport", transport_of(name)] for name in nodes}
    with started_role_by_role(tiny_model, tmp_path, flags) as cluster:
        apart = through(cluster.url, cases)
        states = {name: cluster.state(name) for name in nodes}
    for case, ours, theirs in zip(cases, apart, expected, strict=True):
        assert ours == theirs, f"prompt of {len(case.prompt)}, temperature {case.temperature}"
    assert all(state["bit_exact"] for state in states.values())
    prefill = [state for name, state in states.items() if name.startswith("prefill")]
    received = {name: sum(state["kv_bytes_received"].values()) for name, state in states.items() if "decode" in name}
    assert sum(received.values()) == expected_kv_bytes(tiny_model, dtype, cases)
    assert all(received.values()), "a decode node got nothing"
    for state in prefill:
        assert state["transport"]["links"], "it was not used"
        for link, transport in state["transport"]["links"].items():
            assert transport == transport_of(link.partition("@")[0])
    for name, num_bytes in received.items():
        assert sum(state["transport"]["bytes_sent_over"][transport_of(name)] for state in prefill) == num_bytes
