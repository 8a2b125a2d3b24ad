"""What `python -m bench.peers` measured, as a table: Baton beside its peers, and against the best of them.

Pure. Not here: the page around it (page.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

# case -> peer -> tokens a second of each round
Figures = dict[str, dict[str, list[float]]]


def whole_rounds(figures: Figures, peers: Iterable[str]) -> Figures:
    """Of a run that was interrupted: the cases, and the rounds of each, in which every one of these peers was measured."""
    names = list(peers)
    rounds = {case: min((len(by_peer.get(name, ())) for name in names), default=0) for case, by_peer in figures.items()}
    return {
        case: {name: figures[case][name][:number] for name in names} for case, number in rounds.items() if number > 0
    }


def markdown(figures: Figures) -> str:
    """Medians with the least and greatest, and Baton's against the best of the others, round by round."""
    names = list(dict.fromkeys(name for by_peer in figures.values() for name in by_peer))
    lines = ["| tokens/s | " + " | ".join(names) + " | Baton / best peer |", "|---" * (len(names) + 2) + "|"]
    for case, by_peer in figures.items():
        cells = [
            f"{statistics.median(rates):.0f} [{min(rates):.0f}..{max(rates):.0f}]"
            for name in names
            if (rates := by_peer[name])
        ]
        lines.append(f"| {case} | " + " | ".join(cells) + f" | {ratio_to_best(by_peer)} |")
    return "\n".join(lines)


def ratio_to_best(by_peer: dict[str, list[float]]) -> str:
    """Above 1 Baton is ahead of every peer."""
    others = [rates for name, rates in by_peer.items() if name != "Baton"]
    if "Baton" not in by_peer or not others:
        return ""
    ratios = [ours / max(theirs) for ours, *theirs in zip(by_peer["Baton"], *others, strict=True)]
    return f"{statistics.median(ratios):.2f}"
