"""Several host tensors go to a device in one copy."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.upload import pack, packed_bytes, unpacked, upload_together
from tests.thorough import examples

DTYPES = [torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.int32, torch.float32, torch.int64, torch.float64]


@settings(max_examples=examples(60, 3), deadline=None)
@given(
    of_each=st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), max_size=6),
    seed=st.integers(0, 1000),
)
def test_what_is_packed_comes_out_as_it_was_at_places_that_every_dtype_can_be_read_from(
    of_each: list[tuple[torch.dtype, list[int]]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randint(0, 2, shape, generator=generator).to(dtype) for dtype, shape in of_each]
    tensors += [tensor.T for tensor in tensors if tensor.dim() == 2]  # which do not lie as they are read
    together = torch.full((packed_bytes(tensors),), 255, dtype=torch.uint8)
    pack(tensors, together)
    found = unpacked(together, tensors)
    assert len(found) == len(tensors)
    for each, tensor in zip(found, tensors, strict=True):
        assert (each.dtype, each.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(each, tensor)
        assert (each.data_ptr() - together.data_ptr()) % 16 == 0
        assert each.is_contiguous()


def test_on_a_cpu_they_are_where_they_are_wanted() -> None:
    tensors = [torch.arange(3), torch.ones(2)]
    assert all(a is b for a, b in zip(upload_together(tensors, torch.device("cpu")), tensors, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_device_they_arrive_as_they_were_when_they_were_sent() -> None:
    tensors = [torch.arange(5), torch.ones(3, dtype=torch.bool), torch.rand((2, 3)), torch.arange(4, device="cuda")]
    kept = [tensor.clone() for tensor in tensors]
    found = upload_together(tensors, torch.device("cuda"))
    assert found[3] is tensors[3]
    for tensor in tensors[:3]:
        tensor.zero_()
    for each, tensor in zip(found, kept, strict=True):
        assert each.is_cuda and torch.equal(each.cpu(), tensor.cpu())
