"""Two routers over one prefill and one decode node, found in a real Redis that dies and comes back; a router that is killed.

The routers know nothing of each other: what one has placed, the other learns from refusals. Each fault is checked to have fired.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests import forked
from tests.e2e.cluster import BATON, END_BOUND_S, START_BOUND_S, Cluster, Watch, started_cluster
from tests.e2e.fault_clients import Stream, ask, body, tokens_of
from tests.e2e.role_by_role import HELD, wait_until
from tests.e2e.slow_steps import SlowSteps
from tests.plain_http import NO_CERTIFICATES
from tests.registry.redis_server import RedisServer, started_redis
from tests.thorough import examples

NUM_REQUESTS: Final = examples(50, 2)  # at each router
NUM_CLIENTS: Final = 24
LONG: Final = 600  # tokens: with slow steps, more than are generated before a fault is over
SLOW_S: Final = 0.05  # each of them
NUM_BLOCKS: Final = 280  # room for twelve of the many
NODE_FLAGS: Final = ("--num-blocks", str(NUM_BLOCKS), "--max-model-len", "2100", "--max-num-seqs", "32")
NAMESPACE: Final = "e2e"


@dataclass(frozen=True)
class Router:
    """One of a cluster's routers."""

    url: str
    pid: int

    def metric(self, name: str) -> dict[str, float]:
        """Samples of a metric by their labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=60, trust_env=False, verify=NO_CERTIFICATES).text
        found = re.findall(rf"^baton_router_{name}(\{{.*\}})? (\S+)$", text, re.MULTILINE)
        return {labels: float(value) for labels, value in found}

    def is_ready(self) -> bool:
        return httpx.get(f"{self.url}/ready", timeout=60, trust_env=False, verify=NO_CERTIFICATES).status_code == 200


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with started_redis(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> SlowSteps:
    return SlowSteps(tmp_path_factory.mktemp("steps"))


@pytest.fixture(scope="module")
def cluster(
    redis: RedisServer, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, steps: SlowSteps
) -> Iterator[Cluster]:
    flags = ("--routers", "2", "--registry", redis.url, "--registry-namespace", NAMESPACE, *NODE_FLAGS)
    folder = tmp_path_factory.mktemp("shared")
    environment = steps.environment | {"BATON_SESSION_GRACE_S": "4"}  # of a router that is killed
    with started_cluster(tiny_model, folder, *flags, environment=environment) as running:
        yield running


@pytest.fixture(scope="module")
def routers(cluster: Cluster) -> list[Router]:
    return [Router(each["url"], each["pid"]) for each in cluster.routers]


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(NUM_CLIENTS) as running:
        yield running


def wait_until_nothing_is_held(cluster: Cluster) -> None:
    def is_idle(state: dict[str, Any]) -> bool:
        return not (state["running"] or state["waiting"] or any(state["blocks"][each] for each in HELD))

    wait_until("nothing is held", lambda: all(is_idle(cluster.state(node)) for node in cluster.nodes))
    for node in cluster.nodes:
        state = cluster.state(node)
        assert sum(state["blocks"].values()) == NUM_BLOCKS
        assert state["leases"] == 0


@contextmanager
def another_decode_node(
    variables: dict[str, str], redis: RedisServer, model: Path, folder: Path
) -> Iterator[dict[str, Any]]:
    """A decode node that is started by hand, with the secretive variable instead of the flag; ready, perhaps not listed."""
    ready_file = folder / "ready.json"
    command = [BATON, "decode", "--model", str(model), "--node-id", "decode-late", "--threads", "1", *NODE_FLAGS]
    command += ["--ready-file", str(ready_file), "--parent-pid", str(os.getpid()), "--registry-namespace", NAMESPACE]
    environment = {key: os.environ[key] for key in ("PATH", "HOME", "BATON_KERNELS") if key in os.environ}
    with (folder / "decode-late.log").open("wb") as log:
        process = forked.Popen(
            command, stdout=log, stderr=log, env=environment | variables | {"BATON_REGISTRY": redis.url}, cwd=folder
        )
    try:
        wait_until("the node is ready", lambda: ready_file.exists() or process.poll() is not None, START_BOUND_S)
        assert process.poll() is None, (folder / "decode-late.log").read_text()[-2000:]
        yield json.loads(ready_file.read_text())
        process.terminate()
        assert process.wait(END_BOUND_S) == 0
    finally:
        process.kill()
        process.wait(END_BOUND_S)


@pytest.mark.covers("R16", "D01")
def test_two_routers_share_a_small_pool_and_every_request_of_both_gets_its_own_tokens(
    cluster: Cluster, routers: list[Router], threads: ThreadPoolExecutor, steps: SlowSteps, fresh_seed: int
) -> None:
    """Neither knows what the other has placed: the decode node's refusals tell, and nothing is booked twice."""
    rng = random.Random(fresh_seed)
    asked = [(routers[i % 2], body(rng, 300, 48)) for i in range(2 * NUM_REQUESTS)]
    (decode,) = cluster.nodes_of("decode")
    with steps.wanted(0.2):  # or who decodes may keep up with who computes prompts
        futures = [threads.submit(ask, router, fields) for router, fields in asked]
        wait_until("the pool is short", lambda: cluster.state(decode)["attempts"]["waiting_reserves"] > 0)
    together = [tokens_of(future.result()) for future in futures]
    wait_until_nothing_is_held(cluster)
    errors = {label for router in routers for label, number in router.metric("pd_errors_total").items() if number}
    assert errors <= {'{code="NO_BLOCKS"}', '{code="BUSY"}', '{code="PREEMPTED"}'}  # it is short for who decodes, too
    for router in routers:
        assert sum(router.metric("requests_total").values()) == NUM_REQUESTS
        assert not any(router.metric("live_requests").values())
        assert not any(router.metric("node_branches").values())
    calm = [tokens_of(ask(routers[0], fields)) for _, fields in asked]
    assert together == calm


@pytest.mark.covers("C08", "R16", "R13")
def test_redis_dies_and_comes_back_empty_and_no_stream_or_new_request_is_the_worse_for_it(
    cluster: Cluster,
    routers: list[Router],
    redis: RedisServer,
    threads: ThreadPoolExecutor,
    steps: SlowSteps,
    tiny_model: Path,
    tmp_path: Path,
    fresh_seed: int,
) -> None:
    """A node that starts meanwhile is found by both routers once Redis is back, and one that lives is never unlisted."""
    rng = random.Random(fresh_seed)
    fields = [body(rng, 40, LONG) for _ in routers]
    with ExitStack() as late:
        with steps.wanted(SLOW_S):
            streams = [Stream(router, threads, each) for router, each in zip(routers, fields, strict=True)]
            for stream in streams:
                stream.take_tokens(5)
            failed_before = [sum(router.metric("registry_failed_reads_total").values()) for router in routers]
            redis.kill()
            for router, before in zip(routers, failed_before, strict=True):
                wait_until(
                    "it is missed",
                    lambda: sum(router.metric("registry_failed_reads_total").values()) > before + 2,  # noqa: B023
                )
            for stream in streams:
                num_heard = len(stream.heard_at)
                wait_until("it goes on", lambda: len(stream.heard_at) > num_heard + 10)  # noqa: B023
            assert all(len(tokens_of(ask(router, body(rng, 40, 8)))) == 8 and router.is_ready() for router in routers)
            late.enter_context(another_decode_node(steps.environment, redis, tiny_model, tmp_path))
            assert all(len(router.metric("node_up")) == 2 for router in routers)
            redis.start()
            key = f"baton:{{{NAMESPACE}}}:entries"
            assert redis.client.dbsize() == 0 or redis.client.exists(key), "it came back empty"
            wait_until("it is found", lambda: all(sum(router.metric("node_up").values()) == 3 for router in routers))
        for stream in streams:
            stream.take_all()
            assert stream.last == "[DONE]"
            assert len(stream.token_ids) == LONG
        for router in routers:
            wait_until("it is used", lambda: bool(_runs_on_the_newcomer(router, threads, rng, steps)))  # noqa: B023
    wait_until("its goodbye is heard", lambda: all(len(router.metric("node_up")) == 2 for router in routers))
    calm = [tokens_of(ask(routers[0], each)) for each in fields]
    assert [stream.token_ids for stream in streams] == calm
    wait_until_nothing_is_held(cluster)
    for path in ("router.log", "router-1.log"):
        unlisted = re.findall(r"node_unlisted node=(\S+)", (cluster.run_dir / path).read_text())
        assert unlisted == ["decode-late"]


def _runs_on_the_newcomer(router: Router, threads: ThreadPoolExecutor, rng: random.Random, steps: SlowSteps) -> bool:
    """Whether of two requests at once one was placed there; all are answered."""
    with steps.wanted():
        asked = [threads.submit(ask, router, body(rng, 40, 30)) for _ in range(2)]
        was_there = False
        while wait(asked, 0.02).not_done:
            was_there |= any(
                number for label, number in router.metric("node_branches").items() if "decode-late" in label
            )
    assert all(len(tokens_of(each.result())) == 30 for each in asked)
    return was_there


@pytest.mark.covers("C09", "R16")
def test_a_killed_routers_work_is_freed_and_the_streams_of_the_other_run_on(
    cluster: Cluster, routers: list[Router], threads: ThreadPoolExecutor, steps: SlowSteps, fresh_seed: int
) -> None:
    """The last test of this cluster: the launcher starts nothing again."""
    rng = random.Random(fresh_seed)
    survivor, victim = routers
    fields = body(rng, 40, LONG)
    with steps.wanted(SLOW_S):
        stream = Stream(survivor, threads, fields)
        lost = [Stream(victim, threads, body(rng, 40, LONG)), Stream(victim, threads, body(rng, 40, LONG))]
        for each in (stream, *lost):
            each.take_tokens(5)
        (decode,) = cluster.nodes_of("decode")
        assert cluster.state(decode)["running"] == 3
        watch = Watch([victim.pid])
        os.kill(victim.pid, signal.SIGKILL)
        watch.wait_for_end([victim.pid])
        watch.close()
        num_tokens = len(stream.token_ids)
        wait_until("its work is freed", lambda: cluster.state(decode)["running"] <= 1)
    for each in lost:
        with pytest.raises(httpx.RemoteProtocolError):
            each.take_all()
        assert len(each.token_ids) < LONG
    assert len(stream.token_ids) == num_tokens, "nobody has read on"
    stream.take_all()
    assert stream.last == "[DONE]"
    assert stream.token_ids == tokens_of(ask(survivor, fields))
    wait_until_nothing_is_held(cluster)


@pytest.mark.covers("R16")
def test_two_routers_with_registries_of_their_own_serve_the_same_nodes(tiny_model: Path, tmp_path: Path) -> None:
    """`baton up --routers 2`, and nothing else to install."""
    with started_cluster(tiny_model, tmp_path, "--routers", "2", "--num-blocks", "256") as running:
        fields = body(random.Random(0), 40, 8)
        one, two = (tokens_of(ask(Router(each["url"], each["pid"]), fields)) for each in running.routers)
        assert one == two
        assert running.end(signal.SIGINT) == 0
