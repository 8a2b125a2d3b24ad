"""A recorded service's requests, in the format of Mooncake's traces (FAST'25), and how they are scaled to a smaller one.

A line is a JSON object: `timestamp` (ms), `input_length`, `output_length` (tokens), `hash_ids` (one per block of 512 prompt
tokens; equal ids mean equal text, and everything before it equal, too). There is no text in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TRACE_BLOCK: Final = 512  # prompt tokens that one of the trace's hash ids stands for
MAX_TOKENS: Final = 1 << 24  # of a prompt, or of an answer: what is replayed or simulated costs as much as it is long
_HIGHEST: Final = 1 << 53
_FIELDS: Final = "timestamp, input_length, output_length, hash_ids"
_KINDS: Final = {list: "a list", str: "a text", int: "a number", float: "a number", bool: "a truth value"}


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
        except json.JSONDecodeError as error:
            problem = f"is no JSON, {error.msg} in column {error.colno}; each line must be one JSON object"
            raise ValueError(f"line {number} {problem}") from None
        except RecursionError:
            raise ValueError(f"line {number} is nested too deeply; each line must be one JSON object") from None
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return sorted(entries, key=lambda entry: entry.at_s)


def read_trace_file(path: Path) -> list[Entry]:
    """The same of a file. ValueError names the flag --trace and the file: it cannot be read, or a line is none."""
    try:
        with path.open(encoding="utf-8") as lines:
            return read_trace(lines)
    except UnicodeDecodeError:
        raise ValueError(
            f"--trace {path}: is no text; it must be JSON lines in the format of Mooncake's traces"
        ) from None
    except OSError as error:
        raise ValueError(f"--trace {path}: cannot be read: {error.strerror}; it must be a file of JSON lines") from None
    except ValueError as error:
        raise ValueError(f"--trace {path}: {error}") from None


def _entry(content: object) -> Entry:
    if not isinstance(content, dict):
        raise ValueError(f"is {_KINDS.get(type(content), 'null')}; each line must be one JSON object with {_FIELDS}")
    if lacking := [name for name in _FIELDS.split(", ") if name not in content]:
        raise ValueError(f"{lacking[0]} is missing; each line must have {_FIELDS}")
    hash_ids = content["hash_ids"]
    if not isinstance(hash_ids, list):
        raise ValueError(f"hash_ids {hash_ids!r:.40}: must be a list of whole numbers from 0 to {_HIGHEST - 1}")
    prompt, output = (_whole(name, content[name], MAX_TOKENS) for name in ("input_length", "output_length"))
    ids = tuple([_whole("hash_ids", each, _HIGHEST - 1) for each in hash_ids])
    at_ms = content["timestamp"]
    if isinstance(at_ms, bool) or not isinstance(at_ms, int | float) or not 0 <= at_ms < _HIGHEST:
        raise ValueError(f"timestamp {at_ms!r:.40}: must be milliseconds from 0 to 2**53 - 1")
    return Entry(at_ms / 1000, prompt, output, ids)


def _whole(name: str, value: object, high: int) -> int:
    if type(value) is not int or not 0 <= value <= high:
        raise ValueError(f"{name} {value!r:.40}: must be a whole number from 0 to {high}")
    return value


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
