"""Where a node computes: on the CPU, or on the one device that torch sees. Not here: what computes there (kernels)."""

from __future__ import annotations

from typing import Final

import torch

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


def free_device_bytes(device: torch.device, free_host_bytes: int) -> int:
    """What KV blocks may take at most: on a device with memory of its own they lie there and in host memory."""
    if device.type != "cuda":
        return free_host_bytes
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return min(free_bytes, free_host_bytes)
