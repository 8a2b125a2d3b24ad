"""What reports are given: results that they know, in their order, or one line and exit code 2."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from bench.result_files import results_of
from bench.router_report import main as report_of_router

ENGINE = {"command": "python -m bench.engine --model m", "number": 1}
STORES = {"command": "python -m bench.kv_pool", "number": 2}
STEPS = {"command": "python -m bench.kv_pool_step --model m", "number": 3}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, content in (("engine", ENGINE), ("stores", STORES), ("steps", STEPS), ("list", [1])):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    (tmp_path / "text.json").write_text("# no JSON")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_results_come_in_the_order_in_which_they_are_asked_for() -> None:
    two = [{"kv_pool"}, {"kv_pool_step"}]
    assert results_of("report", "", two, ["stores.json", "steps.json"]) == [STORES, STEPS]
    assert results_of("report", "", [{"engine"}], ["engine.json"] * 3, has_more=True) == [ENGINE] * 3
    assert results_of("report", "", [("prefix", "kv_pool")], ["stores.json"]) == [STORES]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("named", "said"),
    [
        (["none.json"], "none.json: No such file or directory"),
        (["text.json"], "text.json: is not JSON"),
        (["list.json"], "list.json: is a result of nothing known, not of bench.engine"),
        (["engine.json", "steps.json"], "steps.json: is a result of kv_pool_step, not of bench.engine"),
        ([], "the following arguments are required: RESULT.json"),
    ],
)
def test_what_is_no_result_of_theirs_is_one_line(
    named: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        results_of("bench.engine_report", "", [{"engine"}], named, has_more=True)
    assert ended.value.code == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("python -m bench.engine_report: ") and told.endswith(said)


def test_a_page_without_marks_stays_as_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, result = folder / "page.md", folder / "router.json"
    page.write_text("by hand")
    result.write_text(json.dumps({"command": "python -m bench.router", "sides": []}))
    with pytest.raises(SystemExit) as ended:
        report_of_router([str(page), str(result)])
    assert ended.value.code == 2 and page.read_text() == "by hand"
    assert "the page has no marks" in capsys.readouterr().err


@pytest.mark.parametrize("report", ["engine_report", "page"])
def test_what_a_result_lacks_is_one_line(report: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "cut.json"
    bench = "start" if report == "page" else report.removesuffix("_report")
    path.write_text(json.dumps({"command": f"python -m bench.{bench} --model m"}))
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"bench.{report}").main([str(path)])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith(f"python -m bench.{report}: {path}: is no whole result: '") and told.count("\n") == 1
