"""Rates of a running cluster from what a client sees of it: single prompts, and streams side by side. Part of `baton plan measure`.

    first tokens of prompts of some lengths    ->  chunks: base, token, pair; and what is around a prompt (route, reply)
    gaps of n streams that decode side by side ->  steps of rows: base, row, position
    first gap of a stream, less such a step    ->  the handoff: latency, bytes per second

Gaps are measured while the prefill node computes other prompts, which are answered by one token and so are handed over to nobody:
a cluster that serves has both roles at work, and where nodes share a machine that costs (cores, memory, the router's turn). The
same with the prefill node at rest is measured beside it, in turns: what is fitted to that is `alone`, and the difference is what
the neighbour costs. The cluster is to have one prefill and one decode node, and nothing else to do. Prompts are drawn: no cache
helps.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from bench.cluster import ClusterProblem
from bench.completions import Asked, Asking, Record
from bench.load import Sender, run_open_loop
from bench.plan_rates import Measured, Rates, Shape, Terms, fit, pairs_of
from runtime.process import run_async
from runtime.unanswered import why_no_http

_FIRST_TOKEN: Final = 3  # below it are special tokens
_STREAM_TOKENS: Final = 24
_LEAST_S: Final = 1e-6  # of a step
_MOST_BESIDE: Final = 64  # prompts


@dataclass(frozen=True, slots=True)
class Probe:
    """What is asked of the cluster."""

    model: str  # its name
    vocab_size: int
    token_bytes: int  # of KV, all layers
    chunk: int  # --max-num-batched-tokens of its prefill node
    lengths: Sequence[int]  # of prompts
    streams: Sequence[int]  # side by side
    rounds: int
    seed: int

    @property
    def num_asked(self) -> int:
        """Times that something is asked, in all rounds."""
        return (self.rounds + 1) * (2 * len(self.lengths) + 4 * len(self.streams))


@dataclass(slots=True)
class Seen:
    """With the prefill node at work, or at rest."""

    gaps: dict[int, list[float]] = field(
        default_factory=dict
    )  # from the first token to the second, by length of the prompt
    steps: list[Measured] = field(default_factory=list)


class Prober:
    """Asks, and keeps what came."""

    def __init__(self, probe: Probe, sender: Sender, advance: Callable[[str], None]) -> None:
        self._probe = probe
        self._sender = sender
        self._advance = advance
        self._random = random.Random(probe.seed)
        self._num_asked = 0
        self._longest_s = 1.0  # to the first token of the longest prompt
        self.firsts: dict[int, list[float]] = {}  # seconds to the first token, by length of the prompt
        self.seen = {is_beside: Seen() for is_beside in (False, True)}

    def run(self) -> Rates:
        """Every kind of request in turns, the first round for nothing; then the fit. ClusterProblem."""
        for number in range(self._probe.rounds + 1):
            for length in self._probe.lengths:
                self._single(length, counts=number > 0)
            for streams in self._probe.streams:
                for length in (self._probe.lengths[0], self._probe.lengths[-1] // 2):
                    self._side_by_side(streams, length, counts=number > 0)
        return self.rates(is_beside=True)

    def rates(self, *, is_beside: bool) -> Rates:
        """After `run`: of gaps with the prefill node at work, or at rest. ClusterProblem: too little was seen."""
        seen = self.seen[is_beside]
        try:
            return rates_of(self._probe, self.firsts, seen.gaps, seen.steps)
        except ValueError as error:
            raise ClusterProblem(
                f"{self._sender.server.base_url}: {error}; it must stream token by token, and have one prefill and one decode node"
            ) from None

    def _ask(self, number: int, length: int, tokens: int, num_beside: int = 0) -> list[Record]:
        """The records of `number` prompts; behind them come `num_beside` of the longest, for one token, and their records."""
        asked, asking = [], Asking(self._probe.model, "token_ids", wants_token_ids=True)
        longest = self._probe.lengths[-1]
        for of_length, of_tokens in [(length, tokens)] * number + [(longest, 1)] * num_beside:
            prompt = [self._random.randrange(_FIRST_TOKEN, self._probe.vocab_size) for _ in range(of_length)]
            body = asking.body(json.dumps(prompt), of_tokens)
            asked.append(Asked(self._num_asked, body, of_length, of_tokens))
            self._num_asked += 1
        records = run_async(run_open_loop(self._sender, asked, [0.0] * len(asked)))
        for record in records:
            of = f"a prompt of {record.prompt_tokens_asked} tokens, to be answered by {record.output_tokens_asked}"
            if record.status == "connect":
                if (why := why_no_http(record.error or "", self._sender.server.base_url, "--ca FILE")) is not None:
                    raise ClusterProblem(f"{self._sender.server.base_url}: {why}")
                raise ClusterProblem(f"{self._sender.server.base_url}: nobody answers there: {record.error}")
            if not record.is_ok:
                raise ClusterProblem(f"{self._sender.server.base_url}: {of}, failed: {record.kind} {record.error}")
            if record.output_tokens is None:
                raise ClusterProblem(
                    f"{self._sender.server.base_url}: {of}, came without a count of its tokens (usage)"
                )
            if record.output_tokens != record.output_tokens_asked or len(record.chunk_at_s) < min(
                2, record.output_tokens
            ):
                raise ClusterProblem(
                    f"{self._sender.server.base_url}: {of}, was answered by {record.output_tokens} in "
                    f"{len(record.chunk_at_s)} events; it must stream token by token, and know ignore_eos"
                )
        self._advance(f"{number} x {length} tokens")
        return records

    def _single(self, length: int, *, counts: bool) -> None:
        for is_beside in (False, True):
            record = self._ask(1, length, 4, num_beside=int(is_beside))[0]
            if counts and not is_beside:
                self.firsts.setdefault(length, []).append(record.chunk_at_s[0])
            if counts:
                gap_s = record.chunk_at_s[1] - record.chunk_at_s[0]
                self.seen[is_beside].gaps.setdefault(length, []).append(gap_s)
            if length == self._probe.lengths[-1] and not is_beside:
                self._longest_s = record.chunk_at_s[0]

    def _side_by_side(self, streams: int, length: int, *, counts: bool) -> None:
        num_beside = 0
        for is_beside in (False, True):
            records = self._ask(streams, length, _STREAM_TOKENS + 4 * streams, num_beside)
            measured = step_of(records[:streams], records[streams:], length)
            if counts and measured is not None:
                self.seen[is_beside].steps.append(measured)
            ends_s, firsts_s = zip(
                *((each.chunk_at_s[-1], each.chunk_at_s[0]) for each in records[:streams]), strict=True
            )
            decode_s = max(ends_s) - max(firsts_s)  # at rest; beside prompts it may take twice as long
            num_beside = min(2 + int(2 * decode_s / max(self._longest_s, _LEAST_S)), _MOST_BESIDE)


def step_of(streams: Sequence[Record], beside: Sequence[Record], length: int) -> Measured | None:
    """The mean step while all streams decode and, where there are any, prompts beside them are computed; None: too few events.

    A server that merges tokens into one event has fewer and longer gaps than steps.
    """
    instants = [[record.arrival_s + record.lag_s + at for at in record.chunk_at_s] for record in streams]
    begin, end = max(each[1] for each in instants), min(each[-1] for each in instants)
    if beside:
        end = min(end, max(record.arrival_s + record.lag_s + record.chunk_at_s[0] for record in beside))
    steps = []
    for record, each in zip(streams, instants, strict=True):
        within = [at for at in each if begin <= at <= end]
        if len(within) > 1 and record.output_tokens is not None:
            merged = (len(each) - 1) / (record.output_tokens - 1)
            steps.append(merged * (within[-1] - within[0]) / (len(within) - 1))
    if not steps or (step_s := statistics.median(steps)) <= 0:
        return None
    positions = statistics.mean(length + len(each) / 2 for each in instants)
    return Measured(Shape(len(streams), round(len(streams) * positions)), step_s)


def rates_of(
    probe: Probe, firsts: dict[int, list[float]], gaps: dict[int, list[float]], steps: Sequence[Measured]
) -> Rates:
    """The fit, of medians. ValueError: too little was seen."""
    decode = fit(steps, ("base_s", "row_s", "position_s"))
    lengths = sorted(firsts)
    times = np.array([statistics.median(firsts[each]) for each in lengths])
    chunks = np.array([-(-each // probe.chunk) for each in lengths], float)
    pairs = np.array([pairs_of(each, 0) for each in lengths], float)
    columns = {
        "around_s": np.ones(len(lengths)),
        "base_s": chunks,
        "token_s": np.array(lengths, float),
        "pair_s": pairs,
    }
    found = least_squares(columns, times)
    step_s = decode.seconds(Shape(1, lengths[0]))
    tails = np.array([min(each, probe.chunk) for each in lengths], float)
    exposed = np.array([statistics.median(gaps[each]) for each in lengths]) - step_s
    usual = max(float(np.median(exposed)), step_s)  # a gap that was too short by chance is no gap of 0, known exactly
    link = least_squares({"latency_s": np.ones(len(lengths)), "token_s": tails}, np.maximum(exposed, 0.0), usual)
    slope = max(link.get("token_s", 0.0), probe.token_bytes / 1e11)
    of_chunk = found.get("token_s", 0.0), found.get("pair_s", 0.0)
    chunk = Terms(max(found.get("base_s", 0.0), _LEAST_S), decode.row_s, decode.position_s, *of_chunk)
    return Rates(
        decode=(decode,),
        chunk=(chunk,),
        token_bytes=probe.token_bytes,
        link_bytes_per_s=probe.token_bytes / slope,
        link_latency_s=link.get("latency_s", 0.0),
        route_s=found.get("around_s", 0.0),
        source="measured through a running cluster, both roles at work",
    )


def least_squares(
    columns: dict[str, np.ndarray[Any, Any]], values: np.ndarray[Any, Any], least: float = 1e-6
) -> dict[str, float]:
    """Of relative errors, none below 0: what would be is left out, the furthest below first. ValueError: too few values.

    `least`: errors of smaller values are relative to it."""
    weights = 1 / np.maximum(np.abs(values), least)
    names = list(columns)
    while True:
        if len(values) < len(names):
            raise ValueError(f"{len(values)} measurements cannot tell {len(names)} numbers")
        matrix = np.stack([columns[name] * weights for name in names], axis=1)
        scale = np.maximum(np.abs(matrix).max(axis=0), 1e-30)
        found = np.linalg.lstsq(matrix / scale, values * weights, rcond=None)[0] / scale
        worst = int(np.argmin(found * scale))
        if found[worst] >= 0 or len(names) == 1:
            return {name: max(0.0, float(value)) for name, value in zip(names, found, strict=True)}
        del names[worst]
