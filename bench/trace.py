"""A recorded service's requests, in the format of Mooncake's traces (FAST'25), and how they are scaled to a smaller one. Pure.

A line is a JSON object: `timestamp` (ms), `input_length`, `output_length` (tokens), `hash_ids` (one per block of 512 prompt
tokens; equal ids mean equal text, and everything before it equal, too). There is no text in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

TRACE_BLOCK: Final = 512  # prompt tokens that one of the trace's hash ids stands for
_HIGHEST: Final = 1 << 53


@dataclass(frozen=True, slots=True)
class Entry:
    """One line, or what scaling made of it."""

    at_s: float  # from the trace's beginning
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scaling:
    """What becomes of lengths and times."""

    block_tokens: int = TRACE_BLOCK  # a block of 512 becomes so many: the factor of all lengths is theirs
    output_factor: float = 1.0
    speed: float = 1.0  # times are divided by it
    max_prompt_tokens: int | None = None  # longer ones are cut at their ends
    max_output_tokens: int | None = None


def read_trace(lines: Iterable[str]) -> list[Entry]:
    """The entries, by time; those at one instant in the file's order. ValueError: a line is none, and which."""
    entries = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entries.append(_entry(json.loads(line)))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"line {number} of the trace: {error!r}") from None
    return sorted(entries, key=lambda entry: entry.at_s)


def _entry(content: dict[str, Any]) -> Entry:
    at_ms, prompt, output = content["timestamp"], content["input_length"], content["output_length"]
    hash_ids = content["hash_ids"]
    if not all(isinstance(each, int) and 0 <= each < _HIGHEST for each in (prompt, output, *hash_ids)):
        raise ValueError("lengths and hash ids must be whole numbers, 0 at least")
    if not 0 <= float(at_ms) < _HIGHEST:
        raise ValueError("a timestamp must be milliseconds, 0 at least")
    return Entry(at_ms / 1000, prompt, output, tuple(hash_ids))


def scaled(entries: Sequence[Entry], scaling: Scaling) -> list[Entry]:
    """The same requests in the same order, shorter or nearer to each other; at least a token of prompt and one of output.

    Of a prompt's ids so many are left as its length needs: who shared k blocks of 512 shares k of the new ones.
    """
    factor = scaling.block_tokens / TRACE_BLOCK
    result = []
    for entry in entries:
        prompt = max(int(entry.prompt_tokens * factor), 1)
        output = max(int(entry.output_tokens * scaling.output_factor), 1)
        if scaling.max_prompt_tokens is not None:
            prompt = min(prompt, scaling.max_prompt_tokens)
        if scaling.max_output_tokens is not None:
            output = min(output, scaling.max_output_tokens)
        num_ids = -(-prompt // scaling.block_tokens)
        result.append(Entry(entry.at_s / scaling.speed, prompt, output, entry.hash_ids[:num_ids]))
    return result


def mean_rate(entries: Sequence[Entry]) -> float:
    """Requests per second from the first to the last one's arrival; infinite where all arrive at once."""
    seconds = entries[-1].at_s - entries[0].at_s if entries else 0.0
    return (len(entries) - 1) / seconds if seconds > 0 else float("inf")


def clipped(entries: Sequence[Entry], max_requests: int | None, duration_s: float | None) -> list[Entry]:
    """From the first one's arrival, so many at most, and no longer."""
    first_s = entries[0].at_s if entries else 0.0
    kept = [entry for entry in entries if duration_s is None or entry.at_s - first_s < duration_s]
    return kept if max_requests is None else kept[:max_requests]
