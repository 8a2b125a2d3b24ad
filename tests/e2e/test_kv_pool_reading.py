"""What real prefill nodes read out of the KV pool: only tails are computed, and whatever is wrong with it costs a recompute."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.fault_clients import Stream, ask, body, tokens_of
from tests.e2e.role_by_role import RoleByRole, started_role_by_role, wait_until
from tests.registry.redis_server import RedisServer, started_redis
from tests.thorough import IS_THOROUGH

BLOCK_SIZE = 16
# In steps of half a block: computing it takes many times as long as looking for it and reading it, however busy the machine is.
PROMPT_BLOCKS = 80 if IS_THOROUGH else 32
SIZES = ("--block-size", str(BLOCK_SIZE), "--max-num-seqs", "8", "--max-num-batched-tokens", "8", "--dtype", "fp32")
PREFILL = ("prefill-0", "prefill-1")
NUM_HARMED = 8 if IS_THOROUGH else 4  # prompts that Redis has and does not give; two at least at each node


@contextmanager
def started(model: Path, folder: Path, url: str, *decode: str) -> Iterator[RoleByRole]:
    """Two prefill nodes, asked in turn, that store what they compute, and decode nodes."""
    flags: dict[str, tuple[str, ...]] = {"router": ("--placement-prefill", "round_robin")}
    flags |= dict.fromkeys(PREFILL, (*SIZES, "--kv-pool", url, "--save-finished-kv", "on"))
    flags |= dict.fromkeys(decode, SIZES)
    with started_role_by_role(model, folder, flags) as cluster:
        yield cluster


class Counted:
    """What the prefill nodes have counted since this was made."""

    def __init__(self, cluster: RoleByRole, *nodes: str) -> None:
        self._cluster = cluster
        self._nodes = nodes or PREFILL
        self._before = {name: self._sum(*name) for name in self._names()}

    def _names(self) -> list[tuple[str, str]]:
        counters = self._cluster.state(self._nodes[0])["counters"]
        return [
            (name, label) for name, value in counters.items() for label in (value if isinstance(value, dict) else ("",))
        ]

    def _sum(self, name: str, label: str) -> int:
        counters = [self._cluster.state(node)["counters"][name] for node in self._nodes]
        return sum(each[label] if label else each for each in counters)

    def __call__(self, name: str, label: str = "") -> int:
        return self._sum(name, label) - self._before[name, label]

    @property
    def computed(self) -> int:
        """Prompt positions."""
        return self("tokens_computed", "prefill")


# After a look that took long, of a frozen pool or on a busy machine, a node looks only every 10 s; five failures open the circuit.
LOOKS_BOUND_S = 150.0
PAUSE_S = 0.5  # between two prompts, most of which may be computed without a look


def wait_until_written(cluster: RoleByRole, *nodes: str) -> None:
    """Nothing is kept for the pool, and nothing waits to be written."""
    cluster.wait_until_nothing_is_held(*nodes)
    wait_until("all is written", lambda: not any(cluster.state(n)["kv_pool"]["staging_blocks_used"] for n in nodes))


def prompt_of(rng: random.Random) -> dict[str, object]:
    """A request whose full blocks are PROMPT_BLOCKS, and a tail of three tokens."""
    return body(rng, PROMPT_BLOCKS * BLOCK_SIZE + 3, 8)


def warm_up(cluster: RoleByRole, rng: random.Random) -> None:
    """Each prefill node has computed and fetched, and knows how long both take."""
    counted = {node: Counted(cluster, node) for node in PREFILL}
    deadline = time.monotonic() + LOOKS_BOUND_S
    while not all(each("kv_pool_reads", "read") for each in counted.values()):
        assert time.monotonic() < deadline, "a node never fetched"
        fields = prompt_of(rng)
        first = tokens_of(ask(cluster, fields))
        wait_until_written(cluster, *PREFILL)
        assert tokens_of(ask(cluster, fields)) == first
        tokens_of(ask(cluster, body(rng, 3, 1)))  # so that the next prompt begins at the other node
        time.sleep(PAUSE_S)  # a node looks every few seconds only: meanwhile all is computed


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """For streams."""
    with ThreadPoolExecutor(4) as pool:
        yield pool


# ---------------------------------------------------------------- a pool that fails


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """The cluster's KV pool."""
    with started_redis(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(scope="module")
def over_redis(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, redis: RedisServer) -> Iterator[RoleByRole]:
    """A cluster that knows how fast its pool is."""
    with started(tiny_model, tmp_path_factory.mktemp("over_redis"), redis.url, "decode-0") as cluster:
        warm_up(cluster, random.Random(1))
        yield cluster


def served_in_spite_of(cluster: RoleByRole, rng: random.Random, harm: Callable[[], None], times: int = 1) -> Counted:
    """Prompts that one node has stored are asked of the other one, once the pool was harmed: the same tokens come, and in time."""
    asked = [prompt_of(rng) for _ in range(times)]
    before = []
    for fields in asked:
        before.append(tokens_of(ask(cluster, fields)))
        tokens_of(ask(cluster, body(rng, 3, 1)))
    wait_until_written(cluster, *PREFILL)
    tokens_of(ask(cluster, body(rng, 3, 1)))  # the others' turns
    counted = Counted(cluster)
    harm()
    for fields, first in zip(asked, before, strict=True):
        assert tokens_of(ask(cluster, fields)) == first
        tokens_of(ask(cluster, body(rng, 3, 1)))
    assert cluster.metric("retries_total") == 0, "an attempt failed of the pool"
    cluster.wait_until_nothing_is_held(*PREFILL)
    return counted


@pytest.mark.covers("W08")
def test_blocks_that_are_garbage_are_not_taken_and_computed_again(
    over_redis: RoleByRole, redis: RedisServer, fresh_seed: int
) -> None:
    def harm() -> None:
        for name in redis.client.keys("baton:{kv}:block:*"):
            value = redis.client.get(name)
            redis.client.set(name, value[:-100] + bytes(100))

    rng = random.Random(fresh_seed)
    deadline = time.monotonic() + LOOKS_BOUND_S
    while not (counted := served_in_spite_of(over_redis, rng, harm))("kv_pool_reads", "corrupt"):
        assert time.monotonic() < deadline  # a node that found looking slow may have computed without a look
    assert counted("kv_pool_reads", "corrupt") == 1 and counted("kv_pool_reads", "read") == 0
    assert counted.computed >= PROMPT_BLOCKS * BLOCK_SIZE


@pytest.mark.covers("W08")
def test_while_redis_stands_still_prompts_are_computed_and_who_comes_later_does_not_wait(
    over_redis: RoleByRole, redis: RedisServer, fresh_seed: int
) -> None:
    rng = random.Random(fresh_seed)
    try:
        counted = served_in_spite_of(over_redis, rng, redis.freeze, NUM_HARMED)
        deadline = time.monotonic() + LOOKS_BOUND_S
        # A node that computes for longer than the pool may take to answer sees it fail before it is late, and leaves it alone.
        while not (counted("kv_pool_too_late") or counted("kv_pool_circuit_opened", "read")):
            assert time.monotonic() < deadline
            tokens_of(ask(over_redis, prompt_of(rng)))
            time.sleep(PAUSE_S)
    finally:
        redis.thaw()
    assert counted("kv_pool_reads", "read") == 0
    assert counted.computed >= NUM_HARMED * PROMPT_BLOCKS * BLOCK_SIZE


@pytest.mark.covers("W08")
def test_a_dead_redis_costs_computing_until_it_is_left_alone(
    over_redis: RoleByRole, redis: RedisServer, fresh_seed: int
) -> None:
    rng = random.Random(fresh_seed)
    try:
        counted = served_in_spite_of(over_redis, rng, redis.kill, NUM_HARMED)
        deadline = time.monotonic() + LOOKS_BOUND_S
        while not (counted("kv_pool_circuit_opened", "read") and counted("kv_pool_looks", "refused")):
            assert time.monotonic() < deadline
            tokens_of(ask(over_redis, prompt_of(rng)))
            time.sleep(PAUSE_S)
    finally:
        redis.start()
    assert counted("kv_pool_looks", "failed") and counted("kv_pool_reads", "read") == 0
    assert counted("kv_pool_circuit_opened", "read") >= 1 and counted("kv_pool_looks", "refused")
    assert counted.computed >= NUM_HARMED * PROMPT_BLOCKS * BLOCK_SIZE


# ---------------------------------------------------------------- a pool of files, and nodes that die


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cluster's KV pool."""
    return tmp_path_factory.mktemp("pool")


@pytest.fixture(scope="module")
def over_files(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, files: Path) -> Iterator[RoleByRole]:
    """A cluster that knows how fast its pool is, and can do without a node of each role."""
    folder = tmp_path_factory.mktemp("over_files")
    with started(tiny_model, folder, files.as_uri(), "decode-0", "decode-1") as cluster:
        warm_up(cluster, random.Random(2))
        yield cluster


@pytest.mark.covers("W08")
def test_files_that_are_cut_short_or_gone_are_computed_from_there_on(
    over_files: RoleByRole, files: Path, fresh_seed: int
) -> None:
    def harm() -> None:
        stored = sorted(files.glob("??/*.kv"))
        for path in stored[::2]:
            path.write_bytes(path.read_bytes()[:-1])
        for path in stored[1::3]:
            path.unlink()

    counted = served_in_spite_of(over_files, random.Random(fresh_seed), harm)
    assert counted.computed > 8 * BLOCK_SIZE and counted("kv_pool_reads", "read") < PROMPT_BLOCKS


@pytest.mark.covers("W07", "W02", "P02")
def test_a_request_that_lost_both_its_nodes_is_computed_from_its_tail_on_at_a_node_that_never_saw_it(
    over_files: RoleByRole, threads: ThreadPoolExecutor, fresh_seed: int
) -> None:
    cluster = over_files
    rng = random.Random(fresh_seed)
    warm_up(cluster, rng)  # a node that found its last look slow would compute without one
    fields = body(rng, PROMPT_BLOCKS * BLOCK_SIZE + 3, 300)
    counted = {node: Counted(cluster, node) for node in PREFILL}
    with cluster.slow_steps(0.01):
        stream = Stream(cluster, threads, fields)
        stream.take_tokens(5)
        wait_until_written(cluster, *PREFILL)
        first, other = sorted(PREFILL, key=lambda node: -counted[node].computed)
        assert (counted[first].computed > PROMPT_BLOCKS * BLOCK_SIZE, counted[other].computed) == (True, 0)
        cluster.kill(first)
        [decode] = [node for node in ("decode-0", "decode-1") if cluster.state(node)["running"]]
        cluster.kill(decode)
    stream.take_all()
    assert stream.last == "[DONE]" and cluster.metric("retries_total", "NODE_LOST") == 1
    assert counted[other]("kv_pool_reads", "read") == PROMPT_BLOCKS
    assert 3 < counted[other].computed <= 3 + 300, "what was fetched was computed, too"
    cluster.wait_until_nothing_is_held(other)
    assert tokens_of(ask(cluster, fields)) == stream.token_ids
