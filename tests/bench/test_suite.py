"""The table of `python -m bench`: what results say in it, its place in the README, and a benchmark that fails."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from bench.__main__ import SuiteConfig
from bench.crossover import Cell, crossovers
from bench.suite_entries import ENTRIES, PEERS, Entry, Line
from bench.suite_table import BEGIN, END, Outcome, only_asked, outcome_of, page, with_table
from runtime.config import ConfigError, parse
from tests.architecture.source_tree import ROOT

MACHINE = {"cores": 2, "cpu_model": "a processor", "python": "3.11"}


def test_every_benchmark_is_there_and_its_flags_are_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    for entry in ENTRIES:
        with pytest.raises(SystemExit) as ended:
            import_module(f"bench.{entry.module}").main(["--help"])
        assert not ended.value.code
        help_text = capsys.readouterr().out
        flags = [word for word in entry.flags.split() if word.startswith("--")]
        flags += ["--output"] + ["--model"] * (entry.model is not None) + ["--plot"] * entry.has_plot
        assert all(f"{flag} " in help_text for flag in flags), entry.name
    assert sum(entry.bound_s for entry in ENTRIES if entry.name != PEERS) <= 2220, (
        "and what they take on two quiet cores is far below"
    )


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: str(entry.name))
def test_no_benchmark_refuses_what_its_entry_asks_for(entry: Entry, tiny_model: Path, tmp_path: Path) -> None:
    module = import_module(f"bench.{entry.module}")
    (config_type,) = [
        each for name, each in vars(module).items() if name.endswith("Config") and each.__module__ == module.__name__
    ]
    argv = [*shlex.split(entry.flags), "--output", str(tmp_path / "result.json")]
    argv += ["--model", str(tiny_model)] if entry.model is not None else []
    argv += ["--envs", str(tmp_path)] if entry.name == PEERS else []
    parse(config_type, "bench", "", argv, {})  # ConfigError: it does
    with pytest.raises(ConfigError):
        parse(config_type, "bench", "", [*argv, "--output", str(tmp_path / "missing" / "result.json")], {})


def test_results_in_the_repository_can_be_told() -> None:
    """Those of the full runs have the same shape."""
    told = {
        entry.name: list(entry.lines(json.loads(path.read_text())))
        for entry in ENTRIES
        if (path := ROOT / "bench" / "results" / f"{entry.name}.json").is_file()
    }
    assert {"failover", "local_prefill", "overlap", "scheduler"} <= set(told)
    assert all(lines and all(line.ratio > 0 for line in lines) for lines in told.values())


def test_peers_are_measured_where_they_are(tmp_path: Path) -> None:
    names = [entry.name for entry in ENTRIES]
    assert [entry.name for entry in SuiteConfig(results=tmp_path, envs=tmp_path).chosen()] == names
    assert [entry.name for entry in SuiteConfig(results=tmp_path).chosen()] == [name for name in names if name != PEERS]
    assert [entry.name for entry in SuiteConfig(results=tmp_path, only="peers,int8").chosen()] == ["int8"]
    with pytest.raises(ValueError, match=r"--envs .*missing: is no directory; `python -m bench\.peers --install on"):
        SuiteConfig(results=tmp_path, envs=tmp_path / "missing")


def test_a_page_says_what_is_met_what_failed_and_of_when_it_is(tmp_path: Path) -> None:
    entry = Entry(
        "one", "one", "", 1, lambda result: [Line("a ÷ b", result["x"], "1 ÷ 2", 0.4), Line("c", 3.0, "", 2.0, True)]
    )
    (tmp_path / "one.json").write_text(json.dumps({"x": 0.5, "date": "2026-01-02T03:04:05"}))
    outcomes = [
        outcome_of(entry, tmp_path / "one.json", 0),
        outcome_of(entry, tmp_path / "one.json", 124),
        outcome_of(entry, tmp_path / "none.json", None),
        replace(outcome_of(entry, tmp_path / "one.json", None), name="old"),
    ]
    text = page(outcomes, "python -m bench", "2026-02-03T00:00:00", MACHINE)
    assert "`python -m bench`, 2026-02-03, 2 cores of a processor" in text
    assert "| a ÷ b | 0.50 | ≤ 0.40 missed | 1 ÷ 2 |\n| c | 3.00 | ≥ 2.00 met |  |" in text
    assert "| one | failed with exit code 124 | | |\n| one | not run yet | | |" in text
    assert "Of earlier runs: old (2026-01-02)." in text


def test_the_readme_has_the_lines_that_something_is_asked_of_and_what_failed() -> None:
    asked, other = Line("a", 0.5, "", 0.4), Line("b", 0.5, "")
    outcomes = [Outcome("one", [asked, other]), Outcome("two", [other]), Outcome("three", [], problem="not run yet")]
    assert only_asked(outcomes) == [Outcome("one", [asked]), Outcome("three", [], problem="not run yet")]


def test_the_readmes_table_is_replaced_and_nothing_else() -> None:
    text = f"before\n{BEGIN}old\n{END}after\n"
    assert with_table(text, "new\n") == f"before\n{BEGIN}\nnew\n\n{END}after\n"
    assert with_table("no marks\n", "new\n") == "no marks\n"
    readme = (ROOT / "README.md").read_text()
    assert readme.count(BEGIN) == readme.count(END) == 1


def test_a_crossover_is_the_length_from_which_on_apart_stays_ahead() -> None:
    ratios = {(16, 1): 0.9, (64, 1): 1.1, (256, 1): 0.8, (1024, 1): 0.7, (16, 4): 1.2, (64, 4): 1.1}
    cells = [
        Cell(length, load, {}, dict.fromkeys(("ttft", "tpot", "gap_p99", "seconds"), ratio))
        for (length, load), ratio in ratios.items()
    ]
    assert crossovers(cells)["ttft"] == {1: 256, 4: None}
