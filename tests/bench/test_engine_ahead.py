"""bench.engine on a device that computes by itself: its stepping runs on the CPU here, its clock and limits are asked there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.device_clock import DeviceClock
from bench.engine import main
from bench.engine_ahead import AheadSteps, run_ahead
from bench.engine_shapes import RandomTensors, shaped_model
from bench.engine_steps import Case, random_memory
from bench.limits import DeviceLimits, seconds_of
from engine.device import CPU
from engine.kv_memory import KvMemory
from engine.model import Model
from engine.model_sizes import SIZES
from engine.plan import StepResult
from engine.under_way import UnderWay
from kernels.choice import choose_kernels


@pytest.fixture(scope="module")
def model() -> Model:
    return shaped_model(SIZES["llama-tiny"], "auto", choose_kernels("torch"), CPU)


class Step:
    """A step that says when it is read."""

    def __init__(self, events: list[str], number: int) -> None:
        self._events, self._number = events, number

    def is_done(self) -> bool:
        return True

    def read(self) -> StepResult:
        self._events.append(f"read {self._number}")
        return StepResult.of(self._number, [])


def test_each_step_is_launched_before_the_one_before_it_is_read_and_all_are_read() -> None:
    events: list[str] = []

    def launch() -> Step:
        number = sum(event.startswith("launch") for event in events)
        events.append(f"launch {number}")
        return Step(events, number)

    run_ahead(launch, 3)
    assert events == ["launch 0", "launch 1", "read 0", "launch 2", "read 1", "read 2"]


@pytest.mark.parametrize("case", [Case(3, 20), Case(0, 5, 30)], ids=lambda case: case.name)
def test_steps_of_an_asynchronous_runner_are_drawn_there_and_timed(model: Model, case: Case) -> None:
    memory = KvMemory(model.config, 16, case.num_blocks(16), model.dtype, mirror=True)
    steps = AheadSteps(case, model, memory, 1.0, DeviceClock(CPU), is_asynchronous=True)
    step = steps.launch()
    assert isinstance(step, UnderWay)
    assert len(step.read().slots) == max(1, case.batch)
    times = steps.times()
    assert times.step_s > 0 and times.alone_s > 0
    parts = steps.parts(2)
    assert parts.keys() == {"launch", "device", "sampler", "rest"}
    assert all(parts[name] > 0 for name in ("launch", "device", "sampler"))


def test_a_chunk_that_is_read_lies_where_senders_read(model: Model) -> None:
    case = Case(0, 0, 32)
    memory = KvMemory(model.config, 16, 2, model.dtype, mirror=True)
    AheadSteps(case, model, memory, 1.0, DeviceClock(CPU), is_asynchronous=True).run()
    assert memory.bytes.any()
    assert torch.equal(torch.from_numpy(memory.bytes).view(torch.float32).view(memory.tensor.shape), memory.tensor)


def test_a_devices_limits_are_rates_by_the_timer_that_they_are_given() -> None:
    limits = DeviceLimits(CPU, torch.float32, lambda run: seconds_of(run) * 0 + 0.5)
    assert limits.bytes_per_s() == 2 * (1 << 30)
    assert limits.operations_per_s() == 4 * 2048**3


def test_weights_of_a_shape_follow_from_their_names() -> None:
    bf16 = shaped_model(SIZES["llama-tiny"], "bf16", choose_kernels("torch"), CPU)
    tensors = RandomTensors(bf16.config, CPU)
    name = "model.layers.0.self_attn.q_proj.weight"
    first, again = (tensors.read(name, torch.bfloat16) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, tensors.read(name.replace("0", "1"), torch.bfloat16))
    assert 0.015 < first.float().std() < 0.025
    assert tensors.read("model.norm.weight", torch.bfloat16).eq(1).all()
    assert bf16.dtype == "bf16"


def test_memory_for_some_cases_is_that_of_the_largest(model: Model) -> None:
    assert random_memory(model, 16, [Case(1, 100), Case(3, 20), Case(0, 5, 30)]).num_blocks == 7


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_run_on_a_gpu_names_it_and_gives_all_figures(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    sizes = ("--batches", "1,3", "--contexts", "20", "--chunks", "30:5", "--rounds", "1")
    assert main(["--device", "cuda", "--shape", "llama-tiny", *sizes, "--output", str(path)]) == 0
    written = json.loads(path.read_text())
    assert written["device"] == torch.cuda.get_device_name()
    assert written["capture_s"] > 0
    assert all(case["step_s"] > 0 and case["parts_s"]["device"] > 0 for case in written["cases"])
