"""A router of two workers with certificates, keys and a registry in Redis: one limit, one state, all timelines, whoever answers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from bench.fleet import wait_until
from tests.e2e.cluster import BATON, Cluster, started_cluster
from tests.registry.redis_server import started_redis
from tests.security.strangers import members_context
from tests.stopping import resume, stop

KEY: Final = "sk-of-the-test-0123456789"
LIMITED: Final = "sk-with-a-limit-0123456789"
LIMIT: Final = 12  # requests a minute
BOUND_S: Final = 100.0
PAGES_S: Final = 0.9  # a little less than the worker that is asked waits for what the others tell


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, ours: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("guarded_workers")
    keys = folder / "keys"
    keys.write_text(f"{KEY} name=test\n{LIMITED} name=limited requests_per_minute={LIMIT}\n")
    keys.chmod(0o600)
    with started_redis(folder) as redis:
        flags = ("--prefill", "0", "--decode", "0", "--mixed", "1", "--workers", "2", "--registry", redis.url)
        secured = ("--tls-dir", str(ours), "--api-keys", str(keys))
        with started_cluster(tiny_model, folder, *flags, *secured, trusted=members_context(ours)) as running:
            wait_for_node(running)
            yield running


def told(client: httpx.Client, path: str, **more: Any) -> httpx.Response:
    """A page that waited in vain for no worker: one that is held up for so long is left out of it."""
    while True:
        asked_at = time.monotonic()
        answer = client.get(path, **more)
        if time.monotonic() - asked_at < PAGES_S:
            return answer


def by_worker(cluster: Cluster, name: str) -> dict[int, float]:
    """A metric's sum, by worker; both of them, or the page is not whole."""
    with cluster.client() as client:
        page = told(client, "/metrics").text
    found: dict[int, float] = {0: 0.0, 1: 0.0}
    for line in page.splitlines():
        if match := re.fullmatch(rf'baton_router_{name}{{worker="(\d)".*}} (\S+)', line):
            found[int(match[1])] += float(match[2])
    return found


def wait_for_node(cluster: Cluster) -> None:
    """Until both workers have it: who stood still for two seconds has lost it."""
    wait_until("both workers have the node", lambda: set(by_worker(cluster, "node_up").values()) == {1.0}, BOUND_S)


def asked(cluster: Cluster, key: str, **more: Any) -> httpx.Response:
    """One completion, on a connection of its own: whichever worker takes it."""
    with cluster.client() as client:
        fields = {"model": "llama-tiny", "prompt": "x", "max_tokens": 2} | more
        return client.post("/v1/completions", json=fields, headers={"Authorization": f"Bearer {key}"})


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """By SIGSTOP: it takes no connection meanwhile."""
    stop(pid)
    try:
        yield
    finally:
        resume(pid)


@pytest.mark.covers("X02", "X03", "R13", "R16")
def test_a_limit_is_the_routers_whichever_worker_is_asked(cluster: Cluster) -> None:
    before = by_worker(cluster, "requests_total")
    with cluster.client() as client:
        state = told(client, "/state", headers={"Authorization": f"Bearer {KEY}"}).json()
    pids = [each["pid"] for each in state["workers"]]
    began_at = time.monotonic()
    with stopped(pids[0]):
        assert [asked(cluster, LIMITED).status_code for _ in range(LIMIT // 2)] == [200] * (LIMIT // 2)
    wait_for_node(cluster)
    codes: list[int] = []
    with stopped(pids[1]):
        while len(codes) < LIMIT or 429 not in codes:
            codes.append(asked(cluster, LIMITED).status_code)
    come_back = (time.monotonic() - began_at) * LIMIT / 60
    wait_for_node(cluster)
    had = {index: number - before[index] for index, number in by_worker(cluster, "requests_total").items()}
    assert had[1] == LIMIT // 2 and had[0] == codes.count(200), "each was asked while the other could not answer"
    assert LIMIT // 2 <= codes.count(200) <= LIMIT // 2 + come_back
    assert set(codes) == {200, 429}
    assert asked(cluster, KEY).status_code == 200, "nobody else pays for it"
    assert asked(cluster, "sk-of-nobody-0123456789").status_code == 401


@pytest.mark.covers("X02", "O03", "R16")
def test_state_requests_and_timelines_are_those_of_all_workers(cluster: Cluster, ours: Path) -> None:
    names = [f"request-{number}" for number in range(8)]
    for name in names:
        assert asked(cluster, KEY, request_id=name).status_code == 200
    shown = {"Authorization": f"Bearer {KEY}"}
    for name in names:
        wait_for_node(cluster)
        with cluster.client() as client:
            found = told(client, f"/v1/requests/{name}/timeline", headers=shown)
            assert found.status_code == 200 and found.json()["client_request_id"] == name
            listed = told(client, "/v1/requests?limit=8", headers=shown).json()["data"]
            assert [each["client_request_id"] for each in listed] == names[::-1]
            state = told(client, "/state", headers=shown).json()
            assert len({each["pid"] for each in state["workers"]}) == 2
            assert [node["session"] for node in state["nodes"]] == ["up"]
            assert told(client, "/v1/requests/nobodys/timeline", headers=shown).status_code == 404
    variables = os.environ | {"BATON_API_KEY": KEY, "BATON_TLS_DIR": str(ours)}
    for command in ("status", "doctor"):
        done = subprocess.run(
            [BATON, command, cluster.url, "--json"],
            capture_output=True,
            text=True,
            timeout=90,
            env=variables,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["ok"] is True
