"""`python -m bench.interference`: what long prompts cost the streams beside them, with prefill apart and on one mixed node.

    apart   a prefill and a decode node, half of the cores each        mixed   one node that does both, on all of them
    vLLM    its CPU build on all of them, if `--peers` has it

    streams  ──quiet: nothing else──►──long prompts arrive at fixed instants──►     gaps between the tokens that a client gets

The same streams and instants for every side, in turns, each side's others idle meanwhile (vLLM stopped). The ratio is of the 99th
percentiles, within a round; the median over rounds is told. Router and load generator share the cores with the nodes.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import uvloop
from rich.console import Console
from rich.table import Table

from bench.cluster import ClusterProblem
from bench.distribution import percentile
from bench.fleet import Fleet, pin
from bench.frame import SUFFIXES, Bench, check_files, check_model
from bench.http_exchange import Server, exchange
from bench.load import PATH
from bench.peers_servers import Peer, PeerProblem, Sizes, vllm
from bench.progress import StepProgress
from runtime.config import knob, load
from runtime.process import run_async

PROG: Final = "python -m bench.interference"
TARGET: Final = 0.5  # apart ÷ mixed on two cores (docs/design.md, section 10)
_BLOCK: Final = 16
_STREAM_PROMPT: Final = 64
_SETTLED_TOKENS: Final = 3  # of each stream, before anything counts
_SETTLED_BOUND_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class InterferenceConfig:
    """One run."""

    model: Path = knob(help="model directory; baton model make --like smollm2-135m", metavar="DIR")
    streams: int = knob(4, "that decode all the time", low=1, high=256)
    prompt_tokens: int = knob(1024, "of each long prompt", low=16, high=1 << 20)
    interval_s: float = knob(2.0, "seconds from one long prompt to the next", low=0.01, high=600)
    quiet_s: float = knob(3.0, "seconds of each round without any", low=0.1, high=3600)
    loud_s: float = knob(9.0, "seconds of each round with them", low=0.1, high=3600)
    rounds: int = knob(3, "of every side", low=1, high=1000)
    peers: Path | None = knob(None, "directory of bench.peers with vLLM in it; none: Baton alone", metavar="DIR")
    seed: int = knob(0, "of the prompts", low=0, high=(1 << 63) - 1)
    output: Path | None = knob(None, "JSON file for all figures", metavar="FILE")
    plot: Path | None = knob(None, f"picture, its suffix {', '.join(SUFFIXES)}; needs matplotlib", metavar="FILE")

    def __post_init__(self) -> None:
        check_files(self.output, self.plot)
        check_model(self.model)
        if self.peers is not None and not (self.peers / "vllm" / "bin" / "vllm").exists():
            raise ValueError(f"--peers {self.peers}: no vLLM there; python -m bench.peers --install vllm")


@dataclass(frozen=True, slots=True)
class Round:
    """One side's round: seconds between the tokens of a stream, sorted, and from each long prompt to its first token.

    ValueError: no gaps, so no ratio.
    """

    quiet: list[float]
    loud: list[float]
    first_tokens: list[float]

    def __post_init__(self) -> None:
        for flag, gaps in (("--quiet-s", self.quiet), ("--loud-s", self.loud)):
            if not gaps or percentile(gaps, 99) == 0:
                raise ValueError(
                    f"{flag}: too short, {len(gaps)} tokens came in it, all at once; more seconds show gaps between them"
                )


@dataclass(frozen=True, slots=True)
class SideFigures:
    """One side, medians over rounds, in seconds."""

    side: str
    quiet_p50: float
    quiet_p99: float
    loud_p50: float
    loud_p99: float
    loud_max: float
    first_token_p50: float  # of the long prompts
    own_ratio: float  # loud p99 ÷ quiet p99
    ratio: float | None = None  # apart's loud p99 ÷ this side's; None: it is apart


@dataclass(frozen=True, slots=True)
class Interference:
    """All of it."""

    sides: list[SideFigures]
    gaps: dict[str, list[float]] = field(default_factory=dict)  # by side, loud, all rounds, sorted


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, 2 for what the user can mend, 130 after Ctrl-C."""
    config = load(InterferenceConfig, PROG, "Measure what long prompts cost the streams beside them.", argv)
    return Bench(PROG, measure, show, to_json, plot).run(config, argv)


def measure(config: InterferenceConfig, console: Console) -> Interference:
    """Every round of every side. ClusterProblem."""
    rounds: dict[str, list[Round]] = {}
    with ExitStack() as stack:
        load_ = _Load(config)
        urls, peer = _start_all(config, load_.max_len, stack)
        progress = stack.enter_context(StepProgress(console, "rounds", config.rounds * len(urls)))
        for number in range(config.rounds):
            sides = list(urls)
            for side in sides[number % len(sides) :] + sides[: number % len(sides)]:
                if peer is not None:
                    peer.send(signal.SIGCONT if side == "vLLM" else signal.SIGSTOP)
                found = run_async(load_.round(side, Server.parse(urls[side])), uvloop.new_event_loop)
                rounds.setdefault(side, []).append(found)
                progress.advance(side)
    return figures_of(rounds)


def _start_all(config: InterferenceConfig, max_len: int, stack: ExitStack) -> tuple[dict[str, str], Peer | None]:
    """The url of each side, and vLLM if it is one; all end with the stack."""
    cores = sorted(os.sched_getaffinity(0))
    half = max(len(cores) // 2, 1)
    num_seqs = config.streams + 4
    num_blocks = (config.streams + 1) * -(-max_len // _BLOCK)
    sizes = ["--max-model-len", str(max_len), "--num-blocks", str(num_blocks), "--max-num-seqs", str(num_seqs)]
    of_half = [*sizes, "--threads", str(half)]
    router = ["--local-prefill-max-tokens", "0"]
    apart = stack.enter_context(_fleet(config, {"router": router, "prefill-0": of_half, "decode-0": of_half}))
    pin(apart.pid("prefill-0"), cores[:half])
    pin(apart.pid("decode-0"), cores[half:] or cores)
    mixed = stack.enter_context(_fleet(config, {"router": [], "mixed-0": [*sizes, "--threads", str(len(cores))]}))
    urls, peer = {"apart": apart.url, "mixed": mixed.url}, None
    if config.peers is not None:
        asked = Sizes(len(cores), num_seqs, max_len, "bf16")
        try:
            peer = stack.enter_context(vllm(config.peers, config.model, asked))
        except PeerProblem as problem:
            raise ClusterProblem(str(problem)) from None
        urls["vLLM"] = peer.url
    return urls, peer


@contextmanager
def _fleet(config: InterferenceConfig, flags: dict[str, list[str]]) -> Iterator[Fleet]:
    with (
        tempfile.TemporaryDirectory(prefix="baton-bench-", ignore_cleanup_errors=True) as folder,
        Fleet.started(config.model.absolute(), Path(folder), flags) as fleet,
    ):
        yield fleet


class _Load:
    """The streams and the long prompts of a round."""

    def __init__(self, config: InterferenceConfig) -> None:
        self._config = config
        about = json.loads((config.model / "config.json").read_text(encoding="utf-8"))
        self._vocab_size = about["vocab_size"]
        self.max_len = min(about["max_position_embeddings"], config.prompt_tokens + 8192)
        self._random = random.Random(config.seed)

    async def round(self, side: str, server: Server) -> Round:
        """Streams, then quiet, then long prompts, until the last of them has its first tokens. ClusterProblem."""
        config, model = self._config, "m" if side == "vLLM" else self._config.model.absolute().name
        instants: list[list[list[float]]] = [[] for _ in range(config.streams)]
        streams = [asyncio.create_task(self._stream(server, model, each)) for each in instants]
        await _settled(instants, streams)
        began = time.monotonic()
        await asyncio.sleep(config.quiet_s)
        loud_from = time.monotonic()
        sent: list[float] = []
        came: list[list[float]] = []
        async with asyncio.TaskGroup() as prompts:
            while time.monotonic() < loud_from + config.loud_s:
                sent.append(time.monotonic())
                came.append([])
                prompts.create_task(self._ask(server, model, config.prompt_tokens, 2, came[-1]))
                await asyncio.sleep(max(0.0, loud_from + config.interval_s * len(sent) - time.monotonic()))
        ended = time.monotonic()
        for stream in streams:
            stream.cancel()
            with suppress(asyncio.CancelledError):
                await stream
        first_tokens = [tokens[0] - at for at, tokens in zip(sent, came, strict=True)]
        of_all = [each for of_stream in instants for each in of_stream]
        return Round(_gaps(of_all, began, loud_from), _gaps(of_all, loud_from, ended), first_tokens)

    async def _stream(self, server: Server, model: str, instants: list[list[float]]) -> None:
        """Requests one behind the other, for ever; `instants` gets a list for each."""
        while True:
            instants.append([])
            await self._ask(server, model, _STREAM_PROMPT, self.max_len - _STREAM_PROMPT - 1, instants[-1])

    async def _ask(self, server: Server, model: str, num_prompt: int, max_tokens: int, instants: list[float]) -> None:
        """One request; `instants` gets when each part with a token came. ClusterProblem where none does."""
        prompt = [self._random.randrange(self._vocab_size) for _ in range(num_prompt)]
        fields: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0}
        fields |= {"ignore_eos": True, "stream": True}
        last, rest = b"", b""

        def take(data: bytes, now: float) -> None:
            nonlocal last, rest
            last = data
            *lines, rest = (rest + data).split(b"\n")  # a read may end anywhere
            instants.extend([now] * sum(line.count(b'"text":') for line in lines))

        await exchange(server, server.post(PATH, json.dumps(fields).encode()), take, lambda _at: None, None)
        if not instants:
            raise ClusterProblem(f"a prompt of {num_prompt} got no token: {last[-300:].decode('utf-8', 'replace')}")


async def _settled(instants: Sequence[Sequence[Sequence[float]]], streams: Sequence[asyncio.Task[None]]) -> None:
    """Until every stream has said a few tokens."""
    async with asyncio.timeout(_SETTLED_BOUND_S):
        while any(not each or len(each[0]) < _SETTLED_TOKENS for each in instants):
            for stream in streams:
                if stream.done():
                    stream.result()
            await asyncio.sleep(0.01)


def _gaps(instants: Sequence[Sequence[float]], begin: float, end: float) -> list[float]:
    """Between the tokens of each request, those that end from `begin` to `end`; sorted."""
    return sorted(b - a for own in instants for a, b in pairwise(own) if begin <= b <= end)


def figures_of(rounds: dict[str, list[Round]]) -> Interference:
    """Reduce the rounds of every side, which are in the same order."""
    p99 = {side: [percentile(each.loud, 99) for each in of_side] for side, of_side in rounds.items()}
    sides = []
    for side, of_side in rounds.items():
        quiet = [percentile(each.quiet, 99) for each in of_side]
        ratios = [ours / theirs for ours, theirs in zip(p99["apart"], p99[side], strict=True)]
        first_tokens = [at for each in of_side for at in each.first_tokens]
        sides.append(
            SideFigures(
                side=side,
                quiet_p50=statistics.median(percentile(each.quiet, 50) for each in of_side),
                quiet_p99=statistics.median(quiet),
                loud_p50=statistics.median(percentile(each.loud, 50) for each in of_side),
                loud_p99=statistics.median(p99[side]),
                loud_max=max(each.loud[-1] for each in of_side),
                first_token_p50=statistics.median(first_tokens),
                own_ratio=statistics.median(loud / still for loud, still in zip(p99[side], quiet, strict=True)),
                ratio=None if side == "apart" else statistics.median(ratios),
            )
        )
    gaps = {side: sorted(gap for each in of_side for gap in each.loud) for side, of_side in rounds.items()}
    return Interference(sides, gaps)


def show(console: Console, result: Interference) -> None:
    """The table, and the ratios in words."""
    table = Table(title="milliseconds between the tokens of a stream, and to the first token of a long prompt")
    for heading in (
        "",
        "quiet p50",
        "p99",
        "beside prompts p50",
        "p99",
        "worst",
        "p99 ÷ quiet",
        "prompt's first token",
    ):
        table.add_column(heading, justify="left" if not heading else "right")
    for each in result.sides:
        times = (each.quiet_p50, each.quiet_p99, each.loud_p50, each.loud_p99, each.loud_max)
        shown = [f"{1000 * value:.1f}" for value in times]
        table.add_row(each.side, *shown, f"{each.own_ratio:.2f}", f"{1000 * each.first_token_p50:.0f}")
    console.print(table)
    for each in result.sides:
        if each.ratio is not None:
            console.print(f"p99 beside long prompts, apart ÷ {each.side}: {each.ratio:.2f}")


def to_json(result: Interference) -> dict[str, Any]:
    """The figures, and the gaps at each percent."""
    quantiles = {
        side: [round(percentile(gaps, percent), 6) for percent in range(101)] for side, gaps in result.gaps.items()
    }
    return {"target": TARGET, "sides": [asdict(each) for each in result.sides], "gaps_by_percent": quantiles}


def plot(result: Interference, path: Path) -> None:
    """How many of the gaps are longer than so many milliseconds. Needs matplotlib, and only here."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "baton", "font.size": 9}):
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        for side, gaps in result.gaps.items():
            shares = [1 - index / len(gaps) for index in range(len(gaps))]
            axes.plot([1000 * gap for gap in gaps], shares, label=side, drawstyle="steps-post")
        axes.axhline(0.01, color="black", linewidth=1, linestyle=":")
        axes.set(xlabel="milliseconds between two tokens of a stream", ylabel="share of gaps that are longer")
        axes.set(xscale="log", yscale="log")
        axes.grid(alpha=0.3, which="both")
        axes.legend()
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    sys.exit(main())
