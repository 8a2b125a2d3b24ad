"""/health, /state and /metrics say what the parts hold, at the moment of asking."""

from __future__ import annotations

import asyncio
import json
import platform
import re
import socket
from collections.abc import Callable, Mapping
from importlib import metadata
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
from node.roles import RoleName
from node.sizes import EngineSizes
from node.view import NodeFacts, NodeView, Sources
from proto import baton_pb2 as pb
from runtime.http_server import HttpServer
from tests.node.scripted_core import ScriptedCore
from tests.plain_http import NO_CERTIFICATES

OF_EVERY_PROCESS = ("process_", "baton_build_")
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


def seen(
    counters: Counters,
    measures: Measures,
    role: RoleName = "decode",
    moved: Callable[[], Mapping[str, object]] = transport,
) -> tuple[NodeFacts, Sources]:
    """A node of this role. On the loop."""
    facts = NodeFacts(
        identity=NodeIdentity("n0", 0xAB),
        role=role,
        threads=2,
        is_bit_exact=True,
        fingerprint=pb.Fingerprint(dtype="fp32", block_size=16),
        sizes=EngineSizes(16, 25, 256),
    )
    core, ending = LoadedCore(), Ending(25.0, role, frozenset())
    ending.take_up(core)
    sessions = {"peers": dict[str, object]()}
    return facts, Sources(core, counters, measures, moved, lambda: sessions, dict, ending, lambda: True, lambda: 1.8e9)


def samples_of(text: str) -> dict[tuple[str, ...], float]:
    """Each by its name and its labels' values."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def _get(counters: Counters, measures: Measures, *paths: str, is_draining: bool = False) -> list[httpx.Response]:
    facts, sources = seen(counters, measures)
    if is_draining:
        sources.ending.ask("the test")
    view = NodeView(facts, sources)
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
    samples = samples_of(answer.text)
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
    assert samples["baton_node_reserve_refused_total", "NO_BLOCKS"] == 0  # there before the first one
    assert samples["baton_node_writes_refused_total", "CHECKSUM"] == 0
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
    all_families = [f for f in text_string_to_metric_families(answer.text) if not f.name.endswith("_created")]
    families = [f for f in all_families if not f.name.startswith(OF_EVERY_PROCESS)]
    shown = {f.name.removeprefix("baton_node_") + ("_total" if f.type == "counter" else "") for f in families}
    assert all(family.name.startswith("baton_node_") and family.documentation for family in families)
    assert shown == set(re.findall(r"^\| `(\w+)` \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.covers("O01")
def test_what_a_process_takes_of_the_machine_and_its_release_are_there_under_the_names_that_all_have() -> None:
    (answer,) = get(Counters(), "/metrics")
    families = [f for f in text_string_to_metric_families(answer.text) if f.name.startswith(OF_EVERY_PROCESS)]
    shown = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    listed = re.findall(r"^- `((?:process|baton_build)_\w+)`", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert shown == set(listed) and len(listed) == 7
    samples = samples_of(answer.text)
    assert samples["process_resident_memory_bytes",] > 1 << 20 and samples["process_open_fds",] > 2
    assert samples["process_cpu_seconds_total",] > 0
    (build,) = (sample.labels for family in families for sample in family.samples if sample.name == "baton_build_info")
    assert build.pop("version") == metadata.version("baton")
    assert build == {"python": platform.python_version(), "torch": metadata.version("torch")}


@pytest.mark.covers("O01")
def test_what_a_node_has_moved_and_refused_in_an_earlier_role_is_counted_on() -> None:
    """Each role has a transport of its own, which counts from 0; a counter that falls is a process that was restarted."""
    first = {
        "kv_bytes_sent": {"decode-0": 4096, "decode-1": 1},
        "kv_bytes_received": {},
        "links_refused": {"shm": 0, "zmq": 2},
    }
    second = {
        "kv_bytes_sent": {"decode-1": 8},
        "kv_bytes_received": {"prefill-0": 512},
        "links_refused": {"shm": 1, "zmq": 0},
    }

    async def run() -> None:
        view = NodeView(*seen(Counters(), Measures(), "prefill", lambda: first))
        before = samples_of(view.metrics().decode())
        view.show(*seen(Counters(), Measures(), "decode", lambda: second))
        state, now = view.state(), samples_of(view.metrics().decode())
        assert state["kv_bytes_sent"] == {"decode-0": 4096, "decode-1": 9}
        assert state["kv_bytes_received"] == {"prefill-0": 512}
        moved = "baton_node_transfer_bytes_total"
        assert (now[moved, "sent", "decode-0"], now[moved, "sent", "decode-1"]) == (4096, 9)
        assert now[moved, "received", "prefill-0"] == 512
        refused = "baton_node_links_refused_total"
        assert (now[refused, "shm"], now[refused, "zmq"]) == (1, 2)
        counted = [name for name in before if name[0].endswith("_total")]
        assert all(now[name] >= before[name] for name in counted)

    asyncio.run(run())


@pytest.mark.covers("O01")
@pytest.mark.parametrize(("role", "prefills", "decodes"), [("prefill", 1, 0), ("decode", 0, 1), ("mixed", 1, 1)])
def test_a_node_says_what_its_role_does_now(role: RoleName, prefills: int, decodes: int) -> None:
    """Whoever scrapes it knows the role that it began with, at most."""

    async def run() -> None:
        view = NodeView(*seen(Counters(), Measures()))
        view.show(*seen(Counters(), Measures(), role))
        samples = samples_of(view.metrics().decode())
        assert samples["baton_node_prefills",] == prefills and samples["baton_node_decodes",] == decodes

    asyncio.run(run())


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
