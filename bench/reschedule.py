"""`python -m bench.reschedule`: what it costs to be preempted, by what the next attempt finds of what was computed.

    two streams on decode-0, whose blocks run short --PREEMPTED--> the younger one goes on at decode-1 --> its longest pause

    prefill-0, decode-0     have both streams
    decode-1, prefill-1     asleep until these run; then decode-1 is awake, and in half of the ways prefill-1 in place of prefill-0

Four ways: the next attempt's prefill node has the prompt in its prefix cache, or not; there is a KV pool, or not. The pause is from
the last token before the preemption to the next one, which is behind the router's retry, the prefill node's work, and the handoff.
Which way was gone is not assumed: the prefill node's counters say what it computed and read. Tokens must be those of the same
request by itself.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

import uvloop
from rich.console import Console
from rich.table import Table

from bench.cluster import ClusterProblem
from bench.fleet import Fleet, wait_until
from bench.frame import SUFFIXES, Bench, check_files, check_model
from bench.http_exchange import Server
from bench.progress import StepProgress
from bench.recovery import fault_free, model_name
from bench.reschedule_plot import plot
from bench.streams import Watched
from runtime.config import knob, load
from runtime.process import run_async

PROG: Final = "python -m bench.reschedule"
_DESCRIPTION: Final = (
    "Preempt a stream, and measure when it goes on: with a KV pool, with a prefix cache only, with both, with neither."
)
BLOCK_SIZE: Final = 16
# way -> (there is a KV pool, the prefill node has computed the prompt)
WAYS: Final = {"neither": (False, False), "prefix cache": (False, True), "KV pool": (True, False), "both": (True, True)}
_TOKENS_BEHIND: Final = 96  # that a stream says, about, when its pause is over
_SLACK_BLOCKS: Final = 2  # of decode-0's pool, when the first stream is as long as --tokens-before says


@dataclass(frozen=True, slots=True)
class RescheduleConfig:
    """One run."""

    model: Path = knob(
        help="model directory; of one whose steps take milliseconds, such as baton model make --like smollm2-135m: a tiny one has "
        "said all its tokens before it can be preempted",
        metavar="DIR",
    )
    rounds: int = knob(2, "preemptions of each way", low=1, high=1000)
    prompt_blocks: int = knob(48, f"of each prompt, {BLOCK_SIZE} tokens each", low=1, high=1 << 16)
    tokens_before: int = knob(
        448, "completion tokens, about, that the stream has when it is preempted", low=32, high=1 << 20
    )
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = knob("auto", "what nodes compute in")
    seed: int = knob(0, "of the requests", low=0, high=(1 << 63) - 1)
    output: Path | None = knob(None, "JSON file for all figures and runs", metavar="FILE")
    plot: Path | None = knob(None, f"picture, its suffix {', '.join(SUFFIXES)}; needs matplotlib", metavar="FILE")

    def __post_init__(self) -> None:
        check_files(self.output, self.plot)
        check_model(self.model)

    @property
    def prompt_tokens(self) -> int:
        """Of each prompt: whole blocks, so that a prefix cache has all of it."""
        return self.prompt_blocks * BLOCK_SIZE

    @property
    def max_tokens(self) -> int:
        """Of each stream: so many that none is done before the other gives way."""
        return self.tokens_before + _TOKENS_BEHIND


@dataclass(frozen=True, slots=True)
class Preempted:
    """One preemption."""

    way: str
    pause_s: float
    num_tokens: int  # prompt and completion, as the next attempt begins
    num_computed: int  # prompt positions, by the prefill node of the next attempt
    num_read: int  # tokens in blocks that it read from the KV pool
    read_s: float  # that the reading took
    is_right: bool  # every token is that of the request by itself


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, 1 if a token was wrong, 2 for what the user can mend."""
    config = load(RescheduleConfig, PROG, _DESCRIPTION, argv)
    return Bench(PROG, measure, show, _to_json, _plot, _complaints).run(config, argv)


def _to_json(runs: Sequence[Preempted]) -> dict[str, Any]:
    return {"runs": [asdict(run) for run in runs]}


def _plot(runs: Sequence[Preempted], path: Path) -> None:
    plot(runs, list(WAYS), path)


def _complaints(runs: Sequence[Preempted]) -> list[str]:
    return [f"{run.way}: a token is not that of the request by itself" for run in runs if not run.is_right]


def measure(config: RescheduleConfig, console: Console) -> list[Preempted]:
    """Every way once a round. ClusterProblem."""
    runs: list[Preempted] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-")))
        fleets: dict[bool, Fleet] = {}
        for has_pool in (False, True):
            place = folder / f"pool-{has_pool}"
            place.mkdir()
            flags = flags_of(config, ("--kv-pool", (place / "kv").as_uri()) if has_pool else ())
            fleets[has_pool] = stack.enter_context(Fleet.started(config.model, place, flags))
        with StepProgress(console, "preemptions", config.rounds * len(WAYS)) as progress:
            for number in range(config.rounds):
                for way, (has_pool, is_cached) in WAYS.items():
                    bodies = [_body(config, f"{way}/{number}/{which}") for which in ("older", "younger")]
                    runs.append(run_async(_preempt(fleets[has_pool], way, is_cached, bodies), uvloop.new_event_loop))
                    progress.advance(way)
    return runs


def flags_of(config: RescheduleConfig, pool: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Of each process. decode-0 has room for both streams until each has said --tokens-before tokens."""
    max_len = config.prompt_tokens + config.max_tokens
    each = -(-(config.prompt_tokens + config.tokens_before) // BLOCK_SIZE)
    node: tuple[str, ...] = (
        "--block-size",
        str(BLOCK_SIZE),
        "--dtype",
        config.dtype,
        "--max-model-len",
        str(max_len),
        "--threads",
        "1",
    )
    node += ("--max-num-seqs", "4", "--max-num-batched-tokens", "256", *pool)
    decode = (*node, "--reserve-policy", "none", "--preempt-move-ms", "0", "--local-prefill", "off")
    return {
        "router": ("--local-prefill-max-tokens", "0"),
        "prefill-0": node,
        "prefill-1": node,
        "decode-0": (*decode, "--num-blocks", str(max(2 * each + _SLACK_BLOCKS, -(-max_len // BLOCK_SIZE)))),
        "decode-1": decode,
    }


def _body(config: RescheduleConfig, name: str) -> dict[str, Any]:
    rng = random.Random(f"{config.seed}/{name}")
    return {
        "model": model_name(config.model),
        "prompt": [rng.randrange(256) for _ in range(config.prompt_tokens)],
        "max_tokens": config.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


async def _preempt(fleet: Fleet, way: str, is_cached: bool, bodies: list[dict[str, Any]]) -> Preempted:
    """Let the second of two streams give way, and go on elsewhere."""
    prefill = "prefill-0" if is_cached else "prefill-1"
    asleep = ("prefill-1", "decode-1")
    for node in asleep:
        _put_to_sleep(fleet, node)
    watched = Watched(Server.parse(fleet.url), bodies)
    await watched.start(4)
    if not is_cached:
        await asyncio.to_thread(_put_to_sleep, fleet, "prefill-0")
    for node in asleep:
        fleet.thaw(node)
        await asyncio.to_thread(_wait_until_awake, fleet, node)
    awake_at = time.monotonic()
    before = await asyncio.to_thread(_counted, fleet, prefill)
    runs = await watched.finish()
    if not is_cached:
        fleet.thaw("prefill-0")
    computed, num_read, read_s, retries = (
        now - then for now, then in zip(_counted(fleet, prefill), before, strict=True)
    )
    if retries != 1 or any(run.error for run in runs):
        errors = "".join(f"; {run.error}" for run in runs if run.error)
        raise ClusterProblem(
            f"{way}: {retries:g} preemptions since all were awake, not one{errors}. A larger --tokens-before, or a model "
            "whose steps take longer, leaves more time"
        )
    stream = runs[1]  # who came later gives way
    cached = stream.prompt_tokens if is_cached else 0
    num_tokens = cached + int(computed) + int(num_read) * BLOCK_SIZE
    instants = [at for at, number in stream.events for _ in range(number)]
    first_again = num_tokens - stream.prompt_tokens  # index of the first token of the next attempt
    if not 0 < first_again < len(instants) or instants[first_again - 1] < awake_at:
        raise ClusterProblem(
            f"{way}: {num_tokens} tokens were prefilled again, of which {stream.prompt_tokens} are the prompt"
        )
    pause_s = instants[first_again] - instants[first_again - 1]
    fleet.restore()
    alone = await asyncio.to_thread(fault_free, fleet, [bodies[1]])
    blocks = int(num_read) * BLOCK_SIZE
    is_right = alone == [stream.token_ids]
    return Preempted(way, pause_s, num_tokens, int(computed), blocks, read_s, is_right)


def _put_to_sleep(fleet: Fleet, node: str) -> None:
    """Stop it, and wait until nobody sends it anything."""
    fleet.freeze(node)
    wait_until(f"{node} is missed", lambda: not _is_up(fleet, node))


def _wait_until_awake(fleet: Fleet, node: str) -> None:
    wait_until(f"{node} is awake", lambda: _is_up(fleet, node))


def _is_up(fleet: Fleet, node: str) -> bool:
    return fleet.metric("node_up", f'node="{node}"') == 1


def _counted(fleet: Fleet, prefill: str) -> tuple[float, float, float, float]:
    """Prompt positions computed, blocks read, seconds of reading, preemptions that cost a retry."""
    return (
        fleet.node_metric(prefill, "tokens_computed_total", 'phase="prefill"'),
        fleet.node_metric(prefill, "kv_pool_reads_total", 'outcome="read"'),
        fleet.node_metric(prefill, "kv_pool_fetch_seconds_sum"),
        fleet.metric("retries_total", "PREEMPTED"),
    )


def show(console: Console, runs: Sequence[Preempted]) -> None:
    """A row for each way: medians over the rounds."""
    table = Table(title=None, box=None, pad_edge=False)
    for heading in ("what is left", "pause ms", "least", "most", "of neither", "tokens", "computed", "read", "read ms"):
        table.add_column(heading, justify="left" if heading == "what is left" else "right", no_wrap=True)
    slowest = statistics.median([run.pause_s for run in runs if run.way == "neither"])
    for way in WAYS:
        of_way = [run for run in runs if run.way == way]
        pauses = [run.pause_s for run in of_way]
        median = statistics.median(pauses)
        figures = [1000 * median, 1000 * min(pauses), 1000 * max(pauses)]
        medians = [
            statistics.median(each)
            for each in zip(
                *((run.num_tokens, run.num_computed, run.num_read, 1000 * run.read_s) for run in of_way), strict=True
            )
        ]
        cells = [f"{each:.0f}" for each in figures], [f"{median / slowest:.2f}"], [f"{each:.0f}" for each in medians]
        table.add_row(way, *(cell for row in cells for cell in row))
    console.print(table)
    num_wrong = sum(not run.is_right for run in runs)
    console.print(
        "pause: from the last token before the preemption to the next one, median over the rounds; of neither: its share of the "
        "pause with neither; tokens: of the sequence then; computed, and read out of the KV pool, by the next attempt's "
        f"prefill node; {len(runs) - num_wrong} of {len(runs)} streams have the tokens of the request by itself"
    )


if __name__ == "__main__":
    sys.exit(main())
