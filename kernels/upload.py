"""Host numbers to where a back end computes, without waiting for what it computes."""

from __future__ import annotations

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
    memory, begin = together.numpy(), 0
    for numbers in tensors:
        memory[begin : begin + numbers.nbytes] = numbers.reshape(-1).view(torch.uint8).numpy()
        begin += _taken_bytes(numbers)


def unpacked(together: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """What was packed, as views of where it lies now."""
    views, begin = list[Tensor](), 0
    for numbers in like:
        views.append(together[begin : begin + numbers.nbytes].view(numbers.dtype).view(numbers.shape))
        begin += _taken_bytes(numbers)
    return views


def _taken_bytes(numbers: Tensor) -> int:
    return -(-numbers.nbytes // _ALIGNMENT) * _ALIGNMENT
