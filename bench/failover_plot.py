"""The picture of the failover benchmark: a panel for each way, a row for each stream, a dot for each token, a line for the fault.

Needs matplotlib (the extra `bench`), and only here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.recovery import WAYS, Played

_HIT: Final = "#d55e00"
_OTHER: Final = "#0072b2"
_BEFORE_S: Final = 0.5  # that is shown


def plot(runs: Sequence[Played], path: Path) -> None:
    """Write the picture of one run of each way. Equal runs give equal SVG files."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    shown_s = 1.3 * max(run.next_token_s(i) for run in runs for i in run.hit or [0])
    with rc_context({"svg.hashsalt": "baton", "font.size": 9}):
        figure = Figure(figsize=(10, 1.7 * len(runs)), layout="constrained")
        panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
        for axes, run in zip(panels, runs, strict=True):
            order = sorted(range(len(run.streams)), key=lambda i, run=run: i not in run.hit)  # type: ignore[misc]
            for row, i in enumerate(order):
                instants = [at - run.fault_at for at, _ in run.streams[i].events]
                near = [at for at in instants if -_BEFORE_S <= at <= shown_s]
                colour = _HIT if i in run.hit else _OTHER
                axes.plot(near, [row] * len(near), ".", color=colour, markersize=2, rasterized=True)
            axes.axvline(0, color="black", linewidth=1)
            axes.axvline(run.found_s, color="black", linewidth=1, linestyle=":")
            axes.set_title(f"{run.way}: {WAYS[run.way]}", loc="left", fontsize=9)
            axes.set(ylabel="stream", yticks=[], xlim=(-_BEFORE_S, shown_s))
        panels[-1].set_xlabel("seconds from the fault (solid line) to when the router has found it (dotted), and on")
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
