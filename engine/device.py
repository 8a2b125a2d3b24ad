"""Where a node computes: on the CPU, or on the one device that torch sees. Not here: what computes there (kernels)."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Final

import torch
from torch import Tensor

CPU: Final = torch.device("cpu")


def choose_device(name: str) -> torch.device:
    """Take "auto" (CUDA where torch sees it), "cpu" or "cuda". Raises ValueError, in one sentence, where there is none."""
    if name == "cpu":
        return CPU
    if torch.cuda.is_available():
        return torch.device("cuda")
    if name == "cuda":
        raise ValueError("--device cuda: torch sees no CUDA device on this machine")
    return CPU


def rank_device(device: torch.device, rank: int) -> torch.device:
    """Where one of a node's ranks computes: on a CPU all of them, else each on a device of its own."""
    return device if device.type == "cpu" else torch.device(device.type, rank)


def check_devices(device: torch.device, num_ranks: int) -> None:
    """Raise ValueError, in one sentence, where there are fewer devices than ranks."""
    if device.type != "cpu" and (num_seen := torch.cuda.device_count()) < num_ranks:
        raise ValueError(f"--tp {num_ranks}: torch sees {num_seen} CUDA devices, and each rank needs one")


class HostCopies:
    """Copies from a device that are under way; what they give is there once `wait` has returned, and `is_done` says so before."""

    def __init__(self, *tensors: Tensor) -> None:
        """Begin to copy what earlier calls make of these, without waiting; to page-locked memory, or it would not be so."""
        self._event: torch.Event | None = None
        if any(tensor.is_cuda for tensor in tensors):
            self._copies = [torch.empty_like(tensor, device=CPU, pin_memory=True) for tensor in tensors]
            for copy, tensor in zip(self._copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
            self._event = torch.Event(tensors[0].device)
            self._event.record()
        else:
            self._copies = [tensor.clone() for tensor in tensors]

    def is_done(self) -> bool:
        """Whether the device has come so far."""
        return self._event is None or self._event.query()

    def wait(self) -> list[Tensor]:
        """The copies, in host memory."""
        if self._event is not None:
            self._event.synchronize()
        return self._copies


def lock_pages(owner: object, memory: Tensor, device: torch.device) -> bool:
    """Have the device read and write host memory by itself for as long as its owner lives; False where that cannot be.

    cudaHostRegister takes memory that lies together. On a CPU, and where CUDA refuses, everything goes as it did before.
    """
    if device.type != "cuda" or not memory.is_contiguous():
        return False
    runtime, address = torch.cuda.cudart(), memory.data_ptr()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(address, memory.nbytes, 0)) == 0:
        weakref.finalize(owner, runtime.cudaHostUnregister, address)
        return True
    with suppress(RuntimeError):  # the next call reports the refusal once more
        torch.zeros(1, device=device).cpu()
    return False


def begin_copy(to: Tensor, of: Tensor) -> None:
    """Between the device and memory whose pages it has locked: in order with what it is told, and nobody waits."""
    to.copy_(of, non_blocking=True)


def wait_for(device: torch.device) -> None:
    """Until it has done all that it was told; a CPU has."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def free_device_bytes(device: torch.device, free_host_bytes: int, num_ranks: int = 1) -> int:
    """What KV blocks may take at most: on devices with memory of their own they lie there, shared out, and in host memory."""
    if device.type != "cuda":
        return free_host_bytes
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return min(free_bytes * num_ranks, free_host_bytes)
