"""The picture of the prefix benchmark: per load, how the times to the first token are spread, a line for each way of placing.

Needs matplotlib (the extra `bench`), and only here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

_COLOURS: Final = ("#4d4d4d", "#d55e00", "#0072b2", "#009e73", "#e69f00")


def plot(found: Mapping[tuple[str, str], tuple[float, Sequence[float]]], path: Path) -> None:
    """Write the picture of (load, way) -> (hit rate, seconds to the first token). Equal figures give equal SVG files."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    loads = list(dict.fromkeys(load for load, _ in found))
    ways = list(dict.fromkeys(way for _, way in found))
    with rc_context({"svg.hashsalt": "baton", "font.size": 9}):
        figure = Figure(figsize=(5 * len(loads), 4), layout="constrained")
        for axes, load in zip(figure.subplots(1, len(loads), squeeze=False)[0], loads, strict=True):
            for way, colour in zip(ways, _COLOURS, strict=False):
                hit_rate, seconds = found[load, way]
                ordered = [1000 * each for each in sorted(seconds)]
                shares = [100 * (rank + 1) / len(ordered) for rank in range(len(ordered))]
                axes.plot(ordered, shares, color=colour, label=f"{way}: hit rate {hit_rate:.0%}")
            axes.set(xlabel="time to the first token, ms", ylabel="% of requests", xscale="log", title=load)
            axes.grid(alpha=0.3)
            axes.legend(loc="lower right")
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
