"""What `baton bench` sends in each run: random requests or a trace's, at which instants. Reads the trace's file."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, repeat, takewhile
from typing import Final

from bench.arrivals import Lengths, arrivals_of
from bench.completions import Asked, Asking
from bench.serve_config import BenchConfig
from bench.trace import TRACE_BLOCK, Entry, Scaling, clipped, mean_rate, read_trace_file, scaled
from bench.workload import (
    Piece,
    Prompts,
    RandomLoad,
    Request,
    Space,
    alphabet,
    num_digits,
    replay,
    width_of,
)

_MANY: Final = 1 << 20  # requests that nobody has counted
_WARMUP_TOKENS: Final = 2048  # of a prompt, at most


class NoRequest(ValueError):
    """A run would send nothing, and so say nothing; the message is one sentence for the user."""


@dataclass(frozen=True, slots=True)
class RunLoad:
    """The requests of one run; those without end only in a closed loop that has a duration."""

    requests: Iterable[Request]
    prompts: Prompts
    num_requests: int | None
    warmup: Sequence[Request]

    def asked(self, asking: Asking, requests: Iterable[Request]) -> Iterator[Asked]:
        """Each with its text, which is made when it is taken."""
        for each in requests:
            body = asking.body(self.prompts.json(each.pieces), each.output_tokens)
            yield Asked(each.index, body, each.prompt_tokens, each.output_tokens)


class Loads:
    """Makes the load of each run; ValueError in one sentence if the trace is none."""

    def __init__(self, config: BenchConfig) -> None:
        self._config = config
        self._block = max(round(TRACE_BLOCK * config.length_scale), 1)
        self._entries = self._read_entries()

    def of_run(self, asking: Asking, rate: float | None, seed: str) -> RunLoad:
        """One run's, at a rate or, of a trace, at its own times; other seeds share no prompt."""
        letters = alphabet(asking.prompt_form, self._config.vocab_size)
        if self._entries is not None:
            entries = self._at_rate(self._entries, rate)
            requests: Iterable[Request] = list(replay(entries, self._block))
            number: int | None = len(entries)
            width = width_of(entries, len(letters))
        else:
            number = self._config.num_random(rate)
            random_requests = self._random_requests(rate, seed)
            requests = random_requests if number is None and self._config.concurrency else list(random_requests)
            number = len(requests) if isinstance(requests, list) else None
            width = num_digits(max(number or _MANY, self._config.prefix_groups), len(letters))
        if number == 0:
            raise NoRequest(
                f"--duration-s {self._config.duration_s:g}: no request arrives in it at {rate:g} per second; give it more seconds"
            )
        return RunLoad(requests, Prompts(seed, asking.prompt_form, letters, width), number, self._warmup(requests))

    def _read_entries(self) -> list[Entry] | None:
        path, config = self._config.trace, self._config
        if path is None:
            return None
        entries = read_trace_file(path)
        output_factor = self._block / TRACE_BLOCK
        scaling = Scaling(self._block, output_factor, 1.0, config.max_prompt_tokens, config.max_output_tokens)
        entries = clipped(scaled(entries, scaling), config.max_requests, None)
        if not entries:
            raise ValueError(f"--trace {path}: has no request")
        if width_of(entries, config.vocab_size // 2) > self._block:
            raise ValueError(
                f"--length-scale {config.length_scale:g}: leaves too few tokens to tell this trace's blocks apart"
            )
        return entries

    def _at_rate(self, entries: Sequence[Entry], rate: float | None) -> list[Entry]:
        if rate is None:
            speed = self._config.speed
        elif math.isinf(own := mean_rate(entries)) and not math.isinf(rate):
            raise ValueError("--rate: this trace's requests all come at once, so it has no rate that could be scaled")
        else:
            speed = math.inf if math.isinf(rate) else rate / own
        at = [replace(entry, at_s=entry.at_s / speed) for entry in entries]
        return clipped(at, None, None if self._config.concurrency else self._config.duration_s)

    def _random_requests(self, rate: float | None, seed: str) -> Iterator[Request]:
        config = self._config
        load = RandomLoad(
            Lengths.parse(config.prompt_tokens),
            Lengths.parse(config.output_tokens),
            config.prefix_share,
            config.prefix_groups,
        )
        offsets: Iterator[float] = repeat(0.0)
        if rate is not None:
            offsets = arrivals_of(random.Random(f"{seed}/arrivals"), config.arrivals, rate, config.burstiness)
            if (duration_s := config.duration_s) is not None:
                offsets = takewhile(lambda at_s: at_s < duration_s, offsets)
        return load.requests(random.Random(f"{seed}/lengths"), islice(offsets, config.num_random(rate)))

    def _warmup(self, requests: Iterable[Request]) -> list[Request]:
        """Prompts of their own, as long as the first request's, within reason."""
        first = next(iter(requests), None) if isinstance(requests, list) else None
        tokens = min(first.prompt_tokens if first else Lengths.parse(self._config.prompt_tokens).mean, _WARMUP_TOKENS)
        pieces = [(Piece(Space.WARMUP, index, tokens),) for index in range(self._config.warmup)]
        output = min(first.output_tokens, 32) if first else 32
        return [Request(index, 0.0, each, output) for index, each in enumerate(pieces)]
