"""The way to a device and back that lets tests for host memory run there, tried where both sides are host memory."""

from __future__ import annotations

import torch

from tests.kernels.back_ends import COMPILED
from tests.kernels.on_device import OnDevice
from tests.kernels.test_stack import EPS, SHAPES, Sequences, angles, inputs, made_layers, one_by_one


def test_there_and_back_changes_nothing() -> None:
    kernels, shape = COMPILED[0], SHAPES[1]
    there = OnDevice(kernels, torch.device("cpu"))
    plain, fused, single = (Sequences(shape, torch.float32, 1, 16) for _ in range(3))
    fused.tables, single.tables = plain.tables, plain.tables
    rows = inputs(0, torch.float32)[:90]
    layers = made_layers(there, shape, torch.float32)
    stack = there.stack(layers, shape.num_heads, EPS)
    assert stack is not None
    expected = one_by_one(kernels, made_layers(kernels, shape, torch.float32), plain, [(0, 0, 90)], rows)
    batch, positions = fused.batch([(0, 0, 90)])
    assert torch.equal(stack(rows.clone(), *angles(positions, shape.head_dim), fused.kv, batch), expected)
    assert torch.equal(one_by_one(there, layers, single, [(0, 0, 90)], rows), expected)
    for own in (fused, single):
        assert torch.equal(own.kv.nan_to_num(), plain.kv.nan_to_num())
    chosen = there.gather_blocks(plain.kv, torch.tensor([3, 1]))
    there.scatter_blocks(fused.kv, torch.tensor([0, 2]), chosen)
    assert torch.equal(fused.kv[[0, 2]].nan_to_num(), plain.kv[[3, 1]].nan_to_num())
