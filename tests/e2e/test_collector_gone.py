"""A collector of spans that is gone, however long, and is back: a line each, whatever the library says of every batch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SpanExportResult

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
        logging.getLogger(FULL_QUEUE).warning("Queue full, dropping Span.")  # what its batches say of a busy process
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
