"""`python -m bench.start`: a cluster is really started and asked, and ratios are a round's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.page import page
from bench.start import TARGET_S, Start, figures_of, main


def test_ratios_are_taken_within_a_round() -> None:
    figures = figures_of([Start(1.0, 2.0, 2.5), Start(2.0, 8.0, 9.0), Start(4.0, 12.0, 12.5)])
    assert (figures.import_s, figures.ready_s, figures.token_s, figures.ratio) == (2.0, 8.0, 9.0, 3.0)


def test_a_tiny_run_starts_a_cluster_and_asks_it(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "start.json"
    assert main(["--model", str(tiny_model), "--rounds", "1", "--output", str(path)]) == 0
    result = json.loads(path.read_text())
    (only,) = result["rounds"]
    assert 0 < only["import_s"] / 10 < only["ready_s"] < only["token_s"]
    assert result["ready_s"] == only["ready_s"] < 10 * TARGET_S
    assert "ready after" in page(result)


@pytest.mark.parametrize("flags", [("--model", "/nowhere"), ("--output", "/nowhere/x.json"), ("--rounds", "0")])
def test_what_cannot_be_measured_is_one_line(
    flags: tuple[str, ...], tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--model", str(tiny_model), *flags])
    assert ended.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1
