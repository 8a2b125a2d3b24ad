"""Steps as a node runs them on a device that computes by itself: each one is launched before the last one is read.

    host    launch 1   launch 2   read 1   launch 3   read 2  …        step = all of them / how many
    device             [ 1     ][ 2      ][ 3      ] …

A chunk is computed again and again, as the chunks of a long prompt are one after the other. Reading it finds the KV that it wrote
where senders read, as on a node. Not here: what a step is (engine_steps.py).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from bench.device_clock import DeviceClock
from bench.engine_steps import Case, Steps, StepTimes
from engine.device_sampler import plain_draws, sample_on_device
from engine.draw import Draw
from engine.kv_memory import TORCH_DTYPES, KvSides, kv_block_bytes
from engine.model import Model
from engine.plan import Launched
from kernels.interface import SlotNumbers

_AHEAD: Final = 20  # decode steps that are timed together
_CHUNKS_AHEAD: Final = 6
_ALONE: Final = 5
_BUSY_TIMES: Final = 3.0  # how much longer than a launch takes the device is kept busy before it
_DRAW_S: Final = 0.02  # that telling a device to draw takes at most


class AheadSteps(Steps):
    """One case, ready to run again and again."""

    def __init__(
        self,
        case: Case,
        model: Model,
        memory: KvSides,
        temperature: float,
        clock: DeviceClock,
        *,
        is_asynchronous: bool | None = None,
    ) -> None:
        """`is_asynchronous`: see TorchRunner."""
        super().__init__(case, model, memory, temperature, is_asynchronous=is_asynchronous)
        self._clock = clock

    def launch(self) -> Launched:
        """One step, which must be read."""
        return self._runner.launch(self._plan(()))

    def times(self) -> StepTimes:
        """Of some steps."""
        self._clock.synchronize()
        alone = []
        for _ in range(_ALONE):
            begin = time.perf_counter()
            self.run()
            alone.append(time.perf_counter() - begin)
        alone_s = statistics.median(alone)
        num_steps = _CHUNKS_AHEAD if self.case.chunk else _AHEAD
        self._clock.synchronize()
        begin = time.perf_counter()
        run_ahead(self.launch, num_steps)
        self._clock.synchronize()
        return StepTimes((time.perf_counter() - begin) / num_steps, alone_s)

    def parts(self, num_steps: int) -> dict[str, float]:
        """Seconds of one step, medians, of host and device, which work at the same time.

        launch: of the host; device: all that it is told by that; sampler: drawing, a part of device; rest: what a step takes
        beyond the longer of launch and device.
        """
        launches = [self._launch_s() for _ in range(num_steps)]
        launch_s = statistics.median(launches)
        busy_s = _BUSY_TIMES * max(launches)
        device_s = statistics.median(self._device_s(busy_s) for _ in range(num_steps))
        rest_s = self.times().step_s - max(launch_s, device_s)
        return {"launch": launch_s, "device": device_s, "sampler": self._sampler_s(num_steps), "rest": rest_s}

    def _launch_s(self) -> float:
        self._clock.synchronize()
        begin = time.perf_counter()
        launched = self.launch()
        seconds = time.perf_counter() - begin
        launched.read()
        return seconds

    def _device_s(self, busy_s: float) -> float:
        self._clock.synchronize()
        launched: list[Launched] = []
        seconds = self._clock.seconds_of(lambda: launched.append(self.launch()), busy_s)
        launched.pop().read()
        return seconds

    def _sampler_s(self, num_steps: int) -> float:
        embedding, sampling = self._model.ends.embedding, self._sampling
        logits = torch.randn(len(sampling), len(embedding), dtype=embedding.dtype, device=embedding.device)
        numbers = SlotNumbers.of(len(sampling), 1)
        numbers.temperatures[:] = [each.temperature for each in sampling]
        last = torch.zeros(len(sampling), dtype=torch.int64, device=embedding.device)
        known = plain_draws(numbers, np.arange(len(sampling)))
        draws = [Draw(each, 0) for each in sampling]

        def draw() -> None:
            if self._model.kernels.draw(logits, known, last) is None:
                sample_on_device(logits, draws)

        return statistics.median(self._clock.seconds_of(draw, _DRAW_S) for _ in range(num_steps))


def run_ahead(launch: Callable[[], Launched], num_steps: int) -> None:
    """Steps, launched one ahead; at the end all are read."""
    launched = launch()
    for _ in range(num_steps - 1):
        following = launch()
        launched.read()
        launched = following
    launched.read()


def device_memory(model: Model, block_size: int, cases: Sequence[Case], device: torch.device) -> KvSides:
    """KV for the largest case, of random numbers, on the device, and as much host memory, which the device copies to by itself.

    Raises ValueError, in one sentence, if the device has not so much.
    """
    num_blocks, config = max(case.num_blocks(block_size) for case in cases), model.config
    wanted = num_blocks * kv_block_bytes(config, block_size, model.dtype)
    free, _ = torch.cuda.mem_get_info(device)
    if wanted > free:
        raise ValueError(
            f"--batches, --contexts: the largest case takes {wanted >> 20} MiB of KV, {free >> 20} MiB are free on {device}"
        )
    shape = (num_blocks, config.num_layers, 2, block_size, config.num_kv_heads, config.head_dim)
    sides = KvSides(torch.empty(shape, dtype=TORCH_DTYPES[model.dtype]), device, copies=model.kernels)
    torch.cuda.manual_seed(0)
    for piece in torch.split(sides.tensor.view(-1), 1 << 28):
        piece.normal_()
    return sides
