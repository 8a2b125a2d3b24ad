"""`baton plan`: how many prefill and decode nodes serve a trace within its objective, by simulating clusters on a virtual clock.

    trace + rates --plan_search.py--> clusters to try --plan_cluster.py--> what became of each request --plan_report.py--> answer

Rates are read from a file (`baton plan measure` writes one), or are limits of hardware: --bytes-per-s, --operations-per-s and a
model. Nothing is started, and nothing here needs the model's weights. docs/planning.md says what is simulated, and how well.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from bench.frame import SUFFIXES, Bench, check_files
from bench.plan_cluster import Cluster
from bench.plan_engine import Sizes
from bench.plan_load import Load
from bench.plan_model import read_model_size
from bench.plan_outcome import Counts, Outcome, Setup, Slo
from bench.plan_rates import Rates, of_hardware, read_rates
from bench.plan_report import Found, plot, show, to_json
from bench.plan_search import Search
from bench.trace import Entry, read_trace_file
from engine.reserve import ReserveConfig, ReservePolicy
from router.placement import CACHE_AWARE, POLICIES
from runtime.command_words import as_flags
from runtime.config import knob, load

PROG: Final = "baton plan"
_AROUND: Final = 2  # nodes more and less of each role, in the picture
_MAX_BLOCKS: Final = 1 << 27  # of all nodes: 60 bytes each


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """One question."""

    trace: Path = knob(help="requests, a trace in Mooncake's format (JSON lines)", metavar="FILE")
    slo_ttft_ms: float = knob(help="milliseconds to the first token", metavar="MS", low=0.001)
    slo_tpot_ms: float = knob(
        help="milliseconds per token behind the first, on average over an answer", metavar="MS", low=0.001
    )
    attainment: float = knob(0.95, "share of requests that are to keep both", low=0.001, high=1)
    rates: Path | None = knob(
        None,
        "how long steps and transfers take: JSON, as `baton plan measure` writes it",
        metavar="FILE",
        variable="BATON_PLAN_RATES",
    )
    model: Path | None = knob(
        None, "model directory, for rates that are limits of hardware", metavar="DIR", variable="BATON_PLAN_MODEL"
    )
    dtype: str = knob(
        "auto", "of the model's weights and KV, likewise: auto, fp32, bf16 or fp16", variable="BATON_PLAN_DTYPE"
    )
    bytes_per_s: float | None = knob(None, "what a node's memory reads, likewise", metavar="N", low=1)
    operations_per_s: float | None = knob(None, "what a node multiplies, likewise", metavar="N", low=1)
    link_bytes_per_s: float = knob(
        10e9, "what a prefill node sends, likewise", metavar="N", low=1, variable="BATON_PLAN_LINK_BYTES_PER_S"
    )

    requests: int | None = knob(
        None,
        "requests; none: those of the trace; more: it is repeated, with new prompts",
        low=1,
        high=100_000_000,
        variable="BATON_PLAN_REQUESTS",
    )
    length_scale: float = knob(
        1.0, "lengths are divided by it", low=0.001, high=512, variable="BATON_PLAN_LENGTH_SCALE"
    )
    speed: float = knob(1.0, "times are divided by it: 2 is twice the load", low=1e-6, high=1e6)
    max_model_len: int = knob(1 << 20, "tokens of prompt and answer; longer prompts are cut", low=2, high=1 << 24)

    block_size: int = knob(
        16, "tokens of a KV block; larger ones are simulated faster, and rounded more", low=1, high=1 << 14
    )
    num_blocks: int | None = knob(
        None, "blocks of a node; none: for max_num_seqs sequences of the longest request", low=1
    )
    max_num_seqs: int = knob(32, "sequences that run at once on a node", low=1, high=4096)
    max_num_batched_tokens: int = knob(512, "token positions of a step", low=1, high=1 << 20)
    reserve_policy: ReservePolicy = knob("ratio", "room that admission leaves to what runs, as a node's")
    placement_prefill: str = knob(CACHE_AWARE, f"{CACHE_AWARE}, {', '.join(POLICIES)}: as a router's")
    max_queue: int = knob(
        1024, "requests that wait in the router; more are refused, and count as missed", low=1, high=1 << 30
    )

    prefill: int | None = knob(
        None, "instead of a search: so many prefill nodes", low=0, high=100_000, variable="BATON_PLAN_PREFILL"
    )
    decode: int | None = knob(None, "with so many decode nodes", low=0, high=100_000, variable="BATON_PLAN_DECODE")
    mixed: int | None = knob(None, "or so many mixed nodes", low=1, high=100_000, variable="BATON_PLAN_MIXED")
    max_nodes: int = knob(256, "nodes of the largest cluster that may be the answer", low=1, high=100_000)
    exact: bool = knob(
        False, "have the product's scheduler plan each step, for small loads: the same answer, more slowly"
    )
    output: Path | None = knob(None, "JSON file for all figures", metavar="FILE")
    plot: Path | None = knob(
        None,
        f"picture of attainment over both numbers, its suffix {', '.join(SUFFIXES)}; needs matplotlib",
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        check_files(self.output, self.plot)
        if self.placement_prefill not in (CACHE_AWARE, *POLICIES):
            raise ValueError(
                f"--placement-prefill {self.placement_prefill}: is none of {CACHE_AWARE}, {', '.join(POLICIES)}"
            )
        if (self.rates is None) == (self.bytes_per_s is None):
            raise ValueError("give --rates FILE, or --bytes-per-s, --operations-per-s and --model")
        if self.bytes_per_s is not None and (self.operations_per_s is None or self.model is None):
            raise ValueError("--bytes-per-s: needs --operations-per-s and --model, too")
        of_hardware_only = (("model", None), ("dtype", "auto"), ("operations_per_s", None), ("link_bytes_per_s", 10e9))
        for name, nothing in of_hardware_only if self.rates is not None else ():
            if getattr(self, name) != nothing:
                raise ValueError(
                    f"--{name.replace('_', '-')}: is of rates that are limits of hardware; --rates has its own"
                )
        if self.rates is None and (self.model is None) != (self.bytes_per_s is None):
            raise ValueError("--model: needs --bytes-per-s and --operations-per-s, too")
        if (self.prefill is None) != (self.decode is None) or (self.mixed is not None and self.prefill is not None):
            raise ValueError("give --prefill and --decode together, or --mixed, or none of them")
        if self.mixed is not None and self.plot is not None:
            raise ValueError("--plot: is of prefill and decode nodes; leave it out with --mixed")
        if 0 in (self.prefill, self.decode):
            raise ValueError("--prefill and --decode: at least one node of each role")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("--max-num-batched-tokens: at least one for each of --max-num-seqs")

    @property
    def named(self) -> Counts | None:
        """The one cluster that is asked about, if it is."""
        if self.mixed is not None:
            return Counts(0, 0, self.mixed)
        return None if self.prefill is None or self.decode is None else Counts(self.prefill, self.decode)

    def find_rates(self) -> Rates:
        """ValueError, OSError."""
        if self.rates is not None:
            return read_rates(self.rates)
        assert self.model is not None and self.bytes_per_s is not None and self.operations_per_s is not None
        size = read_model_size(self.model, self.dtype)
        return of_hardware(size, self.bytes_per_s, self.operations_per_s, self.link_bytes_per_s)


def main(argv: Sequence[str] | None = None) -> int:
    """Answer; 0, 1 if no cluster keeps the objective, 2 for what the user can mend, 130 after Ctrl-C."""
    words = as_flags(sys.argv[1:] if argv is None else argv, ("--trace",), ("--exact",))
    config = load(PlanConfig, PROG, "Say how many prefill and decode nodes serve a trace within an objective.", words)
    return Bench(PROG, plan, show, to_json, plot, _complaints).run(config, argv)


def _complaints(found: Found) -> list[str]:
    return [] if found.is_kept else ["the objective is not kept"]


def plan(config: PlanConfig, console: Console) -> Found:
    """Search, or try what is named. ValueError, OSError: what the user can mend."""
    rates = config.find_rates()
    trace: list[Entry] = read_trace_file(config.trace)
    if not trace:
        raise ValueError(f"--trace {config.trace}: has no request")
    asked = Load(trace, config.requests or len(trace), config.length_scale, config.speed, config.max_model_len)
    blocks = _blocks_of_a_node(config, asked)
    reserve = ReserveConfig(config.reserve_policy)
    sizes = Sizes(blocks, config.block_size, config.max_num_seqs, config.max_num_batched_tokens, reserve)
    setup = Setup(sizes, rates, config.placement_prefill, max_queue=config.max_queue, is_exact=config.exact)
    slo = Slo(config.slo_ttft_ms / 1000, config.slo_tpot_ms / 1000, config.attainment)
    runs = _Runs(setup, asked, slo, console)
    if (named := config.named) is not None:
        runs.whole(named)
        return runs.found(named=runs.tried[named], max_nodes=config.max_nodes)
    search = runs.search(config.max_nodes)
    apart, mixed = search.smallest_pair(), search.smallest_mixed()
    if apart is None and mixed is None and (nearest := runs.nearest(config.max_nodes)) is not None:
        runs.whole(nearest)  # it was given up: how far it is off is not known yet
    if apart is not None:
        runs.whole(Counts(0, 0, apart.total))
        for counts in _around(apart) if config.plot is not None else ():
            runs.whole(counts)
    return runs.found(apart, mixed, max_nodes=config.max_nodes)


def _blocks_of_a_node(config: PlanConfig, asked: Load) -> int:
    """ValueError: more than this process could hold."""
    blocks = config.num_blocks or config.max_num_seqs * -(-asked.longest // config.block_size)
    nodes = config.max_nodes if config.named is None else config.named.total
    if blocks * nodes > _MAX_BLOCKS:
        why = (
            ""
            if config.num_blocks
            else f", for --max-num-seqs {config.max_num_seqs} of {asked.longest} tokens, the longest"
        )
        fewer = "--max-nodes" if config.named is None else "nodes"
        raise ValueError(
            f"--num-blocks {blocks}{why}: up to {nodes} nodes would have {blocks * nodes} blocks, more than {_MAX_BLOCKS}: "
            f"a smaller --num-blocks, larger --block-size, fewer {fewer}, or --max-model-len to cut requests"
        )
    return blocks


def _around(middle: Counts) -> list[Counts]:
    """Pairs for the picture."""
    return [
        Counts(prefill, decode)
        for prefill in range(max(1, middle.prefill - _AROUND), middle.prefill + _AROUND + 1)
        for decode in range(max(1, middle.decode - _AROUND), middle.decode + _AROUND + 1)
    ]


class _Runs:
    """Every cluster that was run."""

    def __init__(self, setup: Setup, load: Load, slo: Slo, console: Console) -> None:
        self._setup, self._load, self._slo, self._console = setup, load, slo, console
        self.tried: dict[Counts, Outcome] = {}
        self._began = time.process_time()

    def search(self, max_nodes: int) -> Search:
        """Over what was tried already."""
        most_missed = len(self._load) - int(self._slo.attainment * len(self._load) + 0.999_999)
        return Search(self._slo.attainment, max_nodes, lambda counts: self._run(counts, most_missed), self.tried)

    def whole(self, counts: Counts) -> None:
        """Run it to its end, whatever it misses."""
        if counts not in self.tried or not self.tried[counts].is_whole:
            self.tried[counts] = self._run(counts, None)

    def nearest(self, max_nodes: int) -> Counts | None:
        """Of what was tried, and may be the answer, the cluster that kept it for most requests; of equals the largest."""
        allowed = [each for each in self.tried.values() if each.counts.total <= max_nodes]
        best = max(allowed, key=lambda each: (each.num_kept, each.counts.total), default=None)
        return None if best is None else best.counts

    def _run(self, counts: Counts, most_missed: int | None) -> Outcome:
        began = time.process_time()
        cluster = Cluster(self._setup, counts, self._load, self._slo, most_missed)
        with self._console.status(str(counts)) as status:
            outcome = cluster.run(lambda number: status.update(f"{counts}: {number} of {len(self._load)} requests"))
        took_s = time.process_time() - began
        kept = f"{outcome.attainment:.1%}" if outcome.is_whole else "given up: too many missed"
        self._console.print(f"{counts}: {kept}, {took_s:.1f} s")
        return outcome

    def found(
        self, apart: Counts | None = None, mixed: Counts | None = None, named: Outcome | None = None, max_nodes: int = 0
    ) -> Found:
        """What is told."""
        tried = self.tried
        allowed = [each for each in tried.values() if each.counts.total <= max_nodes]
        return Found(
            slo=self._slo,
            rates=self._setup.rates,
            apart=None if apart is None else tried[apart],
            mixed=None if mixed is None else tried[mixed],
            same=None if apart is None else tried[Counts(0, 0, apart.total)],
            named=named,
            tried=dict(tried),
            best=max(allowed, key=lambda each: (each.is_whole, each.num_kept), default=None),
            max_nodes=max_nodes,
            cpu_s=time.process_time() - self._began,
        )


if __name__ == "__main__":
    sys.exit(main())
