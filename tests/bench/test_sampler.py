"""`python -m bench.sampler` as a user runs it, for a few rounds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.page import page
from tests import forked
from tests.architecture.source_tree import ROOT
from tests.kernels_choice import KERNELS


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    """The command's end and output, which is no terminal."""
    return forked.run([sys.executable, "-m", "bench.sampler", *flags], cwd=ROOT, timeout=250)


def test_a_run_gives_what_each_way_costs_beside_a_plain_draw_and_a_peer(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    result = run("--vocab", "2000", "--rows", "2", "--rounds", "3", "--kernels", KERNELS, "--output", str(path))
    assert result.returncode == 0, result.stderr
    told = json.loads(path.read_text())
    assert {"greedy", "plain", "top_p 0.95", "top_k 50", "min_p 0.05"} < {each["asked"] for each in told["ways"]}
    for each in told["ways"]:
        assert min(each["row_s"], each["peer_row_s"], each["ratio_to_plain"], each["ratio_to_peer"]) > 0
        assert each["asked"] in result.stdout and f"| {each['asked']} |" in page(told)
    assert [each["ratio_to_plain"] for each in told["ways"] if each["asked"] == "plain"] == [1.0]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--vocab", "10"), "--vocab"),
        (("--output", "/no/where.json"), "--output /no/where.json: its folder does not exist"),
    ],
)
def test_what_cannot_be_measured_is_one_line(flags: tuple[str, ...], said: str) -> None:
    result = run(*flags)
    assert result.returncode == 2
    assert said in result.stderr and result.stderr.count("\n") == 1
