"""`python -m bench.kv_pool` and `python -m bench.kv_pool_step` as a user runs them, small."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from bench.kv_pool_step import Round, figures_of
from tests import forked
from tests.architecture.source_tree import ROOT
from tests.kernels_choice import KERNELS
from tests.registry.redis_server import PROGRAM

STORES = {f"{store}{suffix}" for store in ("memory", "directory", "server") for suffix in ("", " keyed")}


def run(bench: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"bench.{bench}", *flags]
    return forked.run(command, cwd=ROOT, timeout=250)


def test_every_store_is_measured_against_what_is_under_it(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    sizes = ("--block-kib", "16,512", "--run-mib", "1", "--rounds", "2", "--warmup", "1")
    ended = run("kv_pool", *sizes, "--folder", str(tmp_path), "--output", str(path))
    assert ended.returncode == 0, ended.stderr
    assert "blocks of 512 KiB, 1 MiB in a row:" in ended.stdout
    result: dict[str, Any] = json.loads(path.read_text())
    assert [case["block_bytes"] for case in result["cases"]] == [16 << 10, 512 << 10]
    expected = {store for store in STORES if PROGRAM is not None or not store.startswith("server")}
    for case in result["cases"]:
        compared = {way["way"]: way for way in case["ways"] if way["ratio"] is not None}
        assert set(compared) == expected
        assert all(0.0001 < way["ratio"]["p50"] < 1000 for way in compared.values())
        assert len(case["samples"]) == 2 * 2 * (len(expected) + len(expected) // 2)
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"], "its files are gone"


def test_steps_are_measured_with_no_pool_a_fast_one_and_one_that_takes_nothing(
    tiny_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    sizes = ("--batch", "4", "--prompt-tokens", "64", "--output-tokens", "8", "--steps", "300", "--rounds", "1")
    ended = run(
        "kv_pool_step",
        *("--model", str(tiny_model), *sizes, "--staging-mib", "1", "--slow-ms", "60000"),
        *("--kernels", KERNELS, "--output", str(path)),
    )
    assert ended.returncode == 0, ended.stderr
    by_way = {way["way"]: way for way in json.loads(path.read_text())["ways"]}
    assert by_way["none"]["num_saved"] == 0 and by_way["none"]["mean_ratio"] == 1
    assert by_way["memory"]["num_written"] > 0 and by_way["slow"]["num_written"] == 0
    of_last_step = 4 * 64 // 16  # blocks of those that end with it: one round may count them, and the other one not yet
    assert by_way["slow"]["num_saved"] >= by_way["memory"]["num_written"] - of_last_step
    assert by_way["slow"]["mean_s"] * 300 < 60, "a step waits for no store"


def test_ratios_are_taken_within_a_round() -> None:
    rounds = [Round("none", mean_s / 2, mean_s, 2 * mean_s, 0, 0, 0) for mean_s in (1.0, 100.0)]
    rounds += [Round("slow", mean_s, mean_s, mean_s, 8, 4, 2) for mean_s in (1.5, 150.0)]
    figures = figures_of("slow", rounds)
    assert (figures.p50_ratio, figures.mean_ratio, figures.p99_ratio) == (3, 1.5, 0.75)
    assert (figures.num_saved, figures.num_dropped, figures.num_written) == (8, 4, 2)


@pytest.mark.parametrize(
    ("bench", "flags", "named"),
    [
        ("kv_pool", ("--block-kib", "x"), "--block-kib"),
        ("kv_pool", ("--block-kib", "4096", "--run-mib", "1"), "--block-kib"),
        ("kv_pool", ("--folder", "/nowhere"), "--folder"),
        ("kv_pool_step", ("--model", ".", "--output", "/nowhere/x"), "--output"),
        ("kv_pool_step", ("--model", "/nowhere"), "/nowhere"),
    ],
)
def test_a_wrong_value_is_one_line_and_exit_code_2(
    bench: str, flags: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        import_module(f"bench.{bench}").main(flags)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and named in said and len(said.splitlines()) == 1
