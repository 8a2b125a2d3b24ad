"""Where a node computes: on the CPU, or on the one device that torch sees. Not here: what computes there (kernels)."""

from __future__ import annotations

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


def free_device_bytes(device: torch.device, free_host_bytes: int) -> int:
    """What KV blocks may take at most: on a device with memory of its own they lie there and in host memory."""
    if device.type != "cuda":
        return free_host_bytes
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return min(free_bytes, free_host_bytes)
