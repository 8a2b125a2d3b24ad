"""The engine over the Triton kernels: a model's logits and tokens, drawn where they are computed, KV in memory of its own.

Runs where back_ends.py finds Triton, on a CUDA device or interpreted.
"""

from __future__ import annotations

import pytest
import torch

from engine.batch import Segment, build_batch
from engine.block_pool import BlockPool
from engine.device import CPU
from engine.kv_memory import KvMemory
from engine.local_engine import LocalEngine
from engine.model import load_model
from engine.plan import SamplingParams
from engine.probe import find_inexactness
from engine.runner import TorchRunner
from engine.scheduler import Scheduler, SchedulerConfig
from engine.sequence import SequenceSpec
from tests.engine_torch.conftest import ModelDirs
from tests.kernels.back_ends import IS_INTERPRETED, TRITON

BLOCK_SIZE = 16
MAX_MODEL_LEN = 64
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")

pytestmark = [
    pytest.mark.covers("M04", "M05", "Q09"),
    pytest.mark.skipif(not TRITON, reason="no CUDA device, and this process does not interpret Triton"),
]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_logits_are_those_of_the_reference(model_dirs: ModelDirs, dtype: str) -> None:
    name = "group1" if dtype == "fp32" else "group7"
    triton = load_model(model_dirs(name, dtype), "auto", "triton", DEVICE)
    reference = load_model(model_dirs(name, dtype), "auto", "torch")
    assert triton.kernels.name.startswith("triton-")
    assert triton.shortfall == ""
    tokens = list(range(40, 60))
    memories = [KvMemory(each.config, BLOCK_SIZE, 4, dtype, each.ends.embedding.device) for each in (triton, reference)]
    for segment in (Segment(tokens[:19], 0, (2, 0), 2), Segment(tokens[19:], 19, (2, 0), 1)):
        found, expected = (
            each.forward(build_batch([segment], BLOCK_SIZE), kv.tensor).cpu().float()
            for each, kv in zip((triton, reference), memories, strict=True)
        )
        bound = {"fp32": 1e-5, "bf16": 2e-2}[dtype] * expected.abs().max().item()
        torch.testing.assert_close(found, expected, rtol=0, atol=bound)


def test_tokens_drawn_where_they_are_computed_over_memory_of_its_own_are_those_of_the_reference(
    model_dirs: ModelDirs,
) -> None:
    prompts = [tuple(range(40, 60)), tuple(range(90, 94))]
    specs = [
        SequenceSpec(number, prompt, 0, SamplingParams(0.9, 7 + number), 3, frozenset(), ())
        for number, prompt in enumerate(prompts)
    ]
    said = []
    for name in ("triton", "torch"):
        device = DEVICE if name == "triton" else CPU
        model = load_model(model_dirs("group1"), "fp32", name, device)
        is_like_cuda = name == "triton"
        memory = KvMemory(model.config, BLOCK_SIZE, 8, "fp32", device, mirror=is_like_cuda, copies=model.kernels)
        scheduler = Scheduler(SchedulerConfig(2, 16, MAX_MODEL_LEN), BlockPool(8, BLOCK_SIZE), b"key")
        runner = TorchRunner(model, memory, 2, MAX_MODEL_LEN, is_asynchronous=is_like_cuda)
        said.append(LocalEngine(scheduler, runner).generate(specs))
        if is_like_cuda:  # what chunks computed went to the host through the back end's own copies
            assert memory.bytes.any()
    assert said[0] == said[1]
    assert [len(tokens) for tokens in said[0].values()] == [3, 3]


@pytest.mark.skipif(IS_INTERPRETED, reason="test_triton_kernels.py asks more, in less time")
def test_the_start_probe_finds_a_rows_bits_its_own(model_dirs: ModelDirs) -> None:
    assert find_inexactness(load_model(model_dirs("group1"), "fp32", "triton", DEVICE)) is None
