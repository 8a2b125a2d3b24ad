"""Logging: one line is one event with values, on stderr, the same form in every process: `key=value`, or JSON.

`log_event(logger, logging.INFO, "request_ended", request=request_id, tokens=12)` prints

    2026-11-21T12:00:00.123Z INFO router request_ended request=… tokens=12
    {"time": "2026-11-21T12:00:00.123Z", "level": "INFO", "process": "router", "event": "request_ended", "request": "…", …}

Rooms that may not import this one log `_LOG.info("event=link_closed link=%s reason=%s", …)`, of which comes the same line: its
fields are taken from its form and not from what was put into it. Not here: what is logged; prompts and keys never are.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, Literal

LEVELS: Final = ("debug", "info", "warning", "error")
LogFormat = Literal["text", "json"]
_BARE: Final = re.compile(r"[^\s\"=]+")
_FIELD: Final = re.compile(r"(\w+)=(?:%[\d.]*[a-z]|(\S+))")
_NOT_OF_THE_EVENT: Final = ("logger", "message")  # fields of a record that came with a form


class _Event:
    """What log_event says: text once somebody writes it."""

    def __init__(self, name: str, values: Mapping[str, object]) -> None:
        self.name = name
        self.values = values

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{key}={_spelled(value)}" for key, value in self.values.items())])


def _instant(record: logging.LogRecord) -> str:
    """When it was said, in UTC (ISO 8601): hosts' lines can be put into one order, and a night's told apart from the next."""
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _JsonFormatter(logging.Formatter):
    """One object a line, ASCII, so that no value can end the line or fake another."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        line: dict[str, Any] = {"time": _instant(record), "level": record.levelname, "process": self._process}
        for name, value in _fields(record).items():
            line.setdefault(name, value if isinstance(value, int | float | bool | None) else str(value))
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _TextFormatter(logging.Formatter):
    """`key=value`."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process} %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """As in JSON."""
        return _instant(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """As logging does it, once the record is the line of an event, if it is one."""
        if not isinstance(record.msg, _Event) and str(record.msg).startswith("event="):
            fields = {name: value for name, value in _fields(record).items() if name not in _NOT_OF_THE_EVENT}
            record.message = str(_Event(str(fields.pop("event")), fields))
        return super().formatMessage(record)


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    """Its event and values; of what others log, the message."""
    if isinstance(record.msg, _Event):
        return {"event": record.msg.name, **record.msg.values}
    form = str(record.msg)
    fields: dict[str, object] = {"event": "log", "logger": record.name}
    arguments = iter(record.args if isinstance(record.args, tuple) else ())
    if "=%" in form or form.startswith("event="):
        fields["event"] = form.split()[0]
        for name, fixed in _FIELD.findall(form):
            fields[name] = fixed or next(arguments, None)
    return fields | {"message": record.getMessage()}


def set_up_logging(level: str, process: str, log_format: LogFormat = "text") -> None:
    """Send records of `level` (one of LEVELS) and above to stderr, each line naming this process; called once, by an entry."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(process) if log_format == "json" else _TextFormatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)


def log_event(logger: logging.Logger, level: int, event: str, /, **values: object) -> None:
    """Log one event; a value with spaces, quotes or `=` is quoted, so that a line can be split again."""
    if logger.isEnabledFor(level):
        logger.log(level, _Event(event, values))


def _spelled(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    if _BARE.fullmatch(text) and text.isprintable():
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return '"' + printable(escaped) + '"'


def printable(text: str) -> str:
    """The text with what a terminal would obey, and not show, written out: it may be a stranger's."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
