"""Where a benchmark's result is to go is looked at before the run, and what cannot be written behind it is one line."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import pytest
from rich.console import Console

from bench import block_index
from bench.frame import Bench
from bench.prefix_model import PrefixModelConfig, measure

SOURCES: Final = {
    path.stem: path.read_text(encoding="utf-8") for path in sorted((Path(__file__).parents[2] / "bench").glob("*.py"))
}
CONFIGS: Final = [name for name, source in SOURCES.items() if "\n    output: Path" in source]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_in_the_place_of_a_result_is_told_before_the_run(name: str, tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "trace").touch()
    given: dict[str, Any] = {"model": tiny_model, "envs": tmp_path, "trace": tmp_path / "trace", "output": tmp_path}
    module = import_module(f"bench.{name}")
    (config,) = [
        each
        for each in vars(module).values()
        if dataclasses.is_dataclass(each) and each.__module__ == module.__name__ and "output" in each.__annotations__
    ]
    assert isinstance(config, type)
    fields = dataclasses.fields(config)
    needed = {each.name: 1.0 for each in fields if each.default is each.default_factory is dataclasses.MISSING}
    with pytest.raises(ValueError, match=f"^--output {tmp_path}: is a folder"):
        config(**needed | {each.name: given[each.name] for each in fields if each.name in given})


def test_results_are_written_where_an_error_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [name for name, source in SOURCES.items() if "write_atomically" in source] == ["frame"]
    output = tmp_path / "folder" / "index.json"
    output.parent.mkdir()

    def gone(*_: object) -> None:
        output.parent.rmdir()

    flags = ["--cases", "1x1", "--blocks", "4096", "--lookups", "10"]
    with pytest.MonkeyPatch.context() as patched, pytest.raises(SystemExit) as ended:
        patched.setattr(block_index, "show", gone)  # while it is measured
        block_index.main([*flags, "--output", str(output)])
    assert ended.value.code == 2
    told = f"{block_index.PROG}: --output {output}: cannot be written: No such file or directory\n"
    assert capsys.readouterr().err == told


@dataclasses.dataclass
class Written:
    """A benchmark's settings."""

    output: Path
    plot: Path


def test_a_picture_that_cannot_be_drawn_loses_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which may have taken an hour."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    config = Written(tmp_path / "result.json", tmp_path / "picture.png")
    bench: Bench[Written, dict[str, Any]] = Bench("it", lambda *_: {"a": 1}, lambda *_: None, dict, full)
    with pytest.raises(SystemExit) as ended:
        bench.run(config, [])
    assert ended.value.code == 2 and "--plot" in capsys.readouterr().err
    assert json.loads(config.output.read_text())["a"] == 1


@pytest.mark.parametrize(
    ("blocks", "why"), [("9" * 400, "must be whole numbers from 1 to"), ("37", "the longest prompt takes 59$")]
)
def test_a_model_of_nodes_says_which_number_of_blocks_it_cannot_have(blocks: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"^--blocks {blocks}: {why}"):
        measure(PrefixModelConfig(talks=4, turns=2, blocks=blocks), Console(quiet=True))
