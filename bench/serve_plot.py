"""The picture of `baton bench`: latency over time, how times are spread, and goodput by rate.

Needs matplotlib (the extra `bench`), and only here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench.completions import Record
from bench.goodput import Slo
from bench.report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#56b4e9", "#4d4d4d", "#f0c75e")
Plotted = tuple[str, float | None, Sequence[Record], Report]  # pace, rate, records, figures


def plot(runs: Sequence[Plotted], slo: Slo, path: Path) -> None:
    """Write the picture; the suffix is one of frame.SUFFIXES. Equal figures give equal SVG files."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "baton", "font.size": 9}):
        figure = Figure(figsize=(11, 7.5), layout="constrained")
        over_time, last, ttft, tpot = figure.subplots(2, 2).flat
        ordered = sorted(runs, key=lambda run: math.inf if run[1] is None else run[1])
        for index, (pace, _, records, _) in enumerate(ordered):
            colour, good = _COLOURS[index % len(_COLOURS)], [record for record in records if record.is_ok]
            _latencies(over_time, good, pace, colour)
            _spread(ttft, [each for record in good if (each := record.ttft_s) is not None], colour)
            _spread(tpot, [each for record in good if (each := record.tpot_s) is not None], colour)
        for axes, name, limit_s in (
            (ttft, "time to the first token", slo.ttft_s),
            (tpot, "time per output token", slo.tpot_s),
        ):
            has_width = any(
                max(line.get_xdata(), default=0) > 0 for line in axes.lines
            )  # TPOT is 0 if all comes at once
            axes.set(xlabel=f"{name}, ms", ylabel="% of the answered requests", xscale="log" if has_width else "linear")
            if limit_s is not None:
                axes.axvline(1000 * limit_s, color="#999999", linestyle="--", linewidth=1)
        over_time.set(xlabel="instant of arrival, s", ylabel="ms: dots TTFT, crosses the whole answer", yscale="log")
        at_rates = [(rate, report) for _, rate, _, report in ordered if rate is not None and not math.isinf(rate)]
        if len(at_rates) > 1:
            _goodput(last, at_rates)
        else:
            _in_flight(last, ordered)
        for axes in figure.axes:
            axes.grid(alpha=0.3)
        figure.legend(*over_time.get_legend_handles_labels(), loc="outside lower center", ncols=min(len(runs), 6))
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)


def _latencies(axes: Axes, good: Sequence[Record], pace: str, colour: str) -> None:
    instants = [record.arrival_s for record in good]
    axes.plot(instants, [1000 * record.end_s for record in good], "x", color=colour, markersize=3, alpha=0.5)
    firsts = [(record.arrival_s, 1000 * each) for record in good if (each := record.ttft_s) is not None]
    axes.plot([at for at, _ in firsts], [each for _, each in firsts], ".", color=colour, markersize=4, label=pace)


def _spread(axes: Axes, seconds: Sequence[float], colour: str) -> None:
    ordered = sorted(1000 * each for each in seconds)
    axes.plot(ordered, [100 * (rank + 1) / len(ordered) for rank in range(len(ordered))], color=colour)


def _goodput(axes: Axes, at_rates: Sequence[tuple[float, Report]]) -> None:
    rates = [rate for rate, _ in at_rates]
    axes.plot(rates, [report.goodput.requests_per_s for _, report in at_rates], "o-", color=_COLOURS[0], markersize=4)
    axes.plot(rates, [report.requests_per_s for _, report in at_rates], "o:", color=_COLOURS[6], markersize=3)
    axes.plot(rates, rates, "-", color="#cccccc", linewidth=1)
    axes.set_ylim(bottom=0)
    axes.set(xlabel="requests/s sent", ylabel="requests/s: in the limits (line), answered (dots)")
    shares = axes.twinx()
    shares.plot(
        rates, [100 * report.goodput.attainment for _, report in at_rates], "s--", color=_COLOURS[1], markersize=4
    )
    shares.set(ylabel="% in the limits (dashed)", ylim=(0, 105))


def _in_flight(axes: Axes, runs: Sequence[Plotted]) -> None:
    for index, (_, _, records, _) in enumerate(runs):
        begins = [(record.arrival_s + record.lag_s, 1) for record in records]
        ends = [(record.arrival_s + record.lag_s + record.end_s, -1) for record in records]
        instants, levels, level = [], [], 0
        for instant, change in sorted(begins + ends):
            level += change
            instants.append(instant)
            levels.append(level)
        axes.step(instants, levels, where="post", color=_COLOURS[index % len(_COLOURS)])
    axes.set(xlabel="instant, s", ylabel="requests in flight")
