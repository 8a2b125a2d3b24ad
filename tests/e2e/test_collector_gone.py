"""A collector of spans that is gone, however long, and is back, or slow: a line each, whatever the library says of every batch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import cast

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from runtime.tracing import QuietExporter


class _Takes(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


FULL_QUEUE = "opentelemetry.sdk._shared_internal"


@pytest.fixture
def library_log() -> Iterator[None]:
    """The library's own logs as they were."""
    logs = [logging.getLogger(name) for name in ("opentelemetry.exporter.otlp", FULL_QUEUE)]
    before = [(log.propagate, log.handlers) for log in logs]
    yield
    for log, (propagates, handlers) in zip(logs, before, strict=True):
        log.propagate, log.handlers = propagates, handlers


@pytest.mark.covers("O04")
@pytest.mark.usefixtures("library_log")
def test_a_collector_that_is_gone_costs_a_line_and_one_when_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    server = HTTPServer(("127.0.0.1", 0), _Takes, bind_and_activate=False)
    server.server_bind()  # its port refuses until it listens
    exporter = QuietExporter(OTLPSpanExporter(endpoint=f"http://127.0.0.1:{server.server_port}/v1/traces", timeout=0.2))
    try:
        assert [exporter.export(()) for _ in range(3)] == [SpanExportResult.FAILURE] * 3
        (line,) = [record.getMessage() for record in caplog.records]
        assert line.startswith("spans_lost reason=") and "Failed to export" in line
        server.server_activate()
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        assert [exporter.export(()) for _ in range(2)] == [SpanExportResult.SUCCESS] * 2
        server.shutdown()
        thread.join()
    finally:
        server.server_close()
        exporter.shutdown()
    assert [record.getMessage().split()[0] for record in caplog.records[1:]] == ["spans_told_again"]


class _Slow:
    """Has a batch for as long as it must, and then says that there was nobody, as the library's own exporters do, or takes it."""

    def __init__(self, result: SpanExportResult) -> None:
        self.has_one, self.may_end = threading.Event(), threading.Event()
        self._result = result

    def export(self, spans: Sequence[object]) -> SpanExportResult:
        self.has_one.set()
        assert self.may_end.wait(30)
        if self._result is SpanExportResult.FAILURE:
            logging.getLogger("opentelemetry.exporter.otlp.proto.http").error("nobody there")
        return self._result

    def shutdown(self) -> None:
        pass

    def force_flush(self, timeout_millis: int = 0) -> bool:
        return True


@pytest.mark.covers("O04")
@pytest.mark.usefixtures("library_log")
@pytest.mark.parametrize("result", [SpanExportResult.SUCCESS, SpanExportResult.FAILURE])
def test_what_finds_no_room_is_said_once_and_is_not_the_reason_of_an_export_that_fails(
    result: SpanExportResult, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    slow = _Slow(result)
    provider = TracerProvider(shutdown_on_exit=False)
    batches = BatchSpanProcessor(
        cast("SpanExporter", QuietExporter(cast("SpanExporter", slow))), max_queue_size=4, max_export_batch_size=2
    )
    provider.add_span_processor(batches)
    tracer = provider.get_tracer("baton")
    try:
        for _ in range(2):
            tracer.start_span("request").end()
        assert slow.has_one.wait(30)
        for number in range(10):
            tracer.start_span("request").end()
            if number == 7:  # the library itself says the same thing once alone, until it has said another one
                logging.getLogger(FULL_QUEUE).warning("Queue full, dropping Span, again")
    finally:
        slow.may_end.set()
        provider.shutdown()
    told = [record.getMessage() for record in caplog.records]
    gone = [] if result is SpanExportResult.SUCCESS else ['spans_lost reason="nobody there"']
    assert told == ['spans_lost reason="the collector is too slow"', *gone]
