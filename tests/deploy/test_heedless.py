"""What a command says to a pipe, a terminal or a disk that takes no more."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy import chat

SAYS = "import sys\nfor _ in range(100):\n    print('x' * 1000, flush=True)\n    sys.stderr.write('y\\n')\nsys.exit(3)"


def no_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def no_terminal() -> int:
    ours, theirs = pty.openpty()
    os.close(ours)
    return theirs


def no_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def ending(tmp_path: Path, nowhere: int, line: str = "") -> int:
    """The exit code of a command that says much there, on stdout and stderr both."""
    (tmp_path / "says.py").write_text(line + SAYS)
    environment = dict(os.environ, PYTHONPATH=str(tmp_path))
    command = [sys.executable, "-m", "deploy.quiet_stop", "says"]
    try:
        return subprocess.run(command, env=environment, stdout=nowhere, stderr=nowhere, check=False).returncode
    finally:
        os.close(nowhere)


def unwritten(command: list[str], **variables: str) -> tuple[int, str]:
    """Exit code and stderr of `python -m` with these, whose stdout is on a full disk."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "", **variables}
    with Path("/dev/full").open("wb") as nowhere:
        words = [sys.executable, "-m", *command]
        ended = subprocess.run(words, env=environment, stdout=nowhere, stderr=subprocess.PIPE, text=True, check=False)
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_is_said_while_a_command_runs_is_read_while_it_runs(tmp_path: Path, unbuffered: str, stream: str) -> None:
    say = f"import sys\nsys.{stream}.write('said\\n')\n"
    say += "sys.stdout.flush()\n" if not unbuffered else ""
    (tmp_path / "says.py").write_text(f"{say}sys.stdin.read()")
    environment = dict(os.environ, PYTHONPATH=str(tmp_path), PYTHONUNBUFFERED=unbuffered)
    command = [sys.executable, "-m", "deploy.quiet_stop", "says"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        told = process.stdout if stream == "stdout" else process.stderr
        assert told.readline() == "said\n"
        process.stdin.close()
        assert process.wait(60) == 0


@pytest.mark.parametrize("encoding", ["utf-8:strict", "ascii"])
def test_what_a_locale_does_not_know_is_spelled_and_ends_no_command(tmp_path: Path, encoding: str) -> None:
    """A run directory's name is any bytes, and `baton up` ended its cluster over it."""
    (tmp_path / "says.py").write_text("import os\nprint('logs in', os.fsdecode(b'caf\\xe9'))\nprint('there')")
    environment = dict(os.environ, PYTHONPATH=str(tmp_path), PYTHONIOENCODING=encoding)
    command = [sys.executable, "-m", "deploy.quiet_stop", "says"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "logs in caf\\udce9\nthere\n", "")


@pytest.mark.parametrize("open_nowhere", [no_pipe, no_terminal])
def test_a_command_comes_to_its_own_end_whoever_has_stopped_reading(
    tmp_path: Path, open_nowhere: Callable[[], int]
) -> None:
    assert ending(tmp_path, open_nowhere()) == 3


def test_what_a_full_disk_does_not_take_is_an_error_but_where_all_is_forgiven(tmp_path: Path) -> None:
    assert ending(tmp_path, no_disk()) not in (0, 3)
    forgiving = "from deploy.heedless import outlive_readers\noutlive_readers(of_all=True)\n"
    assert ending(tmp_path, no_disk(), forgiving) == 3


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["--help", "--version", "status --help", "chat --help", "certs make DIR", "doctor"])
def test_what_a_full_disk_does_not_take_is_one_line_whichever_command_says_it(
    tmp_path: Path, words: str, unbuffered: str
) -> None:
    told = "baton: stdout: cannot be written: No space left on device\n"
    command = ["deploy.cli", *words.replace("DIR", str(tmp_path / "certs")).split()]
    assert unwritten(command, PYTHONUNBUFFERED=unbuffered) == (1, told)


def test_a_full_disk_hides_no_bug(tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text("print('x')\nraise ValueError('told')")
    code, told = unwritten(["deploy.quiet_stop", "says"], PYTHONPATH=str(tmp_path))
    assert code != 0 and "ValueError: told\n" in told


def test_a_chats_lines_that_a_disk_does_not_take_in_the_end_are_a_line_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = tmp_path / "folder" / "lines"
    history.parent.mkdir()
    with chat._line_history(history):
        shutil.rmtree(history.parent)
    assert capsys.readouterr().err == f"baton chat: --history {history}: was not kept: No such file or directory\n"


@pytest.mark.parametrize("words", ["--help", "--version", "certs make DIR"])
def test_what_is_asked_with_no_standard_output_at_all_is_said_to_nobody(tmp_path: Path, words: str) -> None:
    command = ["deploy.cli", *words.replace("DIR", str(tmp_path / "certs")).split()]
    closed = ["bash", "-c", 'exec "$@" >&-', "-", sys.executable, "-m", *command]
    ended = subprocess.run(closed, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
