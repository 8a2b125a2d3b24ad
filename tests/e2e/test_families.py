"""Prompts of every family through one prefill and one decode node: the greedy tokens of transformers on the same directory."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from engine.make_model import main as make_model
from tests.e2e.cluster import Cluster, started_cluster
from tests.thorough import a_share, examples

NUM_PROMPTS = examples(50)
MAX_TOKENS = 64
LENGTHS = (1, 200)  # across blocks of 16, chunks of 64 and mistral-tiny's window of 100
FAMILIES = ("llama-tiny", "qwen2-tiny", "qwen3-tiny", "mistral-tiny")


def greedy_of_transformers(model_dir: Path, rng: random.Random) -> dict[tuple[int, ...], list[int]]:
    """The oracle: prompts and their completions, one at a time, in fp32, whatever ends a text.

    A prompt is left out where transformers itself is undecided: two right sums of the same numbers differ by about 1e-6 of
    the largest logit, and about one completion in a hundred has its first two closer together than ten times that.
    """
    from transformers import AutoModelForCausalLM

    # On a machine with other work two threads wait for each other at every product: minutes for what takes one thread seconds.
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    completions: dict[tuple[int, ...], list[int]] = {}
    for _ in range(2 * NUM_PROMPTS):
        prompt = [rng.randrange(256) for _ in range(rng.randint(*LENGTHS))]
        answer = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits = torch.cat(answer.logits)
        first, second = logits.topk(2).values.unbind(-1)
        if ((first - second) > 1e-5 * logits.abs().amax(-1)).all():
            completions[tuple(prompt)] = answer.sequences[0, len(prompt) :].tolist()
        if len(completions) == NUM_PROMPTS:
            return completions
    raise AssertionError("transformers is undecided on most prompts")


def through(cluster: Cluster, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """The same prompts over HTTP, all at once."""
    with cluster.client() as client, ThreadPoolExecutor(len(prompts)) as threads:
        model_id = client.get("/v1/models").json()["data"][0]["id"]

        def ask(prompt: tuple[int, ...]) -> list[int]:
            body = {
                "model": model_id,
                "prompt": list(prompt),
                "max_tokens": MAX_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            answer = client.post("/v1/completions", json=body, timeout=200)
            assert answer.status_code == 200, answer.text
            token_ids: list[int] = answer.json()["choices"][0]["completion_token_ids"]
            return token_ids

        return list(threads.map(ask, prompts))


@pytest.mark.covers("M02")
def test_fp16_is_served_by_torch_and_its_bits_hold_whatever_onednn_packs(tmp_path: Path) -> None:
    model_dir = tmp_path / "llama-tiny"
    assert make_model(["--dtype", "fp16", "--out", str(model_dir)]) == 0
    with started_cluster(
        model_dir, tmp_path, "--dtype", "fp16", "--kernels", "torch", "--max-model-len", "512"
    ) as cluster:
        (completion,) = through(cluster, [(1, 2, 3)])
        states = [cluster.state(node) for node in cluster.nodes]
        logs = [(cluster.run_dir / f"{node['node_id']}.log").read_text() for node in cluster.nodes]
    assert len(completion) == MAX_TOKENS and len(set(completion)) > 5
    assert [state["bit_exact"] for state in states] == [True, True]
    assert not any(" not_bit_exact " in log for log in logs)


@pytest.mark.covers("D07", "M01")
@pytest.mark.parametrize("family", a_share(FAMILIES, 2))
def test_a_cluster_gives_the_greedy_tokens_of_transformers(
    made_model: Callable[[str], Path], tmp_path: Path, family: str, fresh_seed: int
) -> None:
    model_dir = made_model(family)
    theirs = greedy_of_transformers(model_dir, random.Random(fresh_seed))
    flags = ["--dtype", "fp32", "--max-model-len", "512", "--max-num-batched-tokens", "64"]
    with started_cluster(model_dir, tmp_path, *flags) as cluster:
        ours = through(cluster, list(theirs))
        (decode,) = [cluster.state(node) for node in cluster.nodes_of("decode")]
    for (prompt, their_tokens), our_tokens in zip(theirs.items(), ours, strict=True):
        assert our_tokens == their_tokens, f"prompt of {len(prompt)}"
    assert len({token for tokens in ours for token in tokens}) > 50, "constant tokens would prove little"
    assert sum(decode["kv_bytes_received"].values()) > 0, "no KV crossed the wire"
