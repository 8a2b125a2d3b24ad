"""The picture of the rescheduling benchmark: a row for each way, a dot for each preemption's pause, a line at the median.

Needs matplotlib (the extra `bench`), and only here.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


class HasPause(Protocol):
    """One preemption."""

    @property
    def way(self) -> str:
        """What was left."""

    @property
    def pause_s(self) -> float:
        """Until the next token."""


def plot(runs: Sequence[HasPause], ways: Sequence[str], path: Path) -> None:
    """Write the picture. Equal runs give equal SVG files."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "baton", "font.size": 9}):
        figure = Figure(figsize=(7, 0.6 * len(ways) + 0.8), layout="constrained")
        axes = figure.subplots()
        for row, way in enumerate(reversed(ways)):
            pauses = [1000 * run.pause_s for run in runs if run.way == way]
            axes.plot(pauses, [row] * len(pauses), "o", color="#0072b2", alpha=0.6)
            axes.plot([statistics.median(pauses)] * 2, [row - 0.3, row + 0.3], color="#d55e00", linewidth=2)
        axes.set(yticks=range(len(ways)), yticklabels=[*reversed(ways)], xlim=(0, None))
        axes.set_xlabel("milliseconds from a stream's last token before its preemption to its next one")
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
