"""The table of docs/coverage.md: for each row of docs/checklist.md the tests that prove it and how they ended.

A pytest plugin, on with `--coverage-table FILE`. Not here: what a row means, or whether a test deserves its mark.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Final

import pytest

CHECKLIST: Final = Path(__file__).resolve().parent.parent / "docs" / "checklist.md"
COVERS: Final = "covers"  # the mark, and the name under which reports bring its rows from process to process
ROW: Final = re.compile(r"^\| ([A-Z]\d\d) \| (.*) \|$", re.MULTILINE)
HEADER: Final = """\
# Which tests prove which row

Written by `make coverage-table`, never by hand. A row of `checklist.md` without a passing test counts as missing.

| id | behaviour | tests and their last result |
|---|---|---|
"""


def checklist_rows() -> dict[str, str]:
    """Every row of the checklist: id -> behaviour, in its order."""
    return dict(ROW.findall(CHECKLIST.read_text(encoding="utf-8")))


class CoverageTable:
    """Collects marks and outcomes, and writes the table when the run ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tests_of_row: dict[str, set[str]] = defaultdict(set)
        self._outcomes: dict[str, list[str]] = defaultdict(list)  # of a test function, one per case

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note which rows a case covers, and how it ended: its call, or what kept it from being called."""
        for name, row in report.user_properties:
            if name == COVERS:
                self._tests_of_row[str(row)].add(_function_of(report.nodeid))
        if report.when == "call" or report.outcome != "passed":
            self._outcomes[_function_of(report.nodeid)].append(report.outcome)

    def pytest_sessionfinish(self) -> None:
        """Write the table."""
        lines = []
        proven = 0
        for row, behaviour in checklist_rows().items():
            tests = sorted(self._tests_of_row.get(row, ()))
            proven += bool(tests) and all(self._result_of(test).startswith("passed") for test in tests)
            cell = "<br>".join(f"`{test}` {self._result_of(test)}" for test in tests) or "missing"
            lines.append(f"| {row} | {behaviour} | {cell} |\n")
        summary = f"\n{proven} of {len(lines)} rows are proven.\n"
        self._path.write_text(HEADER + "".join(lines) + summary, encoding="utf-8")

    def _result_of(self, test: str) -> str:
        outcomes = self._outcomes.get(test, [])
        counted = ", ".join(f"{outcome} {outcomes.count(outcome)}" for outcome in sorted(set(outcomes)))
        return counted if len(outcomes) > 1 else counted.removesuffix(" 1") or "not run"


def _function_of(nodeid: str) -> str:
    return nodeid.split("[")[0]
