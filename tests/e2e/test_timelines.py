"""Timelines of real requests, held against what their clients measured: sums, retries, preemptions, and nothing that is private."""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest

from tests.e2e.fault_clients import Stream, ask, body, tokens_of
from tests.e2e.role_by_role import RoleByRole, started_role_by_role

NUM_THREADS: Final = 8
MIN_MEASURED: Final = 16
MAX_MEASURED: Final = 300  # a busy machine's
NUM_CLOSE: Final = 6
TO_FIRST: Final = {"route", "queue", "retry", "prefill", "return"}
TO_SECOND: Final = {"reserve_wait", "transfer", "admit", "first_step"}
# Four sequences of 216 tokens at their ends are 56 blocks, and there are 40.
SHORT: Final = ("--num-blocks", "40", "--max-num-seqs", "8", "--max-model-len", "512", "--reserve-policy", "none")
NO_MOVES: Final = ("--preempt-move-ms", "0")


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoleByRole]:
    """One prefill node, two decode nodes that are short of blocks."""
    flags = {"router": (), "prefill-0": (), "decode-0": (*SHORT, *NO_MOVES), "decode-1": (*SHORT, *NO_MOVES)}
    with started_role_by_role(tiny_model, tmp_path_factory.mktemp("timelines"), flags) as running:
        yield running


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """Where clients run."""
    with ThreadPoolExecutor(NUM_THREADS) as running:
        yield running


def timeline(cluster: RoleByRole, name: str) -> dict[str, Any]:
    answer = cluster.get(f"/v1/requests/{name}/timeline")
    assert answer.status_code == 200, answer.text
    shown: dict[str, Any] = answer.json()
    assert shown["object"] == "request.timeline" and shown["events_left_out"] == 0
    for leg in (shown["time_to_first_token"], shown["first_to_second_token"]):
        assert min(leg["parts"].values()) >= 0
        assert sum(leg["parts"].values()) == pytest.approx(leg["seconds"], abs=1e-5)
    return shown


def timed_stream(connection: http.client.HTTPConnection, fields: dict[str, Any]) -> tuple[str, list[float]]:
    """A stream's request id, and the instants at which it was sent and its tokens came."""
    content = json.dumps(fields | {"stream": True}).encode()
    instants = [time.perf_counter()]
    connection.request("POST", "/v1/completions", content, {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200
    while line := response.readline():
        if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["completion_token_ids"]:
            instants.append(time.perf_counter())
    return response.headers["X-Request-Id"], instants


@pytest.mark.covers("O02", "O03")
def test_the_parts_add_up_to_what_the_client_saw(
    cluster: RoleByRole, fresh_seed: int, request: pytest.FixtureRequest
) -> None:
    """In order, so that nothing but the machine's other load comes between; some of them, since that does."""
    rng = random.Random(fresh_seed)
    address = urlsplit(cluster.url)
    close_to_first, close_to_second = list[bool](), list[bool]()
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)
    request.addfinalizer(connection.close)
    for number in range(MAX_MEASURED):
        name, instants = timed_stream(connection, body(rng, rng.choice((20, 200)), 6))
        shown = timeline(cluster, name)
        first, second = shown["time_to_first_token"], shown["first_to_second_token"]
        assert set(first["parts"]) == TO_FIRST and set(second["parts"]) == TO_SECOND
        seen, seen_between = instants[1] - instants[0], instants[2] - instants[1]
        assert 0 < first["seconds"] <= seen, "the client asked before the router heard, and heard after it spoke"
        assert all(first["parts"][name] > 0 for name in ("route", "prefill", "return"))
        assert first["parts"]["retry"] == 0
        told = shown["choices"][0]["attempts"][0]["parts"]
        assert {"prefill", "admit", "first_step"} <= set(told), "be it that the client got both tokens at once"
        if number >= 4:  # the first ones find cold processes
            close_to_first.append(abs(first["seconds"] - seen) <= max(0.05 * seen, 0.002))
            close_to_second.append(abs(second["seconds"] - seen_between) <= max(0.05 * seen_between, 0.002))
        if number >= MIN_MEASURED and min(sum(close_to_first), sum(close_to_second)) >= NUM_CLOSE:
            break
    # Were a part missing, none would be close, however quiet the machine; on a busy one few are.
    assert sum(close_to_first) >= NUM_CLOSE and sum(close_to_second) >= NUM_CLOSE, (close_to_first, close_to_second)


@pytest.mark.covers("O02", "O03")
def test_a_request_whose_decode_node_was_killed_says_so(
    cluster: RoleByRole, threads: ThreadPoolExecutor, fresh_seed: int
) -> None:
    rng = random.Random(fresh_seed)
    with cluster.slow_steps():
        stream = Stream(cluster, threads, body(rng, 40, 460))
        stream.take_tokens(5)
        (before,) = (each for each in cluster.get("/v1/requests").json()["data"] if each["id"] == stream.request_id)
        assert before["outcome"] is None and before["completion_tokens"] is None
        killed = next(name for name in before["nodes"] if name.startswith("decode"))
        other = "decode-1" if killed == "decode-0" else "decode-0"
        cluster.kill(killed)
    stream.take_all()
    assert stream.last == "[DONE]" and len(stream.token_ids) == 460

    shown = timeline(cluster, stream.request_id)
    lost, last = shown["choices"][0]["attempts"]
    assert (lost["sender"], lost["receiver"], lost["end"]) == ("prefill-0", killed, "NODE_LOST")
    assert (last["sender"], last["receiver"], last["end"]) == ("prefill-0", other, "length")
    assert lost["ended_at"] <= last["at"] and {"queue", "prefill", "admit", "first_step"} >= set(lost["parts"]) - {
        "reserve_wait"
    }
    assert last["parts"]["prefill"] > 0 and last["parts"]["admit"] > 0
    failed = next(each for each in shown["events"] if each["what"] == "failed")
    assert failed["nodes"] == [killed] and failed["code"] == "NODE_LOST"
    names = [(span["lane"], span["name"], span["attempt"]) for span in shown["spans"]]
    assert {("router", "attempt", 0), ("router", "attempt", 1), ("prefill-0", "prefill", 1)} <= set(names)
    assert shown["outcome"] == "length" and shown["completion_tokens"] == 460 and shown["num_attempts"] == 2
    cluster.restore()


@pytest.mark.covers("O02", "O03")
def test_a_request_that_was_preempted_says_so(
    cluster: RoleByRole, threads: ThreadPoolExecutor, fresh_seed: int
) -> None:
    rng = random.Random(fresh_seed)
    secret = "Xyzzy, the word is kumquat"
    private = body(rng, 1, 200) | {"prompt": secret}
    fields = [private, *(body(rng, 16, 200) for _ in range(NUM_THREADS - 1))]
    with cluster.slow_steps(0.005):  # or the first have ended before the last have come
        answers = list(threads.map(lambda each: ask(cluster, each), fields))
    assert all(len(tokens_of(answer)) == 200 for answer in answers)
    shown = [timeline(cluster, answer.headers["X-Request-Id"]) for answer in answers]
    preempted = [each for each in shown if any(event["code"] == "PREEMPTED" for event in each["events"])]
    assert preempted, "blocks were short, and nobody gave way"
    for each in preempted:
        assert each["outcome"] == "length" and each["num_attempts"] >= 2
        assert any(attempt["end"] == "PREEMPTED" for attempt in each["choices"][0]["attempts"])
    assert cluster.metric("retries_total", "PREEMPTED") > 0
    whole = json.dumps([shown, cluster.get("/v1/requests").json(), cluster.get("/state").json()])
    assert "kumquat" not in whole and "token_ids" not in whole
