"""`python -m bench.plan_error`: how far `baton plan` is from a cluster: a piece of a trace, replayed for real and simulated.

    a cluster of one prefill and one decode node --plan_probe.py--> rates
    the trace's first requests --> the cluster, some rounds                  --> TTFT, TPOT as clients see them
                               --> the simulator, with these rates and sizes --> the same; the error of each percentile

Simulated once more with decode steps and handoffs as they are while the prefill node rests: that difference is the machine's.

Everything is on one machine; where it has two cores each node has one of them, and router and clients share both. Writes the page
beside --output.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.cluster import ClusterProblem
from bench.completions import Asked, Asking, Record
from bench.fleet import Fleet, pin
from bench.frame import Bench, check_files, check_model
from bench.http_exchange import Server
from bench.load import Sender, run_open_loop
from bench.machine import machine, utc_date
from bench.plan_cluster import Cluster
from bench.plan_engine import Sizes
from bench.plan_load import Load
from bench.plan_model import read_model_size
from bench.plan_outcome import Counts, Setup, Slo
from bench.plan_probe import Probe, Prober
from bench.plan_rates import Rates
from bench.plan_report import percentiles
from bench.progress import StepProgress
from bench.trace import read_trace
from engine.config_values import read_settings
from runtime.config import knob, load
from runtime.process import run_async

PROG: Final = "python -m bench.plan_error"
_LENGTHS: Final = (1, 2, 4, 8, 12, 16)  # of 32 parts of max_model_len
_STREAMS: Final = (1, 2, 4, 8)
_TIMEOUT_S: Final = 300.0
_PERCENTS: Final = ("p50", "p90", "p99")


@dataclass(frozen=True, slots=True)
class ErrorConfig:
    """One run."""

    model: Path = knob(help="model directory; baton model make --like smollm2-135m", metavar="DIR")
    trace: Path = knob(help="trace in Mooncake's format", metavar="FILE")
    requests: int = knob(80, "of the trace, from its beginning", low=2, high=1_000_000)
    length_scale: float = knob(32.0, "lengths are divided by it", low=0.001, high=512)
    speed: float = knob(0.6, "times are divided by it", low=1e-6, high=1e6)
    rounds: int = knob(2, "replays of the same requests", low=1, high=100)
    probe_rounds: int = knob(3, "of the measurement of rates", low=1, high=100)
    max_model_len: int = knob(2048, "tokens of prompt and answer; longer prompts are cut", low=256, high=1 << 20)
    max_num_seqs: int = knob(16, "sequences of a node", low=1, high=4096)
    num_blocks: int = knob(2048, "blocks of a node, 16 tokens each", low=16, high=1 << 20)
    chunk: int = knob(256, "--max-num-batched-tokens of both nodes", low=16, high=1 << 20)
    seed: int = knob(0, "of the measurement's prompts", low=0, high=(1 << 63) - 1)
    output: Path | None = knob(None, "JSON file for all figures; the page is written beside it", metavar="FILE")

    def __post_init__(self) -> None:
        check_files(self.output)
        check_model(self.model)


@dataclass(frozen=True, slots=True)
class Compared:
    """Both sides; seconds, at 50, 90, 99 %. Of what was measured the median over rounds."""

    real: dict[str, list[float]]  # "ttft", "tpot"
    simulated: dict[str, list[float]]
    error: dict[str, list[float]]  # simulated / real - 1
    error_alone: dict[str, list[float]]  # the same with what was measured while the prefill node rested
    spread: dict[str, list[float]]  # of the rounds: the largest less the smallest, as a share of the median
    rates: Rates
    rates_alone: Rates
    num_requests: int
    lag_p99_s: float  # how late the load generator was
    use: dict[str, float]  # simulated, by role
    command: str


def main(argv: Sequence[str] | None = None) -> int:
    """Compare; 0, 2 for what the user can mend, 130 after Ctrl-C."""
    config = load(ErrorConfig, PROG, "Compare the planner's simulator with a replay on a real cluster.", argv)
    command = f"{PROG} {' '.join(sys.argv[1:] if argv is None else argv)}"

    def measured(config: ErrorConfig, console: Console) -> Compared:
        return measure(config, console, command)

    code = Bench(PROG, measured, show, to_json).run(config, argv)
    if code == 0 and config.output is not None:
        page = config.output.with_suffix(".md")
        page.write_text(page_of(json.loads(config.output.read_text(encoding="utf-8"))), encoding="utf-8")
        sys.stdout.write(f"written: {page}\n")
    return code


def measure(config: ErrorConfig, console: Console, command: str = PROG) -> Compared:
    """Rates, replays, simulation. ClusterProblem, ValueError, OSError."""
    with config.trace.open(encoding="utf-8") as lines:
        trace = [line for line, _ in zip(lines, range(config.requests), strict=False)]
    asked = Load(read_trace(trace), config.requests, config.length_scale, config.speed, config.max_model_len - 1)
    size = read_model_size(config.model)
    vocab_size = read_settings(config.model / "config.json").count("vocab_size")
    name = config.model.absolute().name
    lengths = sorted({16, *(config.max_model_len * part // 32 for part in _LENGTHS)})
    streams = [each for each in _STREAMS if each <= config.max_num_seqs]
    probe = Probe(name, vocab_size, size.token_bytes, config.chunk, lengths, streams, config.probe_rounds, config.seed)
    rounds: list[list[Record]] = []
    with StepProgress(console, "measurements", probe.num_asked) as progress, _started(config) as fleet:
        sender = Sender(Server.parse(fleet.url), is_stream=True, timeout_s=_TIMEOUT_S)
        prober = Prober(probe, sender, progress.advance)
        rates = prober.run(), prober.rates(is_beside=False)
    for number in range(config.rounds):
        with _started(config) as fleet:  # caches are empty, as the simulator's
            sender = Sender(Server.parse(fleet.url), is_stream=True, timeout_s=_TIMEOUT_S)
            _warm(sender, name)
            rounds.append(_replay(sender, name, asked))
        console.print(f"round {number + 1} of {config.rounds} done")
    return compare(config, asked, rates, rounds, command)


def compare(
    config: ErrorConfig,
    asked: Load,
    rates: tuple[Rates, Rates],
    rounds: Sequence[Sequence[Record]],
    command: str,
) -> Compared:
    """The same load through the simulator, and the errors. `rates`: with the prefill node at work, and at rest."""
    sizes = Sizes(config.num_blocks, 16, config.max_num_seqs, config.chunk)
    outcomes = [Cluster(Setup(sizes, each), Counts(1, 1), asked, Slo(1e9, 1e9, 1.0)).run() for each in rates]
    simulated, alone = (
        {"ttft": percentiles(each.ttft_s) or [], "tpot": percentiles(each.tpot_s) or []} for each in outcomes
    )
    of_rounds: dict[str, list[list[float]]] = {"ttft": [], "tpot": []}
    for records in rounds:
        for what, values in (("ttft", [r.ttft_s for r in records]), ("tpot", [r.tpot_s for r in records])):
            found = percentiles(np.array([np.nan if value is None else value for value in values], float))
            if found is None:
                raise ClusterProblem(f"no request of a round has a {what}")
            of_rounds[what].append(found)
    real = {what: [statistics.median(each) for each in zip(*found, strict=True)] for what, found in of_rounds.items()}
    spread = {
        what: [(max(each) - min(each)) / statistics.median(each) for each in zip(*found, strict=True)]
        for what, found in of_rounds.items()
    }
    error, error_alone = (
        {what: [have / is_ - 1 for have, is_ in zip(found[what], real[what], strict=True)] for what in found}
        for found in (simulated, alone)
    )
    lags = sorted(record.lag_s for records in rounds for record in records)
    lag_p99_s = lags[int(0.99 * (len(lags) - 1))]
    return Compared(
        real=real,
        simulated=simulated,
        error=error,
        error_alone=error_alone,
        spread=spread,
        rates=rates[0],
        rates_alone=rates[1],
        num_requests=len(asked),
        lag_p99_s=lag_p99_s,
        use=outcomes[0].use,
        command=command,
    )


@contextmanager
def _started(config: ErrorConfig) -> Iterator[Fleet]:
    """Both nodes, with half of the cores each."""
    cores = sorted(os.sched_getaffinity(0))
    half = max(len(cores) // 2, 1)
    flags = ["--max-model-len", str(config.max_model_len), "--num-blocks", str(config.num_blocks)]
    flags += ["--max-num-seqs", str(config.max_num_seqs), "--max-num-batched-tokens", str(config.chunk)]
    flags += ["--block-size", "16", "--threads", str(half), "--local-prefill", "off", "--reserve-wait-s", "60"]
    of_processes = {"router": ["--local-prefill-max-tokens", "0"], "prefill-0": flags, "decode-0": flags}
    with (
        tempfile.TemporaryDirectory(prefix="baton-plan-", ignore_cleanup_errors=True) as folder,
        Fleet.started(config.model.absolute(), Path(folder), of_processes) as fleet,
    ):
        pin(fleet.pid("prefill-0"), cores[:half])
        pin(fleet.pid("decode-0"), cores[half:] or cores)
        yield fleet


def _body(name: str, prompt: Sequence[int], tokens: int) -> bytes:
    return Asking(name, "token_ids", wants_token_ids=True).body(json.dumps(list(prompt)), tokens)


def _warm(sender: Sender, name: str) -> None:
    """What a first request makes: links, threads, pages. Its prompt begins as no other's does."""
    prompts = [[2] * 8, [2] * 300]
    asked = [Asked(index, _body(name, prompt, 8), len(prompt), 8) for index, prompt in enumerate(prompts)]
    run_async(run_open_loop(sender, asked, [0.0, 1.0]))


def _replay(sender: Sender, name: str, load_: Load) -> list[Record]:
    requests = [load_[index] for index in range(len(load_))]
    asked = [
        Asked(each.index, _body(name, load_.tokens(each), each.output_tokens), each.prompt_tokens, each.output_tokens)
        for each in requests
    ]
    records = run_async(run_open_loop(sender, asked, [each.at_s for each in requests]))
    if failed := [record for record in records if not record.is_ok]:
        raise ClusterProblem(f"{len(failed)} requests failed, the first: {failed[0].status} {failed[0].error}")
    return records


def to_json(compared: Compared) -> dict[str, Any]:
    """Everything."""
    return {**asdict(compared), "date": utc_date(), "machine": machine()}


def show(console: Console, compared: Compared) -> None:
    """The table."""
    table = Table("", "measured, ms", "simulated, ms", "error", "spread of rounds", "error, at rest")
    for cells in _rows(asdict(compared)):
        table.add_row(*cells)
    console.print(table)


def _rows(result: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for what in ("ttft", "tpot"):
        columns = [result[name][what] for name in ("real", "simulated", "error", "spread", "error_alone")]
        for percent, real, simulated, error, spread, alone in zip(_PERCENTS, *columns, strict=True):
            times = f"{1000 * real:.1f}", f"{1000 * simulated:.1f}"
            yield f"{what.upper()} {percent}", *times, f"{error:+.0%}", f"{spread:.0%}", f"{alone:+.0%}"


def page_of(result: dict[str, Any]) -> str:
    """The page of a result file."""
    where = f"{result['machine']['cores']} cores of {result['machine']['cpu_model']}"
    worst = max((abs(each), what) for what, found in result["error"].items() for each in found)
    lines = [
        "# The planner against a cluster",
        "",
        f"`{result['command']}`, {result['date'][:10]}, {where}. All figures: the JSON beside.",
        "",
        f"{result['num_requests']} requests of the trace on one prefill and one decode node, a core each, beside router",
        "and clients; then in `baton plan`'s simulator, with rates measured on such a cluster before (`baton plan measure --url`).",
        f"Measured: medians over {result['settings']['rounds']} rounds, each with empty caches. The last column: the error with",
        "decode steps and handoffs as they were measured, in turns with the others, while the prefill node rested.",
        "",
        "| | measured, ms | simulated, ms | error | spread of rounds | error, prefill at rest |",
        "|---|---|---|---|---|---|",
        *(f"| {' | '.join(cells)} |" for cells in _rows(result)),
        "",
        f"The largest error is {worst[0]:.0%}, of {worst[1].upper()}. In the simulation the prefill node had a step in "
        f"{result['use']['prefill']:.0%} of the time, the decode node in {result['use']['decode']:.0%}.",
        f"The load generator was late by {1000 * result['lag_p99_s']:.1f} ms at the 99th percentile.",
        "",
        "What the simulator leaves out, and why it errs, stands in [docs/planning.md](../../docs/planning.md).",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
