"""The containers of compose.yaml with compose.tls.yaml: everything encrypted, everybody healthy, and a crash that loses nothing."""

from __future__ import annotations

import json
import os
import random
import signal
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from deploy import certs
from tests.compose.containers import Containers, build_images, model_for_containers, started_containers, wait_until
from tests.e2e.fault_clients import body, tokens_of

pytestmark = pytest.mark.timeout(1800)  # the first one builds the images
OURS: Final = ("router-0", "router-1", "prefill-0", "prefill-1", "decode-0", "decode-1")
USER: Final = 10001
KEY: Final = "sk-of-the-compose-test-0123456789"
NUM_STREAMS: Final = 6
NUM_TOKENS: Final = 3500


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compose_tls")


@pytest.fixture(scope="module")
def containers(folder: Path) -> Iterator[Containers]:
    """As docs/containers.md says; keys among the routers' files."""
    build_images()
    model = model_for_containers(folder)  # before there are keys: it lets others read
    made = folder / "certs"
    assert certs.main([str(made), "--hosts", ",".join((*OURS, "front", "redis"))]) == 0
    (made / "ca.crt").chmod(0o644)
    for name in OURS:
        if "router" in name:
            (made / name / "keys").write_text(f"{KEY} name=test\n")
            (made / name / "keys").chmod(0o600)
        for path in (made / name, *(made / name).iterdir()):
            os.chown(path, USER, USER)
    with started_containers(model, folder, made, {"BATON_API_KEYS": "/tls/keys"}) as cluster:
        yield cluster


@pytest.fixture
def client(folder: Path, containers: Containers) -> Iterator[httpx.Client]:
    trusted = ssl.create_default_context(cafile=str(folder / "certs" / "ca.crt"))
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=containers.url, verify=trusted, headers=headers, timeout=120, trust_env=False) as made:
        yield made


@pytest.mark.covers("X02", "X03")
def test_clients_come_in_by_https_with_a_key_and_kv_crosses_encrypted(
    containers: Containers, client: httpx.Client
) -> None:
    fields = body(random.Random(1), 100, 24)
    assert len(tokens_of(client.post("/v1/completions", json=fields))) == 24
    assert client.post("/v1/completions", json=fields, headers={"Authorization": "Bearer nobody"}).status_code == 401
    with pytest.raises(httpx.TransportError):
        httpx.get(containers.url.replace("https", "http") + "/ready", trust_env=False).raise_for_status()
    sent = [containers.state(f"prefill-{i}")["transport"]["bytes_sent_over"].get("zmq", 0) for i in (0, 1)]
    assert sum(sent) > 0


@pytest.mark.parametrize("service", OURS)
def test_every_process_is_healthy_by_https(containers: Containers, service: str) -> None:
    wait_until("it is healthy", lambda: containers.inspect(service, ".State.Health.Status") == "healthy")


@pytest.mark.covers("O01")
def test_prometheus_scrapes_every_process_by_https(containers: Containers) -> None:
    wait_until("all six are up", lambda: [each["value"][1] for each in containers.query("sum(up)")] == ["6"])


def take(client: httpx.Client, fields: dict[str, Any], token_ids: list[int]) -> None:
    """Stream it; what has come of it is in `token_ids`."""
    with client.stream("POST", "/v1/completions", json=fields | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                token_ids += json.loads(line.removeprefix("data: "))["choices"][0]["completion_token_ids"]


@pytest.mark.covers("X03", "R16")
def test_a_container_that_crashes_costs_a_stream_nothing_and_is_back_under_its_name(
    containers: Containers, client: httpx.Client
) -> None:
    bodies = [body(random.Random(seed), 60, NUM_TOKENS) for seed in range(NUM_STREAMS)]
    expected = [tokens_of(client.post("/v1/completions", json=fields)) for fields in bodies]
    told: list[list[int]] = [[] for _ in bodies]
    pid = containers.pid("decode-0")
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        ends = [threads.submit(take, client, *each) for each in zip(bodies, told, strict=True)]
        wait_until("all of them run", lambda: all(len(token_ids) > 50 for token_ids in told))
        os.kill(pid, signal.SIGKILL)
        assert not all(end.done() for end in ends), "all of them were over before it crashed"
        for end in ends:
            end.result()
    assert told == expected
    wait_until("it was started again", lambda: containers.inspect("decode-0", ".RestartCount") == "1")
    containers.wait_until_ready()
