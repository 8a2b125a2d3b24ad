"""What was computed once is found again, on both nodes: by the same prompt, by a chat's next turn.

The answers are those of one engine alone, which looks in no cache; that they came the short way is read from the nodes' own
counts of computed positions and of bytes that crossed the wire.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest

from engine.byte_tokenizer import BEGIN_OF_TEXT, MESSAGE_END, MESSAGE_START, NUM_BYTES, SPECIAL_TOKENS
from engine.local_engine import LocalEngine
from engine.plan import SamplingParams
from engine.sequence import SequenceSpec
from tests.e2e.cluster import Cluster, started_cluster
from tests.e2e.engine_alone import block_bytes, engine_alone
from tests.e2e.test_serving import wait_until_nothing_is_held

BLOCK: Final = 16
TEMPERATURES: Final = (0.0, 0.75)
MODEL: Final = "llama-tiny"
UNREADABLE: Final = [*range(128, NUM_BYTES + len(SPECIAL_TOKENS))]  # bytes that are no character by themselves


@pytest.fixture(scope="module", params=["shm", "zmq"])
def cluster(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Cluster]:
    """One of each role, so that there is one cache of each role."""
    flags = ("--block-size", str(BLOCK), "--max-num-batched-tokens", "64", "--max-model-len", "1024")
    folder = tmp_path_factory.mktemp("prefix")
    with started_cluster(tiny_model, folder, *flags, "--transport", request.param) as running:
        yield running


@dataclass(frozen=True)
class Work:
    """What the nodes have done so far, or between two looks."""

    computed: int  # positions of prompts, on the prefill node
    sent: int  # bytes of KV
    received: int


def work_of(cluster: Cluster) -> Work:
    """Once nothing runs any more: what is done is counted when its step was read."""
    wait_until_nothing_is_held(cluster)
    (prefill,), (decode,) = ([cluster.state(node) for node in cluster.nodes_of(role)] for role in ("prefill", "decode"))
    assert decode["counters"]["tokens_computed"]["prefill"] == 0, "decode nodes compute no prompts"
    computed = prefill["counters"]["tokens_computed"]["prefill"]
    return Work(computed, sum(prefill["kv_bytes_sent"].values()), sum(decode["kv_bytes_received"].values()))


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> LocalEngine:
    """One engine alone."""
    return engine_alone(tiny_model, block_size=BLOCK)


def alone(oracle: LocalEngine, prompt: list[int], max_tokens: int, sampling: SamplingParams) -> list[int]:
    """The engine's tokens; without block keys it looks for nothing in its cache."""
    spec = SequenceSpec("alone", tuple(prompt), 0, sampling, max_tokens, frozenset(), block_keys=())
    return oracle.generate([spec])["alone"]


def num_blocks(num_tokens: int) -> int:
    """Blocks that hold the KV of so many tokens, the last one perhaps in part."""
    return -(-num_tokens // BLOCK)


@pytest.mark.covers("D09", "H03", "P02")
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_prompt_seen_before_is_neither_computed_nor_sent_again_and_says_the_same(
    tiny_model: Path, cluster: Cluster, oracle: LocalEngine, temperature: float, fresh_seed: int
) -> None:
    rng = random.Random(fresh_seed)
    size = block_bytes(tiny_model, block_size=BLOCK)
    with cluster.client() as client:
        for length in (BLOCK - 1, BLOCK, 6 * BLOCK, 6 * BLOCK + 1, 200):
            prompt = [rng.randrange(NUM_BYTES) for _ in range(length)]
            sampling = SamplingParams(temperature, seed=rng.getrandbits(53))
            fields: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
            fields |= {"temperature": temperature, "seed": sampling.seed, "return_token_ids": True}
            works, said = [work_of(cluster)], []
            for _ in range(3):
                said.append(client.post("/v1/completions", json=fields).json()["choices"][0]["completion_token_ids"])
                works.append(work_of(cluster))
            assert said == [alone(oracle, prompt, 8, sampling)] * 3
            # Prefill: all but what follows the last full block, one token at least. Decode: what is no full block.
            found, held = (length - 1) // BLOCK, length // BLOCK
            again = Work(length - found * BLOCK, *[(num_blocks(length) - held) * size] * 2)
            first = Work(length, *[num_blocks(length) * size] * 2)
            assert [between(*each) for each in pairwise(works)] == [first, again, again]


def between(before: Work, after: Work) -> Work:
    """What was done meanwhile."""
    return Work(after.computed - before.computed, after.sent - before.sent, after.received - before.received)


@pytest.mark.covers("D09", "H03", "P02")
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_each_turn_of_a_chat_finds_the_last_ones_prompt_to_compute_on_and_its_answer_too_where_it_was_generated(
    tiny_model: Path, cluster: Cluster, oracle: LocalEngine, temperature: float, fresh_seed: int
) -> None:
    """The prefill node has the last prompt's full blocks; the decode node those of prompt and answer."""
    rng = random.Random(fresh_seed)
    size = block_bytes(tiny_model, block_size=BLOCK)
    readable = {str(token_id): -100 for token_id in UNREADABLE}
    messages: list[dict[str, str]] = []
    num_found = num_held = 0
    for _ in range(4):
        # Begins as no other conversation does.
        text = f"{rng.getrandbits(64):016x}" + "".join(rng.choices("abc €é😀", k=rng.randint(20, 60)))
        messages.append({"role": "user", "content": text})
        prompt, max_tokens = chat_prompt(messages), rng.randint(10, 60)
        sampling = SamplingParams(
            temperature, rng.getrandbits(53), logit_bias=tuple((token_id, -100.0) for token_id in UNREADABLE)
        )
        fields: dict[str, Any] = {
            "model": MODEL,
            "messages": messages,
            "max_tokens": max_tokens,
            "logit_bias": readable,
        }
        before = work_of(cluster)
        with cluster.client() as client:
            answer = client.post(
                "/v1/chat/completions", json=fields | {"temperature": temperature, "seed": sampling.seed}
            ).json()
        done = between(before, work_of(cluster))
        said = alone(oracle, prompt, max_tokens, sampling)
        assert answer["choices"][0]["message"]["content"] == bytes(said).decode()
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        not_held = (num_blocks(len(prompt)) - num_held) * size
        assert done == Work(len(prompt) - num_found * BLOCK, not_held, not_held), f"turn {len(messages) // 2 + 1}"
        assert num_held >= num_found > 0 or len(messages) == 1
        num_found = len(prompt) // BLOCK
        num_held = (len(prompt) + max_tokens - 1) // BLOCK  # the last token's KV was never computed
        messages.append({"role": "assistant", "content": bytes(said).decode()})


def chat_prompt(messages: list[dict[str, str]]) -> list[int]:
    """As the model's template writes it."""
    token_ids = [BEGIN_OF_TEXT]
    for message in messages:
        token_ids += [MESSAGE_START, *f"{message['role']}\n{message['content']}".encode(), MESSAGE_END, *b"\n"]
    return [*token_ids, MESSAGE_START, *b"assistant\n"]
