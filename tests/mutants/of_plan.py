"""Bugs in the planner's simulator: in what takes many steps at once, and in what sends requests to nodes."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_ENGINE: Final = ("tests/bench/test_plan_engine.py",)
_PLAN: Final = ("tests/bench/test_plan.py",)
_CLUSTER: Final = ("tests/bench/test_plan_cluster.py",)
_MEASURE: Final = ("tests/bench/test_plan_measure.py",)

MUTANTS: Final = (
    Mutant(
        "plan-skips-over-a-newcomer",
        "A step that somebody joined counts as one like those before it.",
        "bench/plan_fast.py",
        "is_plain = is_silent and not (is_joined or self._is_short)",
        "is_plain = is_silent",
        _CLUSTER,
    ),
    Mutant(
        "plan-foresees-past-a-newcomer",
        "A prompt that waits for nothing but the next plan is not reckoned with.",
        "bench/plan_fast.py",
        "return not self._waiting or self._num_slots <= self._num_reserved",
        "return True",
        _ENGINE,
    ),
    Mutant(
        "plan-foresees-a-step-too-many",
        "The step that an answer ends with is taken for one that tells nothing.",
        "bench/plan_fast.py",
        "self._filed.next_end() - self._num_plans + 1)",
        "self._filed.next_end() - self._num_plans + 2)",
        _ENGINE,
    ),
    Mutant(
        "plan-forgets-who-missed-a-step",
        "A row that found no block is a position on all the same.",
        "bench/plan_fast.py",
        "                row.base -= 1\n",
        "",
        _ENGINE,
    ),
    Mutant(
        "plan-counts-a-step-twice",
        "A run of steps reads half a position per row and step too many.",
        "bench/plan_rates.py",
        "more = num_steps * (num_steps - 1) // 2 * shape.num_rows",
        "more = num_steps * num_steps // 2 * shape.num_rows",
        _PLAN,
    ),
    Mutant(
        "plan-measures-decode-nodes-whose-neighbours-rest",
        "Rates of a cluster are fitted to what was seen while no prompt was computed.",
        "bench/plan_probe.py",
        "return self.rates(is_beside=True)",
        "return self.rates(is_beside=False)",
        _MEASURE,
    ),
    Mutant(
        "plan-measures-on-when-the-prompts-beside-are-over",
        "Steps count as beside prompts that are answered already.",
        "bench/plan_probe.py",
        "    if beside:\n        end = min(",
        "    if not streams:\n        end = min(",
        _MEASURE,
    ),
    Mutant(
        "plan-measures-events-for-tokens",
        "An event of two tokens counts as one step.",
        "bench/plan_probe.py",
        "steps.append(merged * (within",
        "steps.append((within",
        _MEASURE,
    ),
)
