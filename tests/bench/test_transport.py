"""`python -m bench.transport` as a user runs it, and how it reduces what it measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.transport import BenchProblem, Pair, TransportBenchConfig, main, started
from bench.transport_node import Setup
from bench.transport_report import Sample, report_of, spread_of
from connector.nixl_agent import is_installed
from tests import forked
from tests.architecture.source_tree import ROOT

BASELINES = {
    "tcp": None,
    "memcpy": None,
    "libzmq": "tcp",
    "asked memcpy": "memcpy",
    "zmq": "tcp",
    "zmq+checksum": "tcp",
    "shm": "memcpy",
    "shm+checksum": "memcpy",
} | ({"NIXL": "memcpy", "nixl": "NIXL", "nixl+checksum": "NIXL"} if is_installed() else {})
NIXL = ("nixl", "nixl+checksum") if is_installed() else ()


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    """The command's end and output, which is no terminal."""
    command = [sys.executable, "-m", "bench.transport", *flags]
    return forked.run(command, cwd=ROOT, timeout=120)


def test_a_run_gives_a_table_and_a_result_with_every_transfer(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    sizes = ("--block-kib", "64,1536", "--transfer-mib", "4", "--rounds", "3", "--warmup", "1")
    ended = run(*sizes, "--output", str(path))
    assert ended.returncode == 0, ended.stderr
    assert f"{6 * len(BASELINES)} of {6 * len(BASELINES)} transfers ended, 0 failed" in ended.stdout
    assert "blocks of 64 KiB, 4 MiB a transfer:" in ended.stdout and "shm+checksum" in ended.stdout
    result: dict[str, Any] = json.loads(path.read_text())
    assert result["command"].startswith("python -m bench.transport --block-kib 64,1536") and result["date"]
    assert result["machine"]["cores"] >= 1 and result["settings"]["rounds"] == 3
    assert [case["block_bytes"] for case in result["cases"]] == [64 << 10, 1536 << 10]
    assert [case["transfer_bytes"] for case in result["cases"]] == [4 << 20, 3 << 20]  # whole blocks
    for case in result["cases"]:
        transfers = case["transfers"]
        assert set(transfers) == set(BASELINES)
        assert all(len(numbers) == 3 for way in transfers.values() for numbers in way.values())
        for way in case["ways"]:
            rates = [case["transfer_bytes"] / 1e9 / seconds for seconds in transfers[way["way"]]["seconds"]]
            assert way["gb_per_s"]["p50"] == pytest.approx(spread_of(rates).p50, rel=0.01)
        assert {each["way"]: each["baseline"] for each in case["ways"]} == BASELINES


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--block-kib", "64,x"), "--block-kib 64,x: whole numbers"),
        (("--block-kib", "0"), "--block-kib 0: from 1"),
        (("--transfer-mib", "-1"), "--transfer-mib -1: from 1"),
        (("--block-kib", "4096", "--transfer-mib", "2,8"), "a transfer holds one block at least"),
        (("--rounds", "0"), "rounds"),
        (("--output", "/nowhere/x.json"), "its folder does not exist"),
        (("--checksum", "maybe"), "checksum"),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(
    flags: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert sentence in said and len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("transport", "checksum", "ways"),
    [
        ("all", "both", ("zmq", "zmq+checksum", "shm", "shm+checksum", *NIXL)),
        ("shm", "off", ("shm",)),
        ("zmq", "on", ("zmq+checksum",)),
    ],
)
def test_what_is_measured_can_be_chosen(transport: Any, checksum: Any, ways: tuple[str, ...]) -> None:
    assert TransportBenchConfig(transport=transport, checksum=checksum).transports == ways


def test_mooncake_is_measured_where_a_python_that_has_it_is_named() -> None:
    assert "Mooncake" not in TransportBenchConfig().references
    assert TransportBenchConfig(mooncake=Path(sys.executable)).references[-1] == "Mooncake"
    with pytest.raises(ValueError, match="--mooncake /nowhere/python: no program that can be run"):
        TransportBenchConfig(mooncake=Path("/nowhere/python"))
    setup = Setup("Mooncake", 4096, 4, (), os.getpid())
    with (
        pytest.raises(BenchProblem, match=r"the Mooncake: (No module named 'mooncake'|no network namespace)"),
        started(setup, Path(sys.executable)),
    ):
        raise AssertionError("an environment without Mooncake has measured it")


def test_ratios_are_taken_within_a_round() -> None:
    seconds = {"tcp": [1.0, 8.0, 3.0], "zmq": [2.0, 8.0, 4.0], "memcpy": [1.0, 1.0, 1.0]}
    samples = [Sample(way, i, value, 0.5) for way, values in seconds.items() for i, value in enumerate(values)]
    report = report_of(1 << 20, 2_000_000_000, samples)
    tcp, zmq, memcpy = report.ways
    assert (tcp.way, zmq.way, memcpy.way) == ("tcp", "zmq", "memcpy")
    assert zmq.ratio == spread_of([0.5, 1.0, 0.75]) and zmq.ratio is not None and zmq.ratio.p50 == 0.75
    assert zmq.gb_per_s.p50 == 0.5 and zmq.cpu_s_per_gb.p50 == 0.25 and zmq.baseline == "tcp"
    assert tcp.ratio is None and memcpy.ratio is None


def test_an_end_that_dies_or_cannot_transfer_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", forked.Popen)
    setup = Setup("receiver", 4096, 4, ("shm",), os.getpid())
    with started(setup) as receiver:
        receiver.ask("clear")
        with pytest.raises(BenchProblem, match="the receiver: its process has ended"):
            receiver.ask("admit", way="no such way", lease_id=1)
    with Pair(4096, 4, ("shm", "zmq")) as pair:
        assert pair.transfer("shm")[0] > 0
        for way in ("shm", "zmq"):  # nobody has admitted lease 99
            with pytest.raises(BenchProblem, match="the sender: 0 blocks landed: no lease with that id and secret"):
                pair.sender.ask("send", way=way, lease_id=99)
