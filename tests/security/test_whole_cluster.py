"""A whole cluster with certificates and keys: equal tokens over encrypted links, a kill that loses nothing, no stranger gets in."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import grpc
import httpx
import pytest

from bench.fleet import wait_until
from engine.plan import SamplingParams
from engine.sequence import SequenceSpec
from proto import baton_pb2 as pb
from proto.baton_pb2_grpc import NodeStub
from runtime.credentials import Credentials
from tests.e2e.cluster import BATON, Cluster, started_cluster
from tests.e2e.engine_alone import engine_alone
from tests.security.strangers import GARBAGE, members_context, say, stranger_channels

KEY: Final = "sk-of-the-test-0123456789"
AUTHORIZED: Final = {"Authorization": f"Bearer {KEY}"}
LONG: Final = 1500  # tokens: more than are generated before a node is killed
NODE_FLAGS: Final = ("--max-model-len", "2048", "--num-blocks", "600")


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, ours: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("guarded")
    keys = folder / "keys"
    keys.write_text(f"{KEY} name=test\n")
    keys.chmod(0o600)
    flags = ("--prefill", "1", "--decode", "2", "--transport", "zmq", *NODE_FLAGS)
    # On all addresses: what nodes, this machine's tools and the curl line then dial must still be what certificates name.
    secured = ("--tls-dir", str(ours), "--api-keys", str(keys), "--host", "0.0.0.0")
    with started_cluster(tiny_model, folder, *flags, *secured, trusted=members_context(ours)) as running:
        yield running


def completion(seed: int, max_tokens: int) -> dict[str, Any]:
    chance = random.Random(seed)
    return {
        "model": "llama-tiny",
        "prompt": [chance.randrange(256) for _ in range(100)],
        "max_tokens": max_tokens,
        "temperature": 1.0,
        "seed": seed,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def ask(client: httpx.Client, fields: dict[str, Any]) -> list[int]:
    answer = client.post("/v1/completions", json=fields, headers=AUTHORIZED, timeout=120)
    assert answer.status_code == 200, answer.text
    token_ids: list[int] = answer.json()["choices"][0]["completion_token_ids"]
    return token_ids


@pytest.mark.covers("X03", "D07")
def test_tokens_equal_one_engine_alone_and_their_kv_crossed_encrypted_links(cluster: Cluster, tiny_model: Path) -> None:
    fields = [completion(seed, 24) for seed in range(6)]
    with cluster.client() as client, ThreadPoolExecutor(3) as threads:
        got = list(threads.map(lambda each: ask(client, each), fields))
    engine = engine_alone(tiny_model, max_model_len=2048)
    specs = [
        SequenceSpec(
            sequence_id=index,
            token_ids=tuple(each["prompt"]),
            num_generated=0,
            sampling=SamplingParams(1.0, each["seed"]),
            max_new_tokens=24,
            stop_token_ids=frozenset(),
            block_keys=(),
        )
        for index, each in enumerate(fields)
    ]
    alone = engine.generate(specs)
    assert got == [alone[index] for index in range(len(fields))]
    (prefill,) = (cluster.state(node) for node in cluster.nodes_of("prefill"))
    received = sum(sum(cluster.state(node)["kv_bytes_received"].values()) for node in cluster.nodes_of("decode"))
    assert prefill["transport"]["bytes_sent_over"] == {"zmq": received}
    assert received > 0
    assert all(node["http"].startswith("https://") for node in cluster.nodes)
    assert cluster.url.startswith("https://")


@pytest.mark.covers("X02", "O06")
def test_status_and_doctor_show_key_and_certificates_and_are_turned_away_without(cluster: Cluster, ours: Path) -> None:
    shown = {"BATON_API_KEY": KEY, "BATON_TLS_DIR": str(ours)}
    keyless = {"BATON_TLS_DIR": str(ours)}
    for command in ("status", "doctor"):
        words = [BATON, command, cluster.url, "--json"]
        for variables, code in ((shown, 0), (keyless, 1)):
            found = subprocess.run(words, capture_output=True, text=True, timeout=90, env={**os.environ, **variables})
            assert found.returncode == code, (command, found.stdout, found.stderr)
            assert code == 0 or "wants a key" in found.stdout + found.stderr
            assert KEY not in found.stdout + found.stderr


@pytest.mark.covers("X02", "X03")
def test_strangers_get_nowhere_on_any_port_and_the_cluster_goes_on(cluster: Cluster, ours: Path, others: Path) -> None:
    before = cluster.metrics()
    assert not any(refused_grpc(cluster))
    with cluster.client() as client:
        assert client.post("/v1/completions", json=completion(1, 4)).status_code == 401
        assert client.get("/ready").status_code == 200
    with pytest.raises(httpx.TransportError):
        httpx.get(cluster.url.replace("https", "http") + "/health", trust_env=False)
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{cluster.url}/health", trust_env=False, verify=members_context(others))

    async def call_everybody() -> None:
        addresses = [node["grpc"] for node in cluster.nodes]
        for address in addresses:
            for what, channel in stranger_channels(address, ours, others).items():
                async with channel:
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await NodeStub(channel).Release(pb.ReleaseRequest(), timeout=30)
                assert refused.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED), what
        ports = [cluster.routers[0]["registry"], *addresses, cluster.url.removeprefix("https://")]
        ports += [node["http"].removeprefix("https://") for node in cluster.nodes]
        for port in ports:
            for garbage in GARBAGE:
                assert b"200" not in await asyncio.to_thread(say, port, garbage)

    asyncio.run(call_everybody())
    after = cluster.metrics()
    assert after["turned_away_total{no_key}"] == before.get("turned_away_total{no_key}", 0) + 1
    assert after["turned_away_total{tls}"] >= before.get("turned_away_total{tls}", 0) + 3
    for node in cluster.nodes:
        wait_until("each is counted", lambda node=node: cluster.metrics(node)["refused_http_total{tls}"] >= 3)  # type: ignore[misc]
    strangers = [len(GARBAGE), *[len(GARBAGE) + 4] * len(cluster.nodes)]
    wait_until("each is counted, and no member", lambda: refused_grpc(cluster) == strangers, 100.0)
    with cluster.client() as client:
        assert len(ask(client, completion(1, 4))) == 4


@pytest.mark.covers("X02", "X03", "O06")
def test_an_operators_tools_get_in_with_key_and_authority(cluster: Cluster, ours: Path) -> None:
    with cluster.client() as client:
        assert client.get("/ready?deep=1").status_code == 401
        deep = client.get("/ready?deep=1", headers=AUTHORIZED, timeout=60)
        assert deep.status_code == 200, deep.text
    command = [BATON, "status", cluster.url, "--once", "--json", "on", "--tls-dir", str(ours)]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert refused.returncode != 0
    done = subprocess.run([*command, "--api-key", KEY], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(node["node_id"] in done.stdout for node in cluster.nodes)


@pytest.mark.covers("X03")
def test_router_and_nodes_say_when_their_certificates_end(cluster: Cluster, ours: Path) -> None:
    ends_at = Credentials(ours).ends_at()
    for metrics in (cluster.metrics(), *map(cluster.metrics, cluster.nodes)):
        assert metrics["certificate_ends_seconds"] == ends_at


@pytest.mark.covers("X03", "R09")
def test_a_killed_decode_nodes_stream_goes_on_over_encrypted_links(cluster: Cluster) -> None:
    fields = completion(77, LONG)
    token_ids: list[int] = []
    killed = None
    with (
        cluster.client() as client,
        client.stream("POST", "/v1/completions", json=fields | {"stream": True}, headers=AUTHORIZED) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            token_ids += json.loads(line.removeprefix("data: "))["choices"][0]["completion_token_ids"]
            if killed is None and len(token_ids) > 20:
                (killed,) = (node for node in cluster.nodes_of("decode") if cluster.state(node)["running"])
                os.kill(killed["pid"], signal.SIGKILL)
                assert len(token_ids) < LONG
    assert killed is not None
    assert len(token_ids) == LONG
    assert cluster.metrics()["retries_total{NODE_LOST}"] >= 1, "of another node that stands still there may be more"
    with cluster.client() as client:
        assert ask(client, fields) == token_ids


@pytest.mark.covers("X03", "A09")
def test_an_operator_with_a_certificate_drains_a_node_and_one_without_is_told(cluster: Cluster, ours: Path) -> None:
    """Behind the kill: the last decode node goes."""
    (name,) = {node["node_id"] for node in cluster.nodes_of("decode") if is_there(cluster, node)}
    command = [BATON, "drain", name, "--run-dir", str(cluster.run_dir)]
    without = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert without.returncode == 2
    assert re.fullmatch(
        r"baton drain: --run-dir \S+: its router \S+: .*; where processes have certificates --tls-dir DIR is needed\n",
        without.stderr,
    )
    done = subprocess.run([*command, "--tls-dir", str(ours)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(f"baton drain: {name} has drained\n")


def refused_grpc(cluster: Cluster) -> list[float]:
    """By the registry, and by each node."""
    return [metrics["refused_grpc_total"] for metrics in (cluster.metrics(), *map(cluster.metrics, cluster.nodes))]


def is_there(cluster: Cluster, node: dict[str, Any]) -> bool:
    try:
        cluster.state(node)
    except httpx.TransportError:
        return False
    return True
