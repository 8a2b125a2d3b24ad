"""Logging: one line is one event with key=value, on stderr, the same form in every process.

`log_event(logger, logging.INFO, "request_ended", request=request_id, tokens=12)` prints
`12:00:00.123 INFO router request_ended request=… tokens=12`. Not here: what is logged; prompts and keys never are.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import Final

LEVELS: Final = ("debug", "info", "warning", "error")
_BARE: Final = re.compile(r"[^\s\"=]+")


def set_up_logging(level: str, process: str) -> None:
    """Send records of `level` (one of LEVELS) and above to stderr, each line naming this process; called once, by an entry."""
    handler = logging.StreamHandler(sys.stderr)
    line = f"%(asctime)s.%(msecs)03d %(levelname)s {process} %(message)s"
    handler.setFormatter(logging.Formatter(line, datefmt="%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)


def log_event(logger: logging.Logger, level: int, event: str, /, **values: object) -> None:
    """Log one event; a value with spaces, quotes or `=` is quoted, so that a line can be split again."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s", " ".join([event, *(f"{key}={_spelled(value)}" for key, value in values.items())]))


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
