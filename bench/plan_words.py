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
        lines.append(_try(outcome, ("prefill", "mixed"), _TRY_TTFT))
    if "TPOT" in missed:
        step_s = rates.step_s(Shape(1, 1))
        alone = f"a sequence alone takes {_ms(step_s)} ms a step: " if step_s > slo.tpot_s else ""
        lines.append(f"TPOT: {alone}{_TRY_TPOT}." if alone else _try(outcome, ("decode", "mixed"), _TRY_TPOT))
    if not missed and not outcome.num_refused:
        lines.append(
            "each limit is kept by itself, but not both by enough requests: a larger limit, or a lower --attainment."
        )
    return lines


def _try(outcome: Outcome, roles: tuple[str, ...], otherwise: str) -> str:
    role = next(each for each in roles if each in outcome.use)
    limit, use = ("TPOT" if "decode" in roles else "TTFT"), outcome.use[role]
    if use >= _BUSY:
        return f"{limit}: {role} nodes have a step in {use:.0%} of the time: more nodes (--max-nodes), or a slower trace (--speed)."
    return f"{limit}: {role} nodes have a step in {use:.0%} of the time only, so more of them hardly help: {otherwise}."


def _reached(values: NDArray[np.float64], share: float) -> float | None:
    """What so many keep; who has none, as an answer of one token has no TPOT, keeps it."""
    if not len(values) or np.isnan(values).all():
        return None
    ordered = np.sort(np.nan_to_num(values, nan=0.0))
    return float(ordered[min(int(np.ceil(share * len(ordered))), len(ordered)) - 1])


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.4g}"
