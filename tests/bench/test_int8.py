"""`python -m bench.int8` as a user runs it, on a small model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bench import int8
from engine.demo.examine import EXAMS
from tests import forked
from tests.architecture.source_tree import DEMO_MODEL, ROOT
from tests.kernels_choice import KERNELS


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.int8", "--threads", "1", "--kernels", KERNELS, *flags]
    return forked.run(command, cwd=ROOT, timeout=250)


def test_8_bits_lose_something_but_little(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    result = run("--model", str(tiny_model), "--sequences", "3", "--length", "80", "--output", str(path))
    assert result.returncode == 0, result.stderr
    fp32, bf16, int8 = json.loads(path.read_text())["losses"]
    assert (fp32["way"], fp32["top1_share"], fp32["kl_nats"]) == ("fp32", 1.0, 0.0)
    for each in (bf16, int8):
        assert 1e-7 < each["kl_nats"] < 0.05 and each["top1_share"] > 0.8
        assert 0.9 < each["perplexity"] / fp32["perplexity"] < 1.1
    assert bf16 != int8 | {"way": "bf16"}
    assert "3 of 3 sequences done" in result.stdout


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[str]], int]:
    """What a user can mend is said by main(): a process for it would load torch once more."""
    monkeypatch.setattr(int8, "set_thread_environment", lambda _: None)
    return lambda flags: int8.main(["--threads", "1", "--kernels", KERNELS, *flags])


def test_a_text_of_the_user_s_own_and_one_that_is_too_short(
    tiny_model: Path,
    tmp_path: Path,
    in_this_process: Callable[[Sequence[str]], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = tmp_path / "text"
    text.write_text("Once upon a time there was a text. " * 3)
    result = run("--model", str(tiny_model), "--text", str(text), "--length", "30")
    assert result.returncode == 0, result.stderr
    with pytest.raises(SystemExit, match="2"):
        in_this_process(["--model", str(tiny_model), "--text", str(text), "--length", "300"])
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "105 tokens are fewer than --length 300" in said


def test_the_demo_model_answers_as_often_with_8_bits(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    asked = ("--sequences", "2", "--length", "32", "--exams", "4")
    result = run("--model", str(DEMO_MODEL), *asked, "--output", str(path))
    assert result.returncode == 0, result.stderr
    exams = json.loads(path.read_text())["exams"]
    assert set(exams) == set(EXAMS)
    for name in ("questions", "recall, 512 tokens", "copying"):
        assert all(share >= 0.75 for share in exams[name].values()), (name, exams[name])
        assert f"{name}, right of 4: fp32 " in result.stdout


def test_a_model_that_was_never_taught_is_not_examined(
    tiny_model: Path, in_this_process: Callable[[Sequence[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        in_this_process(["--model", str(tiny_model), "--sequences", "1", "--length", "8", "--exams", "1"])
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "--exams: " in said and "the demo model 1536" in said
