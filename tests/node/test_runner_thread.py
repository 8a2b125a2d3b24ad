"""The runner's thread: the next step is launched before the last one is read from a device that computes by itself, and laid out
before the last one is told where the device is the thread's own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from engine.plan import Done, Plan, StepResult
from node.runner_thread import RunnerThread


class Device:
    """Steps that are done when the test says so; notes what it is asked, in order."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.allowed = [threading.Event() for _ in range(4)]
        self.is_read = threading.Event()

    def launch(self, plan: Plan, on_ready: Callable[[], None]) -> Step:
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
        assert self._device.allowed[self._step_id].wait(60)
        return StepResult.of(self._step_id, ())


@pytest.mark.covers("Q09")
def test_a_step_is_launched_before_the_one_before_it_is_read_where_there_is_one() -> None:
    async def run() -> None:
        device, results = Device(), asyncio.Queue[int]()
        loop = asyncio.get_running_loop()

        def tell(result: StepResult) -> None:
            loop.call_soon_threadsafe(results.put_nowait, result.step_id)

        thread = RunnerThread(device, tell)
        async with asyncio.timeout(60):
            thread.submit(Plan(0))
            thread.submit(Plan(1))
            assert await asyncio.to_thread(device.is_read.wait, 60)
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
            assert await thread.stop(60)
            assert await results.get() == 3
        assert device.asked[3:] == ["read 1", "launch 2", "read 2", "launch 3", "read 3"]

    asyncio.run(run())


class Processor:
    """Computes on the thread that launches; each step waits to be laid out until the test says so."""

    def __init__(self) -> None:
        self.noted: list[str] = []
        self.allowed = [threading.Event() for _ in range(4)]

    def launch(self, plan: Plan, on_ready: Callable[[], None]) -> Done:
        assert self.allowed[plan.step_id].wait(60)
        self.noted.append(f"laid out {plan.step_id}")
        on_ready()
        self.noted.append(f"computed {plan.step_id}")
        return Done(StepResult.of(plan.step_id, ()))


def test_a_step_is_told_once_the_next_one_is_laid_out_and_at_once_where_there_is_none() -> None:
    async def run() -> None:
        processor, told = Processor(), asyncio.Queue[int]()
        loop = asyncio.get_running_loop()

        def tell(result: StepResult) -> None:
            processor.noted.append(f"told {result.step_id}")
            loop.call_soon_threadsafe(told.put_nowait, result.step_id)

        thread = RunnerThread(processor, tell)
        async with asyncio.timeout(60):
            for step_id in range(3):
                thread.submit(Plan(step_id))
            for step_id in range(3):
                processor.allowed[step_id].set()
            assert [await told.get() for _ in range(3)] == [0, 1, 2]  # nothing follows the last one
            thread.submit(Plan(3))
            ending = asyncio.create_task(thread.stop(60))
            processor.allowed[3].set()
            assert await ending
            assert await told.get() == 3
        assert processor.noted == [
            *("laid out 0", "computed 0", "laid out 1", "told 0", "computed 1"),
            *("laid out 2", "told 1", "computed 2", "told 2"),
            *("laid out 3", "computed 3", "told 3"),
        ]

    asyncio.run(run())
