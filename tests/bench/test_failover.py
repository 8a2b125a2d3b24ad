"""`python -m bench.failover` and `bench.exactness`: figures from given runs, what they refuse, and one tiny run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.exactness import BEGIN, END, Cell, table_of, write_table
from bench.failover import complaints_of, figures_of, show
from bench.failover_plot import plot
from bench.recovery import NAMES, WAYS, Played, Streams
from bench.streams import StreamRun
from tests import forked
from tests.architecture.source_tree import ROOT


def stream(*instants: float, token_ids: list[int] | None = None, error: str = "") -> StreamRun:
    """One that told a token at each instant."""
    run = StreamRun(prompt_tokens=10, request_id="r", token_ids=token_ids or [1] * len(instants), error=error)
    run.events = [(at, 1) for at in instants]
    return run


def played(way: str = "kill", **details: Any) -> Played:
    """Two streams; the first was on the node that died at 100.0, and had said three tokens."""
    streams = [stream(99.8, 99.9, 100.01, 100.3, 100.4, 103.0), stream(99.9, 100.0, 100.1, 100.2)]
    fields: dict[str, Any] = {"found_s": 0.1, "prefill_s": 0.05, "prefill_tokens": 5, "retries": 1, "hit": [0]}
    bodies = [{"temperature": 0.0}, {"temperature": 1.0}]
    return Played(way, fault_at=100.0, bodies=bodies, streams=streams, **(fields | details))


def run(module: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """A command's end and output, which is no terminal."""
    command = [sys.executable, "-m", module, *flags]
    return forked.run(command, cwd=ROOT, timeout=280)


def test_the_next_token_follows_the_pause_in_which_the_fault_was_found_not_a_longer_one_later() -> None:
    one = played()
    assert one.next_token_s(0) == pytest.approx(0.3)
    assert played("move").next_token_s(0) == pytest.approx(2.6), "the pause alone, whenever it came"
    assert one.target_s == pytest.approx(0.1 + 0.05 + 0.05)
    figures = figures_of([one])
    assert (figures.way, figures.num_hit) == ("kill", 1)
    assert figures.ratio == figures.worst_ratio == pytest.approx(0.3 / 0.2)
    assert figures.others_pause_s == pytest.approx(0.1)
    assert figures_of([one, played(found_s=0.15), played(found_s=0.2)]).worst_ratio == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("way", "details", "said"),
    [
        ("kill", {}, []),
        ("kill", {"retries": 0}, ["0 retries of 1 streams"]),
        ("kill", {"prefill_tokens": 2}, ["2 tokens prefilled where 3 said ones were to be, and no whole prompt"]),
        ("kill", {"prefill_tokens": 13}, ["13 tokens prefilled where 3 said ones were to be, and no whole prompt"]),
        ("kill", {"hit": []}, ["no stream was on the node"]),
        ("recompute", {"prefill_tokens": 13}, []),
        ("recompute", {"prefill_tokens": 12}, ["12 tokens prefilled, less than 13: a cache helped"]),
        ("move", {"prefill_tokens": 0, "retries": 0}, []),
        ("move", {"prefill_tokens": 1, "retries": 0}, ["0 retries and 1 tokens prefilled where KV should have moved"]),
        ("move", {"prefill_tokens": 0}, ["1 retries and 0 tokens prefilled where KV should have moved"]),
    ],
)
def test_a_run_that_went_another_way_than_the_one_meant_is_no_result(
    way: str, details: dict[str, Any], said: list[str]
) -> None:
    assert played(way, **details).complaints() == said


def test_other_tokens_and_errors_are_complaints() -> None:
    broken = played()
    broken.streams[1].error = "NODE_LOST: gone"
    broken.num_different = 1
    assert complaints_of([played(), broken]) == ["kill: stream 1: NODE_LOST: gone", "kill: 1 streams have other tokens"]


def test_requests_follow_from_the_seed_share_no_prompt_and_are_greedy_and_seeded_on_either_node() -> None:
    load = Streams(number=8, prompt_tokens=20, max_tokens=30, fault_after=5, seed=3)
    bodies = load.draw("m", "kill", 0)
    assert bodies == load.draw("m", "kill", 0)
    prompts = [tuple(body["prompt"]) for way in WAYS for number in (0, 1) for body in load.draw("m", way, number)]
    assert len(set(prompts)) == len(prompts) == 8 * 2 * len(WAYS)
    for node in (0, 1):  # neighbours are placed on different nodes
        assert sorted(body["temperature"] for body in bodies[node::2]) == [0, 0, 1, 1]
    assert set(load.flags("bf16")) == set(NAMES) and "bf16" in load.flags("bf16")["decode-0"]


def test_the_table_fits_eighty_columns_and_equal_runs_give_an_equal_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [played(way) for way in WAYS]
    show(Console(width=80), [figures_of([each]) for each in runs])
    output = capsys.readouterr().out
    assert "…" not in output and all(way in output for way in WAYS)
    paths = [tmp_path / f"{number}.svg" for number in range(2)]
    for path in paths:
        plot(runs, path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_cell_counts_its_own_streams_that_were_hit_and_the_page_gets_the_table(tmp_path: Path) -> None:
    one = played(hit=[0, 1])
    greedy, seeded = (Cell("fp32", "kill", sampling, is_bit_exact=True) for sampling in ("greedy", "seeded"))
    for cell in (greedy, seeded):
        cell.take(one, [[1] * 6, [1, 1, 1, 2]])
    assert (greedy.streams, greedy.equal, greedy.tokens, greedy.tokens_behind) == (1, 1, 6, 4)
    assert (seeded.streams, seeded.equal, seeded.tokens) == (1, 0, 4)
    result, page = tmp_path / "result.json", tmp_path / "page.md"
    fields = ("dtype", "way", "sampling", "is_bit_exact", "streams", "equal", "tokens", "tokens_behind")
    cells = [{name: getattr(cell, name) for name in fields} for cell in (greedy, seeded)]
    result.write_text(json.dumps({"cells": cells}))
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_table(result, page)
    row = "| fp32 | prefix cache | 1 of 1 streams (100 %) | 6 | 0 of 1 streams (0 %) | 4 |"
    assert page.read_text() == f"before\n{BEGIN}\n{table_of(cells)}\n{END}\nafter\n" and row in page.read_text()


def test_the_page_has_the_measured_table_and_every_cell_on_this_cpu_is_whole() -> None:
    cells = json.loads((ROOT / "bench/results/exactness.json").read_text())["cells"]
    assert f"{BEGIN}\n{table_of(cells)}\n{END}" in (ROOT / "docs/exactness.md").read_text()
    assert all(cell["equal"] == cell["streams"] > 0 for cell in cells if cell["is_bit_exact"])


@pytest.mark.parametrize(
    ("module", "flags", "said"),
    [
        ("bench.failover", ("--ways", "kill,burn"), "--ways burn: is none of kill, stop"),
        (
            "bench.failover",
            ("--fault-after", "50", "--max-tokens", "50"),
            "--fault-after 50: must be below --max-tokens",
        ),
        ("bench.failover", ("--plot", "x.gif"), "--plot x.gif: must end in .png"),
        ("bench.failover", ("--output", "/no/where.json"), "--output /no/where.json: its folder does not exist"),
        ("bench.exactness", ("--dtypes", "fp8"), "--dtypes fp8: is none of fp32, bf16, fp16"),
        ("bench.exactness", ("--ways", "stop"), "--ways stop: is none of move, kill, recompute"),
    ],
)
def test_what_cannot_be_measured_is_one_line(tiny_model: Path, module: str, flags: tuple[str, ...], said: str) -> None:
    result = run(module, "--model", str(tiny_model), *flags)
    assert result.returncode == 2
    assert result.stderr.startswith(f"python -m {module}: ") and result.stderr.count("\n") == 1
    assert said in result.stderr


@pytest.mark.covers("R09", "R10", "P09", "M06")
def test_a_tiny_run_kills_a_node_and_finds_every_stream_equal_and_every_prompt_cached(
    tiny_model: Path, tmp_path: Path
) -> None:
    output, picture = tmp_path / "result.json", tmp_path / "plot.svg"
    load = ("--streams", "4", "--prompt-tokens", "100", "--fault-after", "20", "--max-tokens", "200", "--rounds", "1")
    files = ("--output", str(output), "--plot", str(picture))
    result = run("bench.failover", "--model", str(tiny_model), "--ways", "kill", *load, *files)
    assert result.returncode == 0, result.stdout + result.stderr
    written = json.loads(output.read_text())
    assert written["command"].startswith("python -m bench.failover --model ") and picture.stat().st_size > 0
    (only,) = written["runs"]
    assert only["num_different"] == 0 and only["retries"] == 2
    assert [each["is_hit"] for each in only["streams"]].count(True) == 2
    assert all(each["num_tokens"] == 200 for each in only["streams"])
