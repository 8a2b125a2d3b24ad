"""How a step's draws are launched: what the host knows of them goes up in one copy, what kernels tell each other stays there."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kernels.interface import PlainDraws
from kernels.triton_launch import aligned, launcher
from kernels.triton_sampler import greatest_of_rows, winners_of_rows
from kernels.triton_tuning import next_power_of_two
from kernels.upload import upload_together

SLICE: Final = 1024  # tokens of a program: one row of a large vocabulary then keeps most of a device busy


def launch_draws(logits: Tensor, draws: PlainDraws, last: Tensor) -> Tensor:
    """See Kernels.draw. The second launch is for those that are drawn by chance, and not made where nobody is."""
    logits, device = aligned(logits), logits.device
    num_rows, vocab_size = logits.shape
    drawn = torch.empty(num_rows, dtype=torch.int64, device=device)
    if not num_rows:
        return drawn
    temperatures, streams, slots, arrived = upload_together(
        [
            torch.from_numpy(draws.temperatures),
            torch.from_numpy(draws.streams.view("int64")),
            torch.from_numpy(draws.slots),
            torch.zeros(num_rows, dtype=torch.int32),
        ],
        device,
    )
    num_slices = -(-vocab_size // SLICE)
    grid = (num_slices, num_rows)
    greatest = torch.empty(num_rows, dtype=torch.float64, device=device)
    bests = torch.empty(grid[::-1], dtype=torch.float64, device=device)
    between = (greatest, bests, torch.empty(grid[::-1], dtype=torch.int32, device=device), arrived)
    sizes = {"VOCAB_SIZE": vocab_size, "SLICE": SLICE, "SLICES": next_power_of_two(num_slices)}
    launcher(greatest_of_rows, **sizes)(grid, logits, slots, draws.broken, drawn, last, *between)
    if draws.temperatures.any():
        launcher(winners_of_rows, **sizes)(grid, logits, temperatures, streams, slots, drawn, last, *between)
    return drawn
