"""The benchmarks of `python -m bench`: how each is run briefly, and what of its result is said in a line. Pure.

A line is what was compared, its ratio, and the ratio that the design asks for where it asks for one (docs/design.md, section 10). A
ratio is better small unless its line says otherwise.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from bench.engine_report import target_of
from bench.page import transport_target
from bench.router_figures import is_near

TINY: Final = "llama-tiny"
SMOL: Final = "smollm2-135m"
LLAMA: Final = "llama-125m"

Result = Mapping[str, Any]


class Line(NamedTuple):
    """One row of the table."""

    what: str
    ratio: float
    shown: str  # the two numbers behind it
    target: float | None = None
    is_better_high: bool = False
    unjudged: str = ""  # why it is neither met nor missed, though something is asked for

    @property
    def is_met(self) -> bool | None:
        """None: nothing is asked for, or it cannot be told."""
        if self.target is None or self.unjudged:
            return None
        return self.ratio >= self.target if self.is_better_high else self.ratio <= self.target


@dataclass(frozen=True, slots=True)
class Entry:
    """One benchmark."""

    name: str
    module: str
    flags: str
    bound_s: float
    lines: Callable[[Result], Iterable[Line]]
    model: str | None = None
    has_plot: bool = False


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def _router(result: Result) -> Iterable[Line]:
    sides = result["sides"]
    floor = next(side["token_us"] for side in sides if side["side"] == "uvicorn")
    direct_s = next(side["delay_p99_s"] for side in sides if side["side"] == "direct")
    for side in sides:
        if side["side"] == "baton":
            beyond, many = side["token_us"] - floor, side["branches"] >= 8
            yield Line(
                f"router, CPU of a streamed token beyond uvicorn's, {side['branches']} branches a message; of 30 µs",
                beyond / 30,
                f"{beyond:.1f} µs, uvicorn {floor:.1f} µs",
                1.0 if many else None,
            )
            asked = result["settings"]["load"]
            yield Line(
                f"router, p99 delay of a token at {side['load']:.0%} of a core beyond a back end's own, {side['branches']} "
                "branches a message; of 2 ms",
                (side["delay_p99_s"] - direct_s) / 0.002,
                f"{_ms(side['delay_p99_s'])}, the back end alone {_ms(direct_s)}",
                1.0 if many else None,
                unjudged="" if is_near(side["load"], asked) else f"at {asked:.0%} of a core, which was not reached",
            )
    for policy in ("least_loaded", "cache_aware"):
        costs = {each["nodes"]: each["decision_us"] for each in result["placement"] if each["policy"] == policy}
        if costs:
            few, most = min(costs), max(costs)
            said = f"{costs[most]:.0f} ÷ {costs[few]:.0f} µs"
            yield Line(f"placement, {policy}, {most} nodes ÷ {few}", costs[most] / costs[few], said)


def _scheduler(result: Result) -> Iterable[Line]:
    for case in result["cases"]:
        target_s, slots = result["target_s"], case["num_slots"]
        what = f"scheduler, bookkeeping of a step, {slots} slots; of {1e6 * target_s:.0f} µs"
        target = 1.0 if slots <= 256 else None
        ended = f"{case['ended_per_1000_steps'] / 1000:.1f} sequences end in each"
        for which, middle_s, best_s in (
            ("nobody comes or goes", case.get("quiet_s"), case["best_quiet_s"]),
            (ended, case["step_s"], case["best_step_s"]),
        ):
            if middle_s is not None:
                shown = f"{1e6 * middle_s:.0f} µs, in the best round {1e6 * best_s:.0f}"
                yield Line(f"{what}; {which}", middle_s / target_s, shown, target)


def _engine(result: Result) -> Iterable[Line]:
    for case in result["cases"]:
        said = f"engine, {case['case']} ÷ the machine's limit"
        yield Line(said, case["ratio"], _ms(case["step_s"]), target_of(case["case"]))


def _overlap(result: Result) -> Iterable[Line]:
    for each in result["batches"]:
        said = f"{_ms(each['overlapped_s'])} ÷ {_ms(each['alone_s'])}"
        yield Line(f"a step planned ahead ÷ one at a time, batch {each['batch']}", each["ratio"], said)


def _transport(result: Result) -> Iterable[Line]:
    for case in result["cases"]:
        size = f"blocks of {case['block_bytes'] >> 10} KiB, {case['transfer_bytes'] >> 20} MiB"
        for way in case["ways"]:
            if way["ratio"] is not None:
                median, target = way["ratio"]["p50"], transport_target(result, case, way)
                said = f"{way['gb_per_s']['p50']:.1f} GB/s"
                yield Line(f"transport {way['way']} ÷ {way['baseline']}, {size}", median, said, target, True)


def _kv_pool_step(result: Result) -> Iterable[Line]:
    for way in result["ways"]:
        if way["way"] != "none":
            said = f"{_ms(way['p50_s'])} a step"
            yield Line(f"a step beside a KV pool ÷ without: {way['way']}", way["p50_ratio"], said)


def _local_prefill(result: Result) -> Iterable[Line]:
    for each in result["figures"]:
        said = f"{_ms(each['second_token_s']['local'])} ÷ {_ms(each['second_token_s']['handoff'])}"
        what = f"second token of a prompt of {each['prompt_tokens']}, computed by the decode node ÷ handed over"
        yield Line(what, each["second_token_ratio"], said)


def _failover(result: Result) -> Iterable[Line]:
    for way in result["ways"]:
        said = f"{_ms(way['last_next_token_s'])} ÷ {_ms(way['target_s'])}"
        yield Line(f"failover, {way['way']}: next token ÷ (found + prefill + 50 ms)", way["ratio"], said, 1.0)


def _crossover(result: Result) -> Iterable[Line]:
    names = {"ttft": "first token", "gap_p99": "p99 between tokens"}
    for cell in result["cells"]:
        for name, said in names.items():
            by_side = cell["by_side"]
            shown = f"{_ms(by_side['apart'][name])} ÷ {_ms(by_side['mixed'][name])}"
            what = (
                f"1P+1D ÷ mixed on the same cores, prompts of {cell['prompt_tokens']}, {cell['load']} under way, {said}"
            )
            is_asked = name == "gap_p99" and cell["prompt_tokens"] >= 512 and cell["load"] > 1
            yield Line(what, cell["ratios"][name], shown, 0.5 if is_asked else None)


def _exposed(result: Result) -> Iterable[Line]:
    for each in result["figures"]:
        what = f"handoff behind the last chunk ÷ prefill, {each['transport']}, prompts of {each['prompt_tokens']}"
        target = result["target"] if each["prompt_tokens"] >= 1024 else None
        yield Line(what, each["share"], f"{_ms(each['exposed_s'])} ÷ {_ms(each['prefill_s'])}", target)


def _interference(result: Result) -> Iterable[Line]:
    apart = next(each for each in result["sides"] if each["side"] == "apart")
    for each in result["sides"]:
        if each["ratio"] is not None:
            said = f"{_ms(apart['loud_p99'])} ÷ {_ms(each['loud_p99'])}"
            target = result["target"] if each["side"] == "mixed" else None
            what = f"p99 between tokens beside long prompts, 1P+1D ÷ {each['side']}, same cores"
            yield Line(what, each["ratio"], said, target)


def _start(result: Result) -> Iterable[Line]:
    what = f"start, `baton up` until it is ready; of {result['target_s']:.0f} s"
    yield Line(what, result["ready_s"] / result["target_s"], f"{result['ready_s']:.2f} s", 1.0)
    said = f"{result['ready_s']:.2f} ÷ {result['import_s']:.2f} s"
    yield Line("start, `baton up` until it is ready ÷ a process that imports torch", result["ratio"], said)


def _int8(result: Result) -> Iterable[Line]:
    exact, _, int8 = result["losses"]
    said = f"{int8['perplexity']:.4f} ÷ {exact['perplexity']:.4f}"
    yield Line("weights in 8 bits, perplexity ÷ fp32's", int8["perplexity"] / exact["perplexity"], said)
    asked = result["settings"]["exams"]
    for name, right in result["exams"].items():
        if right["fp32"]:
            said = f"{right['int8']:.1%} ÷ {right['fp32']:.1%}"
            what = f"weights in 8 bits, {name}: {asked} answers, right ÷ fp32's"
            yield Line(what, right["int8"] / right["fp32"], said, is_better_high=True)


def _peers(result: Result) -> Iterable[Line]:
    for case, by_peer in result["tokens_per_s"].items():
        best = max((name for name in by_peer if name != "Baton"), key=lambda name: statistics.median(by_peer[name]))
        ours, theirs = (statistics.median(by_peer[name]) for name in ("Baton", best))
        yield Line(
            f"{case}, tokens/s ÷ the best peer's", ours / theirs, f"{ours:.0f} ÷ {theirs:.0f} ({best})", 1.0, True
        )


PEERS: Final = "peers"  # the entry that needs their environments
ENTRIES: Final[tuple[Entry, ...]] = (
    Entry("router", "router", "--rounds 1 --window-s 3 --decisions 200", 240, _router, TINY, has_plot=True),
    Entry("scheduler", "scheduler", "--slots 16,256 --more-sequences '' --steps 4000", 60, _scheduler),
    Entry(
        "engine",
        "engine",
        "--threads 1 --batches 1,8,32 --contexts 128,512 --chunks 512:0 --rounds 3",
        240,
        _engine,
        SMOL,
    ),
    Entry("overlap", "overlap", "--batches 1,8 --rounds 3 --steps 60", 180, _overlap, SMOL),
    Entry("transport", "transport", "--block-kib 2048 --transfer-mib 16,256 --rounds 6", 120, _transport),
    Entry("exposed", "exposed", "--lengths 1024 --rounds 4", 120, _exposed, SMOL),
    Entry(
        "interference",
        "interference",
        "--rounds 2 --quiet-s 2 --loud-s 6",
        120,
        _interference,
        SMOL,
        has_plot=True,
    ),
    Entry("kv_pool_step", "kv_pool_step", "--rounds 3 --steps 120 --output-tokens 48", 180, _kv_pool_step, SMOL),
    Entry(
        "local_prefill",
        "local_prefill",
        "--lengths 16,32,128,512 --chunks 32 --rounds 4",
        240,
        _local_prefill,
        SMOL,
        has_plot=True,
    ),
    Entry("start", "start", "--rounds 3", 180, _start, SMOL),
    Entry("failover", "failover", "--ways kill,move --rounds 2", 180, _failover, TINY, has_plot=True),
    Entry(
        "crossover",
        "crossover",
        "--lengths 16,128,1024 --loads 1,4,8 --rounds 1 --requests 12",
        240,
        _crossover,
        SMOL,
        has_plot=True,
    ),
    Entry("int8", "int8", "--model deploy/demo_model --sequences 32 --length 256 --exams 50", 120, _int8),
    Entry(
        PEERS,
        "peers",
        "--peers Baton,vLLM,llama.cpp --clients 1,8 --contexts 128 --prompts 512 --rounds 1",
        600,
        _peers,
        LLAMA,
    ),
)
