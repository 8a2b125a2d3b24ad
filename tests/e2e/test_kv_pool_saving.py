"""What reaches the KV pool, whose processes and stores are real: which blocks, under which keys, from whom, and from whom not."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from connector.file_store import FileStore
from connector.kv_record import KvRecords
from connector.kv_store import KvStoreLimits
from engine.fingerprint import Fingerprint
from proto.block_key import block_keys, seed_key
from tests.e2e.engine_alone import block_bytes
from tests.e2e.role_by_role import RoleByRole, started_role_by_role, wait_until
from tests.registry.redis_server import RedisServer, started_redis

BLOCK_SIZE = 16
SIZES = ("--block-size", str(BLOCK_SIZE), "--max-num-seqs", "16", "--max-num-batched-tokens", "64", "--dtype", "fp32")
UNWRITTEN = ("full", "failed", "refused")


def keys_of(cluster: RoleByRole, node: str, token_ids: list[int]) -> list[bytes]:
    """Of all full blocks of these tokens, as the node that says so in its /state must compute them."""
    fields = cluster.state(node)["fingerprint"]
    fingerprint = Fingerprint(**{name: fields[name] for name in Fingerprint.__slots__})
    return block_keys(seed_key(fingerprint.to_bytes()), token_ids, BLOCK_SIZE)


def saves(cluster: RoleByRole, node: str) -> dict[str, int]:
    """What became of the blocks that a node was to store."""
    counts: dict[str, int] = cluster.state(node)["counters"]["kv_pool_saves"]
    return counts


def ask(cluster: RoleByRole, prompt: list[int], max_tokens: int) -> tuple[str, list[int]]:
    """The request's id, and the completion's tokens."""
    body = {"model": "llama-tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    url = f"{cluster.url}/v1/completions"
    answer = cluster.http.post(url, json=body | {"return_token_ids": True}, timeout=120)
    assert answer.status_code == 200, answer.text
    usage: dict[str, int] = answer.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), max_tokens)
    token_ids: list[int] = answer.json()["choices"][0]["completion_token_ids"]
    return answer.json()["id"].removeprefix("cmpl-"), token_ids


def wait_until_written(cluster: RoleByRole, *nodes: str) -> None:
    """Nothing is kept for the pool, and nothing waits to be written."""
    cluster.wait_until_nothing_is_held(*nodes)
    wait_until("all is written", lambda: not any(cluster.state(n)["kv_pool"]["staging_blocks_used"] for n in nodes))


# ---------------------------------------------------------------- who is done, through Redis


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """The cluster's KV pool."""
    with started_redis(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(scope="module")
def all_roles(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, redis: RedisServer) -> Iterator[RoleByRole]:
    """A node of each role, all of which save who is done."""
    of_nodes = (*SIZES, "--kv-pool", redis.url, "--save-finished-kv", "on")
    router = ("--placement-prefill", "round_robin", "--placement-decode", "round_robin")
    flags = {"router": router} | dict.fromkeys(("prefill-0", "decode-0", "mixed-0"), of_nodes)
    with started_role_by_role(tiny_model, tmp_path_factory.mktemp("all"), flags) as cluster:
        yield cluster


def names_in(redis: RedisServer) -> set[bytes]:
    """What Redis stores blocks under, the store's prefix left out."""
    return {name.removeprefix(b"baton:{kv}:block:") for name in redis.client.keys("baton:{kv}:block:*")}


@pytest.mark.covers("W02", "W06", "W09", "W03")
def test_every_role_saves_the_same_blocks_under_the_same_keys_and_each_is_written_once(
    all_roles: RoleByRole, redis: RedisServer, fresh_seed: int
) -> None:
    rng = random.Random(fresh_seed)
    prompt = [rng.randrange(256) for _ in range(5 * BLOCK_SIZE + 3)]
    nodes = ("prefill-0", "decode-0", "mixed-0")
    completions = {tuple(ask(all_roles, list(prompt), 40)[1]) for _ in range(6)}
    assert len(completions) == 1
    wait_until_written(all_roles, *nodes)
    token_ids = [*prompt, *completions.pop()][:-1]  # the last token is never computed
    assert len(token_ids) % BLOCK_SIZE, "there is a tail that is not full"
    keys = {node: keys_of(all_roles, node, token_ids) for node in nodes}
    assert keys["prefill-0"] == keys["decode-0"] == keys["mixed-0"]
    assert names_in(redis) == set(keys["decode-0"])
    by_node = {node: saves(all_roles, node) for node in nodes}
    assert all(sum(by_node[node].values()) for node in nodes), by_node
    assert sum(each["written"] for each in by_node.values()) == len(keys["decode-0"])
    assert not any(each[outcome] for each in by_node.values() for outcome in UNWRITTEN)
    num_prompt = len(prompt) // BLOCK_SIZE
    assert sum(by_node["prefill-0"].values()) % num_prompt == 0, "a prefill node's is the prompt"


def staging(cluster: RoleByRole) -> list[str]:
    """Nodes with blocks that are not written yet."""
    return [name for name in ("decode-0", "mixed-0") if cluster.state(name)["kv_pool"]["staging_blocks_used"]]


@pytest.mark.covers("W01", "D08")
def test_what_is_staged_is_written_before_a_node_that_drains_has_gone(
    all_roles: RoleByRole, redis: RedisServer, fresh_seed: int
) -> None:
    """The store stands still when the sequence ends, and still does when the node has nothing else left to do."""
    rng = random.Random(fresh_seed)
    prompt = [rng.randrange(256) for _ in range(3 * BLOCK_SIZE)]
    keys = keys_of(all_roles, "mixed-0", prompt)
    body = {"model": "llama-tiny", "prompt": prompt, "max_tokens": 150, "ignore_eos": True, "stream": True}
    try:
        with ExitStack() as slow:
            slow.enter_context(all_roles.slow_steps())  # or it were written before the store stands still
            with all_roles.http.stream("POST", f"{all_roles.url}/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                next(lines)
                redis.freeze()
                frozen_at = time.monotonic()
                slow.close()
                assert [line for line in lines if line][-1] == "data: [DONE]"
        found: list[str] = []

        def is_staged() -> bool:
            found.extend(staging(all_roles))
            return bool(found)

        wait_until("its blocks are staged", is_staged)
        (node,) = found
        all_roles.terminate(node)
        wait_until("it has nothing else to do", lambda: "drain_over" in all_roles.log_text(node))
        time.sleep(0.6)
        has_ended = all_roles.exit_code(node) is not None
        is_in_time = time.monotonic() - frozen_at < 0.9 * KvStoreLimits().timeout_s
        assert not (has_ended and is_in_time)
    finally:
        redis.thaw()
    assert all_roles.wait_for_end(node) == 0
    assert "kv_pool_unwritten" not in all_roles.log_text(node)
    assert set(keys) <= names_in(redis) or not is_in_time, "else the store had failed by then"


# ---------------------------------------------------------------- who gives way, through directories

PRESSED = (*SIZES, "--num-blocks", "40", "--max-model-len", "256", "--reserve-policy", "none", "--preempt-move-ms", "0")


def stored_in(pool: Path, model: Path) -> set[bytes]:
    """The keys of a pool's blocks, each of them read and found right."""
    keys = [bytes.fromhex(path.stem) for path in pool.glob("??/*.kv")]
    records = KvRecords(block_bytes(model, block_size=BLOCK_SIZE))
    store = FileStore(pool, records, KvStoreLimits())
    into = [memoryview(bytearray(records.block_bytes)) for _ in keys]
    assert store.read(keys, into).num_blocks == len(keys)
    return set(keys)


@pytest.mark.covers("W01", "W03", "W04", "W09", "Q07")
def test_under_pressure_each_decode_node_saves_what_its_flags_say_and_no_token_changes(
    tiny_model: Path, tmp_path: Path, fresh_seed: int
) -> None:
    """One saves prompt and completion, one the prompt alone, one nothing; all are short of blocks."""
    pools = {name: tmp_path / name for name in ("decode-0", "decode-1", "decode-2")}
    more = {"decode-1": ("--cache-generated", "off"), "decode-2": ("--save-preempted-kv", "off")}
    flags: dict[str, Any] = {"router": (), "prefill-0": SIZES}
    flags |= {name: (*PRESSED, "--kv-pool", path.as_uri(), *more.get(name, ())) for name, path in pools.items()}
    rng = random.Random(fresh_seed)
    drawn = [[rng.randrange(256) for _ in range(rng.randint(20, 60))] for _ in range(36)]
    with started_role_by_role(tiny_model, tmp_path, flags) as cluster, ThreadPoolExecutor(36) as threads:
        with cluster.slow_steps(0.005):  # or the first have ended before the last have come
            answers = dict(threads.map(lambda prompt: ask(cluster, prompt, 120), drawn))
        prompts = dict(zip(answers, drawn, strict=True))
        cluster.wait_until_nothing_is_held("prefill-0")
        wait_until_written(cluster, *pools)
        runs = {name: keys_of(cluster, "decode-0", [*prompts[name], *answers[name]][:-1]) for name in prompts}
        num_prompt = {name: len(prompt) // BLOCK_SIZE for name, prompt in prompts.items()}
        for node, pool in pools.items():
            gave_way = {name for name in prompts if "PREEMPTED" in cluster.outcomes(node, name)}
            assert gave_way, "nothing was short"
            stored, counts = stored_in(pool, tiny_model), saves(cluster, node)
            assert counts["written"] == len(stored) and not any(counts[outcome] for outcome in UNWRITTEN)
            saved = {name: [key in stored for key in keys] for name, keys in runs.items()}
            assert sum(map(sum, saved.values())) == len(stored), "a block of nobody"
            for name, found in saved.items():
                num_found = sum(found)
                assert all(found[:num_found]), "a run from the first block on"
                if node == "decode-2" or name not in gave_way:
                    assert not num_found
                elif node == "decode-1":
                    assert num_found == num_prompt[name]
                else:
                    assert num_found >= num_prompt[name]
            has_completions = any(sum(found) > num_prompt[name] for name, found in saved.items())
            assert has_completions == (node == "decode-0")
