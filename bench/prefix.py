"""`python -m bench.prefix`: what it buys that a prompt goes where its beginning has been computed.

    chat     conversations behind one system prompt; each turn's prompt is all that was said before, and more
    trace    a real service's requests (--trace), lengths and times scaled down, sharing of prefixes as it was

For each of both, and each way of placing, a cluster of its own gets the same requests at the same instants; rounds of
the ways take turns. A prefill node's blocks do not hold what all conversations need, as is usual. Told are the share of
prompt tokens that were not computed, the tokens that were computed though some node had computed them before, and times
to the first token.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench.completions import Asked
from bench.distribution import summarize
from bench.fleet import Fleet
from bench.frame import SUFFIXES, Bench, check_files
from bench.http_exchange import Server
from bench.load import Sender, run_open_loop
from bench.prefix_load import Ask, Chats, chat_asks, fresh_tokens, trace_asks
from bench.prefix_plot import plot
from bench.progress import StepProgress
from bench.trace import TRACE_BLOCK
from runtime.config import knob, load
from runtime.process import run_async

PROG: Final = "python -m bench.prefix"
BLOCK: Final = 16
# name -> (--placement-prefill, whether the prefill nodes share a KV pool)
WAYS: Final = {
    "round_robin": ("round_robin", False),
    "least_loaded": ("least_loaded", False),
    "cache_aware": ("cache_aware", False),
    "cache_aware + pool": ("cache_aware", True),
}


@dataclass(frozen=True, slots=True)
class PrefixConfig:
    """One run."""

    model: Path = knob(help="model directory in Hugging Face layout", metavar="DIR")
    trace: Path | None = knob(None, "trace in Mooncake's format; none: chats only", metavar="FILE")
    scale: int = knob(32, "the trace's lengths are divided by it; 512 must be a multiple", low=1, high=TRACE_BLOCK)
    speed: float = knob(10.0, "the trace's times are divided by it", low=0.01, high=10_000)
    requests: int = knob(1000, "requests of the trace, from its beginning", low=1, high=1_000_000)
    talks: int = knob(24, "conversations", low=1, high=10_000)
    turns: int = knob(8, "turns of each", low=1, high=1000)
    system_tokens: int = knob(256, "tokens that all conversations begin with", low=1, high=100_000)
    turn_tokens: int = knob(256, "tokens that a turn adds, on average", low=2, high=100_000)
    rate: float = knob(6.0, "turns per second, over all conversations", low=0.01, high=10_000)
    output_tokens: int = knob(4, "tokens that each turn generates", low=1, high=10_000)
    prefill: int = knob(3, "prefill nodes", low=1, high=64)
    num_blocks: int = knob(1024, f"blocks of {BLOCK} tokens on each of them", low=16, high=1 << 20)
    max_model_len: int = knob(4096, "tokens of prompt and completion; longer prompts of the trace are cut", low=64)
    ways: str = knob("round_robin,least_loaded,cache_aware", f"of {', '.join(WAYS)}", metavar="NAME,…")
    rounds: int = knob(3, "of every way", low=1, high=1000)
    seed: int = knob(0, "of the conversations", low=0, high=(1 << 63) - 1)
    output: Path | None = knob(None, "JSON file for all figures", metavar="FILE")
    plot: Path | None = knob(None, f"picture, its suffix {', '.join(SUFFIXES)}; needs matplotlib", metavar="FILE")

    def __post_init__(self) -> None:
        if unknown := [name for name in self.names if name not in WAYS]:
            raise ValueError(f"--ways {unknown[0]}: is none of {', '.join(WAYS)}")
        if TRACE_BLOCK % self.scale:
            raise ValueError(f"--scale {self.scale}: {TRACE_BLOCK} is no multiple of it")
        check_files(self.output, self.plot)

    @property
    def names(self) -> list[str]:
        """The ways, each once."""
        return list(dict.fromkeys(name for name in self.ways.split(",") if name))


@dataclass(frozen=True, slots=True)
class Run:
    """One way's round of one load."""

    load: str
    way: str
    num_ok: int
    num_requests: int
    prompt_tokens: int
    computed: int  # prompt tokens
    recomputed: int  # of them, those that some node had computed before
    hit_rate: float  # of prompt tokens, how many were not computed
    ttft_s: list[float]
    lag_p99_s: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, 1 if a request failed, 2 for what the user can mend, 130 after Ctrl-C."""
    config = load(PrefixConfig, PROG, "Measure ways to place prompts that share beginnings.", argv)
    return Bench(PROG, measure, show, _to_json, _plot, _complaints).run(config, argv)


def _to_json(runs: Sequence[Run]) -> dict[str, Any]:
    return {"runs": [asdict(run) | {"ttft_s": [round(each, 5) for each in run.ttft_s]} for run in runs]}


def _plot(runs: Sequence[Run], path: Path) -> None:
    plot({(run.load, run.way): _of(runs, run.load, run.way) for run in runs}, path)


def _complaints(runs: Sequence[Run]) -> list[str]:
    failed = [(run, run.num_requests - run.num_ok) for run in runs]
    return [f"{run.load}, {run.way}: {number} requests failed" for run, number in failed if number]


def measure(config: PrefixConfig, console: Console) -> list[Run]:
    """Every round of every way. ClusterProblem; ValueError: the trace is none."""
    vocab_size = json.loads((config.model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    chats = Chats(
        config.talks, config.turns, config.system_tokens, config.turn_tokens, config.output_tokens, config.rate
    )
    loads = {"chat": chat_asks(chats, vocab_size, config.seed)}
    if config.trace is not None:
        lines = config.trace.read_text(encoding="utf-8").splitlines()[: config.requests]
        loads["trace"] = trace_asks(lines, config.scale, config.speed, config.max_model_len * 3 // 4, vocab_size)
    runs: list[Run] = []
    with StepProgress(console, "runs", config.rounds * len(config.names) * len(loads)) as progress:
        for number in range(config.rounds):
            for name in config.names if number % 2 else config.names[::-1]:
                for kind, asks in loads.items():
                    runs.append(run_way(config, kind, name, asks))
                    progress.advance(f"{kind}, {name}")
    return runs


def run_way(config: PrefixConfig, kind: str, name: str, asks: Sequence[Ask]) -> Run:
    """Start a cluster, and send it all requests at their instants."""
    policy, has_pool = WAYS[name]
    with tempfile.TemporaryDirectory(prefix="baton-prefix-") as folder:
        sizes = ("--block-size", str(BLOCK), "--max-model-len", str(config.max_model_len))
        prefill = (*sizes, "--num-blocks", str(config.num_blocks), "--max-num-batched-tokens", "512")
        pool = ("--kv-pool", f"file://{folder}/pool", "--save-finished-kv", "on") if has_pool else ()
        names = [f"prefill-{index}" for index in range(config.prefill)]
        router = ("--placement-prefill", policy, "--local-prefill-max-tokens", "0")
        flags = {"router": router, "decode-0": sizes, **dict.fromkeys(names, (*prefill, *pool))}
        with Fleet.started(config.model, Path(folder), flags) as fleet:
            before = _computed(fleet, names)
            sender = Sender(Server.parse(fleet.url), is_stream=True, timeout_s=600.0)
            asked = [_asked(config, index, ask) for index, ask in enumerate(asks)]
            records = run_async(run_open_loop(sender, asked, [ask.at_s for ask in asks]))
            fleet.wait_until_nothing_is_held(*fleet.nodes)
            computed = _computed(fleet, names) - before
    prompt_tokens = sum(len(ask.prompt) for ask in asks)
    lag = summarize([record.lag_s for record in records])
    return Run(
        load=kind,
        way=name,
        num_ok=sum(record.is_ok for record in records),
        num_requests=len(records),
        prompt_tokens=prompt_tokens,
        computed=computed,
        recomputed=computed - fresh_tokens(asks, BLOCK),
        hit_rate=1 - computed / prompt_tokens,
        ttft_s=[each for record in records if (each := record.ttft_s) is not None],
        lag_p99_s=lag.p99 if lag else 0.0,
    )


def _asked(config: PrefixConfig, index: int, ask: Ask) -> Asked:
    fields: dict[str, Any] = {"model": config.model.resolve().name, "prompt": ask.prompt, "max_tokens": ask.max_tokens}
    fields |= {"temperature": 0.0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    return Asked(index, json.dumps(fields, separators=(",", ":")).encode(), len(ask.prompt), ask.max_tokens)


def _computed(fleet: Fleet, names: Sequence[str]) -> int:
    return sum(int(fleet.node_metric(name, "tokens_computed_total", 'phase="prefill"')) for name in names)


def _of(runs: Sequence[Run], kind: str, name: str) -> tuple[float, list[float]]:
    """A way's median hit rate, and all of its times to the first token."""
    mine = [run for run in runs if (run.load, run.way) == (kind, name)]
    return statistics.median(run.hit_rate for run in mine), [each for run in mine for each in run.ttft_s]


def show(console: Console, runs: Sequence[Run]) -> None:
    """The table: medians over rounds; times over all requests of all rounds."""
    table = Table()
    columns = ("load", "way", "hit rate", "recomputed", "TTFT p50, ms", "p90", "p99", "lag p99", "failed")
    for column in columns:
        table.add_column(column, justify="left" if column in ("load", "way") else "right")
    for kind, name in dict.fromkeys((run.load, run.way) for run in runs):
        mine = [run for run in runs if (run.load, run.way) == (kind, name)]
        hit_rate, ttfts = _of(runs, kind, name)
        summary = summarize(ttfts)
        times = [f"{1000 * each:.0f}" for each in (summary.p50, summary.p90, summary.p99)] if summary else ["-"] * 3
        recomputed = statistics.median(run.recomputed / run.prompt_tokens for run in mine)
        failed = sum(run.num_requests - run.num_ok for run in mine)
        lag_ms = 1000 * max(run.lag_p99_s for run in mine)
        table.add_row(kind, name, f"{hit_rate:.1%}", f"{recomputed:.1%}", *times, f"{lag_ms:.0f}", str(failed))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
