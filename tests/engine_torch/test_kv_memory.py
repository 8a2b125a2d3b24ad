"""One memory, two views: what a transport copies is what the runner computes with."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.batch import Segment, build_batch
from engine.kv_memory import KvMemory, kv_block_bytes
from engine.model import load_model
from engine.model_config import read_model_config
from tests.engine_torch.conftest import ModelDirs
from tests.kernels_choice import KERNELS


@pytest.mark.covers("M06")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_blocks_copied_as_bytes_into_other_places_continue_the_sequence_bit_for_bit(
    model_dirs: ModelDirs, dtype: str
) -> None:
    model = load_model(model_dirs(), dtype, KERNELS)
    prompt = list(range(50))
    sender = KvMemory(model.config, 16, 4, dtype)
    whole = model.forward(build_batch([Segment(prompt, 0, range(4), 50)], 16), sender.tensor)
    receiver = KvMemory(model.config, 16, 9, dtype)
    table = [8, 2, 5, 0]
    receiver.bytes[table] = sender.bytes
    decoded = model.forward(build_batch([Segment(prompt[-1:], 49, table, 1)], 16), receiver.tensor)
    assert torch.equal(decoded, whole[-1:])


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_block_is_one_span_of_all_layers(model_dirs: ModelDirs, dtype: str, torch_dtype: torch.dtype) -> None:
    config = read_model_config(model_dirs())
    kv = KvMemory(config, 8, 5, dtype)
    assert kv.tensor.dtype == torch_dtype
    assert kv.tensor.shape == (5, config.num_layers, 2, 8, config.num_kv_heads, config.head_dim)
    assert kv.bytes.shape == (5, kv.block_bytes) == (5, kv_block_bytes(config, 8, dtype))
    assert kv.tensor[0].nbytes == kv.block_bytes
    assert not kv.bytes.any()
    kv.tensor[3] = 1
    assert np.flatnonzero(kv.bytes.any(1)).tolist() == [3]
