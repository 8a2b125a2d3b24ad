"""When a node takes its runner for hung, and that it ends though its end hangs, too."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import dataclass
from typing import Final

import pytest

from node.step_watch import watch_steps

TIMEOUT_S: Final = 0.2

HANGS_AT_ITS_END: Final = """
import asyncio, time, types
from node import step_watch

step_watch._END_S = 0.5
steps = types.SimpleNamespace(num_answered=7, num_unanswered=1)
try:
    asyncio.run(step_watch.watch_steps(steps, 0.2))
except step_watch.StepHung as hung:
    print("ending", flush=True)
time.sleep(600)
"""


@dataclass(slots=True)
class Told:
    """What a runner would say of its plans."""

    num_answered: int = 0
    num_unanswered: int = 0


@pytest.mark.covers("C10")
@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
def test_a_runner_that_has_nothing_to_do_or_answers_has_not_hung(is_busy: bool) -> None:
    async def run() -> None:
        told = Told(num_unanswered=2 * is_busy)
        watch = asyncio.create_task(watch_steps(told, TIMEOUT_S))
        for _ in range(100):
            await asyncio.sleep(TIMEOUT_S / 20)
            told.num_answered += is_busy
        assert not watch.done()
        watch.cancel()

    asyncio.run(run())


@pytest.mark.covers("C10")
def test_one_that_hangs_ends_its_process_though_the_end_hangs_too_and_says_where_it_stood() -> None:
    command = [sys.executable, "-c", HANGS_AT_ITS_END]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stdout == "ending\n"
    assert "most recent call first" in ended.stderr
    assert ended.stderr.endswith("\na step has not ended for 0.2 s (--step-timeout-s)\n")
