"""Ends a node whose step does not: a device, a driver or a file system hangs, while the loop answers every probe.

Routers find a process that is gone within their grace, and go on elsewhere with what it served; of one that is silent in its steps
alone they would learn nothing, and neither would whoever starts it again. Time is counted in looks, so that a process that was
stopped for a while, and a host that slept, have not hung.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import threading
from typing import Final, Protocol

_LOOKS: Final = 10  # in the time that a step may take
_END_S: Final = 10.0  # that the process has to end in order: what hangs may hang there, too


class StepHung(RuntimeError):
    """The step that is the oldest unanswered one has taken too long."""


class Steps(Protocol):
    """What has become of the plans given to a runner (node/runner_thread.py)."""

    @property
    def num_answered(self) -> int:
        """Plans whose results were told."""

    @property
    def num_unanswered(self) -> int:
        """Plans that have none yet."""


async def watch_steps(steps: Steps, timeout_s: float) -> None:
    """Until cancelled. Raises StepHung once no plan was answered for so long, though there was one.

    Whoever runs the process says that, as its last words; if it hangs before, it is said and the process ended here.
    """
    look_s, silent_looks, num_answered = timeout_s / _LOOKS, 0, 0
    while silent_looks < _LOOKS:
        await asyncio.sleep(look_s)
        is_silent = steps.num_unanswered > 0 and steps.num_answered == num_answered
        silent_looks = silent_looks + 1 if is_silent else 0
        num_answered = steps.num_answered
    faulthandler.dump_traceback()  # where each thread stands, on stderr
    threading.excepthook = _say_nothing  # what waits for other ranks dies of their end, which is ours
    hung = StepHung(f"a step has not ended for {timeout_s:g} s (--step-timeout-s)")
    end = threading.Timer(_END_S, _end, (hung,))
    end.daemon = True
    end.start()
    raise hung


def _say_nothing(_: threading.ExceptHookArgs) -> None:
    pass


def _end(hung: StepHung) -> None:
    sys.stderr.write(f"{hung}\n")
    os._exit(1)
