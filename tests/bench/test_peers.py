"""`python -m bench.peers`: what its figures mean, and a run where Baton is the only one that is there."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.completions import Record
from bench.peers import decode_rate
from bench.peers_report import markdown, ratio_to_best, whole_rounds
from bench.peers_servers import PeerProblem
from tests import forked
from tests.architecture.source_tree import ROOT


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.peers", *flags]
    return forked.run(command, cwd=ROOT, timeout=250)


def test_decode_counts_tokens_behind_each_stream_s_first_between_the_first_and_the_last() -> None:
    early = Record(0, 8, 5, arrival_s=0.0, status="200", chunk_at_s=[1.0, 2.0, 3.0], output_tokens=5)
    late = Record(1, 8, 5, arrival_s=0.5, lag_s=0.5, status="200", chunk_at_s=[1.0, 4.0], output_tokens=7)
    assert decode_rate([early, late]) == (4 + 6) / (5.0 - 1.0)


def test_tokens_that_were_all_read_at_once_have_no_rate() -> None:
    record = Record(0, 8, 2, arrival_s=0.0, status="200", chunk_at_s=[1.0, 1.0], output_tokens=2)
    with pytest.raises(PeerProblem, match="--output-tokens"):
        decode_rate([record])


def test_a_ratio_is_the_median_of_rounds_against_the_best_of_each() -> None:
    rates = {"Baton": [10.0, 12.0, 9.0], "one": [5.0, 12.0, 3.0], "other": [8.0, 6.0, 3.0]}
    assert ratio_to_best(rates) == "1.25"
    assert ratio_to_best({"Baton": [1.0]}) == "" and ratio_to_best({"one": [1.0]}) == ""
    assert "| a case | 10 [9..12] | 5 [3..12] | 6 [3..8] | 1.25 |" in markdown({"a case": rates})


def test_of_an_interrupted_run_the_rounds_are_left_in_which_everybody_was_measured() -> None:
    figures = {
        "first": {"Baton": [1.0, 2.0], "one": [3.0, 4.0]},
        "second": {"Baton": [5.0, 6.0], "one": [7.0]},
        "third": {"Baton": [8.0]},
        "fourth": {},
    }
    assert whole_rounds(figures, ("Baton", "one")) == {
        "first": {"Baton": [1.0, 2.0], "one": [3.0, 4.0]},
        "second": {"Baton": [5.0], "one": [7.0]},
    }


def test_ctrl_c_writes_what_was_measured_and_ends_with_130(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    command = [sys.executable, "-m", "bench.peers", "--envs", str(tmp_path), "--model", str(tiny_model)]
    command += ["--threads", "1", "--peers", "Baton", "--clients", "1", "--contexts", "20", "--prompts", "30"]
    command += ["--output-tokens", "100", "--rounds", "40", "--output", str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None and running.stderr is not None
        next(line for line in running.stdout if "of 80 measurements done" in line)
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 130, running.stderr.read()
        assert "interrupted; these are the cases and rounds in which all were measured" in running.stderr.read()
    assert not path.exists(), "a whole run's result may be there"
    part = tmp_path / "result.part.json"
    result = json.loads(part.read_text())
    assert result["interrupted"] and 1 <= len(result["tokens_per_s"]["decode 1 x 20"]["Baton"]) < 40
    page = part.with_suffix(".md").read_text()
    assert "| decode 1 x 20 | " in page and "rounds of 40 (the run was interrupted)" in page


def test_a_peer_that_is_not_there_is_named_and_left_out(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    flags = ["--envs", str(tmp_path), "--model", str(tiny_model), "--threads", "1", "--output", str(path)]
    sizes = ["--clients", "1,2", "--contexts", "20", "--prompts", "30", "--output-tokens", "200", "--rounds", "1"]
    result = run(*flags, *sizes, "--peers", "Baton,vLLM,llama.cpp")
    assert result.returncode == 0, result.stderr
    for name in ("vLLM", "llama.cpp"):
        assert f"{name}: not in {tmp_path} (--install on)" in result.stdout
    figures = json.loads(path.read_text())["tokens_per_s"]
    assert list(figures) == ["decode 1 x 20", "decode 2 x 20", "prefill 30"]
    assert all(rates["Baton"][0] > 0 for rates in figures.values())
    assert "| decode 2 x 20 | " in path.with_suffix(".md").read_text()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--clients", "0"), "--clients 0: must be positive whole numbers with commas between"),
        (("--peers", "Baton,nobody"), "--peers nobody: not one of Baton, vLLM, llama.cpp, transformers"),
        (("--output", "/no/where.json"), "--output /no/where.json: its folder does not exist"),
    ],
)
def test_what_cannot_be_measured_is_one_line(tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    result = run("--envs", str(tmp_path), *flags)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert said in result.stderr
