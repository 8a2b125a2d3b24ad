"""What the command `baton` answers before any process of ours runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import pytest

from deploy.cli import HELP
from engine.model_sizes import SIZES

BATON = str(Path(sys.executable).with_name("baton"))


def run(command: Sequence[str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run to the end."""
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=cwd)


def test_help_names_every_command_and_shows_one_that_works_as_typed() -> None:
    """A newcomer's first call."""
    result = run([BATON, "--help"])
    assert result.returncode == 0
    for word in (
        "up ",
        "router ",
        "prefill ",
        "decode ",
        "mixed ",
        "drain ",
        "status ",
        "doctor ",
        "chat ",
        "bench ",
        "model make ",
        "baton up --model DIR",
        "exit code 2",
    ):
        assert word in result.stdout


def test_version_is_one_line() -> None:
    """Asked for in every report of a bug."""
    result = run([BATON, "--version"])
    assert (result.returncode, result.stdout, result.stderr) == (0, f"baton {version('baton')}\n", "")


@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
def test_every_role_has_a_help_of_its_own(role: str) -> None:
    """All nodes have the same flags."""
    result = run([BATON, role, "--help"])
    assert result.returncode == 0 and f"baton {role} " in result.stdout and "--block-size" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            [],
            "baton: a command is missing, one of up, router, prefill, decode, mixed, drain, role, status, doctor, chat, "
            "bench, certs make, model make, plan measure, plan; "
            "see baton --help",
        ),
        (["prefil"], "baton: prefil: unknown command; did you mean prefill?"),
        (["model", "bake"], "baton: model: unknown command; did you mean model make?"),
        (
            ["xyz"],
            "baton: xyz: unknown command; must be one of up, router, prefill, decode, mixed, drain, role, status, doctor, "
            "chat, bench, certs make, model make, plan measure, plan",
        ),
        (["router"], "baton router: --model is missing (or BATON_MODEL, or model in a --config file)"),
        (
            ["up", "--model", "."],
            "baton up: --model .: has no config.json, so it is not a Hugging Face model directory",
        ),
        (
            ["up", "--model", "/no"],
            "baton up: --model /no: is not a directory; make one with: baton model make --out /no",
        ),
        (["up", "--model", BATON], f"baton up: --model {BATON}: is not a directory"),
        (["up", "--model", ".", "--decode", "65"], "baton up: --decode 65: must be a whole number between 0 and 64"),
        (
            ["up", "--model", ".", "--decode", "0"],
            "baton up: --decode 0: nobody would decode; at least 1 is needed, or --mixed 1",
        ),
        (
            ["up", "--model", ".", "--prefill", "0", "--local-prefill", "off"],
            "baton up: --prefill 0: nobody would prefill, with --local-prefill off; at least 1 is needed, or --mixed 1",
        ),
        (
            ["up", "--step-timeout-s=5"],
            "baton up: --step-timeout-s: unknown flag; did you mean --stop-timeout-s? (a setting of nodes or routers "
            "alone is given as BATON_STEP_TIMEOUT_S, or in a --config file)",
        ),
        (["router", "--modle", "."], "baton router: --modle: unknown flag; did you mean --model?"),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_code_2(tmp_path: Path, arguments: list[str], line: str) -> None:
    """On stderr, without a traceback."""
    result = run([BATON, *arguments], cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", line + "\n")


def test_a_wrong_role_is_one_line_and_exit_code_2() -> None:
    """Before any role is imported."""
    result = run([sys.executable, "-m", "deploy.node_process", "encode"])
    assert (result.returncode, result.stderr) == (2, "baton: encode: must be prefill, decode or mixed\n")


def test_folders_named_like_our_rooms_where_the_user_stands_are_not_imported(tmp_path: Path) -> None:
    """`python -m` would look there first."""
    for room in ("deploy", "router", "runtime"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text("raise SystemExit('the wrong room')")
    result = run([BATON, "router"], cwd=tmp_path)
    assert result.returncode == 2
    assert "--model is missing" in result.stderr


def test_help_names_every_size_of_model_that_can_be_made() -> None:
    assert not [size for size in SIZES if size not in HELP]


def test_a_run_directory_that_cannot_be_made_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    """Here a file is in its place."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "taken").write_text("")
    result = run([BATON, "up", "--model", str(tmp_path), "--run-dir", str(tmp_path / "taken")])
    assert (result.returncode, result.stderr) == (2, f"baton up: --run-dir {tmp_path}/taken: is no directory\n")


def test_who_stops_a_node_while_it_still_imports_its_roles_is_shown_nothing(tmp_path: Path) -> None:
    """A room of ours that presses Ctrl-C stands in for the third of a second, on a busy machine seconds, that they take."""
    (tmp_path / "mixed_node").mkdir()
    (tmp_path / "mixed_node" / "__init__.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "deploy.node_process", "decode"],
        env=dict(os.environ, PYTHONPATH=str(tmp_path)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


def test_who_stops_a_command_while_it_still_imports_is_shown_nothing_and_other_errors_are_told(tmp_path: Path) -> None:
    (tmp_path / "stopped.py").write_text("raise KeyboardInterrupt")
    (tmp_path / "broken.py").write_text("raise ValueError('told')")
    for name, code, told in (("stopped", -signal.SIGINT, ""), ("broken", 1, "ValueError: told")):
        ended = subprocess.run(
            [sys.executable, "-m", "deploy.quiet_stop", name],
            env=dict(os.environ, PYTHONPATH=str(tmp_path)),
            capture_output=True,
            text=True,
            check=False,
        )
        assert (ended.returncode, ended.stderr.rpartition("\n")[0].rpartition("\n")[2]) == (code, told)
