"""OpenTelemetry spans of a real cluster, as a collector gets them; and that without a collector nothing of it is there."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from proto import baton_pb2 as pb
from router.spans import RequestSpans
from runtime.tracing import (
    CLOSE_TIMEOUT_S,
    MAX_TRACESTATE,
    NOBODY,
    TraceContext,
    Tracing,
    endpoint_problem,
    sound_tracestate,
)
from tests import forked
from tests.e2e.fault_clients import Stream, body
from tests.e2e.role_by_role import started_role_by_role, wait_until

TRACE: Final = "0af7651916cd43dd8448eb211c80319c"
CLIENTS_SPAN: Final = "b7ad6b7169203331"
ERROR: Final = 2  # StatusCode of a span that failed


class Collector:
    """Spans that were told, as dictionaries."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[dict[str, Any]] = []

    def take(self, content: bytes) -> None:
        """One request's."""
        for resource in ExportTraceServiceRequest.FromString(content).resource_spans:
            service = {each.key: each.value.string_value for each in resource.resource.attributes}["service.name"]
            for scope in resource.scope_spans:
                for span in scope.spans:
                    attributes = {
                        each.key.removeprefix("baton."): getattr(each.value, str(each.value.WhichOneof("value")))
                        for each in span.attributes
                    }
                    self.spans.append(
                        attributes
                        | {"service": service, "name": span.name, "status": span.status.code}
                        | {"id": span.span_id.hex(), "parent": span.parent_span_id.hex(), "trace": span.trace_id.hex()}
                        | {
                            "state": span.trace_state,
                            "start": span.start_time_unix_nano,
                            "end": span.end_time_unix_nano,
                        }
                    )

    def named(self, name: str, request: str) -> list[dict[str, Any]]:
        """A request's spans of this name, in the order of their beginnings."""
        found = [span for span in self.spans if span["name"] == name and span["request_id"] == request]
        return sorted(found, key=lambda span: int(span["start"]))


@contextmanager
def collecting() -> Iterator[Collector]:
    """An OTLP receiver on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == "/v1/traces"
            collector.take(content)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.covers("O04")
def test_the_spans_of_router_prefill_and_decode_share_the_clients_trace_and_nest(
    tiny_model: Path, tmp_path: Path, fresh_seed: int
) -> None:
    """One request that goes well, and one whose decode node is killed."""
    rng = random.Random(fresh_seed)
    with collecting() as collector, ThreadPoolExecutor(1) as threads:
        told = ("--otlp-endpoint", collector.url)
        flags = {"router": told, "prefill-0": told, "decode-0": told, "decode-1": told}
        with started_role_by_role(tiny_model, tmp_path, flags) as cluster:
            states = [("tracestate", "one=1"), ("tracestate", "t@two=2,")]  # a header may come in parts
            headers = httpx.Headers([("traceparent", f"00-{TRACE}-{CLIENTS_SPAN}-01"), *states])
            fields = body(rng, 40, 6)
            answer = httpx.post(
                f"{cluster.url}/v1/completions", json=fields, headers=headers, trust_env=False, timeout=60
            )
            request = answer.headers["X-Request-Id"]
            with cluster.slow_steps(0.05):
                stream = Stream(cluster, threads, body(rng, 40, 400))
                stream.take_tokens(5)
                listed = cluster.get("/v1/requests").json()["data"][0]
                cluster.kill(next(name for name in listed["nodes"] if name.startswith("decode")))
            stream.take_all()
            assert len(stream.token_ids) == 400
            other = stream.request_id
            wait_until(
                "all spans are told",
                lambda: (
                    len(collector.named("decode", other)) == 1 == len(collector.named("request", other))
                    and len(collector.named("prefill", other)) == 2
                    and len(collector.named("prefill", request)) == 1 == len(collector.named("request", request))
                ),
            )

        (root,) = collector.named("request", request)
        assert (root["trace"], root["parent"], root["service"]) == (TRACE, CLIENTS_SPAN, "baton-router")
        (attempt,) = collector.named("attempt", request)
        (prefill,) = collector.named("prefill", request)
        assert (attempt["parent"], prefill["parent"]) == (root["id"], attempt["id"])
        assert prefill["service"] == "baton-prefill" and prefill["outcome"] == "ok" and prefill["prefill_us"] > 0
        assert root["completion_tokens"] == 6 and root["prompt_tokens"] == 40 and root["outcome"] == "length"
        assert [each["state"] for each in (root, attempt, prefill)] == ["one=1,t@two=2"] * 2 + [""], (
            "the router's alone"
        )
        assert root["start"] <= attempt["start"] and attempt["end"] <= root["end"]

        lost, last = collector.named("attempt", other)
        assert (lost["status"], last["status"]) == (ERROR, 0) and lost["receiver"] != last["receiver"]
        (root,) = collector.named("request", other)
        assert lost["parent"] == last["parent"] == root["id"] and root["parent"] == ""
        first, second = collector.named("prefill", other)
        assert (first["parent"], second["parent"]) == (lost["id"], last["id"])
        (decode,) = collector.named("decode", other)
        assert decode["parent"] == second["id"] and decode["node"] == last["receiver"] and decode["attempt"] == 1
        assert decode["service"] == "baton-decode" and decode["first_step_us"] > 0
        assert {span["trace"] for span in (root, lost, last, first, second, decode)} == {root["trace"]} != {TRACE}


@pytest.mark.covers("O04")
def test_a_requests_span_begins_when_it_came_and_not_when_it_had_been_read() -> None:
    """What reading, checking and tokenizing it took is time that its client waited for."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans = RequestSpans(Tracing(provider, provider.get_tracer("test")))
    spans.begin("r", NOBODY, 8, 1, 90.0)
    spans.dispatch("p", pb.Dispatch(request_id="r", branches=[pb.Branch()]))
    spans.ended("r", "length", 1, None)
    attempt, request = exporter.get_finished_spans()
    times = [each or 0 for each in (request.start_time, attempt.start_time, attempt.end_time, request.end_time)]
    assert times == sorted(times) and 90e9 <= times[1] - times[0] < 150e9


@pytest.mark.covers("O04")
@pytest.mark.parametrize(
    ("header", "passed_on"),
    [
        ("one=1 , t@two=a b,", "one=1,t@two=a b"),
        ("", ""),
        ("one=1,Two=2", ""),  # broken, and nobody knows where
        ("one=1,no member", ""),
        (",".join(f"k{i:02}={'v' * 20}" for i in range(40)), ",".join(f"k{i:02}={'v' * 20}" for i in range(20))),
        (",".join(["a=1", f"long={'v' * 200}", *(f"k{i:02}={'v' * 60}" for i in range(6))]), None),
        (",".join(f"k{i}=1" for i in range(50)), ",".join(f"k{i}=1" for i in range(32))),
        (f"a=1,b={'v' * 200}", f"a=1,b={'v' * 200}"),  # there is room
    ],
)
def test_of_a_clients_tracestate_so_much_is_passed_on_as_w3c_says_and_none_of_a_broken_one(
    header: str, passed_on: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    found = sound_tracestate(header)
    expected = ",".join(each for each in header.split(",") if "long" not in each) if passed_on is None else passed_on
    assert found == expected and len(found) <= MAX_TRACESTATE
    provider = TracerProvider(shutdown_on_exit=False)
    span = Tracing(provider, provider.get_tracer("test")).begin(
        "r", TraceContext(f"00-{TRACE}-{CLIENTS_SPAN}-01", header)
    )
    assert span.context.tracestate == expected
    assert not caplog.records, "the library logs what it cannot read, which is the client's"


ENDING = """
import sys, uvloop
from runtime.tracing import NOBODY, open_tracing

async def run():
    tracing = open_tracing(sys.argv[1], "router", "r")
    for _ in range(2000):  # the library tells 512 at a time, and gives up on each by itself
        tracing.begin("request", NOBODY).end()
    print("ending", flush=True)
    await tracing.close()

uvloop.run(run())
"""


@pytest.mark.covers("O04")
def test_a_collector_that_takes_spans_and_never_answers_holds_up_no_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the system accepts
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with subprocess.Popen([sys.executable, "-c", ENDING, url], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "ending\n"
            began = time.monotonic()
            assert process.wait(60) == 0
            assert time.monotonic() - began < CLOSE_TIMEOUT_S + 3


@pytest.mark.covers("O04")
def test_without_an_endpoint_nothing_of_opentelemetrys_sdk_is_imported() -> None:
    """FastAPI imports the library's interface whatever we do; what costs something is behind it."""
    code = (
        "import sys, router.process, node.process\n"
        "from runtime.tracing import open_tracing\n"
        "assert open_tracing(None, 'router', 'r') is None\n"
        "costly = ('opentelemetry.sdk', 'opentelemetry.exporter')\n"
        "sys.exit(', '.join(name for name in sys.modules if name.startswith(costly)) or None)"
    )
    result = forked.run([sys.executable, "-c", code], timeout=120)
    assert result.returncode == 0, result.stderr


@pytest.mark.covers("O04")
@pytest.mark.parametrize(
    "endpoint",
    [
        *("http://", "http://:4318", "http://host:99999", "http://host:0", "http://[::1", "https://host:port"),
        *("http://a b:4318", "http://host?x=1", "http://host/#x", "http://host\n"),
    ],
)
def test_an_endpoint_where_nobody_can_ever_be_told_is_refused_and_not_told_each_second(endpoint: str) -> None:
    assert (problem := endpoint_problem(endpoint)) is not None and "--otlp-endpoint" in problem
    assert "http(s)://HOST[:PORT]" in problem


@pytest.mark.covers("O04")
@pytest.mark.parametrize(
    "endpoint", [None, "http://host", "https://[::1]:4318/", "http://user:word@host_1:4318/prefix"]
)
def test_an_endpoint_that_may_be_one_is_taken(endpoint: str | None) -> None:
    assert endpoint_problem(endpoint) is None


@pytest.mark.covers("O04")
@pytest.mark.parametrize("module", [("router",), ("deploy.node_process", "decode")])
def test_a_wrong_endpoint_and_a_missing_library_are_one_line(
    tiny_model: Path, tmp_path: Path, module: tuple[str, ...]
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['opentelemetry.sdk'] = None")
    for endpoint, sentence in (
        ("collector:4318", "must begin with http"),
        ("http://127.0.0.1:9", "pip install -c constraints.txt -e '.[trace]'"),
    ):
        command = [sys.executable, "-m", *module, "--model", str(tiny_model), "--otlp-endpoint", endpoint]
        command += ["--port", "0"] if module == ("router",) else ["--router", "127.0.0.1:9"]
        environment = dict(os.environ, PYTHONPATH=str(tmp_path))
        result = forked.run(command, timeout=60, env=environment)
        assert result.returncode == 2 and sentence in result.stderr and len(result.stderr.splitlines()) == 1, (
            result.stderr
        )
