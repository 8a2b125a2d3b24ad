"""What `baton plan` found, for people and for files: sentences, a table, JSON, and a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from bench.plan_outcome import Counts, Outcome, Slo
from bench.plan_rates import Rates
from bench.plan_words import reasons

_PERCENTS: Final = (50, 90, 99)
_NONE: Final = (None, None, None)


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search, or of clusters that were named."""

    slo: Slo
    rates: Rates
    apart: Outcome | None  # the smallest cluster with prefill and decode apart
    mixed: Outcome | None  # the smallest of mixed nodes
    same: Outcome | None  # as many mixed nodes as `apart` has
    named: Outcome | None  # where counts were given
    tried: Mapping[Counts, Outcome]
    best: Outcome | None  # where nothing keeps it: what came nearest
    max_nodes: int
    cpu_s: float  # of all runs

    @property
    def is_kept(self) -> bool:
        """Whether there is a cluster that keeps the objective; of a named one, whether it does."""
        if self.named is not None:
            return self.named.attainment >= self.slo.attainment
        return self.apart is not None or self.mixed is not None


def percentiles(values: NDArray[np.float64]) -> list[float] | None:
    """50, 90, 99, in seconds; None: there are none."""
    known = values[~np.isnan(values)]
    return np.percentile(known, _PERCENTS).tolist() if len(known) else None


def verdict(found: Found) -> list[str]:
    """The answer in sentences."""
    asked = (
        f"TTFT <= {1000 * found.slo.ttft_s:g} ms and TPOT <= {1000 * found.slo.tpot_s:g} ms "
        f"for {found.slo.attainment:.1%} of requests"
    )
    if found.named is not None:
        said = "keep" if found.is_kept else "do not keep"
        line = f"{found.named.counts} {said} {asked}: {found.named.attainment:.1%} have both."
        return [line, *([] if found.is_kept else reasons(found.named, found.slo, found.rates))]
    if not found.is_kept:
        nearest = f"; nearest: {found.best.counts}, {_share(found.best)}" if found.best is not None else ""
        line = f"no cluster of up to {found.max_nodes} nodes keeps {asked}{nearest}."
        return [line, *([] if found.best is None else reasons(found.best, found.slo, found.rates))]
    if found.apart is None:
        assert found.mixed is not None
        return [
            f"{found.mixed.counts} nodes keep {asked}; prefill and decode apart, up to {found.max_nodes} nodes do not."
        ]
    lines = [f"{found.apart.counts} nodes keep {asked}."]
    number = found.apart.counts.total
    if found.mixed is None:
        lines.append(f"Mixed nodes, up to {found.max_nodes}, do not.")
    elif found.mixed.counts.mixed < number:
        lines.append(f"Mixed needs fewer: {found.mixed.counts} instead of {number} nodes.")
    elif found.mixed.counts.mixed == number:
        lines.append(f"Mixed needs as many: {number}.")
    else:
        lines.append(f"Mixed needs more: {found.mixed.counts.mixed} instead of {number} nodes.")
    return lines


def _share(outcome: Outcome) -> str:
    return f"{outcome.attainment:.1%}" if outcome.is_whole else "given up early"


def show(console: Console, found: Found) -> None:
    """Sentences and the table."""
    for line in verdict(found):
        console.print(line)
    table = Table()
    columns = ("nodes", "attainment", "goodput, /s", "TTFT p50, ms", "p90", "p99", "TPOT p50, ms", "p90", "p99")
    for column in (*columns, "use", "blocks", "cached", "preempted", "refused"):
        table.add_column(column, justify="left" if column == "nodes" else "right")
    for outcome in rows(found):
        times = [
            "-" if each is None else f"{1000 * each:.4g}"
            for values in (outcome.ttft_s, outcome.tpot_s)
            for each in (percentiles(values) or _NONE)
        ]
        goodput = f"{outcome.num_kept / outcome.duration_s:.4g}"
        shares = [", ".join(f"{value:.0%}" for value in each.values()) for each in (outcome.use, outcome.blocks)]
        cached = f"{1 - outcome.num_computed / max(outcome.num_prompt, 1):.0%}"
        ends = (str(outcome.num_preempted), str(outcome.num_refused))
        table.add_row(str(outcome.counts), _share(outcome), goodput, *times, *shares, cached, *ends)
    console.print(table)
    console.print(f"rates: {found.rates.source}; {len(found.tried)} clusters tried in {found.cpu_s:.1f} s of CPU")


def rows(found: Found) -> list[Outcome]:
    """What the table tells of, each once."""
    every = (found.named, found.apart, found.mixed, found.same, None if found.is_kept else found.best)
    return list({each.counts: each for each in every if each is not None}.values())


def to_json(found: Found) -> dict[str, Any]:
    """Everything; times in seconds."""
    return {
        "answer": verdict(found),
        "is_kept": found.is_kept,
        "rates": found.rates.to_json(),
        "clusters": [outcome_json(each) for each in rows(found)],
        "tried": [
            {**_counts(each.counts), "attainment": each.attainment if each.is_whole else None}
            for each in found.tried.values()
        ],
        "cpu_s": found.cpu_s,
    }


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """One cluster."""
    return {
        **_counts(outcome.counts),
        "requests": outcome.num_requests,
        "attainment": outcome.attainment,
        "goodput_per_s": outcome.num_kept / outcome.duration_s,
        "ttft_s": percentiles(outcome.ttft_s),
        "tpot_s": percentiles(outcome.tpot_s),
        "percentiles": list(_PERCENTS),
        "use": outcome.use,
        "blocks": outcome.blocks,
        "preemptions": outcome.num_preempted,
        "refused": outcome.num_refused,
        "prompt_tokens": outcome.num_prompt,
        "computed_tokens": outcome.num_computed,
        "steps": outcome.num_steps,
        "duration_s": outcome.duration_s,
    }


def _counts(counts: Counts) -> dict[str, int]:
    return {"prefill": counts.prefill, "decode": counts.decode, "mixed": counts.mixed}


def plot(found: Found, path: Path) -> None:
    """Attainment over both numbers of nodes, of all pairs that were run to their end."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    known = {counts: each for counts, each in found.tried.items() if not counts.mixed and each.is_whole}
    prefills, decodes = _axis([each.prefill for each in known]), _axis([each.decode for each in known])
    shares = [[_at(known, Counts(prefill, decode)) for prefill in prefills] for decode in decodes]
    with rc_context({"svg.hashsalt": "baton", "font.size": 9}):
        figure = Figure(figsize=(6, 5), layout="constrained")
        axes = figure.subplots()
        drawn = axes.imshow(shares, origin="lower", aspect="auto", vmin=0, vmax=1, cmap="viridis")
        for y, line in enumerate(shares):
            for x, share in enumerate(line):
                if not math.isnan(share):
                    colour = "black" if share > 0.6 else "white"
                    axes.text(x, y, f"{share:.0%}", ha="center", va="center", color=colour)
        axes.set_xticks(range(len(prefills)), [str(each) for each in prefills])
        axes.set_yticks(range(len(decodes)), [str(each) for each in decodes])
        axes.set(xlabel="prefill nodes", ylabel="decode nodes", title=_title(found))
        figure.colorbar(drawn, label="share of requests that keep the objective")
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)


def _title(found: Found) -> str:
    return verdict(found)[0].split(" keep")[0] if found.named is None else str(found.named.counts)


def _axis(numbers: Sequence[int]) -> list[int]:
    return sorted(set(numbers)) or [1]


def _at(known: Mapping[Counts, Outcome], counts: Counts) -> float:
    return known[counts].attainment if counts in known else math.nan
