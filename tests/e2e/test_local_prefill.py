"""Decode nodes that compute prompts themselves, as real processes: while the prefill node is dead, and short prompts always."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from router.nodes import NO_PREFILL_NODE
from tests.e2e.fault_clients import Stream, ask, body, tokens_of
from tests.e2e.role_by_role import RoleByRole, started_role_by_role, wait_until

DECODES = ("decode-0", "decode-1")
KINDS = ("handoff", "local_short", "local_absent")
NUM_PROMPTS = 4
NUM_TOKENS = 400  # of the long stream: more than it says before a node is killed


def degraded(cluster: RoleByRole) -> list[str]:
    """What /ready says that requests are served without; nothing either while a broken session may still be resumed."""
    answer = cluster.get("/ready")
    sentences: list[str] = answer.json()["degraded"]
    assert answer.status_code == 200 or not sentences, answer.text
    return sentences


def kinds(cluster: RoleByRole) -> tuple[int, ...]:
    """Dispatches by KINDS."""
    return tuple(int(cluster.metric("dispatches_total", f'kind="{kind}"')) for kind in KINDS)


def counted(cluster: RoleByRole) -> tuple[int, int, int]:
    """Of all decode nodes: prompts that they began themselves, positions computed in prefills, bytes of KV that came."""
    states = [cluster.state(node) for node in DECODES]
    counters = [state["counters"] for state in states]
    return (
        sum(each["local_prefills"] for each in counters),
        sum(each["tokens_computed"]["prefill"] for each in counters),
        sum(sum(state["kv_bytes_received"].values()) for state in states),
    )


@pytest.mark.covers("R22", "D11", "C03")
def test_without_its_prefill_node_a_cluster_says_the_same_tokens_and_hands_over_again_when_it_is_back(
    tiny_model: Path, tmp_path: Path, fresh_seed: int
) -> None:
    rng = random.Random(fresh_seed)
    flags: dict[str, Sequence[str]] = {"router": (), "prefill-0": (), "decode-0": (), "decode-1": ()}
    before, alone = ([body(rng, rng.randint(100, 300), 40) for _ in range(NUM_PROMPTS)] for _ in range(2))
    with started_role_by_role(tiny_model, tmp_path, flags) as cluster, ThreadPoolExecutor(NUM_PROMPTS) as threads:

        def tokens_of_all(fields: Sequence[dict[str, Any]]) -> list[list[int]]:
            return list(threads.map(lambda each: tokens_of(ask(cluster, each)), fields))

        handed_over = tokens_of_all(before)
        assert kinds(cluster) == (NUM_PROMPTS, 0, 0) and counted(cluster)[:2] == (0, 0)
        with cluster.slow_steps(0.04):
            stream = Stream(cluster, threads, long := body(rng, 100, NUM_TOKENS))
            stream.take_tokens(5)
            cluster.kill("prefill-0")
        assert stream.is_running, "it was over before the prefill node was"
        wait_until("it is missed", lambda: degraded(cluster) == [NO_PREFILL_NODE])
        assert cluster.metric("degraded") == 1 and cluster.missing() == []
        bytes_before = counted(cluster)[2]
        computed_alone = tokens_of_all(alone)
        assert tokens_of_all(before) == handed_over
        assert kinds(cluster) == (NUM_PROMPTS + 1, 0, 2 * NUM_PROMPTS)
        num_local, num_computed, num_bytes = counted(cluster)
        assert num_local == 2 * NUM_PROMPTS and num_bytes == bytes_before, "nothing was handed over"
        assert num_computed >= sum(len(each["prompt"]) for each in alone), "these were in no cache"
        assert all(cluster.state(node)["counters"]["local_prefills"] for node in DECODES)
        stream.take_all()
        assert len(stream.token_ids) == NUM_TOKENS and stream.last == "[DONE]", "what decoded went on"
        cluster.start("prefill-0")
        cluster.wait_until_ready()
        assert degraded(cluster) == [] and cluster.metric("degraded") == 0
        assert tokens_of_all(alone) == computed_alone
        assert tokens_of(ask(cluster, long)) == stream.token_ids
        assert kinds(cluster) == (2 * NUM_PROMPTS + 2, 0, 2 * NUM_PROMPTS)
        assert counted(cluster)[0] == num_local
        cluster.wait_until_nothing_is_held("prefill-0", *DECODES)


@pytest.mark.covers("R22", "D11")
def test_short_prompts_go_to_the_decode_node_at_once_and_say_what_a_handoff_would(
    tiny_model: Path, tmp_path: Path, fresh_seed: int
) -> None:
    rng = random.Random(fresh_seed)
    flags: dict[str, Sequence[str]] = {
        "router": ("--local-prefill-max-tokens", "32"),
        "prefill-0": (),
        "decode-0": (),
        "decode-1": ("--local-prefill", "off"),
    }
    with started_role_by_role(tiny_model, tmp_path, flags) as cluster:
        asked = [body(rng, num_tokens, 30) for num_tokens in (1, 32, 33)]
        short = [tokens_of(ask(cluster, each)) for each in asked]
        assert kinds(cluster) == (1, 2, 0)
        assert [cluster.state(node)["counters"]["local_prefills"] for node in DECODES] == [2, 0]
        assert degraded(cluster) == []
        cluster.kill("decode-0")
        wait_until("it is missed", lambda: cluster.metric("node_up") == 2)
        assert [tokens_of(ask(cluster, each)) for each in asked] == short, "the other one may not: all by handoff"
        assert kinds(cluster) == (4, 2, 0)
