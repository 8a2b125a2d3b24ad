"""Host numbers to where a back end computes, without waiting for what it computes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

_ALIGNMENT: Final = 16  # bytes: Triton compiles a kernel of its own for pointers that have less


def upload(numbers: Tensor, device: torch.device) -> Tensor:
    """A copy on the device as they are now, in order with what it is told next; on a CPU, or there already, the same tensor.

    From ordinary memory the copy would wait for all that the device was told before, and a step could not be launched ahead.
    torch's page-locked memory is not given to others until the copy from it is done.
    """
    if device.type != "cuda" or numbers.is_cuda:
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)


def upload_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The same of several, of any dtypes, in one copy: to begin one takes longer than the few numbers of a step do."""
    if device.type != "cuda":
        return [*tensors]
    of_host = [numbers for numbers in tensors if not numbers.is_cuda]
    together = torch.empty(packed_bytes(of_host), dtype=torch.uint8, pin_memory=True)
    pack(of_host, together)
    there = iter(unpacked(together.to(device, non_blocking=True), of_host))
    return [numbers if numbers.is_cuda else next(there) for numbers in tensors]


def upload_into(memory: Tensor, tensors: Sequence[Tensor]) -> None:
    """The same into [packed_bytes] uint8 that stays where it is; `unpacked` says where each lies."""
    if memory.device.type == "cpu":
        pack(tensors, memory)
        return
    together = torch.empty(len(memory), dtype=torch.uint8, pin_memory=True)
    pack(tensors, together)
    memory.copy_(together, non_blocking=True)


def packed_bytes(tensors: Sequence[Tensor]) -> int:
    """What `pack` takes."""
    return sum(_taken_bytes(numbers) for numbers in tensors)


def pack(tensors: Sequence[Tensor], together: Tensor) -> None:
    """Copy host tensors into [packed_bytes] uint8, one after the other."""
    address = together.data_ptr()
    for numbers in tensors:
        numbers = numbers.contiguous()
        ctypes.memmove(address, numbers.data_ptr(), numbers.nbytes)
        address += _taken_bytes(numbers)


def unpacked(together: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """What was packed, as views of where it lies now: at the beginning of its memory."""
    views, begin = list[Tensor](), 0
    for numbers in like:
        dtype, shape = numbers.dtype, numbers.shape
        strides = numbers.stride() if numbers.is_contiguous() else torch.empty(shape, device="meta").stride()
        views.append(together.view(dtype).as_strided(shape, strides, begin // dtype.itemsize))
        begin += _taken_bytes(numbers)
    return views


def _taken_bytes(numbers: Tensor) -> int:
    return -(-numbers.nbytes // _ALIGNMENT) * _ALIGNMENT
