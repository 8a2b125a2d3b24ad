"""`python -m bench.grammar_step`: a tiny run of all ways, its page, and how ratios are reckoned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.grammar_step import figures_of, main
from bench.page import main as write_pages
from tests.kernels_choice import KERNELS


def test_free_rows_and_bound_ones_are_measured_and_compared(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    flags = ["--batches", "1,2", "--steps", "12", "--rounds", "1", "--kernels", KERNELS, "--output", str(path)]
    assert main(["--model", str(tiny_model), *flags]) == 0
    cases = json.loads(path.read_text())["cases"]
    ways = [(1, "free"), (1, "one"), (2, "free"), (2, "one"), (2, "each")]
    assert [(each["batch"], each["way"]) for each in cases] == ways
    assert all(0.02 < each["ratio"] < 50 and each["step_s"] > 0 for each in cases)
    beside_s = {(each["batch"], each["way"]): each["beside_s"] for each in cases}
    for batch, way in ways:  # processes that have nothing to do take a little, too
        assert way == "free" or beside_s[batch, way] > beside_s[batch, "free"]
    assert write_pages([str(path)]) == 0


def test_ratios_are_of_the_same_round() -> None:
    rounds = [
        {"free": (free_s, 0.0), "one": (one_s, beside_s)}
        for free_s, one_s, beside_s in ((1.0, 2.0, 0.1), (2.0, 2.0, 0.3), (10.0, 15.0, 0.2))
    ]
    found = figures_of(8, "one", rounds)
    assert (found.batch, found.step_s, found.ratio, found.beside_s) == (8, 2.0, 1.5, 0.2)
    assert figures_of(8, "free", rounds).ratio == 1


def test_more_rows_than_a_node_follows_grammars_is_one_line(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--model", str(tiny_model), "--batches", "65"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
