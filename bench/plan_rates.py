"""How long a step, a transfer and what is around them take: the numbers of `baton plan`, and where they come from. Pure.

    step of rows only     base + row x rows + position x KV positions that they read
    step with chunks      the same, by numbers of its own, + token x prompt tokens + pair x (query, key) pairs of the chunks
    first token           route (arrival to the prefill node) + its step's end + reply
    transfer              bytes / bandwidth, one prefill node's one after the other, + latency of the commit

Each kind of step has a tuple of such sums, and takes the longest of them: one that was fitted (`fit`), or two that are limits of a
machine, what it reads and what it multiplies (`of_hardware`). A run of steps whose rows are the same reads a position more per
row with each step, so its time is a sum that is known without looking at its steps (`run_s`). Seconds everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from math import sqrt
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np


class Shape(NamedTuple):
    """What a step's time depends on."""

    num_rows: int  # that decode
    num_positions: int  # that they read, each its own included
    num_tokens: int = 0  # of prompts
    num_pairs: int = 0  # (query, key) of their chunks

    def after(self, num_steps: int) -> Shape:
        """The same rows, so many steps later."""
        return self._replace(num_positions=self.num_positions + num_steps * self.num_rows)


def pairs_of(num_tokens: int, context: int) -> int:
    """(query, key) pairs of a chunk behind so many positions."""
    return num_tokens * context + num_tokens * (num_tokens + 1) // 2


def _check_number(name: str, value: object, unit: str, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < high:
        raise ValueError(f"{name} {value!r:.40}: must be {unit} from 0 to below {high:g}")


@dataclass(frozen=True, slots=True)
class Terms:
    """One sum."""

    base_s: float
    row_s: float = 0.0
    position_s: float = 0.0
    token_s: float = 0.0
    pair_s: float = 0.0

    def __post_init__(self) -> None:
        for each in fields(self):
            _check_number(each.name, getattr(self, each.name), "seconds", 1e6)

    def seconds(self, shape: Shape) -> float:
        """Of one step."""
        of_rows = self.base_s + self.row_s * shape.num_rows + self.position_s * shape.num_positions
        return of_rows + self.token_s * shape.num_tokens + self.pair_s * shape.num_pairs

    def run_s(self, shape: Shape, num_steps: int) -> float:
        """Of so many steps of the same rows."""
        more = num_steps * (num_steps - 1) // 2 * shape.num_rows
        return num_steps * self.seconds(shape) + self.position_s * more


_NUMBERS: Final = {
    "token_bytes": "bytes",
    "link_bytes_per_s": "bytes a second",
    "link_latency_s": "seconds",
    "route_s": "seconds",
    "reply_s": "seconds",
}


@dataclass(frozen=True, slots=True)
class Rates:
    """One kind of node, its links, and its router."""

    decode: tuple[Terms, ...]  # steps without chunks take the longest of these
    chunk: tuple[Terms, ...]  # steps with chunks
    token_bytes: int  # of KV, all layers
    link_bytes_per_s: float
    link_latency_s: float  # from the last byte of a handoff to the sequence's place in a plan
    route_s: float = 0.0  # from a request's arrival to its place at the prefill node
    reply_s: float = 0.0  # from a step's end to the client's hearing of it
    source: str = "given"  # where they come from, for people

    def __post_init__(self) -> None:
        for name, unit in _NUMBERS.items():
            _check_number(name, getattr(self, name), unit, 1e18)
        if not self.decode or not self.chunk:
            raise ValueError("rates: decode and chunk need at least one sum each")
        if min((*(each.seconds(Shape(1, 1)) for each in self.decode), self.link_bytes_per_s)) <= 0:
            raise ValueError("rates: a decode step and link_bytes_per_s must be above 0")
        if min(each.seconds(Shape(0, 0, 1, 1)) for each in self.chunk) <= 0:
            raise ValueError("rates: a chunk must take longer than 0")

    def step_s(self, shape: Shape) -> float:
        """Of one step."""
        return max(each.seconds(shape) for each in (self.chunk if shape.num_tokens else self.decode))

    def first_s(self, num_tokens: int, num_cached: int, most: int) -> float:
        """To the first token of a prompt that is alone, `most` tokens in a step; where several sums take turns, at least."""
        left = num_tokens - num_cached
        num_steps, shape = -(-left // most), Shape(0, 0, left, pairs_of(left, num_cached))
        of_steps = max(each.seconds(shape) + (num_steps - 1) * each.base_s for each in self.chunk)
        return self.route_s + of_steps + self.reply_s

    def run_s(self, shape: Shape, num_steps: int) -> float:
        """Of so many steps of the same rows, without chunks."""
        if num_steps == 0:
            return 0.0
        if len(self.decode) == 1:
            return self.decode[0].run_s(shape, num_steps)
        total, done = 0.0, 0
        while done < num_steps:  # each turn ends where another sum becomes the longest: they grow by lines
            here = shape.after(done)
            best = max(self.decode, key=lambda each: (each.seconds(here), each.position_s))
            low, high = 1, num_steps - done
            while low < high:
                middle = (low + high + 1) // 2
                last = here.after(middle - 1)
                if best.seconds(last) >= max(each.seconds(last) for each in self.decode):
                    low = middle
                else:
                    high = middle - 1
            total += best.run_s(here, low)
            done += low
        return total

    def steps_within(self, shape: Shape, seconds: float, most: int) -> int:
        """How many steps of the same rows have ended after so long, `most` at most."""
        low, high = 0, most
        if len(self.decode) == 1:  # near the root of run_s = seconds: two or three looks instead of a dozen
            step_s, more_s = self.decode[0].seconds(shape), self.decode[0].position_s * shape.num_rows
            half = step_s - more_s / 2
            guess = int(2 * seconds / (half + sqrt(half * half + 2 * more_s * max(seconds, 0.0))))
            low, high = (guess - 1 if 1 < guess <= most else 0), min(most, guess + 1)
        while low < high:
            middle = (low + high + 1) // 2
            if self.run_s(shape, middle) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def transfer_s(self, num_tokens: int) -> float:
        """Of the KV of so many positions."""
        return num_tokens * self.token_bytes / self.link_bytes_per_s

    def to_json(self) -> dict[str, Any]:
        """What `read_rates` reads."""
        return asdict(self)


def read_rates(path: Path) -> Rates:
    """From a file of `baton plan measure`, or one written by hand. ValueError says in one sentence what is wrong."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content = content.get("rates", content) if isinstance(content, dict) else content
        if not isinstance(content, dict):
            raise ValueError("must be a JSON object, as baton plan measure writes it")
        if lacking := [each.name for each in fields(Rates) if each.default is MISSING and each.name not in content]:
            raise ValueError(f"{lacking[0]} is missing")
        known = {each.name for each in fields(Rates)}
        if unknown := set(content) - known:
            raise ValueError(f"{min(unknown)} is none of {', '.join(sorted(known))}")
        sums = {name: tuple(_terms(name, content[name])) for name in ("decode", "chunk")}
        return Rates(**{**content, **sums})
    except OSError as error:
        raise ValueError(f"--rates {path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise ValueError(f"--rates {path}: is no JSON; baton plan measure writes such a file") from None
    except ValueError as error:
        raise ValueError(f"--rates {path}: {error}") from None


def _terms(name: str, sums: object) -> list[Terms]:
    known = [each.name for each in fields(Terms)]
    if not isinstance(sums, list) or not all(isinstance(each, dict) for each in sums):
        raise ValueError(f"{name} {sums!r:.40}: must be a list of objects with {', '.join(known)}")
    if unknown := {term for each in sums for term in each} - set(known):
        raise ValueError(f"{name}: {min(unknown)} is none of {', '.join(known)}")
    if any("base_s" not in each for each in sums):
        raise ValueError(f"{name}: base_s is missing")
    return [Terms(**each) for each in sums]


class Measured(NamedTuple):
    """A step that was timed."""

    shape: Shape
    seconds: float


def _columns(shape: Shape, names: Sequence[str]) -> list[float]:
    return [Terms(**({"base_s": 0.0} | {name: 1.0})).seconds(shape) for name in names]


def fit(steps: Sequence[Measured], of: Sequence[str], floor: Mapping[str, float] | None = None) -> Terms:
    """The terms named in `of` (fields of Terms, base_s among them) by least squares of relative errors, none below 0.

    `floor`: other terms, taken as they are. What comes out below 0 is left out, the one that is furthest below first, and the
    rest is fitted again. ValueError: fewer steps than terms.
    """
    fixed, names = dict(floor or {}), list(of)
    if len(steps) < len(names) or min(each.seconds for each in steps) <= 0:
        raise ValueError(f"{len(steps)} steps cannot tell {len(names)} terms")
    seconds = np.array([each.seconds for each in steps])
    known = Terms(**({"base_s": 0.0} | fixed))
    rest = seconds - np.array([known.seconds(each.shape) for each in steps])
    while True:
        matrix = np.array([_columns(each.shape, names) for each in steps], float) / seconds[:, None]
        scale = np.abs(matrix).max(axis=0)
        scale[scale == 0] = 1.0
        found = np.linalg.lstsq(matrix / scale, rest / seconds, rcond=None)[0]
        worst = int(np.argmin(found))
        if found[worst] >= 0 or len(names) == 1:
            return Terms(**(fixed | {n: max(0.0, float(v / s)) for n, v, s in zip(names, found, scale, strict=True)}))
        del names[worst]
        fixed.setdefault("base_s", 0.0)


class ModelSize(NamedTuple):
    """What a model's steps read and multiply."""

    weight_bytes: int  # read once in each step
    token_bytes: int  # of KV, all layers
    layer_operations: int  # of one position through the linears of all layers
    head_operations: int  # of one that a token is drawn from, besides
    pair_operations: int  # of one (query, key) pair, all layers


def of_hardware(size: ModelSize, bytes_per_s: float, operations_per_s: float, link_bytes_per_s: float) -> Rates:
    """Limits of a machine: a step takes as long as reading takes, or as multiplying does. No real node is faster.

    The link's latency is none.
    """
    reads = Terms(
        base_s=size.weight_bytes / bytes_per_s,
        position_s=size.token_bytes / bytes_per_s,
    )
    token_s, pair_s = size.layer_operations / operations_per_s, size.pair_operations / operations_per_s
    row_s = token_s + size.head_operations / operations_per_s
    multiplies = Terms(base_s=0.0, row_s=row_s, position_s=pair_s, token_s=token_s, pair_s=pair_s)
    return Rates(
        decode=(reads, multiplies),
        chunk=(reads, multiplies),
        token_bytes=size.token_bytes,
        link_bytes_per_s=link_bytes_per_s,
        link_latency_s=0.0,
        source="limits of the hardware",
    )
