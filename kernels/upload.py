"""Host numbers to where a back end computes, without waiting for what it computes."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(numbers: Tensor, device: torch.device) -> Tensor:
    """A copy on the device as they are now, in order with what it is told next; on a CPU, or there already, the same tensor.

    From ordinary memory the copy would wait for all that the device was told before, and a step could not be launched ahead.
    torch's page-locked memory is not given to others until the copy from it is done.
    """
    if device.type != "cuda" or numbers.is_cuda:
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)
