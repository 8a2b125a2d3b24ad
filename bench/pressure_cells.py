"""One cell of the pressure benchmark: a cluster whose decode node has so many blocks and such a policy, and what the load saw.

    Workload --draw--> the same requests for every cell        Cell + requests --run_cell--> CellRun

Only the decode node is short: the prefill node has room for every prompt of the load, so that what is computed twice there is
what preemption cost.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import uvloop

from bench.arrivals import Lengths
from bench.cluster import Samples, Settings, started_cluster
from bench.completions import Asked, Record
from bench.http_exchange import Server
from bench.load import Sender, run_closed_loop
from bench.report import report_of
from runtime.process import run_async

_ROLES: Final = ("prefill", "decode")

# Name -> the settings of the decode node. "full" promises what admission takes, so that decode_reserve changes nothing there,
# and off leaves nothing to what runs, whatever the policy would: `ratio-off` and `fixed-off` admit as `none` does.
POLICIES: Final[Mapping[str, Settings]] = MappingProxyType(
    {
        "full": {"reserve_policy": "full", "decode_reserve": "on"},
        "none": {"reserve_policy": "none", "decode_reserve": "on"},
        "fixed": {"reserve_policy": "fixed", "decode_reserve": "on"},
        "fixed-off": {"reserve_policy": "fixed", "decode_reserve": "off"},
        "ratio": {"reserve_policy": "ratio", "decode_reserve": "on"},
        "ratio-off": {"reserve_policy": "ratio", "decode_reserve": "off"},
    }
)


@dataclass(frozen=True, slots=True)
class Workload:
    """The load, and the sizes of the nodes that it fits."""

    num_warmup: int  # requests before the measured ones, under the same pressure: a policy that learns has learnt
    num_requests: int
    slots: int  # requests under way at any time, and sequences that run at once
    prompt: Lengths
    max_tokens: int
    num_stop_ids: int  # of the vocabulary's first ids, each of which ends an answer
    block_size: int
    seed: int

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest prompt and answer that could come."""
        return self.prompt.mean + self.prompt.spread + self.max_tokens

    @property
    def ample_blocks(self) -> int:
        """With which every slot can grow to max_model_len."""
        return self.slots * self.least_blocks

    @property
    def least_blocks(self) -> int:
        """Below which a node does not start."""
        return -(-self.max_model_len // self.block_size)

    def draw(self, model: str, vocab_size: int = 256) -> list[Asked]:
        """The warm-up's requests, then the measured ones; all of it follows from the seed."""
        rng = random.Random(self.seed)
        asked = []
        for index in range(self.num_warmup + self.num_requests):
            num_prompt = self.prompt.draw(rng)
            fields = {
                "model": model,
                "prompt": [rng.randrange(vocab_size) for _ in range(num_prompt)],
                "max_tokens": self.max_tokens,
                "temperature": 1.0,
                "seed": rng.getrandbits(63),
                "stop_token_ids": list(range(self.num_stop_ids)),
                "ignore_eos": True,
                "return_token_ids": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            asked.append(Asked(index, json.dumps(fields).encode(), num_prompt, self.max_tokens))
        return asked


@dataclass(frozen=True, slots=True)
class Cell:
    """What differs between two runs."""

    policy: str  # of POLICIES
    percent: int | None  # of what the load needs; None: ample, nothing is ever short
    num_blocks: int

    @property
    def is_ample(self) -> bool:
        """Whether others are compared with it."""
        return self.percent is None

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.policy}, {'ample' if self.percent is None else f'{self.percent} %'}"


@dataclass(frozen=True, slots=True)
class CellRun:
    """What one run of a cell gave. Durations in seconds; counts are of the measured requests only."""

    cell: Cell
    duration_s: float
    output_tokens: int
    num_steps: int  # of the decode node
    preemptions: int
    refusals: int  # Reserves that the decode node answered with a PD Error
    recomputed_tokens: int  # prefill positions beyond one first prefill of each request
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p99_s: float
    end_to_end_p99_s: float
    errors: dict[str, int]  # by status; of the warm-up too, as are the next three
    num_different: int = 0  # answers whose tokens are not those of the first ample run
    token_ids: list[list[int]] = field(
        default_factory=list, repr=False
    )  # in the order of the requests; not part of the result file
    prompt_tokens: list[int] = field(default_factory=list, repr=False)  # likewise


def run_cell(model: Path, workload: Workload, cell: Cell) -> CellRun:
    """Start a cluster, put the load on it, end it. ClusterProblem if it does not start."""
    asked = workload.draw(model.absolute().name)
    with started_cluster(model, node_settings(workload, cell)) as cluster:
        send = Sender(Server.parse(cluster.url), is_stream=True, timeout_s=300.0)
        warmup = run_async(run_closed_loop(send, asked[: workload.num_warmup], workload.slots), uvloop.new_event_loop)
        before = {role: cluster.samples(role) for role in _ROLES}
        records = run_async(run_closed_loop(send, asked[workload.num_warmup :], workload.slots), uvloop.new_event_loop)
        after = {role: cluster.samples(role) for role in _ROLES}
    counts = {role: _difference(before[role], after[role]) for role in _ROLES}
    return _cell_run(cell, warmup, records, counts)


def node_settings(workload: Workload, cell: Cell) -> dict[str, Settings]:
    """The tables of the cluster's file."""
    both: dict[str, Any] = {
        "block_size": workload.block_size,
        "max_num_seqs": workload.slots,
        "max_model_len": workload.max_model_len,
        "max_num_batched_tokens": max(256, workload.slots),
    }
    longest_prompt = workload.prompt.mean + workload.prompt.spread
    num_prompt_blocks = (workload.num_warmup + workload.num_requests) * -(-longest_prompt // workload.block_size)
    prefill = both | {"num_blocks": workload.ample_blocks + num_prompt_blocks}
    return {"prefill": prefill, "decode": both | {"num_blocks": cell.num_blocks} | dict(POLICIES[cell.policy])}


def _difference(before: Samples, after: Samples) -> Samples:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def _cell_run(
    cell: Cell, warmup: Sequence[Record], records: Sequence[Record], counts: Mapping[str, Samples]
) -> CellRun:
    report, everything = report_of(records), [*warmup, *records]
    computed = sum(each["tokens_computed_total{prefill}"] for each in counts.values())
    decode = counts["decode"]
    ttft, tpot, whole = report.ttft_s, report.tpot_s, report.end_to_end_s
    return CellRun(
        cell=cell,
        duration_s=report.duration_s,
        output_tokens=sum(record.output_tokens or 0 for record in records if record.is_ok),
        num_steps=int(decode["step_seconds_count"]),
        preemptions=int(decode["preemptions_total"]),
        refusals=int(sum(value for name, value in decode.items() if name.startswith("reserve_refused_total"))),
        recomputed_tokens=int(computed) - sum(record.prompt_tokens_asked for record in records),
        ttft_p50_s=ttft.p50 if ttft else 0.0,
        ttft_p99_s=ttft.p99 if ttft else 0.0,
        tpot_p99_s=tpot.p99 if tpot else 0.0,
        end_to_end_p99_s=whole.p99 if whole else 0.0,
        errors=report_of(everything).errors,
        token_ids=[record.token_ids for record in everything],
        prompt_tokens=[record.prompt_tokens_asked for record in everything],
    )
