"""`baton plan measure`: how long steps and transfers take, for `baton plan`: of a model here, or of a running cluster.

    --model DIR            one engine in this process, step by step (bench/engine_steps.py); its link is not measured, but told
    --model DIR --url URL  a cluster that runs this model, as its clients see it (plan_probe.py)

Rates are fitted by least squares to what was timed. They hold for the threads, the dtype and the neighbours that were there.
"""

from __future__ import annotations

import ssl
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from rich.console import Console
from rich.table import Table

from bench.cluster import ClusterProblem
from bench.frame import Bench, check_files, check_model, whole_numbers
from bench.http_exchange import Server
from bench.load import Sender
from bench.plan_model import read_model_size
from bench.plan_probe import Probe, Prober
from bench.plan_rates import Measured, Rates, Shape, fit, pairs_of
from bench.progress import StepProgress
from bench.serve import ServerProblem, find_model
from bench.serve_config import BenchConfig
from engine.config_values import read_settings
from engine.host_memory import free_memory_bytes
from runtime.authority import believing
from runtime.config import knob, load, set_thread_environment
from runtime.process import run_async
from runtime.unanswered import check_key, why_no_authority

PROG: Final = "baton plan measure"
_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class MeasureConfig:
    """One measurement."""

    model: Path = knob(help="model directory in Hugging Face layout", metavar="DIR")
    output: Path = knob(help="JSON file for the rates, which `baton plan --rates` reads", metavar="FILE")
    url: str | None = knob(
        None, "a quiet cluster of one prefill and one decode node; none: an engine in this process", metavar="URL"
    )
    api_key: str | None = knob(None, "of the cluster, where it asks; better in the variable", metavar="KEY")
    ca: Path | None = knob(
        None, "of the cluster: as PEM, who signed its certificate; none: those that this host trusts", metavar="FILE"
    )
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = knob("auto", "of weights and KV; as of a node")
    kernels: Literal["cpu", "numba", "torch", "triton"] = knob("cpu", "what computes in this process; as of a node")
    threads: int = knob(1, "compute threads in this process", low=1, high=1024)
    chunk: int = knob(512, "--max-num-batched-tokens of the node", low=16, high=1 << 20)
    lengths: str = knob("16,128,512,1024,2048", "prompts, or contexts, in tokens", metavar="N,…")
    rows: str = knob("1,2,4,8", "sequences that decode side by side", metavar="N,…")
    rounds: int = knob(3, "of all of it, behind one that does not count", low=1, high=1000)
    link_bytes_per_s: float = knob(1e9, "without --url: what a prefill node sends", metavar="N", low=1)
    link_latency_s: float = knob(
        0.005, "without --url: from a handoff's last byte to its first step", metavar="S", low=0
    )
    route_s: float = knob(0.003, "without --url: from a request's arrival to its prefill node", metavar="S", low=0)
    seed: int = knob(0, "of the prompts", low=0, high=(1 << 63) - 1)

    def __post_init__(self) -> None:
        check_files(self.output)
        check_model(self.model)
        for flag, text, least in (("--lengths", self.lengths, 4), ("--rows", self.rows, 2)):
            if len(set(whole_numbers(flag, text))) < least:
                raise ValueError(f"{flag} {text}: at least {least} different numbers, or there is nothing to fit")
        if self.url is not None:
            try:
                Server.parse(self.url)
            except ValueError as error:
                raise ValueError(f"--url {error}") from None
        check_key(self.api_key)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; 0, 2 for what the user can mend, 130 after Ctrl-C."""
    config = load(MeasureConfig, PROG, "Measure how long an engine's steps take, for baton plan.", argv)
    return Bench(PROG, measure, show, lambda rates: {"rates": rates.to_json()}).run(config, argv)


def measure(config: MeasureConfig, console: Console) -> Rates:
    """ClusterProblem, ValueError, OSError: what the user can mend."""
    lengths = sorted(set(whole_numbers("--lengths", config.lengths)))
    rows = sorted(set(whole_numbers("--rows", config.rows)))
    size = read_model_size(config.model, config.dtype)
    if config.url is None:
        return _of_engine(config, lengths, rows, size.token_bytes, console)
    vocab_size = read_settings(config.model / "config.json").count("vocab_size")
    tls = _tls(config.url, config.ca)
    name = served_name(config.url, config.api_key, config.ca)
    probe = Probe(name, vocab_size, size.token_bytes, config.chunk, lengths, rows, config.rounds, config.seed)
    sender = Sender(Server.parse(config.url), is_stream=True, timeout_s=_TIMEOUT_S, tls=tls, api_key=config.api_key)
    with StepProgress(console, "measurements", probe.num_asked) as progress:
        return Prober(probe, sender, progress.advance).run()


def served_name(url: str, api_key: str | None, authority: Path | None) -> str:
    """What the cluster calls its model, which need not be the folder's name. ClusterProblem."""
    try:
        return run_async(find_model(BenchConfig(url=url, api_key=api_key, ca=authority, timeout_s=_TIMEOUT_S)))
    except ServerProblem as problem:
        raise ClusterProblem(str(problem)) from None


def _tls(url: str, authority: Path | None) -> ssl.SSLContext | None:
    if not Server.parse(url).is_tls:
        return None
    try:
        return believing(authority)
    except OSError as error:
        raise ValueError(f"--ca {authority}: {why_no_authority(error)}") from None


def _of_engine(
    config: MeasureConfig, lengths: Sequence[int], rows: Sequence[int], token_bytes: int, console: Console
) -> Rates:
    set_thread_environment(config.threads)  # before torch loads
    import torch

    from bench.engine_steps import Case, Steps, random_memory
    from engine.model import load_model

    torch.set_num_threads(config.threads)
    model = load_model(config.model, config.dtype, config.kernels)
    cases = [Case(batch, context) for context in lengths for batch in rows]
    cases += [Case(0, context, tokens) for context in (0, *lengths) for tokens in (config.chunk // 8, config.chunk)]
    most = max(cases, key=lambda case: case.num_positions)
    need, free = most.num_positions * token_bytes, free_memory_bytes()
    if need > free:
        raise ValueError(
            f"{most.name}: takes {need >> 20} MiB of KV, {free >> 20} MiB are free: shorter --lengths, fewer --rows"
        )
    memory = random_memory(model, 16, cases)
    timed: list[Measured] = []
    with StepProgress(console, "steps", len(cases)) as progress:
        for case in cases:
            steps = Steps(case, model, memory, 1.0)
            steps.run()
            times = []
            for _ in range(config.rounds):
                begin = time.perf_counter()
                steps.run()
                times.append(time.perf_counter() - begin)
            of_rows, pairs = (0, 0), pairs_of(case.chunk, case.context)
            if not case.chunk:
                of_rows = case.batch, case.num_positions
            timed.append(Measured(Shape(*of_rows, case.chunk, pairs), statistics.median(times)))
            progress.advance(case.name)
    decode = fit([each for each in timed if not each.shape.num_tokens], ("base_s", "row_s", "position_s"))
    beside = {"row_s": decode.row_s, "position_s": decode.position_s}
    chunk = fit([each for each in timed if each.shape.num_tokens], ("base_s", "token_s", "pair_s"), beside)
    link = (config.link_bytes_per_s, config.link_latency_s, config.route_s)
    return Rates(
        (decode,), (chunk,), token_bytes, *link, source=f"measured: {model.kernels.name}, {config.threads} threads"
    )


def show(console: Console, rates: Rates) -> None:
    """The sums."""
    table = Table("steps", "base, ms", "row, ms", "1,000 positions, ms", "1,000 tokens, ms", "1,000,000 pairs, ms")
    for name, sums in (("decode", rates.decode), ("chunk", rates.chunk)):
        for each in sums:
            numbers = (each.base_s, each.row_s, 1e3 * each.position_s, 1e3 * each.token_s, 1e6 * each.pair_s)
            table.add_row(name, *(f"{1000 * number:.3g}" for number in numbers))
    console.print(table)
    console.print(
        f"handoff {rates.link_bytes_per_s / 1e9:.3g} GB/s + {1000 * rates.link_latency_s:.3g} ms, "
        f"around a prompt {1000 * (rates.route_s + rates.reply_s):.3g} ms"
    )


if __name__ == "__main__":
    sys.exit(main())
