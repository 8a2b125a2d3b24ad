"""JSON that clients write, read so that nobody else waits long: not too much at once, and one large text at a time.

Python's reader, and what checks what it has read, let no other thread run, the loop's included, and take a millionth of a second
for each value that is more than a whole number. 8 MiB of brackets took over two, and five such bodies beside each other cost the
router its sessions with all nodes. So these values are counted first, and large texts have turns, with as long a rest behind each:
then the loop catches up. Not here: what a body may say.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

MAX_VALUES: Final = 1 << 17  # names, texts, objects, arrays, fractions, truth values: up to 0.2 s, with their checking
MAX_NUMBERS: Final = 1 << 20  # whole numbers and what else commas part, which is read in as long
LARGE: Final = 64 << 10  # bytes or characters: parsing and tokenizing them leaves the loop, and parsing has turns
MOST_REST_S: Final = 0.5  # what takes longer takes it from a machine that stands still, and more rest helps nobody
_COUNTED: Final = "[{.eE"  # what outside of texts begins one of MAX_VALUES, or is within one
_DECODER: Final = json.JSONDecoder()

P = ParamSpec("P")
R = TypeVar("R")


class TooManyValues(ValueError):
    """There are more than one may have; the message is a sentence without its end."""


def read_json(text: str, decoder: json.JSONDecoder = _DECODER) -> Any:
    """What it says; raises ValueError, TooManyValues among them, and RecursionError."""
    if len(text) > MAX_VALUES:
        _check_extent(text)
    return decoder.decode(text)


class Turns:
    """Threads call functions of large texts one by one."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._rests_until_s = 0.0

    def call(self, size: int, function: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> R:
        """What the function returns or raises; `size`: bytes or characters that it reads. Not from within a turn."""
        if size < LARGE:
            return function(*arguments, **named)
        with self._turn:
            time.sleep(max(self._rests_until_s - time.monotonic(), 0.0))
            began_s = time.monotonic()
            try:
                return function(*arguments, **named)
            finally:
                ended_s = time.monotonic()
                self._rests_until_s = ended_s + min(ended_s - began_s, MOST_REST_S)


TURNS: Final = Turns()  # of the process, since what they share is its interpreter


def _check_extent(text: str) -> None:
    """Of a text as far as it is JSON."""
    if sum(map(text.count, '"' + _COUNTED)) <= MAX_VALUES and text.count(",") <= MAX_NUMBERS:
        return  # the usual case, whatever of that is within texts
    plain = text.replace("\\\\", "").replace('\\"', "")
    num_values, num_numbers = plain.count('"') // 2, 0
    if num_values <= MAX_VALUES:
        outside = "".join(plain.split('"')[::2])
        num_values += sum(map(outside.count, _COUNTED))
        num_numbers = outside.count(",")
    if num_values > MAX_VALUES:
        raise TooManyValues(
            f"{num_values} names, texts, objects and the like are more than the {MAX_VALUES} it may have"
        )
    if num_numbers > MAX_NUMBERS:
        raise TooManyValues(f"{num_numbers} numbers are more than the {MAX_NUMBERS} it may have")
