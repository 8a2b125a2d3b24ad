"""`python -m bench.router` as a user runs it, for moments, and what its figures follow from."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import uvloop

from bench.fine_timer import FineTimer
from bench.router_figures import split_cost, streams_for
from bench.router_load import Heard, Window, window_of
from bench.router_placement import PLACEMENT_POLICIES
from bench.router_report import BEGIN, END, with_figures
from bench.stepping import first_due, next_due
from tests import forked
from tests.architecture.source_tree import ROOT
from tests.router.tiny_model import write_model_text


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.router", *flags]
    return forked.run(command, cwd=ROOT, timeout=250)


def test_a_run_measures_every_side_and_placement(tmp_path: Path) -> None:
    """It fails by itself where a stream has other tokens than were said."""
    model, path = write_model_text(tmp_path / "model"), tmp_path / "result.json"
    short = "--branches 4 --rounds 1 --window-s 0.7 --step-ms 4 --streams 8 --decode 2 --nodes 1,6 --decisions 20 --load 0.1"
    result = run("--model", str(model), *short.split(), "--output", str(path))
    assert result.returncode == 0, result.stderr
    found = json.loads(path.read_text())
    assert [(each["side"], each["branches"]) for each in found["sides"]] == [
        ("direct", None),
        ("uvicorn", None),
        ("baton", 4),
    ]
    assert all(each["tokens_per_s"] > 0 and each["delay_p99_s"] >= each["delay_p50_s"] > 0 for each in found["sides"])
    assert found["sides"][0]["streams"] == found["sides"][1]["streams"] == found["sides"][2]["streams"] > 0
    assert all(each["load"] >= 0 and each["wait"] >= 0 for each in found["sides"])
    page = with_figures(f"text\n{BEGIN}old\n{END}more\n", [found, found])
    assert page == with_figures(page, [found, found]) and "old" not in page
    assert page.startswith("text\n") and page.endswith("more\n") and page.count(found["command"]) == 2
    baton, late = (
        next(line for line in page.split(heading)[1].splitlines() if line.startswith("| baton |"))
        for heading in ("| CPU, µs", "| delay of a token")
    )
    costs, delays = ([cell.strip() for cell in line.strip("|").split("|")] for line in (baton, late))
    direct, floor, side = found["sides"]
    assert costs[1:4] == ["4", f"{side['token_us']:.1f}", f"{side['token_us'] - floor['token_us']:.1f}"]
    assert delays[7] == f"{1000 * (side['delay_p99_s'] - direct['delay_p99_s']):.2f}"
    assert page.count("| cache_aware |") == 2
    with pytest.raises(ValueError, match="no marks"):
        with_figures("text", [found])
    assert {(each["policy"], each["nodes"]) for each in found["placement"]} == {
        (policy, number) for policy in PLACEMENT_POLICIES for number in (1, 6)
    }
    (loss,) = found["losses"]
    assert (
        loss["nodes"] == 6 and loss["turns"] > loss["streams"] / 10 and loss["longest_turn_ms"] < loss["all_turns_ms"]
    )
    assert page.count(f"| of 6 nodes | {loss['streams']} |") == 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--branches", "0"), "--branches 0"),
        (("--nodes", "1,x"), "--nodes 1,x"),
        (("--output", "/no/where.json"), "its folder does not exist"),
        (("--model", "/no/where"), "has no config.json"),
    ],
)
def test_what_cannot_be_measured_is_one_line(tmp_path: Path, flags: tuple[str, str], said: str) -> None:
    model = write_model_text(tmp_path / "model")
    result = run("--model", str(model), *flags)
    assert result.returncode == 2 and said in result.stderr and result.stderr.count("\n") == 1


def window(cpu_s: float, num_tokens: int, num_requests: int) -> Window:
    return Window(2.0, {"router": cpu_s}, num_tokens, num_tokens, num_requests, [], [])


def test_the_costs_of_tokens_and_requests_explain_both_windows() -> None:
    token_s, request_s = 40e-6, 700e-6
    short, steady = (window(t * token_s + r * request_s, t, r) for t, r in ((400, 200), (12_800, 101)))
    assert list(split_cost(short, steady)) == pytest.approx([40, 700])
    with pytest.raises(ValueError, match="20 tokens of 10 short requests, 40 of 20 long ones"):
        split_cost(window(1.0, 20, 10), window(2.0, 40, 20))
    assert streams_for(window(0.5, 1, 1), 64, 0.75) == 192


def test_a_group_that_is_late_keeps_its_place_in_the_step() -> None:
    """Else all that were late together would say their tokens together from then on."""
    assert next_due(10.003, 0.01, 10.003) == pytest.approx(10.013)
    assert next_due(10.003, 0.01, 10.0125) == pytest.approx(10.013)
    assert next_due(10.003, 0.01, 10.035) == pytest.approx(10.043)


def heard(*parts: str) -> Heard:
    one = Heard(10.0)
    one.parts = [(part.encode(), 10.5 + index) for index, part in enumerate(parts)]
    return one


def event(text: str) -> str:
    return f'data: {{"id":"cmpl-a","choices":[{{"text":"{text}"}}]}}\n\n'


def test_a_tokens_delay_is_from_its_being_said_to_its_being_read() -> None:
    one = heard(event("a"), event("bc")[:20], event("bc")[20:] + "data: [DONE]\n\n")
    said = {"a": (10.1, [10.3, 10.4, 12.0])}
    got = window_of([one], said, 10.0, 11.0, {}, 3)
    assert got.delays_s == [pytest.approx(0.2), pytest.approx(2.1)], "the third was said behind the window"
    assert got.first_delays_s == [pytest.approx(0.5 - 0.2)]
    assert (got.num_tokens, got.num_read, got.num_requests) == (2, 1, 1)


@pytest.mark.parametrize("parts", [(event("abc"),), (event("ab"), "data: [DONE]\n\n"), ('data: {"error":{}}\n\n',)])
def test_a_stream_that_is_not_what_was_said_is_no_measurement(parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError):
        window_of([heard(*parts)], {"a": (10.1, [10.3, 10.4, 12.0])}, 10.0, 11.0, {}, 3)


@pytest.mark.parametrize("step_s", [0.01, 0.025])
def test_groups_step_evenly_spread_whenever_they_begin(step_s: float) -> None:
    firsts = [first_due(number, step_s, 50.0 + 0.0037 * number) for number in range(25)]
    assert all(0 < first - 50.0 - 0.0037 * number <= step_s * 1.001 for number, first in enumerate(firsts))
    places = sorted(first / step_s % 1 for first in firsts)
    gaps = [after - before for before, after in pairwise([*places, places[0] + 1])]
    assert max(gaps) < 2.7 / len(places) and min(gaps) > 0.35 / len(places)


def test_the_fine_timer_wakes_in_order_and_never_early() -> None:
    async def scenario() -> list[float]:
        timer, late = FineTimer(), list[float]()
        for at in (time.monotonic() + ahead for ahead in (0.0003, -1.0, 0.0007, 0.0001)):
            await timer.sleep_until(at)
            late.append(time.monotonic() - at)
        timer.close()
        return late

    assert all(each >= 0 for each in uvloop.run(scenario()))
