"""The runner's thread over a device that computes by itself: the next step is launched before the last one is read."""

from __future__ import annotations

import asyncio
import threading

import pytest

from engine.plan import Plan, StepResult
from node.runner_thread import RunnerThread


class Device:
    """Steps that are done when the test says so; notes what it is asked, in order."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.allowed = [threading.Event() for _ in range(4)]
        self.is_read = threading.Event()

    def launch(self, plan: Plan) -> Step:
        self.asked.append(f"launch {plan.step_id}")
        return Step(self, plan.step_id)


class Step:
    """One of them."""

    def __init__(self, device: Device, step_id: int) -> None:
        self._device = device
        self._step_id = step_id

    def is_done(self) -> bool:
        return self._device.allowed[self._step_id].is_set()

    def read(self) -> StepResult:
        self._device.asked.append(f"read {self._step_id}")
        self._device.is_read.set()
        assert self._device.allowed[self._step_id].wait(10)
        return StepResult.of(self._step_id, ())


@pytest.mark.covers("Q09")
def test_a_step_is_launched_before_the_one_before_it_is_read_where_there_is_one() -> None:
    async def run() -> None:
        device, results = Device(), asyncio.Queue[int]()
        loop = asyncio.get_running_loop()

        def tell(result: StepResult) -> None:
            loop.call_soon_threadsafe(results.put_nowait, result.step_id)

        thread = RunnerThread(device, tell)
        async with asyncio.timeout(20):
            thread.submit(Plan(0))
            thread.submit(Plan(1))
            assert await asyncio.to_thread(device.is_read.wait, 10)
            assert device.asked == ["launch 0", "launch 1", "read 0"] and results.empty()
            device.allowed[0].set()
            assert await results.get() == 0
            # Nothing to launch: it waits for what comes first, and here the step is done.
            await asyncio.sleep(0.01)
            assert device.asked[3:] == []
            device.allowed[1].set()
            assert await results.get() == 1
            # One that is done is told at once, and not held back for the next.
            device.allowed[2].set()
            thread.submit(Plan(2))
            assert await results.get() == 2
            thread.submit(Plan(3))
            device.allowed[3].set()
            assert await thread.stop()
            assert await results.get() == 3
        assert device.asked[3:] == ["read 1", "launch 2", "read 2", "launch 3", "read 3"]

    asyncio.run(run())
