"""The picture of the local prefill benchmark: what a local prompt costs, against a handoff, by its length, a line for each chunk.

Needs matplotlib (the extra `bench`), and only here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.local_prefill_figures import Figures

_PANELS: Final = (
    ("ttft_ratio", "first token of the prompt"),
    ("second_token_ratio", "second token of the prompt"),
    ("longest_gap_ratio", "longest gap of the streams beside it"),
    ("stall_ratio", "all that the streams waited longer"),
)


def plot(figures: Sequence[Figures], path: Path) -> None:
    """Write the picture; the suffix is one of SUFFIXES. Equal figures give equal SVG files."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "baton", "font.size": 9}):
        figure = Figure(figsize=(10, 7), layout="constrained")
        for axes, (name, label) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
            for chunk in sorted({each.chunk for each in figures}):
                of_chunk = sorted(
                    (each for each in figures if each.chunk == chunk), key=lambda each: each.prompt_tokens
                )
                lengths, ratios = [each.prompt_tokens for each in of_chunk], [getattr(each, name) for each in of_chunk]
                axes.plot(lengths, ratios, marker="o", markersize=3, label=f"chunks of {chunk}")
            axes.axhline(1, color="black", linewidth=1, linestyle=":")
            axes.set(xlabel="tokens of the prompt", ylabel=f"{label}, local ÷ handoff", xscale="log")
            axes.set_ylim(bottom=0)
            lengths = sorted({each.prompt_tokens for each in figures})
            axes.set_xticks(lengths, [str(length) for length in lengths], minor=False)
            axes.set_xticks([], minor=True)
            axes.grid(alpha=0.3, which="both")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=8)
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
