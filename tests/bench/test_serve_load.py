"""What `baton bench` concludes from a load is so: rates that last, runs of nothing, a generator that is the bottleneck, files."""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from bench import serve
from bench.arrivals import Lengths
from bench.completions import Asked, Asking, Record
from bench.frame import can_plot, check_files
from bench.http_exchange import Server
from bench.load import Sender, run_open_loop
from bench.report import report_of
from bench.serve import main
from bench.serve_config import BenchConfig
from bench.serve_load import Loads, NoRequest
from bench.serve_result import Outcome, Run, show_outcome, write_outcome
from bench.sweep import Search, Try, knee

ASKING = Asking("m", "token_ids")
CAPACITY = 20.0  # requests per second of a server that takes one at a time
SWEEP = BenchConfig(sweep=True, rate="16", slo_ttft_ms=2000, slo_share=0.9, seed=3)


def served(config: BenchConfig, rate: float, seed: str) -> Run:
    """A run on such a server, by Lindley's recursion instead of by a clock."""
    records, free_at = [], 0.0
    for each in Loads(config).of_run(ASKING, rate, seed).requests:
        free_at = max(free_at, each.at_s) + 1 / CAPACITY
        record = Record(each.index, 64, 1, each.at_s, status="200", chunk_at_s=[free_at - each.at_s], output_tokens=1)
        record.end_s = record.chunk_at_s[0]
        records.append(record)
    return Run(rate, f"{rate:g} per second", records, report_of(records, config.slo))


def swept(config: BenchConfig) -> Outcome:
    """A whole sweep."""
    search, runs = Search(config.first_rate, config.sweep_step, 0.01, config.sweep_max_rate), list[Run]()
    while (rate := search.next_rate([Try(run.rate or 0.0, run.verdict(0.9)) for run in runs])) is not None:
        runs.append(served(config, rate, str(len(runs))))
    return Outcome("m", "token_ids", runs, False)


def shown(outcome: Outcome, config: BenchConfig) -> str:
    """What a terminal would have."""
    console = Console(width=200, file=io.StringIO(), soft_wrap=True)
    show_outcome(console, outcome, config)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("limit_ms", [200.0, 2000.0, 10_000.0])
def test_a_sweep_of_its_own_length_finds_what_a_server_stands_for_long(limit_ms: float) -> None:
    config = replace(SWEEP, slo_ttft_ms=limit_ms)
    outcome = swept(config)
    found = knee(outcome.tries(0.9))
    assert found is not None and 0.75 * CAPACITY < found < 1.15 * CAPACITY
    assert "WARNING" not in shown(outcome, config)


def test_a_sweep_that_is_too_short_to_show_a_queue_says_so() -> None:
    config = replace(SWEEP, max_requests=100)
    outcome = swept(config)
    found = knee(outcome.tries(0.9))
    assert found is not None and found > 1.3 * CAPACITY, "a queue is not noticed in so short a time"
    assert "the server may stand less for long; give --duration-s 23" in shown(outcome, config)


def test_a_run_that_would_send_nothing_says_nothing_of_the_server() -> None:
    config = BenchConfig(rate="0.1", duration_s=0.5, seed=1)
    with pytest.raises(NoRequest, match=r"no request arrives in it at 0\.1 per second; give it more"):
        Loads(config).of_run(ASKING, 0.1, "1")


def test_a_late_generator_is_not_told_as_a_slow_server() -> None:
    records = [replace(each, lag_s=0.2) for each in served(SWEEP, 4.0, "1").records]
    run = Run(4.0, "4 per second", records, report_of(records, SWEEP.slo))
    said = shown(Outcome("m", "token_ids", [run, replace(run, rate=2.0)], False), SWEEP)
    assert "no rate is known" in said and "already at 2 this generator could not keep up" in said


def test_a_run_that_was_given_up_is_no_rate_that_failed(tmp_path: Path) -> None:
    """Nor is one that was cut short a rate that passed."""
    config = replace(SWEEP, output=tmp_path / "a.json")
    whole, cut = served(SWEEP, 4.0, "1"), served(SWEEP, 8.0, "2")
    for record in cut.records[1:]:
        record.status = "interrupted"
    cut = replace(cut, report=report_of(cut.records, SWEEP.slo))
    said = shown(Outcome("m", "token_ids", [whole, cut], is_halted=True), config)
    assert "up to 4 requests/s, the highest rate tried, 90% of the requests" in said and "fewer did" not in said
    assert "no rate was tried to its end" in shown(Outcome("m", "token_ids", [cut], is_halted=True), config)
    write_outcome(Console(), Outcome("m", "token_ids", [served(SWEEP, 8.0, "2")], is_halted=True), config, {})
    assert json.loads((tmp_path / "a.json").read_text())["highest_rate_that_met_slo"] is None


def test_answers_that_nobody_counted_are_told_of_and_no_sweep_goes_by_their_tpot(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = served(SWEEP, 4.0, "1")
    records = [replace(record, output_tokens=None) for record in run.records]
    uncounted = replace(run, records=records, report=report_of(records, SWEEP.slo))
    said = shown(Outcome("m", "token_ids", [uncounted, run], is_halted=False), SWEEP)
    assert f"WARNING, 4 per second: {len(records)} answers tell no number of tokens" in said
    assert said.count("WARNING") == 1

    async def found(*_: object) -> Asking:
        return ASKING

    async def sent(*_: object) -> list[Record]:
        return records

    async def warmed(*_: object) -> Sender:
        return Sender(Server.parse("http://127.0.0.1:9"), True, 10.0)

    monkeypatch.setattr(serve, "find_asking", found)
    monkeypatch.setattr(serve, "warmed_up", warmed)
    monkeypatch.setattr(serve, "send", sent)
    assert main(["--sweep", "--slo-tpot-ms", "50"]) == 2
    assert "baton bench: --slo-tpot-ms: no answer tells" in capsys.readouterr().err


def test_all_at_once_is_no_rate_and_the_file_is_json_to_everybody(tmp_path: Path) -> None:
    config = BenchConfig(slo_ttft_ms=2000, output=tmp_path / "a.json")
    run = replace(served(SWEEP, 4.0, "1"), rate=math.inf)
    write_outcome(Console(), Outcome("m", "token_ids", [run], is_halted=False), config, {})

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    result = json.loads((tmp_path / "a.json").read_text(), parse_constant=refuse)
    assert (result["highest_rate_that_met_slo"], result["runs"][0]["rate"]) == (None, "inf")


@pytest.mark.skipif(not can_plot(), reason="matplotlib is missing")
def test_answers_in_one_event_have_a_picture_and_no_warning_of_its_axes(tmp_path: Path) -> None:
    """Their TPOT is 0, which no logarithm has; a run in which nothing was answered has no time at all."""
    for status in ("200", "503"):
        run = served(SWEEP, 4.0, "1")
        for record in run.records:
            record.output_tokens, record.status = 9, status
        config = BenchConfig(slo_tpot_ms=50, plot=tmp_path / "a.svg")
        write_outcome(Console(), Outcome("m", "token_ids", [run], is_halted=False), config, {})
        assert (tmp_path / "a.svg").stat().st_size


def test_a_generator_that_computes_all_the_time_is_told_of_and_stands_in_the_file(tmp_path: Path) -> None:
    run = replace(served(SWEEP, 4.0, "1"), rate=None, busy=0.97)
    config = BenchConfig(concurrency=256, output=tmp_path / "a.json")
    assert "this generator computed 97% of the time" in shown(Outcome("m", "words", [run], False), config)
    assert "computed" not in shown(Outcome("m", "words", [replace(run, busy=0.5)], False), config)
    assert run.to_json(config.slo)["generator_busy"] == 0.97


def test_a_slow_warm_up_hides_no_busy_generator(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it used is a share of the run, of which warming up is no part."""
    clock = SimpleNamespace(now=0.0, used=0.0)
    clock.monotonic, clock.process_time = lambda: clock.now, lambda: clock.used

    async def found(*_: object) -> Asking:
        return ASKING

    async def loop(sender: Sender, asked: Iterator[Asked], *_: object) -> list[Record]:
        clock.now += 10
        return []

    async def open_loop(*_: object) -> list[Record]:
        clock.now, clock.used = clock.now + 5, clock.used + 5
        return list(served(SWEEP, 4.0, "1").records)

    monkeypatch.setattr(serve, "time", clock)
    monkeypatch.setattr(serve, "find_asking", found)
    monkeypatch.setattr(serve, "run_closed_loop", loop)
    monkeypatch.setattr(serve, "run_open_loop", open_loop)
    monkeypatch.setattr(Server, "resolved", lambda server: asyncio.sleep(0, server))
    assert main(["--rate", "4"]) == 0
    assert "this generator computed 100% of the time" in capsys.readouterr().out


def test_what_is_begun_at_once_is_late_by_the_texts_that_are_made_between() -> None:
    def texts() -> Iterator[Asked]:
        for index in range(3):
            time.sleep(0.2 if index else 0)
            yield Asked(index, b"{}", 4, 1)

    async def run() -> list[Record]:
        return await run_open_loop(Sender(Server.parse("http://127.0.0.1:9"), True, 10.0), texts(), [0.0] * 3)

    assert asyncio.run(run())[0].lag_s > 0.3, "it was begun no earlier than the last one"


def test_a_result_replaces_no_device_no_pipe_and_no_link(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("real.json")
    for path in (Path(os.devnull), tmp_path / "pipe", tmp_path / "link"):
        with pytest.raises(ValueError, match=f"--output {path}: is a link or a device, which the result would replace"):
            check_files(path)
    check_files(tmp_path / "new.json")


def test_a_result_that_cannot_be_written_is_one_line_and_the_figures_were_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / "gone").mkdir()
    config = BenchConfig(output=folder / "a.json")
    folder.rmdir()
    with pytest.raises(SystemExit) as end:
        write_outcome(Console(), Outcome("m", "words", [served(SWEEP, 4.0, "1")], False), config, {})
    assert end.value.code == 2
    assert capsys.readouterr().err.strip().endswith("cannot be written: No such file or directory")


@pytest.mark.parametrize("words", [["--burstiness", "0.2", "--rate", "100"], ["--prompt-tokens", "99999999"]])
def test_a_flag_that_would_be_ignored_or_fill_the_memory_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2 and words[0] in capsys.readouterr().err
    assert Lengths.parse("exp:16777216").mean == 1 << 24
