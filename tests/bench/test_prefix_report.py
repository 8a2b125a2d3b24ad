"""The text of the prefix benchmarks' figures: made of their JSON alone, a row for each way, medians and extremes of rounds."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from bench.block_index import CacheIndexConfig, Case, measure
from bench.prefix_model import PrefixModelConfig
from bench.prefix_model import measure as model
from bench.prefix_report import markdown

RESULTS = Path(__file__).parents[2] / "bench" / "results"
FACTS = {"command": "python -m bench.it", "date": "2026-01-01", "machine": {"cores": 2}}


def rows_of(text: str) -> list[list[str]]:
    table = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def test_rounds_of_a_way_are_one_row_with_their_medians_and_extremes() -> None:
    run = {
        "load": "chat",
        "way": "cache_aware",
        "num_ok": 2,
        "num_requests": 2,
        "prompt_tokens": 100,
        "computed": 60,
        "recomputed": 10,
        "hit_rate": 0.4,
        "ttft_s": [0.010, 0.012],
        "lag_p99_s": 0.001,
    }
    slower = run | {"ttft_s": [0.030, 0.032], "num_ok": 1, "lag_p99_s": 0.004, "hit_rate": 0.5, "recomputed": 30}
    settings = json.loads((RESULTS / "prefix.json").read_text(encoding="utf-8"))["settings"]
    text = markdown(FACTS | {"settings": settings, "runs": [run, slower, run | {"way": "round_robin"}]})
    first, second = rows_of(text)
    assert first[:4] == ["chat", "cache_aware", "45.0%", "20.0%"] and first[-2:] == ["4", "1"]
    assert [cell.partition("(")[2] for cell in first[4:7]] == ["11 to 31)", "12 to 32)", "12 to 32)"]
    assert second[1] == "round_robin" and second[-1] == "0"
    assert "prefix.svg" in text and "python -m bench.it" in text


def test_figures_of_the_model_and_of_the_index_have_a_row_each() -> None:
    config = PrefixModelConfig(talks=4, turns=2, blocks="200", uses="50", samples="1,4")
    figures = [asdict(each) for each in model(config, Console(quiet=True))]
    rows = rows_of(markdown(FACTS | {"settings": asdict(config), "figures": figures}))
    assert [row[3] for row in rows] == ["round_robin", "least_loaded", "cache_aware 8,192", "cache_aware 8,192, 1/4"]
    index = CacheIndexConfig(blocks=4096, lookups=50)
    cases = [asdict(measure(index, Case(2, 1, are_shared=shared), lambda: None)) for shared in (False, True)]
    rows = rows_of(markdown(FACTS | {"cases": cases}))
    assert [row[0] for row in rows] == ["2 apart", "2 shared"]
    assert all(row[3] == "all" and row[-1] == "0" for row in rows)


@pytest.mark.parametrize("name", ["prefix", "prefix_model", "block_index"])
def test_the_pages_are_of_the_figures_that_lie_beside_them(name: str) -> None:
    facts = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    page = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
    assert page.startswith(markdown(facts).rstrip("\n")), f"python -m bench.prefix_report bench/results/{name}.json"
