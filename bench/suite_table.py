"""The table of `python -m bench`: what each benchmark's result says, as Markdown, and its place in the README."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bench.machine import in_words
from bench.suite_entries import Entry, Line

BEGIN: Final = "<!-- from bench: make bench -->\n"
END: Final = "<!-- end of bench -->\n"
_HOW_TO_READ: Final = (
    "Short runs. The smaller a ratio the better, but transports': the larger. `of 30 µs`: the ratio is to that. "
    "*Branches a message*: streams whose tokens a node tells in one. `8 x 128`: 8 sequences behind 128 tokens each. "
    "*1P+1D*: a prefill and a decode node, *mixed*: nodes that do both."
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One benchmark's lines, or why there are none."""

    name: str
    lines: Sequence[Line]
    date: str = ""
    problem: str = ""
    is_new: bool = True  # it ran just now


def outcome_of(entry: Entry, path: Path, code: int | None) -> Outcome:
    """What its result file says; `code` is its exit code if it ran just now."""
    if code:
        return Outcome(entry.name, (), problem=f"failed with exit code {code}")
    if not path.is_file():
        return Outcome(entry.name, (), problem="not run yet")
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return Outcome(entry.name, list(entry.lines(result)), str(result.get("date", "")), is_new=code is not None)


def page(outcomes: Sequence[Outcome], command: str, date: str, machine: dict[str, Any]) -> str:
    """The whole table with its date, machine and command; a ratio that a target is named for says whether it is met."""
    where = in_words(machine)
    lines = [f"`{command}`, {date[:10]}, {where}. {_HOW_TO_READ}", ""]
    lines += ["| what | ratio | target | numbers |", "|---|---|---|---|"]
    for outcome in outcomes:
        if outcome.problem:
            lines.append(f"| {outcome.name} | {outcome.problem} | | |")
        for each in outcome.lines:
            sign = "≥" if each.is_better_high else "≤"
            verdict = each.unjudged or ("met" if each.is_met else "missed")
            asked = "" if each.target is None else f"{sign} {each.target:.2f} {verdict}"
            lines.append(f"| {each.what} | {each.ratio:.2f} | {asked} | {each.shown} |")
    if older := [each for each in outcomes if each.date and not each.is_new]:
        told = ", ".join(f"{each.name} ({each.date[:10]})" for each in older)
        lines += ["", f"That command has not run all of them. Of earlier runs: {told}."]
    return "\n".join(lines) + "\n"


def only_asked(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Of each benchmark the lines that a target is named for: what a README has room for."""
    shown = [replace(each, lines=[line for line in each.lines if line.target is not None]) for each in outcomes]
    return [each for each in shown if each.lines or each.problem]


def with_table(text: str, table: str) -> str:
    """A file's text with the table between its marks; as it was if it has none."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{begin}\n{table}\n{end}{after}" if begin and end else text
