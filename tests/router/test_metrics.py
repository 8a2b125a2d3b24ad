"""What the router measures: names with units, values that follow from what happened, and a page that is not stale."""

from __future__ import annotations

import asyncio
import itertools
import math
import re
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from proto import baton_pb2 as pb
from router.entrance import RouterCoreConfig
from router.metrics import HISTOGRAMS, MOST_GONE_CLIENTS, RouterMetrics
from router.node_gauges import node_families, node_text
from router.worker_metrics import merged
from tests.router.core_world import CoreWorld
from tests.router.live_router import LiveRouter, until
from tests.router.metrics_table import HEADING, PAGE, table, used_metrics
from tests.router.scripted_nodes import ScriptedAttempt, replying
from tests.router.test_api import play
from tests.router.tiny_model import write_model_text

IDLE: Final = {
    "queued": 0,
    "live_requests": 0,
    "nodes": {},
    "circuits": {},
    "degraded": [],
    "ready": False,
    "completion_tokens": 0,
    "caches": {},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_text(tmp_path_factory.mktemp("model"))


@pytest.mark.covers("O01")
def test_the_page_of_metrics_is_what_the_registry_says() -> None:
    assert PAGE.read_text(encoding="utf-8").partition(HEADING)[2] == table(), "stale: make docs"


@pytest.mark.covers("O01")
def test_what_a_page_of_figures_needs_is_there() -> None:
    """The row, word by word; of nodes the test of their page holds names and page together."""
    router = {family.name.removeprefix("baton_router_") for family in used_metrics()}
    assert {
        "time_to_first_token_seconds",
        "time_per_output_token_seconds",
        "request_seconds",
        "queue_seconds",
    } <= router
    assert {"retries", "time_to_first_token_part_seconds", "second_token_part_seconds"} <= router
    nodes = (PAGE.parent / "metrics_nodes.md").read_text(encoding="utf-8")
    for name in (
        *("queue_seconds", "reserve_seconds", "transfer_seconds", "transfer_bytes_total", "transfer_failures_total"),
        *("preemptions_total", "blocks", "kv_pool_looks_total", "kv_pool_reads_total"),
    ):
        assert f"| `{name}` |" in nodes, name


def test_what_counts_since_the_start_is_a_counter_and_nothing_else_is() -> None:
    """By its type a Prometheus user knows what to ask of it: `rate` of a gauge is noise."""
    kinds = {family.name: family.type for family in used_metrics()}
    since_the_start = {family.name for family in used_metrics() if "since the start" in family.documentation}
    assert "baton_router_cache_index_dropped" in since_the_start
    assert {kinds[name] for name in since_the_start} == {"counter"}


def test_every_duration_says_its_unit() -> None:
    assert all(shown.endswith("_seconds") for shown, _, _ in HISTOGRAMS.values())


@pytest.mark.covers("O01")
def test_a_workers_process_is_told_of_as_every_other_and_of_several_each_has_its_own() -> None:
    text = RouterMetrics(lambda: IDLE | {"completion_tokens": 0}).render().decode()
    families = {family.name: family.samples for family in text_string_to_metric_families(merged({0: text, 1: text}))}
    for name in ("process_cpu_seconds", "process_resident_memory_bytes", "process_open_fds", "baton_build_info"):
        assert [sample.labels["worker"] for sample in families[name]] == ["0", "1"], name
        assert all(sample.value > 0 for sample in families[name]), name
    assert {sample.labels["version"] for sample in families["baton_build_info"]} == {metadata.version("baton")}


async def measured(router: LiveRouter) -> dict[str, float]:
    """Each sample of /metrics as it is written, without `baton_router_`."""
    families = text_string_to_metric_families((await router.client.get("/metrics")).text)
    return {
        sample.name.removeprefix("baton_router_")
        + "".join(f" {value}" for value in sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.mark.covers("O01")
def test_requests_choices_tokens_and_times_are_measured(model: Path) -> None:
    async def script(attempt: ScriptedAttempt) -> None:
        if attempt.dispatch.prompt_token_ids[-1] == ord("!"):
            attempt.prefill_fails(pb.INCOMPATIBLE, retryable=False)
            return
        await replying(b"hello" if attempt.key.choice else b"hey")(attempt)

    async def scenario(router: LiveRouter) -> None:
        assert (await router.post(n=2, stop="lo")).status_code == 200
        assert (await router.post(prompt="no!")).status_code == 502
        now = await measured(router)
        assert now["requests_total mixed"] == now["requests_total INCOMPATIBLE"] == 1
        assert now["choices_total stop"] == now["choices_total length"] == 1
        assert now["tokens_total prompt"] == 3 + 4
        assert now["tokens_total completion"] == len(b"hey") + len(b"hello")
        assert now["request_seconds_count"] == 2
        assert now["time_to_first_token_seconds_count"] == 1
        assert (now["queue_seconds_count"], now["dispatches_total handoff"]) == (3, 2)  # both choices in one
        assert now["time_per_output_token_seconds_count"] == 2
        assert 0 < now["time_per_output_token_seconds_sum"] < now["request_seconds_sum"] < 10
        assert 0 < now["time_to_first_token_seconds_sum"] < now["request_seconds_sum"]
        assert all(math.isfinite(value) for value in now.values())

    play(model, scenario, script)


@pytest.mark.covers("O01")
def test_tokens_of_a_long_answer_are_counted_while_it_lasts(model: Path) -> None:
    """Else a rate of them is nothing for as long, and leaps at the end."""
    may_end = asyncio.Event()

    async def script(attempt: ScriptedAttempt) -> None:
        attempt.prefill_says(0, b"h")
        attempt.decode_says(0, b"hello")
        await may_end.wait()
        attempt.decode_says(5, b" again", pb.FINISH_LENGTH)

    async def scenario(router: LiveRouter) -> None:
        asked = asyncio.create_task(router.post(max_tokens=50))
        async with asyncio.timeout(60):
            while (now := await measured(router))["tokens_total completion"] < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert now["tokens_total completion"] == 5 and now["requests_total length"] == 0
        may_end.set()
        assert (await asked).status_code == 200
        now = await measured(router)
        assert now["tokens_total completion"] == 11 and now["requests_total length"] == 1

    play(model, scenario, script)


@pytest.mark.covers("O01")
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_choice_that_a_stop_string_ends_is_counted_once(model: Path, is_stream: bool, n: int) -> None:
    """Its client may have all of it before the core has told the node to stop."""

    async def script(attempt: ScriptedAttempt) -> None:
        attempt.prefill_says(0, b"h")
        attempt.decode_says(0, b"hello")
        await until(
            lambda: len(attempt.decode.cancels) >= n
        )  # of all choices; what another says late may be cancelled by now
        attempt.decode_says(5, b" again", pb.FINISH_LENGTH)

    async def scenario(router: LiveRouter) -> None:
        assert (await router.post(n=n, stop="lo", max_tokens=50, stream=is_stream)).status_code == 200
        await until(lambda: len(router.pair.decode.cancels) == 2 * n)  # once more for what it says late
        now = await measured(router)
        assert now["requests_total stop"] == 1
        assert now["choices_total stop"] == now["time_per_output_token_seconds_count"] == n
        assert sum(value for name, value in now.items() if name.startswith("choices_total ")) == n
        (record,) = router.shell.timelines.newest()
        finished = [each for each in record.happenings if each.what == "finished"]
        assert [each.code for each in finished] == ["stop"] * n and {each.choice for each in finished} == {*range(n)}
        assert record.happenings[-1].what == "ended"

    play(model, scenario, script)


async def failing_once(attempt: ScriptedAttempt) -> None:
    """A checksum is wrong at the first attempt; the second one says "ok"."""
    if attempt.dispatch.attempt == 0:
        attempt.prefill_fails(pb.CHECKSUM)
    else:
        await replying(b"ok")(attempt)


@pytest.mark.covers("O01")
def test_retries_are_counted_by_cause(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        await router.post(n=2)
        now = await measured(router)
        assert now["retries_total CHECKSUM"] == now["pd_errors_total CHECKSUM"] == 2
        assert (now["queue_seconds_count"], now["dispatches_total handoff"]) == (4, 3)  # the second ones go alone

    play(model, scenario, failing_once)


@pytest.mark.covers("O01")
def test_a_request_that_no_node_hears_of_is_counted_once_by_what_its_client_was_told(model: Path) -> None:
    """Where it is wrong in itself, or there is nobody to serve it; those refused by the queue are among the requests that ended."""
    wrong: list[dict[str, Any]] = [{"temperature": -1}, {"prompt": ""}, {"model": "other"}, {"max_tokens": 10**6}]
    wrong.append({"prompt": "x" * (1 << 20)})

    async def scenario(router: LiveRouter) -> None:
        codes = [(await router.post(**body)).json()["error"]["code"] for body in wrong]
        router.shell.drain()
        codes.append((await router.post()).json()["error"]["code"])
        assert len(set(codes)) > 4
        now = await measured(router)
        away = {name.split()[1]: value for name, value in now.items() if name.startswith("turned_away_total ")}
        assert {code: number for code, number in away.items() if number} == Counter(codes)
        assert sum(value for name, value in now.items() if name.startswith("requests_total ")) == 0

    play(model, scenario)


@pytest.mark.covers("O01")
def test_whether_a_router_is_ready_and_who_can_take_work_is_measured(model: Path) -> None:
    """An alert needs no prober: /ready is a page that Prometheus does not read."""

    def told(now: dict[str, float]) -> list[float]:
        return [now[name] for name in ("ready", *(f"nodes_ready {role}" for role in ("prefill", "decode", "mixed")))]

    async def scenario(router: LiveRouter) -> None:
        assert told(await measured(router)) == [1, 1, 1, 0]
        (node,) = (node for node, _ in router.shell.nodes() if node.decodes)
        router.shell.on_listed(_with(node.entry, draining=True))
        await until(lambda: bool(router.shell.missing()))
        assert told(await measured(router)) == [0, 1, 0, 0]
        router.shell.on_listed(_with(node.entry, draining=False))
        await until(lambda: not router.shell.missing())
        router.shell.drain()
        assert told(await measured(router)) == [0, 1, 1, 0], "it turns requests away, its nodes would not"

    play(model, scenario)


def _with(entry: pb.NodeEntry, *, draining: bool) -> pb.NodeEntry:
    copied = pb.NodeEntry.FromString(entry.SerializeToString())
    copied.draining = draining
    return copied


@pytest.mark.covers("O01")
def test_a_prompt_that_no_node_was_asked_to_compute_is_no_prompt_to_compute(model: Path) -> None:
    """What share of the prompts was computed is asked of these counts: who is turned away would make it small."""

    async def script(attempt: ScriptedAttempt) -> None:
        await until(lambda: is_full.is_set())
        await replying(b"hey")(attempt)

    async def scenario(router: LiveRouter) -> None:
        served = [asyncio.create_task(router.post(prompt="abc")) for _ in range(2)]
        await until(lambda: router.shell.snapshot()["queued"] == 1)
        assert (await router.post(prompt="x" * 100)).status_code == 429
        is_full.set()
        assert [(await each).status_code for each in served] == [200, 200]
        now = await measured(router)
        assert now["requests_total OVERLOADED"] == 1 and now["requests_total length"] == 2
        assert now["request_seconds_count"] == 2, "who is turned away at once has no duration"
        assert now["tokens_total prompt"] == 2 * (1 + len("abc"))

    is_full = asyncio.Event()
    play(model, scenario, script, core_config=RouterCoreConfig(max_queue=1, max_inflight_prefills=1))


@pytest.mark.covers("O01")
def test_what_is_counted_by_cause_is_there_before_it_happens(model: Path) -> None:
    """A rate needs a beginning: who watches `increase` of a counter that begins with 1 never hears of the first."""
    expected = {
        *("retries_total NODE_LOST", "retries_total PREEMPTED", "pd_errors_total NO_BLOCKS"),
        *("choices_total pd_reschedule", "requests_total OVERLOADED", "requests_total aborted", "moves_total no_room"),
        *("dispatches_total local_absent", "stale_messages_total tokens", "turned_away_total slow"),
        *("turned_away_total invalid_value", "tokens_total completion"),
    }

    async def scenario(router: LiveRouter) -> None:
        before = await measured(router)
        assert {name for name in expected if before.get(name) != 0} == set()
        for n, temperature in ((1, 0), (2, 0), (1, -1)):
            await router.post(n=n, temperature=temperature)
        now = await measured(router)
        counted = {name for name in now if re.match(r"\w+_total( |$)", name)}
        assert counted == {name for name in before if re.match(r"\w+_total( |$)", name)}

    play(model, scenario, failing_once)


@pytest.mark.covers("O01", "X02")
def test_what_is_counted_of_clients_who_have_gone_stays_for_a_while_and_not_for_ever() -> None:
    """As where each tenant's keys are renewed under a new name every day, and a router serves for years."""
    metrics = RouterMetrics(lambda: IDLE)

    def shown() -> set[str]:
        page = metrics.render(names_clients=True).decode()
        found = [set(re.findall(rf'client_{of}_total{{client="([^"]+)"', page)) for of in ("requests", "tokens")]
        assert found[0] == found[1]
        return found[0]

    def use(*names: str) -> None:
        for name in names:
            metrics.client_asked(name)
            metrics.client_used(name, "prompt", 1)
            metrics.client_used(name, "completion", 1)

    of_days = [[f"{tenant}-{day}" for tenant in range(MOST_GONE_CLIENTS // 4)] for day in range(7)]
    for names in of_days:
        use("always", *names)
        metrics.clients_are({"always", *names})
    assert shown() == {"always", *itertools.chain(*of_days[2:])}, "of who has gone the last four days'"
    use(of_days[2][0])  # a stream that has only now come to its end
    metrics.clients_are({"always"})
    assert shown() == {"always", of_days[2][0], *itertools.chain(*of_days[3:])} - {of_days[3][0]}
    metrics.clients_are({"always", of_days[3][1]})
    use(of_days[3][1])
    assert "always" in shown() and of_days[3][1] in shown(), "who has come back"


def with_nodes(number: int) -> dict[str, Any]:
    node = {"role": "decode", "session": "up", "takes_work": True, "prefilling": 0, "branches": 3}
    circuits = {f"decode-{index}": "closed" for index in range(number)}
    return IDLE | {"nodes": {f"{name}@1": node for name in circuits}, "circuits": circuits}


class Families(Collector):
    """For prometheus_client's own writer."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


@pytest.mark.covers("O01")
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=5) | st.sampled_from(["a\nb", 'say "hi"', "back\\slash", "x@y", "é"]),
        st.tuples(st.sampled_from(["up", "lost"]), st.integers(0, 999_999), st.sampled_from(["closed", "open"])),
        max_size=4,
    )
)
def test_what_is_said_of_nodes_is_written_as_prometheus_client_writes_it(
    nodes: dict[str, tuple[str, int, str]],
) -> None:
    state = {
        "nodes": {
            f"{name}@1": {"role": "decode", "session": session, "prefilling": 0, "branches": number}
            for name, (session, number, _) in nodes.items()
        },
        "circuits": {name: circuit for name, (_, _, circuit) in nodes.items()},
    }
    assert node_text(state).encode() == generate_latest(Families(node_families(state)))


@pytest.mark.covers("O01")
def test_a_page_names_each_of_a_thousand_nodes_once() -> None:
    text = RouterMetrics(lambda: with_nodes(1000)).render().decode()
    assert text.count("baton_router_node_up{") == 1000
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = families["baton_router_node_branches"].samples
    assert len({sample.labels["node"] for sample in samples}) == len(samples) == 1000
    assert {sample.value for sample in samples} == {3.0}


@pytest.mark.covers("O01", "R18")
def test_the_circuit_of_a_node_that_fails_is_shown_open_and_nobody_elses() -> None:
    world = CoreWorld.with_nodes("p1", "d1", breaker_failures=1, preempt_retry_count=9)
    world.submit("a")
    world.error_from("d1", "a", pb.INTERNAL)
    text = RouterMetrics(lambda: {**IDLE, **world.core.figures()}).render().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    shown = {sample.labels["node"]: sample.value for sample in families["baton_router_node_circuit_open"].samples}
    assert shown == {"p1": 0, "d1": 1}
