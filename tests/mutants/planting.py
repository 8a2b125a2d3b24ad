"""Plants one mutant in a copy of the tree and runs the tests that should notice it. Never touches the tree itself."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from tests.architecture.source_tree import ROOT, project_files
from tests.mutants.mutant import Mutant

SEED: Final = "1"  # of what the tests draw, so that a verdict is the same in every run
TEST_TIMEOUT_S: Final = 60  # of one test: a mutant that hangs it is killed by that
RUN_TIMEOUT_S: Final = 300
_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (\S+::\S+)", re.MULTILINE)  # not a file that cannot even be imported


class Verdict(Enum):
    """What became of a mutant."""

    KILLED = "killed"
    SURVIVED = "survived"
    UNCLEAR = "unclear"  # no test ran, or the run did not end: says nothing about the tests


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run."""

    verdict: Verdict
    detail: str  # the test that noticed it, or the end of what pytest said
    duration_s: float


def plant(mutant: Mutant) -> Outcome:
    """Run the mutant's tests in a copy that has the bug."""
    with tempfile.TemporaryDirectory(prefix=f"mutant-{mutant.name}-") as folder:
        copy = Path(folder)
        copy_tree(copy)
        target = copy / mutant.path
        target.write_text(mutant.planted_in(target.read_text(encoding="utf-8")), encoding="utf-8")
        return run_tests(copy, mutant.killed_by)


def run_unchanged(killers: Iterable[str]) -> Outcome:
    """Run all these tests in a copy without a bug: only where they pass does a failure mean anything."""
    with tempfile.TemporaryDirectory(prefix="mutant-none-") as folder:
        copy_tree(Path(folder))
        return run_tests(Path(folder), sorted(set(killers)))


def copy_tree(copy: Path) -> None:
    """The project's files, none of what was made from them."""
    for name in project_files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name)


def run_tests(copy: Path, tests: Sequence[str]) -> Outcome:
    """Up to the first failure. The copy comes before the installed rooms on the import path, for `baton`'s processes, too."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", f"--timeout={TEST_TIMEOUT_S}"]
    command += [f"--seed={SEED}", f"--hypothesis-seed={SEED}", "--no-shrink", "-rfE", "--tb=no", *tests]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(copy)}
    began = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return Outcome(Verdict.UNCLEAR, f"no end within {RUN_TIMEOUT_S} s", time.monotonic() - began)
    duration_s = time.monotonic() - began
    if process.returncode == 0:
        return Outcome(Verdict.SURVIVED, "every test passed", duration_s)
    failed = _FAILED.search(said)
    if process.returncode == 1 and failed is not None:
        return Outcome(Verdict.KILLED, failed[1], duration_s)
    return Outcome(Verdict.UNCLEAR, f"pytest ended with {process.returncode}: {said[-300:]}", duration_s)
