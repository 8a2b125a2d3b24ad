"""The deep look, `baton doctor` and `baton status` at a real cluster: well, with a node that hangs, and where nothing is."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests import forked
from tests.e2e.fault_clients import ask, tokens_of
from tests.e2e.role_by_role import RoleByRole, started_role_by_role

BATON: Final = str(Path(sys.executable).with_name("baton"))
PAIRS: Final = [(f"prefill-{i}", f"decode-{j}") for i in range(2) for j in range(2)]
PROMPT: Final = {
    "model": "llama-tiny",
    "prompt": "hello",
    "max_tokens": 3,
    "ignore_eos": True,
    "return_token_ids": True,
}


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoleByRole]:
    """Two of each role; what goes to one of the decode nodes goes over TCP, the rest through shared memory."""
    flags: dict[str, tuple[str, ...]] = {"router": (), "prefill-0": (), "prefill-1": (), "decode-0": ()}
    flags["decode-1"] = ("--transport", "zmq")
    with started_role_by_role(tiny_model, tmp_path_factory.mktemp("doctor"), flags) as running:
        yield running


def baton(*words: str) -> subprocess.CompletedProcess[str]:
    return forked.run([BATON, *words], timeout=90)


def received(cluster: RoleByRole) -> dict[str, dict[str, int]]:
    """KV bytes, by decode node and the node that they came from."""
    return {node: cluster.state(node)["kv_bytes_received"] for node in ("decode-0", "decode-1")}


def deep(cluster: RoleByRole) -> tuple[int, list[dict[str, Any]]]:
    answer = cluster.http.get(f"{cluster.url}/ready?deep=1", timeout=60)
    pairs: list[dict[str, Any]] = answer.json()["pairs"]
    return answer.status_code, pairs


@pytest.mark.covers("O06")
def test_a_deep_look_sends_kv_from_every_prefill_node_to_every_decode_node_each_time(cluster: RoleByRole) -> None:
    sums = list[list[int]]()
    for _ in range(2):
        status, pairs = deep(cluster)
        assert status == 200 and all(pair["ok"] for pair in pairs), pairs
        assert sorted((pair["prefill"], pair["decode"]) for pair in pairs) == PAIRS
        by_node = received(cluster)
        assert {(sender, node) for node, senders in by_node.items() for sender in senders} == set(PAIRS), (
            "bytes crossed"
        )
        sums.append([by_node[node][sender] for sender, node in PAIRS])
    assert all(second == 2 * first > 0 for first, second in zip(*sums, strict=True)), (
        "nobody had the second prompts either"
    )


@pytest.mark.covers("O06")
def test_doctor_and_status_say_that_all_is_well_and_what_is_there(cluster: RoleByRole) -> None:
    assert len(tokens_of(ask(cluster, PROMPT))) == 3
    found = baton("doctor", cluster.url)
    assert found.returncode == 0, found.stdout + found.stderr
    for prefill, decode in PAIRS:
        assert f"{prefill} to {decode}: its KV crossed" in found.stdout
    for sentence in (
        "is ready",
        "everywhere",
        "have the same model",
        "all nodes have zmq",
        "nothing is wrong",
        "open files",
    ):
        assert sentence in found.stdout, sentence
    shown = baton("status", cluster.url, "--once")
    assert shown.returncode == 0 and "ready" in shown.stdout
    assert all(f"{role}-{i}" in shown.stdout for role in ("prefill", "decode") for i in range(2))
    content = json.loads(baton("status", cluster.url, "--json").stdout)
    assert len(content["nodes"]) == 4 and all(
        sum(node["blocks"].values()) == node["num_blocks"] for node in content["nodes"]
    )
    assert any(each["client_request_id"] is None and each["completion_tokens"] == 3 for each in content["requests"])


@pytest.mark.covers("O06")
def test_a_node_that_hangs_is_named_in_time_and_the_others_are_well(cluster: RoleByRole) -> None:
    cluster.freeze("decode-1")
    try:
        found = baton("doctor", cluster.url, "--json")
        assert found.returncode == 1, found.stdout
        findings = json.loads(found.stdout)["findings"]
        by_level = {level: [each for each in findings if each["level"] == level] for level in ("ok", "wrong")}
        wrong = {each["what"] for each in by_level["wrong"]}
        assert {"prefill-0 to decode-1", "prefill-1 to decode-1"} <= wrong <= {
            "decode-1", "prefill-0 to decode-1", "prefill-1 to decode-1"
        }  # fmt: skip
        assert {"prefill-0 to decode-0", "prefill-1 to decode-0"} <= {each["what"] for each in by_level["ok"]}
        assert len(tokens_of(ask(cluster, PROMPT))) == 3, "clients are served meanwhile"
    finally:
        cluster.restore()


def test_where_nothing_is_that_is_said_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = baton("doctor", "--port", str(port))
        assert found.returncode == 1 and f"--port {port}: cannot listen on " in found.stdout
    nowhere = f"http://127.0.0.1:{port}"
    shown = baton("status", nowhere)
    assert shown.returncode == 1 and len(shown.stderr.splitlines()) == 1 and nowhere in shown.stderr
    found = baton("doctor", nowhere, "--json")
    assert found.returncode == 1 and [
        each["what"] for each in json.loads(found.stdout)["findings"] if each["level"] == "wrong"
    ] == ["router"]
    found = baton("doctor", "--port", str(port))
    assert found.returncode == 0, found.stdout
