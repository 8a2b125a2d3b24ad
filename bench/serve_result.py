"""What `baton bench` tells of its runs: a table, warnings, and one JSON file with every request of every run."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench.completions import Record
from bench.frame import writing
from bench.goodput import Slo
from bench.report import NO_LIMITS, Report, length_warnings, show
from bench.serve_config import BenchConfig
from bench.serve_plot import plot
from bench.sweep import Try, Verdict, ceiling, knee

BUSY_WARNING: Final = 0.9  # of a core: from there on nobody knows who the slower one was
_LONG_ENOUGH: Final = 0.7  # of the time that a sweep's rate should last: arrivals are drawn
_DIGITS: Final = 6  # of seconds in the file


@dataclass(frozen=True, slots=True)
class Run:
    """One run and what came of it."""

    rate: float | None  # that was asked for; infinite: all at once
    pace: str
    records: Sequence[Record]
    report: Report
    busy: float = 0.0  # of one core: how much of it this generator, which has no more, used itself

    def verdict(self, share: float) -> Verdict:
        """Whether so many of the requests met the limits; what a late generator found good is not known to be."""
        if self.report.goodput.attainment < share:
            return Verdict.FAILED
        return Verdict.LATE if self.report.is_late else Verdict.PASSED

    def to_json(self, slo: Slo) -> dict[str, Any]:
        """Figures, and each request's own: docs/benchmarking.md explains the keys."""
        requests = []
        for record in self.records:
            fields = asdict(record) | {"ttft_s": record.ttft_s, "tpot_s": record.tpot_s, "met_slo": slo.is_met(record)}
            requests.append({name: _rounded(value) for name, value in fields.items() if value not in ("", [])})
        head = {"pace": self.pace, "rate": _finite(self.rate), "generator_busy": round(self.busy, 3)}
        return {**head, **asdict(self.report), "requests": requests}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call found; fewer runs than it meant to make where it was halted."""

    model: str
    prompt_form: str
    runs: Sequence[Run]
    is_halted: bool
    is_broken: bool = False  # the server could not be asked any more

    def tries(self, share: float) -> list[Try]:
        """Those that were at a rate, to their end: what was given up says nothing of a server."""
        whole = self.runs[:-1] if self.is_halted else self.runs
        return [Try(run.rate, run.verdict(share)) for run in whole if run.rate is not None and math.isfinite(run.rate)]


def show_outcome(console: Console, outcome: Outcome, config: BenchConfig) -> None:
    """Print it: of one run all figures, of several a line each."""
    if outcome.is_halted:
        console.print("halted: what follows is of what was sent until then")
    if len(outcome.runs) == 1:
        show(console, outcome.runs[0].report, outcome.runs[0].records)
        _show_busy(console, outcome.runs)
        if config.slo != NO_LIMITS:
            console.print(_goodput_line(outcome.runs[0].report, config.slo))
    elif outcome.runs:
        console.print(_table(outcome.runs))
        _show_problems(console, outcome.runs)
        _show_busy(console, outcome.runs)
    if config.slo != NO_LIMITS and (config.sweep or config.rates):
        console.print(_knee_line(outcome, config))


def write_outcome(console: Console, outcome: Outcome, config: BenchConfig, facts: dict[str, Any]) -> None:
    """The files that the config names."""
    if config.output is not None:
        found = knee(outcome.tries(config.slo_share)) if config.slo != NO_LIMITS else None
        head = {**facts, "model": outcome.model, "prompt_form": outcome.prompt_form, "is_halted": outcome.is_halted}
        head |= {"slo": asdict(config.slo), "highest_rate_that_met_slo": found}
        with writing("baton bench", "--output", config.output):
            _write(config.output, head, [run.to_json(config.slo) for run in outcome.runs])
        console.print(f"written: {config.output}")
    if config.plot is not None and outcome.runs:
        with writing("baton bench", "--plot", config.plot):
            plot([(run.pace, run.rate, run.records, run.report) for run in outcome.runs], config.slo, config.plot)
        console.print(f"written: {config.plot}")


def _write(path: Path, head: dict[str, Any], runs: Sequence[dict[str, Any]]) -> None:
    """One line per request, so that a large file can be read by eye; whole or not at all."""
    lines = []
    for run in runs:
        requests = ",\n   ".join(json.dumps(each) for each in run["requests"])
        rest = json.dumps({name: value for name, value in run.items() if name != "requests"})
        lines.append(f'  {rest[:-1]},\n   "requests": [\n   {requests}\n  ]}}')
    text = json.dumps(head, indent=1).rstrip("\n}") + ',\n "runs": [\n' + ",\n".join(lines) + "\n ]\n}\n"
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)  # what a full disk left of it
        raise


def _table(runs: Sequence[Run]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("load", "sent", "ok", "in limits", "goodput/s", "answered/s", "tok/s"):
        table.add_column(heading, justify="left" if heading == "load" else "right", no_wrap=True)
    for name in ("TTFT", "TPOT", "E2E"):
        table.add_column(f"{name} p50", justify="right", no_wrap=True)
        table.add_column("p99, ms", justify="right", no_wrap=True)
    for run in runs:
        report, goodput = run.report, run.report.goodput
        cells = [run.pace, str(report.num_requests), str(report.num_ok), f"{goodput.attainment:.1%}"]
        cells += [f"{each:.2f}" for each in (goodput.requests_per_s, report.requests_per_s, report.output_tokens_per_s)]
        for summary in (report.ttft_s, report.tpot_s, report.end_to_end_s):
            cells += ["-", "-"] if summary is None else [f"{1000 * each:.1f}" for each in (summary.p50, summary.p99)]
        table.add_row(*cells)
    return table


def _show_problems(console: Console, runs: Sequence[Run]) -> None:
    for run in runs:
        for status, number in sorted(run.report.errors.items()):
            example = next(record.error for record in run.records if record.kind == status)
            console.print(f"{run.pace}: error {status}: {number} requests, one of them: {example}")
        for warning in length_warnings(run.report):
            console.print(f"WARNING, {run.pace}: {warning}")
        if (lag := run.report.arrival_lag_s) is not None and run.report.is_late:
            console.print(
                f"WARNING, {run.pace}: this generator was late (p99 {1000 * lag.p99:.0f} ms): the times are too good"
            )


def _show_busy(console: Console, runs: Sequence[Run]) -> None:
    for run in runs:
        if run.busy > BUSY_WARNING:
            console.print(
                f"WARNING, {run.pace}: this generator computed {run.busy:.0%} of the time, on the one core that it can use: "
                "the server may stand more, and faster; share the load among several generators"
            )


def _goodput_line(report: Report, slo: Slo) -> str:
    limits = {"TTFT": slo.ttft_s, "TPOT": slo.tpot_s}
    told = " and ".join(f"{name} <= {1000 * value:g} ms" for name, value in limits.items() if value is not None)
    good = report.goodput
    return (
        f"goodput: {good.num_met} of {report.num_requests} requests ({good.attainment:.1%}) met {told}: "
        f"{good.requests_per_s:.2f} requests/s"
    )


def _knee_line(outcome: Outcome, config: BenchConfig) -> str:
    tries = outcome.tries(config.slo_share)
    found, failed = knee(tries), ceiling(tries)
    share = f"{config.slo_share:.0%} of the requests met the limits"
    is_late = any(each.rate == failed and each.verdict is Verdict.LATE for each in tries)
    if found is None and is_late:
        return f"no rate is known at which {share}: already at {failed:g} this generator could not keep up"
    if not tries:
        return f"no rate was tried to its end, so none is known at which {share}"
    if found is None:
        return f"no rate was found at which {share}"
    short = _shortness(next(run for run in outcome.runs if run.rate == found), config)
    if failed is None:
        return f"up to {found:g} requests/s, the highest rate tried, {share}{short}"
    why = "this generator could not keep up" if is_late else "fewer did"
    return f"up to {found:g} requests/s {share}; at {failed:g} {why}{short}"


def _shortness(run: Run, config: BenchConfig) -> str:
    """What a sweep's best rate is not known to stand for long: a queue that grows reaches the limit only after some time."""
    instants = [record.arrival_s for record in run.records]
    if (span_s := max(instants) - min(instants)) >= _LONG_ENOUGH * config.settling_s:
        return ""
    return (
        f"\nWARNING: its requests came within {span_s:.3g} s, too few to see that a queue grows slowly: "
        f"the server may stand less for long; give --duration-s {math.ceil(config.settling_s)}"
    )


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return round(value, _DIGITS)
    return [_rounded(each) for each in value] if isinstance(value, list) else value


def _finite(rate: float | None) -> float | str | None:
    return "inf" if rate == float("inf") else rate
