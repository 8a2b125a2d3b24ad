"""`python -m bench.router`: what the router costs, with nodes that compute nothing, beside uvicorn alone and a peer.

    client ──HTTP──> router ──session──> bench.fake_node        CPU by /proc of the router's process, not by the clock
    client ──HTTP──> bench.sse_floor                            what uvicorn and FastAPI take for as many events: the floor
    client ──HTTP──> peer ──HTTP──> 2 x bench.mock_backend      somebody else's router in PD mode (--peer)
    client ──HTTP──> bench.mock_backend                         what client and machine add by themselves

In each round every side has the same four loads: short requests; a fixed number of long streams, a token every step, spread over
the step; tokens as fast as the side takes them; and so many streams that a router's process is busy for `--load` of a core, where
delays are read. CPU of a token and of a request follow from the first two. What is no router, and shows what the measurement and
uvicorn add by themselves, has as many streams there as the router that had most. Tokens are said by a clock, whoever is late. Who
is measured has a core of its own; a router of several processes has as many, of which the first alone is its own where there are no
more than that. Placement (router_placement.py), and nodes' joining and a node's loss (router_loss.py), are measured apart, without
sockets.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import uvloop
from rich.console import Console
from rich.table import Table

from bench.frame import Bench, check_files, check_model, whole_numbers
from bench.progress import StepProgress
from bench.router_figures import Round, SideFigures, figures_of, is_near, load_of, split_cost, streams_for
from bench.router_load import Shape, Window, run_window, window_of
from bench.router_loss import LossCost, loss_costs
from bench.router_placement import PLACEMENT_POLICIES, PlacementCost, placement_costs
from bench.router_plot import plot
from bench.router_report import tables
from bench.router_sides import Cores, Side, Started
from bench.stepping import Pace
from router.text import ModelText
from runtime.config import knob, load
from runtime.process import run_async

PROG: Final = "python -m bench.router"
_PROMPT: Final = "Tell me how a baton is handed over, and what becomes of it if nobody is there to take it. "
_SHORT_STREAMS: Final = 8
_LONG_TOKENS: Final = 128
_MORE_TRIES: Final = 2  # until the load is the one that was asked for
_MOST_TIMES: Final = 6  # as many streams, where delays are measured: the client is to keep up
_NO_ROUTER: Final = ("direct", "uvicorn")

Case = tuple[str, Side, int | None]  # its name, what is measured, branches a message where that means anything


@dataclass(frozen=True, slots=True)
class RouterBenchConfig:
    """One run."""

    model: Path = knob(help="model directory: only its tokenizer is used; baton model make", metavar="DIR")
    branches: str = knob("1,8,32", "branches a message, of the fake nodes", metavar="N,…")
    workers: str = knob("1", "--workers of the router: a router for each", metavar="N,…")
    decode: int = knob(4, "fake decode nodes", low=1, high=100)
    streams: int = knob(64, "streams under way where CPU is measured", low=1, high=10_000)
    step_ms: int = knob(10, "milliseconds between a stream's tokens", low=1, high=10_000)
    load: float = knob(0.7, "of a core, where delays are measured", low=0.01, high=64)
    window_s: float = knob(4.0, "seconds of each measurement", low=0.2, high=600)
    rounds: int = knob(3, "of every side", low=1, high=1000)
    peer: str | None = knob(
        None,
        "command line that starts another router in PD mode, with {port}, {prefill} and {decode} (urls of mock back ends), and "
        "{spare} (a port), in it",
        metavar="COMMAND",
    )
    nodes: str = knob("1,10,100,1000", "nodes among which requests are placed; empty: not measured", metavar="N,…")
    decisions: int = knob(500, "placements of each number of nodes and policy", low=5, high=1_000_000)
    output: Path | None = knob(None, "JSON file for all figures", metavar="FILE")
    plot: Path | None = knob(None, "picture; needs matplotlib", metavar="FILE")

    def __post_init__(self) -> None:
        whole_numbers("--branches", self.branches)
        whole_numbers("--workers", self.workers, 64)
        whole_numbers("--nodes", self.nodes, 4096, may_be_empty=True)
        check_files(self.output, self.plot)
        check_model(self.model)


@dataclass(frozen=True, slots=True)
class Result:
    """What was found."""

    sides: list[SideFigures]
    placement: list[PlacementCost]
    losses: list[LossCost]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, 2 for what the user can mend, 130 after Ctrl-C."""
    config = load(RouterBenchConfig, PROG, "Measure the router with nodes that compute nothing.", argv)
    return Bench(PROG, measure, show, to_json, lambda result, path: plot(result.sides, result.placement, path)).run(
        config, argv
    )


def measure(config: RouterBenchConfig, console: Console) -> Result:
    """All sides by turns, then placement. ClusterProblem, ValueError."""
    groups, nodes = (
        whole_numbers("--branches", config.branches),
        whole_numbers("--nodes", config.nodes, 4096, may_be_empty=True),
    )
    with ExitStack() as stack:
        cases = _start(config, Started(Cores.split(), stack), groups)
        num_steps = 4 * config.rounds * len(cases) + len(nodes) * (len(PLACEMENT_POLICIES) + 1)
        with StepProgress(console, "measurements", num_steps) as progress:
            rounds: dict[str, list[Round]] = {name: [] for name, _, _ in cases}
            for number in range(config.rounds):
                for each in _round(config, cases if number % 2 else cases[::-1], progress):
                    rounds[each.name].append(each.windows)
            costs = placement_costs(PLACEMENT_POLICIES, nodes, config.decisions, progress.advance)
            losses = loss_costs(nodes, progress.advance)
    return Result([figures_of(side.name, group, rounds[name]) for name, side, group in cases], costs, losses)


def _start(config: RouterBenchConfig, started: Started, groups: Sequence[int]) -> list[Case]:
    """What is measured."""
    cases: list[Case] = [
        ("direct", started.direct(), None),
        ("uvicorn", started.floor(), None),
    ]
    for workers in whole_numbers("--workers", config.workers, 64):
        name = "baton" if workers == 1 else f"baton, {workers} workers"
        side = started.baton(config.model, workers, config.decode, _letters(config.model), name)
        cases += [(f"{name}, {group} a message", side, group) for group in groups]
    if config.peer is not None:
        cases.append(("peer", started.peer(config.peer), None))
    return cases


def _letters(model: Path) -> list[int]:
    """Tokens that are a letter each, wherever they stand: so text tells how many tokens came."""
    text = ModelText(model)
    found = [each for each in range(min(text.vocab_size, 4096)) if text.decode([each]).isascii()]
    letters = [each for each in found if len(text.decode([each])) == 1 and text.decode([each]).isalpha()]
    letters = [each for each in letters if text.decode([each, each, each]) == text.decode([each]) * 3]
    if not letters:
        raise ValueError(f"--model {model}: has no tokens that are a single letter")
    return letters[:16]


class _Measured(NamedTuple):
    name: str
    windows: Round


def _round(config: RouterBenchConfig, cases: Sequence[Case], progress: StepProgress) -> list[_Measured]:
    """The four loads of every case, the last one once all have had the others."""

    def run(case: Case, what: str | None, streams: int, max_tokens: int, step_ms: int) -> Window:
        name, side, group = case
        shape = Shape(streams, max_tokens, step_ms, config.window_s)
        side.speaker.set_pace(Pace(step_ms, group or 8))
        found = run_async(run_window(side.server, side.model, _PROMPT, shape, side.read_cpu), uvloop.new_event_loop)
        if what is not None:  # else a step of before, again
            progress.advance(f"{name}, {what}")
        return window_of(found[0], side.speaker.said(), *found[1:], max_tokens)

    def costs_of(case: Case) -> tuple[Window, Window, Window]:
        short = run(case, "short", _SHORT_STREAMS, 2, config.step_ms)
        steady = run(case, "steady", config.streams, _LONG_TOKENS, config.step_ms)
        try:
            split_cost(short, steady)
        except ValueError as error:  # now, and not when everything has been measured
            raise ValueError(f"--window-s {config.window_s:g}: too short for {case[0]}: {error}") from None
        return short, steady, run(case, "as fast as can be", config.streams, _LONG_TOKENS, 0)

    costs = [costs_of(case) for case in cases]

    def loaded_of(case: Case, steady: Window) -> tuple[int, Window]:
        """At the load that is asked for; what so many streams take says only nearly what more of them would."""
        streams, window = config.streams, steady
        for what in ("loaded", *[None] * _MORE_TRIES):
            streams = min(streams_for(window, streams, config.load), _MOST_TIMES * config.streams)
            window = run(case, what, streams, _LONG_TOKENS, config.step_ms)
            if is_near(load_of(window), config.load):
                break
        return streams, window

    loaded = {
        case[0]: loaded_of(case, steady)
        for case, (_, steady, _) in zip(cases, costs, strict=True)
        if case[0] not in _NO_ROUTER
    }
    most = max((streams for streams, _ in loaded.values()), default=config.streams)
    for case in cases:
        if case[0] in _NO_ROUTER:
            loaded[case[0]] = (most, run(case, "loaded", most, _LONG_TOKENS, config.step_ms))
    return [_Measured(case[0], Round(*windows, *loaded[case[0]])) for case, windows in zip(cases, costs, strict=True)]


def show(console: Console, result: Result) -> None:
    """The tables of the page."""
    for title, rows in tables(to_json(result)):
        table = Table(title=None, box=None, pad_edge=False)
        for index, heading in enumerate(title):
            table.add_column(heading, justify="right" if index else "left", no_wrap=not index)
        for row in rows:
            table.add_row(*row)
        console.print(table)


def to_json(result: Result) -> dict[str, Any]:
    """All figures."""
    return {
        "sides": [asdict(each) for each in result.sides],
        "placement": [asdict(each) for each in result.placement],
        "losses": [asdict(each) for each in result.losses],
    }


if __name__ == "__main__":
    sys.exit(main())
