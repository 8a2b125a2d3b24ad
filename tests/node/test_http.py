"""/health, /state and /metrics say what the parts hold, at the moment of asking."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.sequence import Phase
from node.ending import Ending
from node.http import make_app
from node.identity import NodeIdentity
from node.measures import Measures
from node.metrics import Counters
from node.sizes import EngineSizes
from node.view import NodeFacts, NodeView, Sources
from proto import baton_pb2 as pb
from runtime.http_server import HttpServer
from tests.node.scripted_core import ScriptedCore
from tests.plain_http import NO_CERTIFICATES

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics_nodes.md"


class LoadedCore(ScriptedCore):
    """Holds something of everything."""

    def load(self) -> pb.LoadReport:
        return pb.LoadReport(
            waiting=1, running=2, blocks_free=3, blocks_cached=4, blocks_used=5, blocks_leased=6, blocks_quarantined=7
        )

    def snapshot(self) -> Mapping[str, object]:
        phases = [Phase.WAITING, Phase.RUNNING_DECODE, Phase.RUNNING_DECODE, Phase.PREEMPTING]
        scheduler = {
            "phases": {("not", "json-able", number): phase for number, phase in enumerate(phases)},
            "num_preempted": 11,
            "reserve": 0.5,
        }
        return {"leases": 8, "branches": 9, "waiting_reserves": 3, "scheduler": scheduler}


def transport() -> Mapping[str, object]:
    return {"kv_bytes_sent": {"decode-0": 4096}, "kv_bytes_received": {"prefill-0": 512}, "links": 1}


async def _get(counters: Counters, measures: Measures, *paths: str, is_draining: bool = False) -> list[httpx.Response]:
    facts = NodeFacts(
        identity=NodeIdentity("n0", 0xAB),
        role="decode",
        threads=2,
        is_bit_exact=True,
        fingerprint=pb.Fingerprint(dtype="fp32", block_size=16),
        sizes=EngineSizes(16, 25, 256),
    )
    core = LoadedCore()
    ending = Ending(25.0, "decode", frozenset())
    ending.take_up(core)
    if is_draining:
        ending.ask("the test")
    view = NodeView(
        facts, Sources(core, counters, measures, transport, lambda: {"peers": {}}, dict, ending, lambda: True)
    )
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with (
        asyncio.timeout(120),
        asyncio.TaskGroup() as tasks,
        httpx.AsyncClient(base_url=url, verify=NO_CERTIFICATES, timeout=60) as client,
    ):
        server = HttpServer(make_app(view), listener)
        tasks.create_task(server.run())
        answers = [await client.get(path) for path in paths]
        server.stop()
    return answers


def get(counters: Counters, *paths: str, measures: Measures | None = None) -> list[httpx.Response]:
    return asyncio.run(_get(counters, measures or Measures(), *paths))


def test_state_shows_blocks_queues_bytes_and_who_it_is() -> None:
    counters = Counters()
    counters.count("stale_refused", 3)
    health, answer = get(counters, "/health", "/state")
    assert health.json() == {"status": "ok", "node_id": "n0"}
    state = json.loads(answer.text)
    assert state["blocks"] == {"free": 3, "cached": 4, "used": 5, "leased": 6, "quarantined": 7}
    assert (state["waiting"], state["running"], state["leases"]) == (1, 2, 8)
    assert (state["node_id"], state["role"], state["incarnation"]) == ("n0", "decode", "00000000000000ab")
    assert (state["threads"], state["bit_exact"]) == (2, True)
    assert (state["kv_bytes_sent"], state["kv_bytes_received"]) == ({"decode-0": 4096}, {"prefill-0": 512})
    assert state["fingerprint"] == {"dtype": "fp32", "block_size": 16}
    assert state["counters"]["stale_refused"] == 3
    assert state["attempts"] == {"branches": 9, "waiting_reserves": 3}
    assert state["scheduler"]["sequences"] == {
        "waiting": 1,
        "running_prefill": 0,
        "running_decode": 2,
        "preempting": 1,
        "paused": 0,
        "finished": 0,
    }
    assert (state["scheduler"]["preemptions"], state["scheduler"]["reserve"]) == (11, 0.5)


@pytest.mark.covers("D03", "O01", "S15")
def test_metrics_count_leased_blocks_as_taken_and_parse() -> None:
    counters = Counters()
    counters.count("reserve_refused_busy", 2)
    measures = Measures()
    measures.observe("transfer_seconds", 0.25)
    measures.add("tokens_computed", "decode", 3)
    (answer,) = get(counters, "/metrics", measures=measures)
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert samples["baton_node_blocks", "leased"] == 6  # not free
    assert samples["baton_node_blocks", "free"] == 3
    assert samples["baton_node_leases",] == 8
    assert samples["baton_node_reserves_waiting",] == 3
    assert samples["baton_node_sequences", "running_decode"] == 2
    assert samples["baton_node_sequences", "waiting"] == 1
    assert samples["baton_node_preemptions_total",] == 11
    assert samples["baton_node_reserve",] == 0.5
    assert samples["baton_node_sequences_waiting",] == 1
    assert samples["baton_node_reserve_refused_total", "BUSY"] == 2
    assert samples["baton_node_transfer_bytes_total", "sent", "decode-0"] == 4096
    assert samples["baton_node_transfer_bytes_total", "received", "prefill-0"] == 512
    assert samples["baton_node_transfer_seconds_count",] == 1
    assert samples["baton_node_transfer_seconds_bucket", "0.25"] == 1  # a bucket's bound is in it
    assert samples["baton_node_transfer_seconds_bucket", "0.1"] == 0
    assert samples["baton_node_tokens_computed_total", "decode"] == 3
    assert samples["baton_node_transfer_failures_total", "TRANSFER_FAILED"] == 0  # there before the first one
    assert (
        samples["baton_node_attempts_ended_total", "PREEMPTED"]
        == samples["baton_node_attempts_ended_total", "moved"]
        == 0
    )


@pytest.mark.covers("O01")
def test_every_metric_is_documented_and_every_documented_metric_is_there() -> None:
    (answer,) = get(Counters(), "/metrics")
    families = [f for f in text_string_to_metric_families(answer.text) if not f.name.endswith("_created")]
    shown = {f.name.removeprefix("baton_node_") + ("_total" if f.type == "counter" else "") for f in families}
    assert all(family.name.startswith("baton_node_") and family.documentation for family in families)
    assert shown == set(re.findall(r"^\| `(\w+)` \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.covers("D08")
def test_a_draining_node_is_healthy_takes_no_work_and_says_so_everywhere() -> None:
    paths = ("/health", "/ready", "/state", "/metrics")
    serving = asyncio.run(_get(Counters(), Measures(), *paths))
    draining = asyncio.run(_get(Counters(), Measures(), *paths, is_draining=True))
    assert [answer.status_code for answer in serving] == [200] * 4
    assert [answer.status_code for answer in draining] == [200, 503, 200, 200]
    assert [answer.json()["status"] for answer in (serving[0], draining[0])] == ["ok", "draining"]
    assert [answer.json()["ready"] for answer in (serving[1], draining[1])] == [True, False]
    assert [answer.json()["stage"] for answer in (serving[2], draining[2])] == ["serving", "draining"]
    assert "baton_node_draining 0.0" in serving[3].text and "baton_node_draining 1.0" in draining[3].text


def test_on_a_kept_connection_no_answer_waits_for_an_acknowledgement() -> None:
    """A client acknowledges the first part of an answer 40 ms late; nothing is to depend on it. The best of many counts."""
    answers = get(Counters(), *["/health"] * 100)
    assert min(answer.elapsed.total_seconds() for answer in answers[10:]) < 0.03
