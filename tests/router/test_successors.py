"""What follows a router's worker that died or hangs: it knows the nodes, and takes no connections before it has reached a pair."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from proto import baton_pb2 as pb
from router.config import RouterConfig
from router.node_relay import MAX_MISSED, MISSED_KEPT_S, NodeRelay
from router.worker_pulse import Pulse
from runtime.config import from_json, to_json
from runtime.redis_store import RedisStore
from runtime.session import Peer
from tests import forked
from tests.registry.redis_server import started_redis
from tests.router.test_workers import LOG, NUM_TOKENS, TEXT, by_worker, started, stream, until
from tests.router.tiny_model import write_model_text
from tests.stopping import resume, stop

IMPATIENT = """
from router import workers
workers.BEAT_S = 0.1
from router.__main__ import main
raise SystemExit(main())
"""


def entry(name: str, incarnation: int = 1, port: int = 1) -> pb.NodeEntry:
    fingerprint = pb.Fingerprint(architecture="a", dtype="d", weights="w", kernels="k")
    for size in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
        setattr(fingerprint, size, 1)
    made = pb.NodeEntry(node=pb.PeerId(name=name, incarnation=incarnation), role=pb.ROLE_MIXED, fingerprint=fingerprint)
    made.grpc_address = made.http_address = f"127.0.0.1:{port}"
    made.num_blocks = made.max_num_seqs = made.max_model_len = made.started_ms = 1
    return made


class Clock:
    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


def told(relay: NodeRelay) -> list[str]:
    return [news.listed.node.name for news in relay.news()]


def test_a_node_that_is_missed_is_told_to_who_starts_and_that_it_is_missed_later() -> None:
    relay = NodeRelay(Clock())
    for name, port in (("a", 1), ("b", 2)):
        relay.on_listed(entry(name, port=port))
    relay.on_missed(Peer("a", 1))
    assert told(relay) == ["a", "b"] and relay.knows_nodes
    assert [Peer(news.missed.name, news.missed.incarnation) for news in relay.later_news()] == [Peer("a", 1)]
    relay.on_listed(entry("a"))
    assert not list(relay.later_news()), "it is back"
    relay.on_unlisted(Peer("b", 1))
    relay.on_missed(Peer("a", 1))
    relay.on_unlisted(Peer("a", 1))
    assert not told(relay) and not relay.knows_nodes


@pytest.mark.parametrize("follower", [entry("a", incarnation=2, port=3), entry("b", port=1)])
def test_a_missed_node_whose_name_or_address_another_has_is_told_to_nobody(follower: pb.NodeEntry) -> None:
    relay = NodeRelay(Clock())
    relay.on_listed(entry("a"))
    relay.on_missed(Peer("a", 1))
    relay.on_listed(follower)
    assert told(relay) == [follower.node.name]


def test_missed_nodes_are_forgotten_after_an_hour_and_beyond_a_number() -> None:
    clock = Clock()
    relay = NodeRelay(clock)
    for port in range(1, MAX_MISSED + 4):
        relay.on_listed(entry(f"node-{port}", port=port))
        relay.on_missed(Peer(f"node-{port}", 1))
    assert told(relay) == [f"node-{port}" for port in range(4, MAX_MISSED + 4)]
    clock.at = MISSED_KEPT_S + 1.0
    assert not told(relay) and not relay.knows_nodes


def test_who_has_not_answered_for_some_beats_hangs_and_who_loads_or_answers_does_not() -> None:
    pulse = Pulse(most_unanswered=3)
    for index in (0, 1):
        pulse.begin(index)
    for _ in range(3):
        assert pulse.beat() == [] and pulse.asked == (0, 1)
        pulse.heard(0)
        pulse.heard(2)  # it is not up yet
    assert pulse.beat() == [1] and pulse.asked == (0,)
    pulse.begin(1)
    assert pulse.beat() == [], "its successor has its whole time"
    pulse.end(0)
    assert pulse.beat() == [] and pulse.asked == (1,)


@pytest.mark.covers("C05")
def test_a_worker_that_hangs_is_killed_and_replaced_though_nobody_tells_it_anything(tmp_path: Path) -> None:
    with started(tmp_path, popen=subprocess.Popen, program=("-c", IMPATIENT)) as (router, ready):
        pids = ready["workers"]
        stop(pids[1])
        try:
            until(lambda: not Path(f"/proc/{pids[1]}").exists())
        finally:
            with suppress(ProcessLookupError):
                resume(pids[1])
        until(lambda: by_worker(ready["url"], "node_up") == {0: 2, 1: 2})
        stop(router.pid)
        time.sleep(4.0)  # longer than a worker may be silent: it is the parent who asks nobody
        resume(router.pid)
        assert asyncio.run(stream(ready["url"])) == (TEXT * NUM_TOKENS)[:NUM_TOKENS]
        assert Path(f"/proc/{pids[0]}").exists()
    (hangs,) = [line for line in (tmp_path / LOG).read_text().splitlines() if "worker_hangs" in line]
    assert f"worker=1 pid={pids[1]} unanswered=30" in hangs


@pytest.mark.covers("C05")
def test_a_successor_takes_connections_once_it_has_reached_a_pair_of_nodes_that_are_missed_meanwhile(
    tmp_path: Path,
) -> None:
    def num_lines(what: str) -> int:
        return (tmp_path / LOG).read_text().count(what)

    with started(tmp_path, "--no-nodes-grace-s", "60") as (_, ready):
        address, pids = ("127.0.0.1", int(ready["url"].rpartition(":")[2])), ready["workers"]
        stop(pids[1])  # who is asked now is asked alone
        stop(ready["nodes"])
        try:
            until(lambda: num_lines("router node_missed") == 2)
            os.kill(pids[0], signal.SIGKILL)
            until(lambda: num_lines("router/0 node_listed") == 4)  # so it has heard of both
            with socket.create_connection(address) as client:
                body = json.dumps({"model": "model", "prompt": "x", "max_tokens": 1, "ignore_eos": True}).encode()
                head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                client.settimeout(1.0)
                with pytest.raises(TimeoutError):
                    client.recv(1)
                resume(ready["nodes"])
                client.settimeout(60.0)
                assert client.recv(12) == b"HTTP/1.1 200"
        finally:
            for pid in (ready["nodes"], pids[1]):
                resume(pid)


def test_a_worker_that_an_older_parent_starts_has_the_defaults_of_knobs_that_were_added_and_none_that_went() -> None:
    """A package that was replaced under a running parent: its workers died at their start again and again."""
    config = RouterConfig(model=Path("m"), port=1, api_keys=Path("keys"))
    written = json.loads(to_json(config))
    for name in ("ready_file", "max_queue"):
        del written[name]
    assert from_json(RouterConfig, json.dumps(written | {"gone": 1})) == config


@contextmanager
def started_in_redis(folder: Path, url: str) -> Iterator[list[int]]:
    """A router of two workers that looks for nodes there; the workers' pids."""
    model, ready_file = write_model_text(folder / "model"), folder / "ready.json"
    command = [
        sys.executable,
        "-m",
        "router",
        "--model",
        str(model),
        "--port",
        "0",
        "--workers",
        "2",
        "--registry",
        url,
    ]
    more = ["--ready-file", str(ready_file), "--parent-pid", str(os.getpid())]
    with (folder / LOG).open("wb") as log, forked.Popen(command + more, stdin=subprocess.DEVNULL, stderr=log) as router:
        try:
            until(lambda: ready_file.exists() or router.poll() is not None)
            yield json.loads(ready_file.read_text())["workers"]
        finally:
            router.kill()


async def register(url: str, made: pb.NodeEntry) -> None:
    store = RedisStore(url, "baton", 1.5)
    assert await store.register(made) == ""
    await store.hang_up()


@pytest.mark.covers("C05")
def test_a_successor_hears_of_nodes_that_are_listed_in_a_redis_that_is_away_and_no_line_has_its_password(
    tmp_path: Path,
) -> None:
    password = "s3cret-of-redis"
    url = f"redis://:{password}@{{host}}:{{port}}/0"
    with (
        started_redis(tmp_path, "--requirepass", password, url=url) as redis,
        started_in_redis(tmp_path, redis.url) as pids,
    ):
        log = tmp_path / LOG
        asyncio.run(register(redis.url, entry("alone")))
        until(lambda: log.read_text().count("router/0 node_listed") == 1)
        redis.kill()
        os.kill(pids[0], signal.SIGKILL)
        until(lambda: log.read_text().count("router/0 node_listed") == 2)
        assert password not in log.read_text()
