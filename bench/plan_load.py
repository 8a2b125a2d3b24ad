"""The requests that `baton plan` reckons with: a trace (trace.py), its lengths and times scaled, or repeated. Pure.

A trace's line names the blocks of its prompt by hash ids (512 tokens each, chained: an id stands for all before it, too), so what
prompts share is known without their tokens. A KV block's key is made of the id that its last token lies in, and of its place.
Requests are made when they are asked for: a million take what the trace takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bench.trace import TRACE_BLOCK, Entry

_ID_BITS: Final = 40  # of a block's word; the rest is its place
_MIX: Final = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # SplitMix64


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the simulation takes it."""

    index: int
    at_s: float
    prompt_tokens: int
    output_tokens: int  # at least 1
    hash_ids: NDArray[np.int64]


class Load:
    """Requests by index, in order of arrival."""

    def __init__(
        self,
        lines: Sequence[Entry],
        number: int,
        length_scale: float = 1.0,
        speed: float = 1.0,
        max_tokens: int = 1 << 30,
    ) -> None:
        """`number` requests: of a shorter trace more rounds, whose prompts share nothing with the round before. Lengths are divided
        by `length_scale`, times by `speed`, prompts cut so that they and their answers have `max_tokens`. ValueError: no lines."""
        if not lines:
            raise ValueError("the trace is empty")
        num_turns = -(-number // len(lines))
        if num_turns * _num_ids(lines) > 1 << _ID_BITS:
            lines = _renumbered(lines)
        self._lines = lines
        self._number = number
        self._scale = length_scale
        self._speed = speed
        self._max_tokens = max_tokens
        self._piece = TRACE_BLOCK / length_scale  # tokens of an id
        self._first_at_s = lines[0].at_s
        span_s = lines[-1].at_s - lines[0].at_s
        self._round_s = span_s + span_s / max(len(lines) - 1, 1)
        self._num_ids = _num_ids(lines)

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> Request:
        turn, place = divmod(index, len(self._lines))
        line = self._lines[place]
        output = max(1, min(round(line.output_tokens / self._scale), self._max_tokens - 1))
        prompt = max(1, min(round(line.prompt_tokens / self._scale), self._max_tokens - output))
        at_s = (turn * self._round_s + line.at_s - self._first_at_s) / self._speed
        ids = np.array(line.hash_ids, np.int64) + turn * self._num_ids
        return Request(index, at_s, prompt, output, ids)

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last."""
        return self[self._number - 1].at_s - self[0].at_s

    @property
    def longest(self) -> int:
        """Tokens of prompt and answer of the longest."""
        some = range(min(self._number, len(self._lines)))
        return max(each.prompt_tokens + each.output_tokens for each in map(self.__getitem__, some))

    def keys(self, request: Request, block_size: int) -> list[bytes]:
        """Of the prompt's full blocks, 8 bytes each."""
        return _cut(self.short_keys(request, block_size))

    def short_keys(self, request: Request, block_size: int) -> bytes:
        """The same in one: as router/cache_map.py keeps them, but for the last token, which is always computed."""
        places = np.arange(1, request.prompt_tokens // block_size + 1, dtype=np.int64)
        pieces = ((places * block_size - 1) / self._piece).astype(np.int64)
        ids = request.hash_ids
        known = pieces < len(ids)
        of_ids = np.where(known, ids[np.minimum(pieces, len(ids) - 1)] if len(ids) else 0, -1 - request.index)
        words = (of_ids.astype(np.uint64) << np.uint64(64 - _ID_BITS)) ^ places.astype(np.uint64)
        return _mixed(words).tobytes()

    def tokens(self, request: Request) -> tuple[int, ...]:
        """A prompt: equal ids become equal tokens."""
        places = np.arange(request.prompt_tokens, dtype=np.int64)
        pieces = np.minimum((places / self._piece).astype(np.int64), max(len(request.hash_ids) - 1, 0))
        ids = request.hash_ids[pieces] if len(request.hash_ids) else np.full(len(places), -1 - request.index)
        words = (ids.astype(np.uint64) << np.uint64(64 - _ID_BITS)) ^ places.astype(np.uint64)
        return tuple((_mixed(words) % np.uint64(250) + np.uint64(3)).tolist())


def _num_ids(lines: Sequence[Entry]) -> int:
    """Above the highest id."""
    return 1 + max((each for line in lines for each in line.hash_ids), default=0)


def _renumbered(lines: Sequence[Entry]) -> list[Entry]:
    """The same with ids from 0 on: those of a log may be hashes, for which words have no room once a trace is repeated."""
    numbers: dict[int, int] = {}
    return [
        replace(line, hash_ids=tuple([numbers.setdefault(each, len(numbers)) for each in line.hash_ids]))
        for line in lines
    ]


def _cut(keys: bytes) -> list[bytes]:
    return [keys[start : start + 8] for start in range(0, len(keys), 8)]


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread evenly: placement's index samples keys by their bits."""
    with np.errstate(over="ignore"):
        words = words * np.uint64(_MIX[0])
        words = (words ^ (words >> np.uint64(30))) * np.uint64(_MIX[1])
        words = (words ^ (words >> np.uint64(27))) * np.uint64(_MIX[2])
    return words ^ (words >> np.uint64(31))
