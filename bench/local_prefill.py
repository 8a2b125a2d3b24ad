"""`python -m bench.local_prefill`: up to which length a prompt is better computed by the decode node itself than handed over to it.

    streams that decode on the node, all the time     probe: a prompt of so many tokens, by handoff or local, in turns
        -> their gaps while the probe was there            -> its first token, its second one

The first token is sooner by the handoff if the prefill node computes faster (nobody decodes there); the second one waits for the
handoff. What decodes waits for a local prompt's chunks in its own steps; on few cores it waits for the prefill node's, too. Every
figure is compared within its round, and a ratio is the median over rounds: other load on the machine favours nobody.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import uvloop
from rich.console import Console
from rich.table import Table

from bench.cluster import ClusterProblem
from bench.frame import SUFFIXES, Bench, check_files, check_model, whole_numbers
from bench.http_exchange import Server, exchange
from bench.load import PATH
from bench.local_prefill_figures import Figures, Probe, figures_of, seen
from bench.local_prefill_plot import plot
from bench.progress import StepProgress
from bench.two_ways import WAYS, TwoWays, started_two_ways
from runtime.config import knob, load
from runtime.process import run_async

PROG: Final = "python -m bench.local_prefill"
_PROBE_TOKENS: Final = 3  # that a probe says: the first is the prefill's, the second is behind the handoff
_SETTLED_TOKENS: Final = 3  # of each stream, before the first probe
_SETTLED_BOUND_S: Final = 120.0
_TOKEN_IDS: Final = re.compile(rb'"completion_token_ids":\[([0-9,]+)\]')  # as a router writes them


@dataclass(frozen=True, slots=True)
class LocalPrefillConfig:
    """One run."""

    model: Path = knob(
        help="model directory; a random one will do: baton model make --like smollm2-135m", metavar="DIR"
    )
    lengths: str = knob("16,32,64,128,256,512,1024,2048", "tokens of the probes' prompts", metavar="N,…")
    chunks: str = knob("64", "--local-prefill-chunk of the decode node: a cluster for each", metavar="N,…")
    streams: int = knob(4, "that decode on the node while the probes come; 0: none", low=0, high=256)
    rounds: int = knob(7, "probes of each length and way", low=1, high=10_000)
    vocab_size: int = knob(256, "token ids are drawn below it", low=2, high=1 << 24)
    seed: int = knob(0, "of the prompts", low=0, high=(1 << 63) - 1)
    output: Path | None = knob(None, "JSON file for all figures", metavar="FILE")
    plot: Path | None = knob(
        None, f"picture of the ratios, its suffix {', '.join(SUFFIXES)}; needs matplotlib", metavar="FILE"
    )

    def __post_init__(self) -> None:
        whole_numbers("--lengths", self.lengths)
        whole_numbers("--chunks", self.chunks)
        check_files(self.output, self.plot)
        check_model(self.model)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, or 2 for what the user can mend, 130 after Ctrl-C."""
    config = load(LocalPrefillConfig, PROG, "Compare handoffs with prompts that the decode node computes itself.", argv)
    return Bench(PROG, _measure, show, lambda figures: {"figures": [asdict(each) for each in figures]}, plot).run(
        config, argv
    )


def _measure(config: LocalPrefillConfig, console: Console) -> list[Figures]:
    lengths, chunks = whole_numbers("--lengths", config.lengths), whole_numbers("--chunks", config.chunks)
    max_model_len = max(lengths) + 16 * 1024  # a stream goes on for as long as a round of probes may take
    block_size, num_seqs = 16, config.streams + 2
    num_blocks = -(-(max_model_len + 2 * max(lengths) + 2048 * num_seqs) // block_size)
    figures = []
    with StepProgress(console, "probes", 2 * config.rounds * len(lengths) * len(chunks)) as progress:
        for chunk in chunks:
            sizes = {"block-size": block_size, "max-num-seqs": num_seqs, "num-blocks": num_blocks}
            with started_two_ways(config.model, chunk, sizes) as cluster:
                run = _Run(config, cluster, progress)
                figures += run_async(run.compare_all(chunk, lengths), uvloop.new_event_loop)
                if cluster.num_local() != run.num_local:
                    raise ClusterProblem(f"{cluster.num_local()} prompts were local, {run.num_local} were meant to be")
    return figures


class _Run:
    """The requests to one cluster."""

    def __init__(self, config: LocalPrefillConfig, cluster: TwoWays, progress: StepProgress) -> None:
        self._config = config
        self._model = config.model.absolute().name
        self._servers = {way: Server.parse(url) for way, url in cluster.urls.items()}
        self._progress = progress
        self._random = random.Random(config.seed)
        self._said = asyncio.Event()  # somebody got a token
        self.num_local = 0  # probes

    async def compare_all(self, chunk: int, lengths: Sequence[int]) -> list[Figures]:
        """Each length in its turn."""
        return [await self._compare(chunk, length) for length in lengths]

    async def _compare(self, chunk: int, length: int) -> Figures:
        """All rounds of one length."""
        rounds: list[dict[str, Probe]] = []
        quiet: list[float] = []
        for number in range(-1, self._config.rounds):  # the first warms up: links are opened, pages touched
            instants: list[list[float]] = [[] for _ in range(self._config.streams)]
            streams = [asyncio.create_task(self._stream("handoff", 16, 1536, each)) for each in instants]
            await self._settled(instants)
            quiet += [b - a for each in instants for a, b in pairwise(each[_SETTLED_TOKENS - 1 :])]
            windows = {}
            for way in list(WAYS)[:: 1 if number % 2 else -1]:
                windows[way] = await self._probe(way, length)
                if number >= 0:
                    self._progress.advance(f"{length} tokens, {way}, chunks of {chunk}")
                await asyncio.sleep(0.1 if instants else 0)  # so that each stream's gap over the end is a whole one
            for stream in streams:
                if stream.done():
                    raise ClusterProblem("a stream ended before the probes beside it")
                stream.cancel()
                with suppress(asyncio.CancelledError):
                    await stream
            if number >= 0:
                rounds.append({way: seen(window, instants) for way, window in windows.items()})
        return figures_of(chunk, length, rounds, quiet)

    async def _settled(self, instants: Sequence[Sequence[float]]) -> None:
        """Until every stream has said a few tokens, and for a while longer, which is the quiet that gaps are compared with."""
        async with asyncio.timeout(_SETTLED_BOUND_S):
            while any(len(each) < _SETTLED_TOKENS for each in instants):
                self._said.clear()
                await self._said.wait()
        await asyncio.sleep(0.2 if instants else 0)

    async def _probe(self, way: str, length: int) -> list[float]:
        """The instants of its beginning and of each token."""
        self.num_local += way == "local"
        instants = [time.monotonic()]
        last = await self._stream(way, length, _PROBE_TOKENS, instants)
        if len(instants) <= _PROBE_TOKENS:
            raise ClusterProblem(f"a probe of {length} tokens got {len(instants) - 1} of {_PROBE_TOKENS}: {last}")
        return instants

    async def _stream(self, way: str, num_prompt: int, max_tokens: int, instants: list[float]) -> str:
        """One request; `instants` gets when each of its tokens came. The last words of its answer."""
        server = self._servers[way]
        fields = {
            "model": self._model,
            "prompt": [self._random.randrange(self._config.vocab_size) for _ in range(num_prompt)],
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }

        last, rest = b"", b""

        def take(data: bytes, now: float) -> None:
            nonlocal last, rest
            last = data
            *lines, rest = (rest + data).split(b"\n")
            for token_ids in _TOKEN_IDS.findall(b"\n".join(lines)):
                instants.extend(
                    [now] * (token_ids.count(b",") + 1)
                )  # a router that is behind puts several into one event
            self._said.set()

        await exchange(server, server.post(PATH, json.dumps(fields).encode()), take, lambda _at: None, None)
        return last[-300:].decode("utf-8", "replace").strip()


def show(console: Console, figures: Sequence[Figures]) -> None:
    """The table."""
    table = Table(title="local ÷ handoff, and milliseconds of both")
    for heading in ("chunk", "prompt", "first token", "second token", "longest gap", "stalled", "quiet gap"):
        table.add_column(heading, justify="right")
    for each in figures:
        cells = [
            f"{ratio:.2f}  ({by_way['local'] * 1000:.0f} ÷ {by_way['handoff'] * 1000:.0f})"
            for ratio, by_way in (
                (each.ttft_ratio, each.ttft_s),
                (each.second_token_ratio, each.second_token_s),
                (each.longest_gap_ratio, each.longest_gap_s),
            )
        ]
        row = (str(each.chunk), str(each.prompt_tokens), *cells, f"{each.stall_ratio:.2f}")
        table.add_row(*row, f"{each.quiet_gap_s * 1000:.0f}")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
