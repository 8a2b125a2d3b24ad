"""A small cluster under many requests: streams, disconnects, errors, and nothing left behind."""

from __future__ import annotations

import http.client
import json
import random
import select
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from bench.fleet import wait_until
from tests.e2e.cluster import Cluster, started_cluster
from tests.e2e.slow_steps import SlowSteps
from tests.thorough import examples

NUM_MIXED = examples(1000)  # P08 in full is `make soak`'s
QUIET_BOUND_S = 10.0  # ten times the second that the checklist allows
HELD = ("used", "leased", "quarantined")


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> SlowSteps:
    """Of the cluster's nodes."""
    return SlowSteps(tmp_path_factory.mktemp("steps"))


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, steps: SlowSteps) -> Iterator[Cluster]:
    """One of each role, few slots, so that requests queue and are refused."""
    folder = tmp_path_factory.mktemp("serving")
    sizes = ("--max-num-seqs", "8", "--num-blocks", "512", "--max-model-len", "4096")
    flags = (*sizes, "--reserve-policy", "full")
    with started_cluster(tiny_model, folder, *flags, environment=steps.environment) as running:
        yield running


def body(**fields: Any) -> dict[str, Any]:
    """A completion request for the small model."""
    return {"model": "llama-tiny", "prompt": "Once upon a time", "max_tokens": 8, "ignore_eos": True} | fields


def held_blocks(cluster: Cluster) -> int:
    """Blocks that are not free and not merely cached, on all nodes."""
    return sum(cluster.state(node)["blocks"][state] for node in cluster.nodes for state in HELD)


def wait_until_nothing_is_held(cluster: Cluster) -> float:
    """Seconds until every node's blocks are free or cached; fails after the bound."""
    started = time.monotonic()
    while held_blocks(cluster):
        assert time.monotonic() - started < QUIET_BOUND_S, [cluster.state(node) for node in cluster.nodes]
        time.sleep(0.02)  # who is asked has work to do
    return time.monotonic() - started


def events(response: httpx.Response) -> list[str]:
    """The data fields of a stream."""
    assert response.status_code == 200, response.read()
    return [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]


@contextmanager
def waiting_client(cluster: Cluster, fields: dict[str, Any]) -> Iterator[None]:
    """One that has asked, and hangs up at the end without an answer."""
    address = urlsplit(cluster.url)
    with closing(http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(fields), {"Content-Type": "application/json"})
        yield
        assert not select.select([connection.sock], [], [], 0)[0], "it was answered before it left"


@pytest.mark.covers("A01", "A08")
def test_a_stream_has_the_text_of_the_plain_answer_and_ends_with_done(cluster: Cluster, fresh_seed: int) -> None:
    with cluster.client() as client:
        fields = body(max_tokens=100, temperature=1.0, seed=fresh_seed >> 1)
        plain = client.post("/v1/completions", json=fields).json()
        with client.stream("POST", "/v1/completions", json=fields | {"stream": True}) as response:
            *chunks, last = events(response)
    text = "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks)
    assert last == "[DONE]" and text == plain["choices"][0]["text"]
    assert len(chunks) > 10, "it was not streamed"


@pytest.mark.covers("A10")
@pytest.mark.parametrize("is_streaming", [True, False])
def test_a_client_that_goes_away_frees_its_blocks_on_every_node(
    cluster: Cluster, steps: SlowSteps, is_streaming: bool
) -> None:
    wait_until_nothing_is_held(cluster)
    fields = body(max_tokens=3900, n=2, stream=is_streaming)
    with steps.wanted():
        if is_streaming:
            with cluster.client() as client, client.stream("POST", "/v1/completions", json=fields) as response:
                lines = response.iter_lines()  # kept: dropping it hangs up
                assert next(lines).startswith("data: ")
                assert held_blocks(cluster) > 0, "it was not running"
        else:
            with waiting_client(cluster, fields):
                wait_until("it runs", lambda: held_blocks(cluster) > 0)
        wait_until_nothing_is_held(cluster)  # of itself it would not be over so soon
    assert sum(cluster.state(node)["running"] for node in cluster.nodes) == 0


@pytest.mark.covers("A10", "P08", "R15")
def test_clients_that_go_away_while_they_wait_for_room_leave_nothing_either(cluster: Cluster, steps: SlowSteps) -> None:
    """Two of twelve find room; the others are computed, and wait in the line before the decode node."""
    wait_until_nothing_is_held(cluster)
    (decode,) = cluster.nodes_of("decode")
    with steps.wanted(), ExitStack() as clients:
        for number in range(12):
            clients.enter_context(waiting_client(cluster, body(prompt=[number] * 100, max_tokens=3900)))
        wait_until("some wait", lambda: cluster.metrics(decode)["reserves_waiting"] > 0)
        clients.close()
        wait_until("the router has noticed", lambda: cluster.metrics()["live_requests"] == 0)
        wait_until_nothing_is_held(cluster)  # of itself it would not be over so soon
    now = cluster.metrics()
    assert now["live_requests"] == now["queued_requests"] == 0
    assert {value for name, value in now.items() if name.startswith(("node_prefilling", "node_branches"))} == {0}


@pytest.mark.covers("P08", "R15", "A12")
def test_many_mixed_requests_leak_no_block(cluster: Cluster, fresh_seed: int) -> None:
    """Plain, streamed, abandoned, refused by the API; eight slots, so most of them wait or are refused by a node first."""
    rng = random.Random(fresh_seed)
    plans = [
        (rng.choice(("plain", "stream", "leave", "bad")), rng.randint(1, 60), rng.randint(1, 12))
        for _ in range(NUM_MIXED)
    ]

    with cluster.client() as client, ThreadPoolExecutor(24) as threads:

        def ask(plan: tuple[str, int, int]) -> int:
            kind, prompt_len, max_tokens = plan
            fields = body(prompt=[prompt_len] * prompt_len, max_tokens=max_tokens)
            match kind:
                case "plain":
                    answer = client.post("/v1/completions", json=fields)
                    assert answer.status_code == 200, answer.text
                    assert answer.json()["usage"]["completion_tokens"] == max_tokens
                    return answer.status_code
                case "stream":
                    with client.stream("POST", "/v1/completions", json=fields | {"stream": True}) as response:
                        assert events(response)[-1] == "[DONE]"
                        return response.status_code
                case "leave":
                    with client.stream("POST", "/v1/completions", json=fields | {"stream": True}) as response:
                        return response.status_code
                case _:
                    return client.post("/v1/completions", json=fields | {"temperature": -1}).status_code

        statuses = list(threads.map(ask, plans))
    expected = [400 if kind == "bad" else 200 for kind, _, _ in plans]
    assert statuses == expected
    wait_until_nothing_is_held(cluster)
    metrics = httpx.get(f"{cluster.url}/metrics", timeout=60, trust_env=False).text
    loads = [line for line in metrics.splitlines() if line.startswith("baton_router_node_") and "node_up" not in line]
    assert loads and all(line.endswith(" 0.0") for line in loads), loads


@pytest.mark.covers("R17", "A06")
def test_a_request_over_its_deadline_ends_with_one_clear_error(tiny_model: Path, tmp_path: Path) -> None:
    settings = tmp_path / "baton.toml"
    settings.write_text("[router]\nrequest_timeout_s = 0.5\n")
    steps = SlowSteps(tmp_path)
    with (
        started_cluster(tiny_model, tmp_path, "--config", str(settings), environment=steps.environment) as cluster,
        cluster.client() as client,
        steps.wanted(),
    ):
        answer = client.post("/v1/completions", json=body(max_tokens=4000))
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "DEADLINE", answer.text
        asked, status = body(max_tokens=4000, stream=True), 504
        for _ in range(60):  # on a busy machine some are over before they have begun
            with client.stream("POST", "/v1/completions", json=asked) as response:
                status = response.status_code
                last = events(response)[-1] if status == 200 else response.read().decode()
            assert status in (200, 504) and "error" in json.loads(last), "and no [DONE]"
            if status == 200:
                break
        assert status == 200, "none has begun"
        wait_until_nothing_is_held(cluster)
