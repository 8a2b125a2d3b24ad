"""The picture of the router benchmark: CPU of a token by side, and what a placement costs by the number of nodes.

Needs matplotlib (the extra `bench`), and only here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.router_figures import SideFigures
from bench.router_placement import PlacementCost


def plot(sides: Sequence[SideFigures], placement: Sequence[PlacementCost], path: Path) -> None:
    """Write the picture; the suffix is one of frame.SUFFIXES. Equal figures give equal SVG files."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "baton", "font.size": 9}):
        figure = Figure(figsize=(10, 4), layout="constrained")
        left, right = figure.subplots(1, 2)
        shown = [each for each in sides if each.side != "direct"]
        names = [each.side if each.branches is None else f"{each.side}, {each.branches} a message" for each in shown]
        left.barh(names, [each.token_us for each in shown], color="#0072b2")
        left.invert_yaxis()
        left.set(xlabel="CPU of a streamed token, µs")
        for policy in dict.fromkeys(each.policy for each in placement):
            of_policy = sorted((each for each in placement if each.policy == policy), key=lambda each: each.nodes)
            numbers, costs = [each.nodes for each in of_policy], [each.decision_us for each in of_policy]
            right.plot(numbers, costs, marker="o", markersize=3, label=policy)
        if placement:
            right.set(xlabel="nodes", ylabel="CPU of a placement, µs", xscale="log", yscale="log")
            right.grid(alpha=0.3, which="both")
            right.legend()
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
