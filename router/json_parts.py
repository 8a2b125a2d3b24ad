"""JSON too long to be written at one go, as text in parts. Pure.

A long array is given as `Sliced`, or as an iterator of values that hold such arrays; each bit of it is made only when its turn
comes. Who writes the parts can do other work between them, and no more than one bit ever exists as objects.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Final

ENTRIES_PER_SLICE: Final = 256  # names with a number each: about 4 ms
IDS_PER_SLICE: Final = 16384  # about 2 ms

Dump = Callable[[object], str]


@dataclass(frozen=True, slots=True)
class Sliced:
    """An array, slice by slice, none of them empty; can be read once."""

    slices: Iterator[Sequence[object]]


def in_slices(token_ids: Sequence[int]) -> Sequence[int] | Sliced:
    """The same, slice by slice if they are many."""
    if len(token_ids) <= IDS_PER_SLICE:
        return token_ids
    return Sliced(token_ids[begin : begin + IDS_PER_SLICE] for begin in range(0, len(token_ids), IDS_PER_SLICE))


def dump_ascii(value: object) -> str:
    """All of it at once, ASCII."""
    return _ASCII.encode(value)


def dump_unicode(value: object) -> str:
    """All of it at once, in one line; half a surrogate pair, which no UTF-8 can hold, is left to the reader of the text."""
    return _in_one_line(_UNICODE.encode(value))


def dump_text(text: str) -> str:
    """What `dump_unicode` makes of a string, without what else it can do."""
    return _in_one_line(encode_basestring(text))


def _in_one_line(written: str) -> str:
    """JSON without what some readers take for the end of a line: of Unicode's, three are no control characters, which JSON escapes.

    Server-sent events end theirs at CR and LF alone, but httpx's `iter_lines` at these, too, like Python's `splitlines`: whoever
    reads events with it would get half an event.
    """
    if written.isascii():
        return written
    for end, escaped in _LINE_ENDS.items():
        written = written.replace(end, escaped)
    return written


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


_LINE_ENDS: Final = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
_ASCII: Final = json.JSONEncoder(separators=(",", ":"), default=_as_list)
_UNICODE: Final = json.JSONEncoder(separators=(",", ":"), default=_as_list, ensure_ascii=False)
