"""docs/comparison.md: each yes of ours names a test that exists. Whether that test passes, the test says."""

from __future__ import annotations

import ast
import re
from typing import Final

from tests.architecture.source_tree import ROOT

_PAGE: Final = ROOT / "docs" / "comparison.md"
_YES: Final = re.compile(r'\[yes\]\(([^) ]+) "([^"]+)"\)')


def test_each_yes_of_ours_names_a_test() -> None:
    rows = [line.split("|")[2] for line in _PAGE.read_text(encoding="utf-8").split("\n") if line.count("|") == 6][2:]
    assert len(rows) > 10
    for ours in rows:
        found = _YES.search(ours)
        assert found is not None, f"no test is named for: {ours}"
        source = (_PAGE.parent / found[1]).resolve()
        assert source.is_relative_to(ROOT / "tests"), found[1]
        tree = ast.parse(source.read_text(encoding="utf-8"))
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert found[2] in names, f"{found[1]} has no {found[2]}"
