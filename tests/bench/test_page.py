"""`python -m bench.page`: the pages in the repository are those of the results beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.page import PAGES, page
from bench.result_files import bench_of
from tests.architecture.source_tree import ROOT

RESULTS = ROOT / "bench/results"


def bench_that_wrote(result: Path) -> str:
    return bench_of(json.loads(result.read_text(encoding="utf-8")))


WITH_PAGES = [path for path in sorted(RESULTS.rglob("*.json")) if bench_that_wrote(path) in PAGES]


@pytest.mark.parametrize("result", WITH_PAGES, ids=lambda path: str(path.relative_to(RESULTS)))
def test_a_page_is_that_of_its_result(result: Path) -> None:
    """`python -m bench.page RESULT` writes it."""
    assert result.with_suffix(".md").read_text(encoding="utf-8") == page(json.loads(result.read_text(encoding="utf-8")))


def test_every_page_that_is_written_so_has_a_result_in_the_repository() -> None:
    assert set(map(bench_that_wrote, WITH_PAGES)) == set(PAGES)
