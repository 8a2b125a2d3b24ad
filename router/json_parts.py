"""JSON too long to be written at one go, as text in parts. Pure.

A long array is given as `Sliced`, or as an iterator of values that hold such arrays; each bit of it is made only when its turn
comes. Who writes the parts can do other work between them, and no more than one bit ever exists as objects.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

ENTRIES_PER_SLICE: Final = 256  # names with a number each: about 4 ms
# What Unicode takes for a line's end and neither JSON nor server-sent events do; clients that read lines (httpx's do) cut there.
_LINE_ENDS: Final = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}

Dump = Callable[[object], str]


@dataclass(frozen=True, slots=True)
class Sliced:
    """An array, slice by slice, none of them empty; can be read once."""

    slices: Iterator[Sequence[object]]


def dump_ascii(value: object) -> str:
    """All of it at once, ASCII."""
    return _ASCII.encode(value)


def dump_unicode(value: object) -> str:
    """All of it at once, in one line; half a surrogate pair, which no UTF-8 can hold, is left to the reader of the text."""
    return in_one_line(_UNICODE.encode(value))


def in_one_line(text: str) -> str:
    """The same JSON without what any reader may take for a line's end; the others JSON escapes by itself."""
    return text if text.isascii() else text.translate(_LINE_ENDS)


def json_parts(value: object, dump: Dump) -> Iterator[str]:
    """The JSON that `dump` would write; no part holds more than one slice, or one value that has none."""
    match value:
        case dict():
            lead = "{"
            for name, each in value.items():
                yield f"{lead}{dump(name)}:"
                yield from json_parts(each, dump)
                lead = ","
            yield "}" if value else "{}"
        case Sliced(slices):
            yield "["
            for index, each in enumerate(slices):
                yield ("," if index else "") + dump(each)[1:-1]
            yield "]"
        case Iterator():
            yield "["
            for index, each in enumerate(value):
                if index:
                    yield ","
                yield from json_parts(each, dump)
            yield "]"
        case _:
            yield dump(value)


def _as_list(value: object) -> list[object]:
    match value:
        case Sliced(slices):
            return [each for one in slices for each in one]
        case Iterator():
            return list(value)
    raise TypeError(f"{type(value).__name__} is no JSON")


_ASCII: Final = json.JSONEncoder(separators=(",", ":"), default=_as_list)
_UNICODE: Final = json.JSONEncoder(separators=(",", ":"), default=_as_list, ensure_ascii=False)
