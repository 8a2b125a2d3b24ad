"""The picture of the pressure benchmark: four panels against the size of the pool, a line for each policy.

Needs matplotlib (the extra `bench`), and only here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.pressure_figures import CellFigures

_COLOURS: Final = {
    "full": "#4d4d4d",
    "none": "#d55e00",
    "fixed": "#e69f00",
    "fixed-off": "#f0c75e",
    "ratio": "#0072b2",
    "ratio-off": "#56b4e9",
}
_PANELS: Final = (
    ("goodput", "goodput, ratio to an ample pool"),
    ("tokens_per_step", "tokens per decode step, ratio to an ample pool"),
    ("preemptions_per_1000_steps", "preemptions per 1,000 steps"),
    ("tpot_p99", "TPOT p99, ratio to an ample pool"),
)


def plot(figures: Sequence[CellFigures], path: Path) -> None:
    """Write the picture; the suffix is one of frame.SUFFIXES. Equal figures give equal SVG files."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "baton", "font.size": 9}):
        figure = Figure(figsize=(10, 7), layout="constrained")
        for axes, (name, label) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
            for policy in dict.fromkeys(each.policy for each in sorted(figures, key=lambda each: each.policy)):
                of_policy = sorted((each for each in figures if each.policy == policy), key=lambda each: each.percent)
                percents, values = [each.percent for each in of_policy], [getattr(each, name) for each in of_policy]
                style = "--" if policy.endswith("-off") else "-"
                axes.plot(percents, values, style, color=_COLOURS[policy], marker="o", markersize=3, label=policy)
                if name == "goodput":
                    spread = [each.goodput_least for each in of_policy], [each.goodput_most for each in of_policy]
                    axes.fill_between(percents, *spread, color=_COLOURS[policy], alpha=0.12, linewidth=0)
            axes.set(xlabel="pool, % of what the load needs", ylabel=label)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(_COLOURS))
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
