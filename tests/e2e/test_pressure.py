"""Many requests through a decode node with room for a part of them: some give way, and every token is that of one engine alone."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.plan import SamplingParams
from engine.sequence import SequenceSpec
from tests.e2e.cluster import Cluster, started_cluster
from tests.e2e.engine_alone import engine_alone
from tests.e2e.slow_steps import SlowSteps
from tests.e2e.test_serving import wait_until_nothing_is_held
from tests.thorough import examples

NUM_REQUESTS = examples(200, 3)
NUM_SLOTS = 16
BLOCK_SIZE = 16
MAX_MODEL_LEN = 256
STEP_S = 0.005  # more: a decode node that is as fast as requests come to it is never full
# 16 sequences of 160 tokens at their ends are 160 blocks.
NUM_BLOCKS = 80


@dataclass(frozen=True)
class Case:
    """One request."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int


def draw_cases(seed: int) -> list[Case]:
    """Every second one is sampled."""
    rng = random.Random(seed)
    return [
        Case(
            prompt=tuple(rng.randrange(256) for _ in range(rng.randint(8, 96))),
            max_tokens=rng.randint(40, 150),
            temperature=index % 2 * 1.0,
            seed=rng.getrandbits(63),
        )
        for index in range(NUM_REQUESTS)
    ]


def alone(model_dir: Path, cases: list[Case]) -> list[list[int]]:
    """The run without pressure."""
    engine = engine_alone(model_dir, block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN)
    tokens = engine.generate(
        SequenceSpec(
            sequence_id=index,
            token_ids=case.prompt,
            num_generated=0,
            sampling=SamplingParams(case.temperature, case.seed),
            max_new_tokens=case.max_tokens,
            stop_token_ids=frozenset(),
            block_keys=(),
        )
        for index, case in enumerate(cases)
    )
    return [tokens[index] for index in range(len(cases))]


def through(cluster: Cluster, cases: list[Case]) -> list[list[int]]:
    """All at once over HTTP."""
    with cluster.client() as client, ThreadPoolExecutor(64) as threads:
        model = client.get("/v1/models").json()["data"][0]["id"]

        def ask(case: Case) -> list[int]:
            body = {
                "model": model,
                "prompt": list(case.prompt),
                "max_tokens": case.max_tokens,
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


@pytest.mark.covers("S09", "S15", "S16", "Q02", "D07", "R05", "R06")
@pytest.mark.parametrize("policy", ["ratio", "none"])
def test_half_the_pool_changes_no_token_starves_nobody_and_leaks_nothing(
    tiny_model: Path, tmp_path: Path, policy: str, fresh_seed: int
) -> None:
    cases = draw_cases(fresh_seed)
    expected = alone(tiny_model, cases)
    flags = {
        "--num-blocks": NUM_BLOCKS,
        "--max-num-seqs": NUM_SLOTS,
        "--max-model-len": MAX_MODEL_LEN,
        "--block-size": BLOCK_SIZE,
        "--max-num-batched-tokens": 64,
        "--reserve-policy": policy,
    }
    steps = SlowSteps(tmp_path)
    given = (str(each) for pair in flags.items() for each in pair)
    with started_cluster(tiny_model, tmp_path, *given, environment=steps.environment) as cluster:
        with steps.wanted(STEP_S):
            assert through(cluster, cases) == expected
        wait_until_nothing_is_held(cluster)
        (decode,) = cluster.nodes_of("decode")
        numbers = cluster.metrics(decode)
        num_steps, num_preempted = numbers["step_seconds_count"], numbers["preemptions_total"]
        assert num_preempted > 0 or policy == "ratio", "nothing was short"
        assert num_preempted == numbers["attempts_ended_total{PREEMPTED}"]
        assert num_preempted * 1000 < 200 * num_steps
        for node in cluster.nodes:
            state = cluster.state(node)
            assert {state["blocks"][kind] for kind in ("used", "leased", "quarantined")} == {0}
            assert sum(state["blocks"].values()) == state["num_blocks"]
