"""`python -m bench.variants`: a tiny run of all variants that are compiled, its page, and what is said to be faster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.page import main as write_pages
from bench.variants import figures_of, main
from kernels.cpu_build import library_path, usable_variants

COMPILED = [each.name for each in usable_variants() if library_path(each).exists()]


@pytest.mark.skipif(not COMPILED, reason="no kernels are compiled for this CPU")
def test_every_variant_is_measured_beside_the_one_that_a_node_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    flags = ["--batches", "2", "--contexts", "20", "--chunks", "32:16", "--rounds", "2", "--output", str(path)]
    assert main(["--shape", "llama-tiny", *flags]) == 0
    said = capsys.readouterr().out
    assert f"a node here takes {COMPILED[0]}" in said
    result = json.loads(path.read_text())
    assert [each["case"] for each in result["cases"]] == ["decode 2 x 20", "chunk of 32 behind 16"]
    for each in result["cases"]:
        assert [*each["step_s"]] == [*each["ratio"]] == COMPILED
        assert each["ratio"][COMPILED[0]] == 1 and min(each["step_s"].values()) > 0
    assert write_pages([str(path)]) == 0
    assert f"A node takes `{COMPILED[0]}` here" in path.with_suffix(".md").read_text()


def test_ratios_are_of_the_same_round_and_only_a_clear_lead_is_told() -> None:
    rounds = [{"a": 1.0, "b": 0.9, "c": 1.0}, {"a": 2.0, "b": 1.8, "c": 1.92}, {"a": 10.0, "b": 8.0, "c": 12.0}]
    found = figures_of("decode 1 x 1", ["a", "b", "c"], rounds)
    assert found.step_s == {"a": 2.0, "b": 1.8, "c": 1.92}
    assert found.ratio == {"a": 1.0, "b": 0.9, "c": 1.0}
    assert found.faster == {"b": 0.9}


@pytest.mark.parametrize("flags", [["--shape", "none"], ["--chunks", "3"], ["--batches", "0"]])
def test_a_wrong_value_is_one_line_that_names_it(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and flags[0] in said
