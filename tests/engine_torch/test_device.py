"""Where a node computes, and what that changes: the device is found or missed in one sentence, and has a name of its own."""

from __future__ import annotations

import pytest
import torch

from engine.device import CPU, choose_device, free_device_bytes
from kernels.choice import choose_kernels
from kernels.torch_reference import TorchKernels
from node.assembly import build_engine
from node.config import NodeConfig
from node.identity import NodeIdentity
from tests.engine_torch.conftest import ModelDirs


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


def test_a_device_has_a_back_end_of_its_own_name_that_promises_no_bits() -> None:
    for asked in ("cpu", "torch"):
        found = choose_kernels(asked, torch.bfloat16, "cuda")
        assert (found.kernels.name, found.shortfall) == ("torch-cuda", "")
        assert not found.kernels.keeps_row_bits(torch.bfloat16)
    assert TorchKernels().name == "torch"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what the test misses")
def test_a_node_without_the_device_that_it_was_told_ends_in_one_sentence(model_dirs: ModelDirs) -> None:
    config = NodeConfig(model=model_dirs(), router=("127.0.0.1:1",), device="cuda")
    with pytest.raises(ValueError, match="--device cuda: torch sees no CUDA device on this machine"):
        build_engine(config, NodeIdentity("n", 1))
