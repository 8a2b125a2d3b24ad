"""`python -m bench.reschedule_report FILE.json > FILE.md`: the rescheduling benchmark's figures as text."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from bench.result_files import results_of

_HEADINGS: Final = (
    "what is left of it | pause, median | least to most | share of the pause with neither | tokens of the sequence "
    "| computed again | read from the pool | in"
)


def markdown(facts: Mapping[str, Any]) -> str:
    """Of the benchmark's JSON: command, machine, a row for each way. Medians over its rounds."""
    runs: list[Mapping[str, Any]] = facts["runs"]
    ways = list(dict.fromkeys(run["way"] for run in runs))
    by_way = {way: [run for run in runs if run["way"] == way] for way in ways}
    slowest = _median(by_way["neither"], "pause_s")
    machine = ", ".join(f"{name} {value}" for name, value in facts["machine"].items())
    num_right = sum(run["is_right"] for run in runs)
    lines = [
        "# A stream is preempted, and goes on at another node",
        "",
        f"    {facts['command']}",
        "",
        f"{facts['date']}; {machine}. {len(runs) // len(ways)} preemptions of each way; {num_right} of {len(runs)} streams",
        "have the tokens of the same request by itself.",
        "",
        "![pause of each preemption](reschedule.svg)",
        "",
        f"| {_HEADINGS} |",
        "|" + "---|" * (_HEADINGS.count("|") + 1),
        *(_row(way, of_way, slowest) for way, of_way in by_way.items()),
        "",
        "Pause: from the stream's last token before the preemption to its next one, by the client's clock: PD Error, retry,",
        "prefill of what is not there, handoff to another decode node. Prefix cache: the prefill node of the next attempt is the",
        "one that computed the prompt; KV pool: a directory, into which the decode node saves who gives way (prompt and",
        "completion) while the retry is under way. Computed, and read, by that prefill node.",
    ]
    return "\n".join(lines) + "\n"


def _row(way: str, runs: Sequence[Mapping[str, Any]], slowest_s: float) -> str:
    pauses = sorted(1000 * run["pause_s"] for run in runs)
    median_s = _median(runs, "pause_s")
    cells = [
        way,
        f"{1000 * median_s:,.0f} ms",
        f"{pauses[0]:,.0f} to {pauses[-1]:,.0f} ms",
        f"{median_s / slowest_s:.2f}",
    ]
    cells += [f"{_median(runs, name):,.0f}" for name in ("num_tokens", "num_computed", "num_read")]
    cells.append(f"{1000 * _median(runs, 'read_s'):,.0f} ms")
    return f"| {' | '.join(cells)} |"


def _median(runs: Sequence[Mapping[str, Any]], name: str) -> float:
    return statistics.median(float(run[name]) for run in runs)


if __name__ == "__main__":
    about = "The rescheduling benchmark's figures as text."
    [found] = results_of("bench.reschedule_report", about, [{"reschedule"}], sys.argv[1:])
    sys.stdout.write(markdown(found))
