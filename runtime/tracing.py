"""OpenTelemetry spans, told to a collector over OTLP/HTTP, where an endpoint is given; without one nothing of it is imported.

Spans are begun and ended where a request changes hands, never per token. Their context is W3C's `traceparent`
(https://www.w3.org/TR/trace-context/), which processes pass on as text; a client's `tracestate` is kept to the router's own spans.
What is told is batched by a thread of the library; a collector that is slow or gone costs spans and a few lines, never a request.
No prompt, token or key is in any of them.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple, cast
from urllib.parse import urlsplit

from runtime.logs import log_event
from runtime.threads import started_thread

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.trace import Span, Tracer

Attribute = str | int | float | bool
EXPORT_EVERY_MS: Final = 1000
CLOSE_TIMEOUT_S: Final = 2.0  # for what is not told yet when the process ends
MAX_TRACESTATE: Final = 512  # characters: what W3C asks everybody to pass on
_MAX_MEMBERS: Final = 32
_LONG_MEMBER: Final = 128
_MEMBER: Final = re.compile(
    r"([a-z][_0-9a-z*/-]{0,255}|[a-z0-9][_0-9a-z*/-]{0,240}@[a-z][_0-9a-z*/-]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)

_LOG: Final = logging.getLogger(__name__)
# What says two lines of each batch that finds no collector, and what says one of spans that find no room: events of ours.
_EXPORTERS_LOG: Final = "opentelemetry.exporter.otlp"
_QUEUES_LOG: Final = "opentelemetry.sdk._shared_internal"
_FULL: Final = "Queue full"  # how its line begins


class TraceContext(NamedTuple):
    """Whose span another one is within, as W3C's two headers say it; empty: nobody's."""

    traceparent: str = ""
    tracestate: str = ""  # of the tracing systems that the trace has been through


NOBODY: Final = TraceContext()


class NoTracing(ValueError):
    """What is asked for cannot be had; the message is one sentence."""


class TracedSpan:
    """A span that has begun and not ended."""

    def __init__(self, span: Span) -> None:
        self._span = span
        context = span.get_span_context()
        # What others are to name as their parent.
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
        self.context = TraceContext(self.traceparent, context.trace_state.to_header())

    def note(self, name: str, **attributes: Attribute) -> None:
        """Something happened meanwhile."""
        self._span.add_event(name, {f"baton.{key}": value for key, value in attributes.items()})

    def describe(self, **attributes: Attribute) -> None:
        """More is known of it."""
        self._span.set_attributes({f"baton.{key}": value for key, value in attributes.items()})

    def end(self, error: str | None = None) -> None:
        """It is over; with an error if it failed."""
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class QuietExporter:
    """An exporter whose collector may be gone for days: said once when it goes, and once when it is back.

    From its making on, what the library's own exporters log is only the reason in that line, and what its queue logs is one line
    more: a collector that answers, but more slowly than spans are made, fails no export.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._is_gone = False
        self._said = _FirstSaid()
        for name, handler in ((_EXPORTERS_LOG, self._said), (_QUEUES_LOG, _QueueFull())):
            log = logging.getLogger(name)
            log.propagate = False
            log.handlers = [handler]

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """As SpanExporter; on the library's thread."""
        self._said.why = ""
        result = self._exporter.export(spans)
        if (is_gone := result.name != "SUCCESS") is not self._is_gone:
            self._is_gone = is_gone
            if is_gone:
                log_event(_LOG, logging.WARNING, "spans_lost", reason=self._said.why or result.name)
            else:
                log_event(_LOG, logging.INFO, "spans_told_again")
        return result

    def shutdown(self) -> None:
        """As SpanExporter."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """As SpanExporter."""
        return self._exporter.force_flush(timeout_millis)


class _FirstSaid(logging.Handler):
    """Keeps the first thing that was said since `why` was emptied: the cause, which what follows from it comes behind."""

    why = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.why = self.why or record.getMessage()


class _QueueFull(logging.Handler):
    """Says once that spans were dropped, made faster than they can be told, and all else that the queue has to say at all."""

    _is_said = False

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if not message.startswith(_FULL):
            if record.levelno >= logging.WARNING:
                why = record.exc_info[1] if record.exc_info else None
                log_event(_LOG, record.levelno, "spans_lost", reason=message if why is None else f"{message} {why!r}")
        elif not self._is_said:
            self._is_said = True
            log_event(_LOG, logging.WARNING, "spans_lost", reason="the collector is too slow")


class Tracing:
    """One process's spans."""

    def __init__(self, provider: TracerProvider, tracer: Tracer) -> None:
        self._provider = provider
        self._tracer = tracer

    def begin(self, name: str, within: TraceContext, *, ago_s: float = 0.0, **attributes: Attribute) -> TracedSpan:
        """A span within another one; within none, or one that is no span's name, it begins a trace.

        `ago_s`: so long ago it began.
        """
        from opentelemetry.context import Context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        told = {"traceparent": within.traceparent, "tracestate": sound_tracestate(within.tracestate)}
        parent = TraceContextTextMapPropagator().extract(told, Context())
        named = {f"baton.{key}": value for key, value in attributes.items()}
        begun_at = time.time_ns() - int(ago_s * 1e9)
        return TracedSpan(self._tracer.start_span(name, parent, attributes=named, start_time=begun_at))

    async def close(self) -> None:
        """Tell what is left, within a bounded time.

        The library itself waits for its own thread for 30 s: on a thread that the process may leave behind, as it may not one of
        the loop's.
        """
        telling = asyncio.wrap_future(started_thread("spans-close", self._provider.shutdown))
        with suppress(TimeoutError):
            await asyncio.wait_for(telling, CLOSE_TIMEOUT_S)


def sound_tracestate(header: str) -> str:
    """What is passed on of a client's tracestate: nothing of one that is broken, else as many of its members as there is room for.

    The first ones are kept, which are the newest, and long ones go before others, as W3C asks. The library logs what is broken.
    """
    members = [member for each in header.split(",") if (member := each.strip(" \t"))]
    if not all(map(_MEMBER.fullmatch, members)):
        return ""
    if len(",".join(members)) > MAX_TRACESTATE:
        members = [member for member in members if len(member) <= _LONG_MEMBER]
    members = members[:_MAX_MEMBERS]
    while len(",".join(members)) > MAX_TRACESTATE:
        members.pop()
    return ",".join(members)


def open_tracing(endpoint: str | None, service: str, name: str) -> Tracing | None:
    """Spans of the process `name` of the service, told to the collector at `endpoint` (`http://HOST:4318`); None without one.

    Raises NoTracing where the library is not installed.
    """
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise NoTracing(
            "--otlp-endpoint: needs OpenTelemetry's SDK: pip install -c constraints.txt -e '.[trace]'"
        ) from None
    resource = Resource.create({"service.name": f"baton-{service}", "service.instance.id": name})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=CLOSE_TIMEOUT_S)
    quiet = cast("SpanExporter", QuietExporter(exporter))
    provider.add_span_processor(BatchSpanProcessor(quiet, schedule_delay_millis=EXPORT_EVERY_MS))
    return Tracing(provider, provider.get_tracer("baton"))


def endpoint_problem(endpoint: str | None) -> str | None:
    """What is wrong with --otlp-endpoint, in one sentence; the library would say it each second, and serve on."""
    if endpoint is None:
        return None
    if not endpoint.startswith(("http://", "https://")):
        return f"--otlp-endpoint {endpoint}: must begin with http:// or https://"
    try:
        parts = urlsplit(endpoint)
        is_sound = bool(parts.hostname) and parts.port != 0 and not (parts.query or parts.fragment)
    except ValueError:  # no number, no address
        is_sound = False
    is_one_word = not re.search(r"\s", endpoint)
    return None if is_sound and is_one_word else f"--otlp-endpoint {endpoint!r}: must be http(s)://HOST[:PORT][/PREFIX]"
