"""Mixed nodes: alone, beside nodes of one role, and with half the blocks that they need, they say what one engine alone says."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import started_cluster
from tests.e2e.fault_clients import Stream, ask, body, tokens_of
from tests.e2e.role_by_role import started_role_by_role
from tests.e2e.test_choices import complete
from tests.e2e.test_equality import (
    BLOCK_SIZE,
    CHUNK_TOKENS,
    MAX_MODEL_LEN,
    MAX_TOKENS,
    NUM_BLOCKS,
    Case,
    alone,
    draw_cases,
    through,
)
from tests.e2e.test_kv_pool_reading import wait_until_written
from tests.e2e.test_serving import wait_until_nothing_is_held
from tests.thorough import IS_THOROUGH, only_thorough


def drawn_cases(seed: int) -> list[Case]:
    """Those with the longer prompts, where not all are tried."""
    cases = draw_cases(seed)
    return cases if IS_THOROUGH else cases[len(cases) // 2 :]


def half_of_the_need(cases: list[Case], num_nodes: int) -> int:
    """Blocks of each node's pool, if they share the cases and all of them run at once."""
    need = sum(-(-(len(case.prompt) + MAX_TOKENS - 1) // BLOCK_SIZE) for case in cases)
    return need // (2 * num_nodes)


def flags(folder: Path, num_blocks: int, **num_nodes: int) -> list[str]:
    """For `baton up`; who runs leaves nothing to others, so that a small pool is short at once."""
    config = folder / "baton.toml"
    config.write_text('[mixed]\nreserve_policy = "none"\n[decode]\nreserve_policy = "none"\n')
    sizes = {
        **{f"--{role}": number for role, number in num_nodes.items()},
        "--dtype": "fp32",
        "--block-size": BLOCK_SIZE,
        "--num-blocks": num_blocks,
        "--max-model-len": MAX_MODEL_LEN,
        "--max-num-batched-tokens": CHUNK_TOKENS,
        "--config": config,
    }
    return [str(word) for pair in sizes.items() for word in pair]


def total(states: list[dict[str, Any]], name: str) -> int:
    """A per-peer counter, over nodes and peers."""
    return sum(sum(state[name].values()) for state in states)


@pytest.mark.covers("D07", "S10", "Q02")
@pytest.mark.parametrize("pool", [pytest.param("ample", marks=only_thorough), "half"])
def test_a_mixed_node_gives_the_tokens_of_one_engine_alone_however_often_sequences_give_way(
    tiny_model: Path, tmp_path: Path, pool: str, fresh_seed: int
) -> None:
    cases = drawn_cases(fresh_seed)
    expected = alone(tiny_model, "fp32", cases)
    num_blocks = NUM_BLOCKS if pool == "ample" else half_of_the_need(cases, 1)
    with started_cluster(tiny_model, tmp_path, *flags(tmp_path, num_blocks, prefill=0, decode=0, mixed=1)) as cluster:
        (node,) = cluster.nodes
        assert node["role"] == "mixed" and "1 mixed, logs in" in "\n".join(cluster.lines)
        for case, ours, theirs in zip(cases, through(cluster.url, cases), expected, strict=True):
            assert ours == theirs, f"prompt of {len(case.prompt)}, temperature {case.temperature}"
        choices = complete(cluster, prompt=list(cases[-1].prompt), n=3, seed=7)
        for choice in choices:
            (again,) = complete(cluster, prompt=list(cases[-1].prompt), seed=choice["seed"])
            assert again["completion_token_ids"] == choice["completion_token_ids"], choice["index"]
        wait_until_nothing_is_held(cluster)
        state, numbers = cluster.state(node), cluster.metrics(node)
    assert state["bit_exact"] and (state["kv_bytes_sent"], state["kv_bytes_received"]) == ({}, {})
    assert (numbers["preemptions_total"] > 0) == (pool == "half"), numbers["preemptions_total"]
    assert numbers["attempts_ended_total{finished}"] == len(cases) + 6, "nobody outside notices a preemption"


@pytest.mark.covers("D07", "S10", "Q02")
def test_nodes_of_all_roles_together_give_the_tokens_of_one_engine_alone_with_half_the_blocks(
    tiny_model: Path, tmp_path: Path, fresh_seed: int
) -> None:
    cases = drawn_cases(fresh_seed)
    expected = alone(tiny_model, "fp32", cases)
    with started_cluster(tiny_model, tmp_path, *flags(tmp_path, half_of_the_need(cases, 2), mixed=1)) as cluster:
        for case, ours, theirs in zip(cases, through(cluster.url, cases), expected, strict=True):
            assert ours == theirs, f"prompt of {len(case.prompt)}, temperature {case.temperature}"
        wait_until_nothing_is_held(cluster)
        prefill, decode, mixed = (cluster.state(node) for node in cluster.nodes)
        numbers = [cluster.metrics(node) for node in cluster.nodes]
    assert numbers[1]["preemptions_total"] + numbers[2]["preemptions_total"] > 0
    assert numbers[2]["attempts_ended_total{finished}"] > 0 == numbers[2]["attempts_ended_total{PREEMPTED}"]
    assert mixed["counters"]["tokens_computed"]["prefill"] > 0
    assert total([prefill], "kv_bytes_sent") > 0
    everybody = [prefill, decode, mixed]  # the decode node sends, too, if what it preempted moves on
    assert total(everybody, "kv_bytes_sent") >= total(everybody, "kv_bytes_received") > 0


@pytest.mark.covers("C05", "R10", "R15", "A10")
def test_a_mixed_node_started_by_hand_ends_aborted_work_and_takes_no_stream_with_it_when_it_dies(
    tiny_model: Path, tmp_path: Path, fresh_seed: int
) -> None:
    rng = random.Random(fresh_seed)
    with (
        started_role_by_role(
            tiny_model,
            tmp_path,
            {
                "router": ("--placement-prefill", "least_loaded"),
                "mixed-0": (),
                "mixed-1": (),
            },  # not where it was before
        ) as cluster,
        ThreadPoolExecutor(4) as threads,
    ):
        with cluster.http.stream(
            "POST", f"{cluster.url}/v1/completions", json=body(rng, 40, 4000) | {"stream": True}
        ) as it:
            next(it.iter_lines())
        cluster.wait_until_nothing_is_held("mixed-0", "mixed-1")
        streams, bodies = [], [body(rng, 40, 300) for _ in range(4)]
        with cluster.slow_steps(0.08):
            for each in bodies:  # by turns, since each node decodes less than the other when it is asked
                streams.append(Stream(cluster, threads, each))
                streams[-1].take_tokens(1)
            assert [cluster.state(node)["running"] for node in ("mixed-0", "mixed-1")] == [2, 2]
            cluster.kill("mixed-0")
        for stream in streams:
            stream.take_all()
        assert [stream.last for stream in streams] == ["[DONE]"] * 4
        assert cluster.metric("retries_total", "NODE_LOST") == 2
        cluster.start("mixed-0")
        cluster.wait_until_ready()
        assert [tokens_of(ask(cluster, each)) for each in bodies] == [stream.token_ids for stream in streams]
        cluster.wait_until_nothing_is_held("mixed-0", "mixed-1")
        assert cluster.outcomes("mixed-0").count("finished") > 0


@pytest.mark.covers("W07", "W02")
def test_a_mixed_node_that_never_saw_a_prompt_reads_what_another_one_stored_of_it(
    tiny_model: Path, tmp_path: Path, fresh_seed: int
) -> None:
    """Its first prompt: what it computes and how fast it fetches is not known then, and it waits a quarter of a second.

    Where a busy machine takes longer to read, the next one does it.
    """
    fields = body(random.Random(fresh_seed), 60 * BLOCK_SIZE + 3, 8)
    pool = ("--kv-pool", f"file://{tmp_path / 'pool'}", "--save-finished-kv", "on", "--block-size", str(BLOCK_SIZE))
    tokens, counters = [], []
    for name in ("first", *map(str, range(2, 10))):
        (tmp_path / name).mkdir()
        with started_role_by_role(tiny_model, tmp_path / name, {"router": (), "mixed-0": pool}) as cluster:
            tokens.append(tokens_of(ask(cluster, fields)))
            wait_until_written(cluster, "mixed-0")
            counters.append(cluster.state("mixed-0")["counters"])
        if counters[-1]["kv_pool_reads"]["read"]:
            break
    assert all(each == tokens[0] for each in tokens)
    first, second = counters[0], counters[-1]
    assert first["tokens_computed"]["prefill"] == 60 * BLOCK_SIZE + 3 and first["kv_pool_reads"]["read"] == 0
    assert second["tokens_computed"]["prefill"] == 3 and second["kv_pool_reads"]["read"] == 60
