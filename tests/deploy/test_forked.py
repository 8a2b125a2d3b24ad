"""Processes that tests fork from one that has loaded torch: what they have is what they would have had of a start of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked

SHOWN = """
import os, sys
assert "torch" in sys.modules
inherited = [each for each in range(100) if os.path.exists(f"/proc/self/fd/{each}") and os.get_inheritable(each)]
print(os.getppid(), os.getcwd(), sys.argv[1:], sys.orig_argv[-1], sys.path[0] == "", os.environ, inherited, __name__)
print("assert" in open("/proc/self/cmdline").read())
"""
FIRST_OF_A_LOOP = """
import asyncio, sys
from tests import forked

async def first() -> int:
    return await (await forked.create_process(sys.executable, "-c", "raise SystemExit(7)")).wait()

assert asyncio.run(first()) == 7
"""
SAID = "import sys; print(sys.stdin.read(), end=''); print('not well', file=sys.stderr); sys.exit(7)"


def test_it_has_the_variables_folder_arguments_and_descriptors_that_it_is_given_and_is_a_child_of_who_asked(
    tmp_path: Path,
) -> None:
    ended = forked.run([sys.executable, "-c", SHOWN, "a"], timeout=60, cwd=tmp_path, env={"ALONE": "1"})
    variables = {"ALONE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    assert ended.stdout.split(" ", 1) == [
        str(os.getpid()),
        f"{tmp_path} ['a'] a True environ({variables}) [0, 1, 2] __main__\nTrue\n",
    ], ended.stderr
    read, write = os.pipe()
    with forked.Popen([sys.executable, "-c", f"import os; os.write({write}, b'heard')"], pass_fds=[write]) as process:
        os.close(write)
        assert os.read(read, 9) == b"heard" and os.read(read, 9) == b""
        os.close(read)
    assert process.returncode == 0


def test_its_words_exit_code_and_end_are_those_of_any_process() -> None:
    pipe = subprocess.PIPE
    with forked.Popen([sys.executable, "-c", SAID], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.communicate("well\n", timeout=60) == ("well\n", "not well\n")
    assert process.returncode == 7
    raised = forked.run([sys.executable, "-c", "1 / 0"], timeout=60)
    assert raised.returncode == 1 and "ZeroDivisionError" in raised.stderr
    with forked.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        process.send_signal(signal.SIGTERM)
    assert process.returncode == -signal.SIGTERM


def test_modules_run_as_a_command_runs_them() -> None:
    refused = forked.run([sys.executable, "-m", "deploy.node_process", "cook"], timeout=60)
    assert (refused.returncode, refused.stderr) == (2, "baton: cook: must be prefill, decode or mixed\n")
    baton = str(Path(sys.executable).with_name("baton"))
    helped = forked.run([baton, "up", "--help"], timeout=60)
    assert helped.returncode == 0 and helped.stdout.startswith("usage: baton up") and not helped.stderr


@pytest.mark.parametrize(
    ("words", "has_session"),
    [
        (["sleep", "1"], False),
        ([sys.executable, "-X", "importtime", "-c", "1"], False),
        ([sys.executable, "-c", "1"], True),
    ],
)
def test_what_only_a_start_of_its_own_gives_is_refused(words: list[str], has_session: bool) -> None:
    with pytest.raises(ValueError, match="use subprocess"):
        forked.Popen(words, start_new_session=has_session)


def test_the_first_one_may_be_asked_for_by_a_loop() -> None:
    """The process that forks was then started as if it could be forked itself: files failed that ran first in their worker."""
    subprocess.run([sys.executable, "-c", FIRST_OF_A_LOOP], cwd=Path(__file__).parents[2], check=True, timeout=120)
