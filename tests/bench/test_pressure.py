"""`python -m bench.pressure`: its figures from given runs, and one tiny run as a user starts it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from bench.arrivals import Lengths
from bench.cluster import to_toml
from bench.pressure_cells import POLICIES, Cell, CellRun, Workload, node_settings
from bench.pressure_figures import CellFigures, compared, complaints, figures_of, need_blocks, schedule, show
from bench.pressure_plot import plot
from tests import forked
from tests.architecture.source_tree import ROOT

AMPLE = Cell("full", None, 1000)
SHORT = Cell("ratio", 50, 100)
RUN = CellRun(
    cell=AMPLE,
    duration_s=2.0,
    output_tokens=1000,
    num_steps=100,
    preemptions=0,
    refusals=0,
    recomputed_tokens=0,
    ttft_p50_s=0.01,
    ttft_p99_s=0.02,
    tpot_p99_s=0.004,
    end_to_end_p99_s=0.5,
    errors={},
)


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    """The command's end and output, which is no terminal."""
    command = [sys.executable, "-m", "bench.pressure", *flags]
    return forked.run(command, cwd=ROOT, timeout=250)


def workload(num_requests: int = 6) -> Workload:
    """Two slots, answers of at most 20 tokens."""
    return Workload(
        num_warmup=2,
        num_requests=num_requests,
        slots=2,
        prompt=Lengths(8, 2),
        max_tokens=20,
        num_stop_ids=3,
        block_size=4,
        seed=1,
    )


def test_the_need_is_slots_times_the_mean_blocks_at_the_end() -> None:
    # 1, 2 and 3 blocks, the last ones not full.
    assert need_blocks([4, 5, 11], slots=6, block_size=4) == 6 * 2


def test_the_requests_follow_from_the_seed_and_may_say_more_than_they_will() -> None:
    asked = workload().draw("m")
    assert [each.body for each in asked] == [each.body for each in workload().draw("m")]
    assert asked != replace(workload(), seed=2).draw("m")
    bodies = [json.loads(each.body) for each in asked]
    assert len(bodies) == 2 + 6 and len({body["seed"] for body in bodies}) == 8
    assert all(6 <= len(body["prompt"]) <= 10 and body["stop_token_ids"] == [0, 1, 2] for body in bodies)
    assert {body["max_tokens"] for body in bodies} == {20} and {body["temperature"] for body in bodies} == {1.0}


def test_only_the_decode_node_is_short_and_only_it_has_the_policy() -> None:
    settings = node_settings(workload(), Cell("fixed-off", 40, 9))
    assert settings["decode"]["num_blocks"] == 9
    assert settings["decode"]["reserve_policy"] == "fixed" and settings["decode"]["decode_reserve"] == "off"
    # Both sequences at their limits (2 x 8 blocks) and every prompt of the load (8 x 3).
    assert settings["prefill"]["num_blocks"] == 16 + 24
    assert "reserve_policy" not in settings["prefill"]
    assert "[decode]\n" in to_toml(settings) and 'reserve_policy = "fixed"\n' in to_toml(settings)


def test_every_cell_comes_once_a_round_in_an_order_of_its_own_between_ample_runs() -> None:
    cells = [Cell(policy, percent, 0) for policy in POLICIES for percent in (40, 80)]
    order = schedule(cells, AMPLE, rounds=3, per_lap=5, rng=random.Random(7))
    assert order[0] == order[-1] == AMPLE
    rounds = [[cell for cell in order if cell != AMPLE][begin : begin + 12] for begin in (0, 12, 24)]
    assert all(Counter(each) == Counter(cells) for each in rounds)
    assert rounds[0] != rounds[1] != rounds[2]
    ample_at = [index for index, cell in enumerate(order) if cell == AMPLE]
    assert all(1 < b - a <= 6 for a, b in pairwise(ample_at))


def test_a_run_is_compared_with_the_ample_runs_beside_it_and_rounds_by_their_median() -> None:
    def short(duration_s: float, preemptions: int) -> CellRun:
        return replace(
            RUN, cell=SHORT, duration_s=duration_s, preemptions=preemptions, recomputed_tokens=50, num_steps=200
        )

    slow = replace(RUN, duration_s=4.0)
    # Goodputs: 250 against the mean of 500 and 500, 125 against that of 500 and 250, 250 against that of 250 and 250.
    runs = [RUN, short(4.0, 2), RUN, short(8.0, 4), slow, short(4.0, 8), slow]
    (figures,) = figures_of(runs)
    assert (figures.policy, figures.percent, figures.num_blocks) == ("ratio", 50, 100)
    assert figures.goodput == pytest.approx(0.5)
    assert (figures.goodput_least, figures.goodput_most) == pytest.approx((1 / 3, 1.0))
    assert figures.tokens_per_step == pytest.approx(0.5)
    assert figures.preemptions_per_1000_steps == pytest.approx(20)
    assert figures.recomputed_per_1000_tokens == pytest.approx(50)
    assert figures.tpot_p99 == figures.ttft_p50 == pytest.approx(1)


def test_an_answer_with_one_other_token_is_counted() -> None:
    first = replace(RUN, token_ids=[[1, 2], [3], [4, 5, 6]])
    assert compared(first, first).num_different == 0
    assert compared(replace(RUN, token_ids=[[1, 2], [3, 3], [4, 5, 7]]), first).num_different == 2


def test_whatever_breaks_the_promise_is_said() -> None:
    assert complaints([RUN, replace(RUN, cell=SHORT, preemptions=9, recomputed_tokens=5)]) == []
    failed = replace(RUN, cell=SHORT, errors={"503": 2})
    different = replace(RUN, cell=SHORT, num_different=1)
    short = replace(RUN, preemptions=3)
    assert complaints([failed, different, short]) == [
        "ratio, 50 %: errors {'503': 2}",
        "ratio, 50 %: 1 answers have other tokens than the first ample run's",
        "full, ample: 3 preemptions, 0 tokens recomputed",
    ]


def some_figures() -> list[CellFigures]:
    """Two policies, two sizes."""
    return figures_of(
        [RUN, *(replace(RUN, cell=Cell(policy, size, size)) for policy in ("none", "ratio") for size in (80, 40)), RUN]
    )


def test_the_table_has_every_cell_policy_by_policy_and_no_cut_words(capsys: pytest.CaptureFixture[str]) -> None:
    show(Console(width=80), some_figures())
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[2:6]] == [
        ["none", "40"],
        ["none", "80"],
        ["ratio", "40"],
        ["ratio", "80"],
    ]
    assert not any("…" in line for line in lines)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_plot_is_a_file_and_equal_figures_give_an_equal_one(tmp_path: Path, suffix: str) -> None:
    paths = [tmp_path / f"{number}{suffix}" for number in range(2)]
    for path in paths:
        plot(some_figures(), path)
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    assert first.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")
    assert suffix == ".png" or all(word in first for word in (b"<!-- none -->", b"<!-- ratio -->"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--policies", "ratio,best"), "--policies best: is none of full, none, fixed"),
        (("--sizes", "40,x"), "--sizes 40,x: must be positive whole numbers with commas between"),
        (("--prompt-tokens", "0"), "--prompt-tokens 0: must be at least one token"),
        (("--plot", "x.gif"), "--plot x.gif: must end in .png"),
        (("--output", "/no/where.json"), "--output /no/where.json: its folder does not exist"),
    ],
)
def test_what_cannot_be_measured_is_one_line(tiny_model: Path, flags: tuple[str, ...], said: str) -> None:
    result = run("--model", str(tiny_model), *flags)
    assert result.returncode == 2
    assert result.stderr.startswith("python -m bench.pressure: ") and result.stderr.count("\n") == 1
    assert said in result.stderr


@pytest.mark.covers("S09", "S16")
def test_a_tiny_run_preempts_and_changes_no_token(tiny_model: Path, tmp_path: Path) -> None:
    output, picture = tmp_path / "result.json", tmp_path / "plot.svg"
    load = ("--requests", "40", "--warmup", "4", "--slots", "8", "--max-tokens", "48", "--prompt-tokens", "12:4")
    files = ("--output", str(output), "--plot", str(picture))
    result = run("--model", str(tiny_model), "--policies", "none", "--sizes", "50", *load, *files)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "3 of 3 runs done, last full, ample" in result.stdout and picture.stat().st_size > 0
    written = json.loads(output.read_text())
    assert written["command"].startswith("python -m bench.pressure --model ") and written["machine"]["cores"] >= 1
    (cell,) = written["cells"]
    assert (cell["policy"], cell["percent"], cell["num_errors"], cell["num_different"]) == ("none", 50, 0, 0)
    assert cell["num_blocks"] == round(written["need_blocks"] / 2)
    assert cell["preemptions_per_1000_steps"] > 0 and cell["recomputed_per_1000_tokens"] > 0
    runs = written["runs"]
    assert [each["cell"]["percent"] for each in runs] == [None, 50, None]
    assert len({each["output_tokens"] for each in runs}) == 1
    assert 1 < written["mean_output_tokens"] < 48
