"""Where a node computes, and what that changes: the device is found or missed in one sentence, and has a name of its own."""

from __future__ import annotations

import subprocess
import sys
import types
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from engine.config_values import ModelError
from engine.device import CPU, choose_device, free_device_bytes, lock_pages
from engine.kv_memory import KvMemory, Mirror
from engine.model import load_model
from engine.probe import find_inexactness
from kernels import choice
from kernels.choice import choose_kernels
from kernels.torch_reference import TorchKernels
from kernels.triton_tuning import NoTuning
from node.assembly import build_engine
from node.config import NodeConfig
from node.identity import NodeIdentity
from tests.engine_torch.conftest import ModelDirs

TOO_OLD = "the Triton kernels have no tile shapes for devices as old as sm_75"


@pytest.mark.parametrize("has_cuda", [False, True])
def test_auto_takes_cuda_where_there_is_one(monkeypatch: pytest.MonkeyPatch, has_cuda: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    assert choose_device("cpu") == CPU
    assert choose_device("auto").type == ("cuda" if has_cuda else "cpu")
    if has_cuda:
        assert choose_device("cuda").type == "cuda"
    else:
        with pytest.raises(ValueError, match="--device cuda: torch sees no CUDA device"):
            choose_device("cuda")


def test_blocks_take_no_more_than_the_smaller_of_both_memories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70, 80))
    assert free_device_bytes(CPU, 100) == 100
    assert free_device_bytes(torch.device("cuda"), 100) == 70
    assert free_device_bytes(torch.device("cuda"), 50) == 50


class FakeRuntime:
    """CUDA's, as far as pages are locked by it."""

    def __init__(self, answer: int) -> None:
        self.answer, self.locked = answer, dict[int, int]()

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if not self.answer:
            self.locked[address] = num_bytes
        return self.answer

    def cudaHostUnregister(self, address: int) -> None:
        del self.locked[address]


class Owner:
    """Of memory."""


@pytest.mark.covers("Q09")
def test_pages_are_locked_for_a_device_as_long_as_their_owner_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, owner, memory = FakeRuntime(0), Owner(), torch.zeros(100)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    assert not lock_pages(owner, memory, CPU)
    assert not lock_pages(owner, memory.view(10, 10)[:, :5], torch.device("cuda"))  # a rank's heads do not lie together
    assert runtime.locked == {}
    assert lock_pages(owner, memory, torch.device("cuda"))
    assert runtime.locked == {memory.data_ptr(): 400}
    del owner
    assert runtime.locked == {}


@pytest.mark.covers("Q09")
def test_a_device_that_may_not_lock_pages_is_copied_for_and_its_refusal_is_not_heard_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime, heard = FakeRuntime(1), list[object]()

    def refusing(*sizes: int, device: torch.device) -> None:
        heard.append(device)
        raise torch.AcceleratorError("CUDA error: invalid argument")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "zeros", refusing)
    assert not lock_pages(Owner(), torch.ones(4), torch.device("cuda"))
    assert heard == [torch.device("cuda")]


def test_torch_on_a_device_has_a_name_of_its_own_and_promises_no_bits() -> None:
    found = choose_kernels("torch", "cuda")
    assert (found.kernels.name, found.shortfall) == ("torch-cuda", "")
    assert not found.kernels.keeps_row_bits
    assert TorchKernels().name.startswith(f"torch-{torch.__version__}-")


@pytest.mark.covers("M05")
def test_a_cuda_device_has_triton_unless_there_is_none_and_then_it_is_said_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class Found:
        name = "triton-sm90-0"

    offered = types.ModuleType("kernels.triton_kernels")
    offered.triton_kernels = lambda device_type: Found()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kernels.triton_kernels", offered)
    monkeypatch.setattr(choice, "has_triton", lambda: True)
    for asked in ("cpu", "numba", "triton"):
        found = choose_kernels(asked, "cuda")
        assert (found.kernels.name, found.shortfall) == ("triton-sm90-0", "")
    assert choose_kernels("torch", "cuda").kernels.name == "torch-cuda"
    assert choose_kernels("cpu").kernels.name != "triton-sm90-0"

    def too_old(device_type: str) -> None:
        raise NoTuning(TOO_OLD)

    offered.triton_kernels = too_old  # type: ignore[attr-defined]
    found = choose_kernels("cpu", "cuda")
    assert (found.kernels.name, found.shortfall) == ("torch-cuda", f"Triton cannot be used: {TOO_OLD}")
    monkeypatch.setattr(choice, "has_triton", lambda: False)
    found = choose_kernels("triton", "cuda")
    assert (found.kernels.name, found.shortfall.partition(" (")[0]) == ("torch-cuda", "Triton is not installed")


@pytest.mark.covers("M05")
@pytest.mark.skipif(not choice.has_triton(), reason="Triton is not installed; make setup does that")
@pytest.mark.parametrize("failure", ["a C compiler", "ptxas", "libcuda", ""])
def test_where_triton_cannot_compile_torch_computes_and_it_is_said_why(
    failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.errors import PTXASError

    from kernels import triton_kernels

    class Failing:
        def __init__(self, capability: tuple[int, int], capture: object, num_processors: int) -> None:
            assert (capability, num_processors) == ((9, 0), 132)

        def rms_norm(self, *_: object) -> None:
            match failure:
                case "a C compiler":
                    raise subprocess.CalledProcessError(1, ["gcc", "main.c"])
                case "ptxas":
                    raise PTXASError("`ptxas` failed with error code 1\nand pages more")
                case _:
                    raise AssertionError(failure and "libcuda.so cannot found!\nPossible files are located at []")

    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *sizes, device: ones(*sizes))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    properties = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    monkeypatch.setattr(triton_kernels, "TritonKernels", Failing)
    found = choose_kernels("cpu", "cuda")
    assert found.kernels.name == "torch-cuda"
    assert found.shortfall.startswith("Triton cannot be used: ") and "\n" not in found.shortfall
    assert {"a C compiler": "gcc", "": "AssertionError"}.get(failure, failure) in found.shortfall


@pytest.mark.covers("M05")
@pytest.mark.skipif(torch.cuda.is_available() or not choice.has_triton(), reason="nothing is missing here")
def test_triton_on_a_cpu_is_refused_in_one_sentence(model_dirs: ModelDirs) -> None:
    with pytest.raises(ModelError, match="Triton kernels need a CUDA device"):
        load_model(model_dirs(), "fp32", "triton")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what the test misses")
def test_a_node_without_the_device_that_it_was_told_ends_in_one_sentence(model_dirs: ModelDirs) -> None:
    config = NodeConfig(model=model_dirs(), router=("127.0.0.1:1",), device="cuda")
    with pytest.raises(ValueError, match="--device cuda: torch sees no CUDA device on this machine"):
        build_engine(config, NodeIdentity("n", 1))


@pytest.mark.parametrize("where", ["load_model", "find_inexactness"])
def test_a_device_without_room_for_what_a_node_asks_is_one_sentence(
    model_dirs: ModelDirs, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_much(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    monkeypatch.setattr(f"node.assembly.{where}", too_much)
    config = NodeConfig(model=model_dirs(), router=("127.0.0.1:1",), device="cpu", num_blocks=8, max_model_len=64)
    with pytest.raises(ValueError, match="has no room for the weights, --num-blocks 8 of KV"):
        build_engine(config, NodeIdentity("n", 1))


@pytest.mark.covers("M04")
def test_why_a_node_is_slow_is_said_before_anything_takes_long(
    model_dirs: ModelDirs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What comes first is the probe, in which numba may compile for half a minute."""

    class ProbedError(Exception):
        pass

    def probe(_: object) -> None:
        raise ProbedError

    monkeypatch.setattr(choice, "has_numba", lambda: False)
    monkeypatch.setattr(choice, "library_path", lambda _: tmp_path / "none")
    monkeypatch.setattr("node.assembly.find_inexactness", probe)
    config = NodeConfig(model=model_dirs(), router=("127.0.0.1:1",), device="cpu", num_blocks=8, max_model_len=64)
    with pytest.raises(ProbedError):
        build_engine(config, NodeIdentity("n", 1))
    (said,) = [record.getMessage() for record in caplog.records if "slow_kernels" in record.getMessage()]
    assert "kernels=torch-" in said and "make setup" in said


@pytest.mark.covers("Q09")
def test_a_node_says_that_its_kv_is_copied_by_itself_where_the_device_may_not(
    model_dirs: ModelDirs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = NodeConfig(model=model_dirs(), router=("127.0.0.1:1",), device="cpu", num_blocks=8, max_model_len=64)
    said: dict[Mirror, int] = {True: 1, "direct": 0}
    for mirror, num_said in said.items():
        caplog.clear()
        monkeypatch.setattr("node.assembly.KvMemory", partial(KvMemory, mirror=mirror))
        build_engine(config, NodeIdentity("n", 1)).close()
        assert sum("kv_not_page_locked" in record.getMessage() for record in caplog.records) == num_said


def test_a_back_end_that_finds_out_while_it_is_probed_that_bits_differ_is_believed(
    model_dirs: ModelDirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(model_dirs(), "fp32", "torch")
    assert find_inexactness(model) is None
    answers = iter([True, False])
    monkeypatch.setattr(TorchKernels, "keeps_row_bits", property(lambda _: next(answers)), raising=False)
    kernels = object.__new__(TorchKernels)
    kernels.__dict__.update({name: value for name, value in vars(model.kernels).items() if name != "keeps_row_bits"})
    assert "other bits" in (find_inexactness(replace(model, kernels=kernels)) or "")
