"""`python -m bench.plan_scale`: how long `baton plan` takes for one large cluster: requests per second of one core, memory.

A trace is repeated until there are enough requests, and sped up until the prefill nodes are busy for about `--use` of the time. The
rates are those of no machine in particular. Writes the page beside --output.
"""

from __future__ import annotations

import json
import resource
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from bench.frame import Bench, check_files
from bench.plan_cluster import Cluster
from bench.plan_engine import Sizes
from bench.plan_load import Load
from bench.plan_outcome import Counts, Outcome, Setup, Slo
from bench.plan_rates import Rates, Shape, Terms, pairs_of
from bench.plan_report import outcome_json
from bench.trace import read_trace
from router.placement import CACHE_AWARE, POLICIES
from runtime.config import knob, load

PROG: Final = "python -m bench.plan_scale"
RATES: Final = Rates(
    decode=(Terms(0.012, 0.00005, 2e-8),),
    chunk=(Terms(0.012, 0.00005, 2e-8, 3e-5, 1e-9),),
    token_bytes=30_000,
    link_bytes_per_s=1e10,
    link_latency_s=0.002,
    route_s=0.001,
    reply_s=0.001,
)
_BLOCK_TOKENS: Final = 600_000  # of a node's pool
_SLO: Final = Slo(30.0, 0.05, 0.9)


@dataclass(frozen=True, slots=True)
class ScaleConfig:
    """One run."""

    trace: Path = knob(help="trace in Mooncake's format", metavar="FILE")
    requests: int = knob(1_000_000, "requests; the trace is repeated", low=10, high=100_000_000)
    prefill: int = knob(600, "prefill nodes", low=1, high=100_000)
    decode: int = knob(400, "decode nodes", low=1, high=100_000)
    use: float = knob(0.6, "of the prefill nodes' time, had nothing been cached", low=0.01, high=2)
    block_size: int = knob(512, "tokens of a KV block", low=1, high=1 << 14)
    placement_prefill: str = knob("least_loaded", f"{CACHE_AWARE}, {', '.join(POLICIES)}: as a router's")
    output: Path | None = knob(None, "JSON file; the page is written beside it", metavar="FILE")

    def __post_init__(self) -> None:
        check_files(self.output)


@dataclass(frozen=True, slots=True)
class Scale:
    """What it took."""

    outcome: Outcome
    cpu_s: float
    wall_s: float
    peak_mib: float  # of the process
    base_mib: float  # before the cluster was made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; 0, 2 for what the user can mend, 130 after Ctrl-C."""
    config = load(ScaleConfig, PROG, "Measure how fast the planner simulates a large cluster.", argv)
    code = Bench(PROG, measure, show, to_json).run(config, argv)
    if code == 0 and config.output is not None:
        result = json.loads(config.output.read_text(encoding="utf-8"))
        config.output.with_suffix(".md").write_text(page_of(result), encoding="utf-8")
    return code


def measure(config: ScaleConfig, console: Console) -> Scale:
    """One cluster, one load. ValueError, OSError."""
    with config.trace.open(encoding="utf-8") as lines:
        trace = read_trace(lines)
    once = Load(trace, len(trace))
    busy_s = sum(_prompt_s(once[index].prompt_tokens) for index in range(len(once)))
    speed = config.use * config.prefill * once.duration_s / busy_s
    load_ = Load(trace, config.requests, 1.0, speed)
    sizes = Sizes(max(_BLOCK_TOKENS // config.block_size, 1), config.block_size, 64, 8192)
    base_mib, wall, cpu = _peak_mib(), time.perf_counter(), time.process_time()
    setup = Setup(sizes, RATES, config.placement_prefill, max_queue=1 << 20)
    with console.status("") as status:
        cluster = Cluster(setup, Counts(config.prefill, config.decode), load_, _SLO)
        outcome = cluster.run(lambda number: status.update(f"{number} of {config.requests} requests"))
    return Scale(outcome, time.process_time() - cpu, time.perf_counter() - wall, _peak_mib(), base_mib)


def _prompt_s(num_tokens: int) -> float:
    chunks = -(-num_tokens // 8192)
    return RATES.step_s(Shape(0, 0, num_tokens, pairs_of(num_tokens, 0))) + (chunks - 1) * RATES.chunk[0].base_s


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def show(console: Console, scale: Scale) -> None:
    """In a few lines."""
    outcome = scale.outcome
    console.print(
        f"{outcome.counts}, {outcome.num_requests} requests, {outcome.num_steps} steps, {outcome.duration_s:.0f} s: "
        f"{scale.cpu_s:.0f} s of CPU, {scale.wall_s:.0f} s of wall, {outcome.num_requests / scale.cpu_s:.0f} requests/s, "
        f"{scale.peak_mib:.0f} MiB ({scale.base_mib:.0f} before)"
    )
    console.print(f"use {outcome.use}, attainment {outcome.attainment:.1%}, refused {outcome.num_refused}")


def to_json(scale: Scale) -> dict[str, Any]:
    """Everything."""
    times = {"cpu_s": scale.cpu_s, "wall_s": scale.wall_s, "peak_mib": scale.peak_mib, "base_mib": scale.base_mib}
    return {**times, "cluster": outcome_json(scale.outcome)}


def page_of(result: dict[str, Any]) -> str:
    """The page of a result file."""
    cluster, number = result["cluster"], result["cluster"]["requests"]
    where = f"one of {result['machine']['cores']} cores of {result['machine']['cpu_model']}"
    per_token = cluster["steps"] / result["cpu_s"]
    lines = [
        "# How fast the planner simulates",
        "",
        f"`{shlex.join(shlex.split(result['command']))}`, {result['date'][:10]}, {where}.",
        "",
        "| | |",
        "|---|---|",
        f"| nodes | {cluster['prefill']} prefill, {cluster['decode']} decode |",
        f"| requests | {number:,} |",
        f"| virtual time | {cluster['duration_s']:,.0f} s |",
        f"| steps of nodes | {cluster['steps']:,} |",
        f"| CPU | {result['cpu_s']:,.0f} s (wall {result['wall_s']:,.0f} s) |",
        f"| requests per second of CPU | {number / result['cpu_s']:,.0f} ({per_token:,.0f} steps) |",
        f"| memory, peak | {result['peak_mib']:,.0f} MiB, {result['base_mib']:,.0f} of them before the cluster was made |",
        f"| prefill nodes had a step in | {cluster['use']['prefill']:.0%} of the time |",
        f"| decode nodes | {cluster['use']['decode']:.0%} |",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
