"""Why a simulated cluster misses an objective, in sentences: which limit, by how much, and what to try. Pure."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from bench.plan_outcome import Outcome, Slo
from bench.plan_rates import Rates, Shape

_BUSY: Final = 0.8  # of the time: from there on more nodes are worth a try
_TRY_TTFT: Final = (
    "a larger --slo-ttft-ms, shorter prompts (--length-scale, --max-model-len) or nodes with faster --rates"
)
_TRY_TPOT: Final = "a larger --slo-tpot-ms, fewer --max-num-seqs or nodes with faster --rates"


def reasons(outcome: Outcome, slo: Slo, rates: Rates) -> list[str]:
    """Of a cluster that was run to its end and does not keep the objective."""
    if not outcome.is_whole:
        return []
    lines: list[str] = []
    if outcome.num_refused:
        lines.append(
            f"{outcome.num_refused} of {outcome.num_requests} requests found the router's queue full: "
            "more nodes (--max-nodes), a slower trace (--speed) or a longer --max-queue."
        )
    answered = ~np.isnan(outcome.ttft_s)
    missed = []
    for name, values, limit_s in (("TTFT", outcome.ttft_s, slo.ttft_s), ("TPOT", outcome.tpot_s, slo.tpot_s)):
        reached_s = _reached(values[answered], slo.attainment)
        if reached_s is None:
            continue
        share = float((values[answered] > limit_s).mean())
        if reached_s > limit_s:
            missed.append(name)
            lines.append(
                f"{name}: {slo.attainment:.1%} of the answered requests have {_ms(reached_s)} ms or less, "
                f"{reached_s / limit_s:.3g} times the limit of {_ms(limit_s)} ms; {share:.1%} miss it."
            )
        else:
            lines.append(f"{name} alone is kept: {_ms(reached_s)} ms of {_ms(limit_s)} ms; {share:.1%} miss it.")
    if "TTFT" in missed:
        lines.append(_try_ttft(outcome, slo))
    if "TPOT" in missed:
        step_s = rates.step_s(Shape(1, 1))
        alone = f"a sequence alone takes {_ms(step_s)} ms a step: " if step_s > slo.tpot_s else ""
        lines.append(f"TPOT: {alone}{_TRY_TPOT}." if alone else _try_tpot(outcome))
    if not missed and not outcome.num_refused:
        lines.append(
            "each limit is kept by itself, but not both by enough requests: a larger limit, or a lower --attainment."
        )
    return lines


def _try_ttft(outcome: Outcome, slo: Slo) -> str:
    """Which nodes are waited for is not known: those of a role may rest while prompts wait, as they come in bursts, or for room."""
    alone_s = _reached(outcome.alone_s[~np.isnan(outcome.ttft_s)], slo.attainment)
    if alone_s is not None and alone_s > slo.ttft_s:
        return f"TTFT: {_ms(alone_s)} ms even of prompts that are alone, so more nodes hardly help: {_TRY_TTFT}."
    if "mixed" in outcome.use:
        return f"TTFT: prompts wait for a node: {_more('mixed', outcome)}."
    if outcome.use["prefill"] >= _BUSY:
        return f"TTFT: {_more('prefill', outcome)}."
    return (
        f"TTFT: prompts wait, though prefill nodes have a step in {outcome.use['prefill']:.0%} of the time only: for room at "
        "decode nodes (more of these, --num-blocks or --max-num-seqs), or since they come in bursts (more prefill nodes)."
    )


def _try_tpot(outcome: Outcome) -> str:
    role = "decode" if "decode" in outcome.use else "mixed"
    if outcome.use[role] >= _BUSY:
        return f"TPOT: {_more(role, outcome)}."
    return f"TPOT: {role} nodes have a step in {outcome.use[role]:.0%} of the time only, so more of them hardly help: {_TRY_TPOT}."


def _more(role: str, outcome: Outcome) -> str:
    return f"{role} nodes have a step in {outcome.use[role]:.0%} of the time: more nodes (--max-nodes), or a slower trace (--speed)"


def _reached(values: NDArray[np.float64], share: float) -> float | None:
    """What so many keep; who has none, as an answer of one token has no TPOT, keeps it."""
    if not len(values) or np.isnan(values).all():
        return None
    ordered = np.sort(np.nan_to_num(values, nan=0.0))
    return float(ordered[min(int(np.ceil(share * len(ordered))), len(ordered)) - 1])


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.4g}"
