"""The thread that owns torch: it runs plans in the order in which the loop gave them.

Not here: deciding what to run (the core), and the tensors (the runner). Plans go down through a queue, results come back by a
callable that hops to the loop. How many plans are under way is the core's business (two: one running, one planned behind it).

A device that computes by itself is given the next step, once there is one, before the last one's tokens are read from it. On
any other a step that is done is told once the next one has been laid out and is about to be computed, where there is a next one:
the loop and this thread share the interpreter, and what the loop says of a step would otherwise delay the next one's beginning by
as long as it takes to say (0.6 ms of a step of 6, bench.token_path). Computing itself leaves the interpreter to the loop.

A step that raises is a bug. It ends the thread, the thread's end resolves `ended`, and whoever runs the process dies of it:
a node whose runner is gone would otherwise answer keepalives for ever and serve nobody. So it would of one that hangs:
node/step_watch.py.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from engine.plan import Launched, Launcher, Plan, StepResult

LOOK_EVERY_S: Final = 0.0001  # at a device that is computing; a step there takes many times as long


class RunnerThread:
    """Feeds one runner; made and stopped on the loop's thread."""

    def __init__(self, runner: Launcher, on_result: Callable[[StepResult], None]) -> None:
        """`on_result` is called on the runner's thread, once per plan, in order: it must be thread-safe and not block."""
        self._runner = runner
        self._on_result = on_result
        self._num_given = 0  # of the loop's thread
        self.num_answered = 0  # plans whose results were told; of the runner's thread
        self._plans: queue.SimpleQueue[Plan | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._untold: StepResult | None = None  # of the runner's thread
        # Daemon: a step that hangs must not keep a process alive that was told to stop.
        self._thread = threading.Thread(target=self._run, name="runner", daemon=True)
        self._thread.start()

    def submit(self, plan: Plan) -> None:
        """Run this plan behind all earlier ones."""
        self._num_given += 1
        self._plans.put(plan)

    @property
    def num_unanswered(self) -> int:
        """Plans whose results were not told yet."""
        return self._num_given - self.num_answered

    async def stop(self, timeout_s: float = 2.0) -> bool:
        """End behind the plans already given; False if the thread did not end in time."""
        self._plans.put(None)
        done, _ = await asyncio.wait({self.ended}, timeout=timeout_s)
        if done:
            self._thread.join()  # has nothing left to do but write its traceback, if it died of an exception
        return bool(done)

    def _run(self) -> None:
        try:
            self._run_plans()
        finally:
            # An exception goes on to threading.excepthook, which writes its traceback.
            with suppress(RuntimeError):  # of a loop that did not wait for a thread that hung
                self._loop.call_soon_threadsafe(self.ended.set_result, None)

    def _run_plans(self) -> None:
        launched: Launched | None = None  # and not read yet
        while True:
            if launched is not None and launched.is_done():
                self._untold, launched = launched.read(), None
            try:
                plan = self._next_plan(launched)
            except queue.Empty:
                self._tell()
                continue
            try:
                following = None if plan is None else self._runner.launch(plan, self._tell)
            finally:
                self._tell()  # what was computed counts, whatever becomes of the next
            if launched is not None:
                self._answer(launched.read())
            if plan is None:
                return
            launched = following

    def _next_plan(self, launched: Launched | None) -> Plan | None:
        """Wait for it, as long as there is nothing to tell. Raises queue.Empty."""
        if self._untold is not None:
            return self._plans.get_nowait()
        return self._plans.get(timeout=None if launched is None else LOOK_EVERY_S)

    def _tell(self) -> None:
        """Hand over the result that is there, if one is."""
        if self._untold is not None:
            result, self._untold = self._untold, None
            self._answer(result)

    def _answer(self, result: StepResult) -> None:
        self._on_result(result)
        self.num_answered += 1
