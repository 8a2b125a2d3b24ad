"""Draw tokens where the logits are, so that a step can be launched before the tokens of the one before it have been read.

Only what needs no more of a request than its temperature and its seed (`is_decided_by_logits`).
Nothing here waits for the device: what comes from the host is uploaded in order (kernels/upload.py); a tensor or an index made of a
list would wait for the step that has just been launched.
Here is torch's way of it; a back end may have one of its own, with fewer launches (Kernels.draw).
The same numbers in the same order as engine/sampler.py, over every token instead of the few that can win; on a device whose
logarithm rounds otherwise a draw that is decided by the last bit of its noise may fall otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.draw import Draw
from engine.gumbel import GOLDEN, MIX_1, MIX_2, noise_stream, noise_streams
from engine.plan import BROKEN_ROW
from kernels.interface import PlainDraws, SlotNumbers
from kernels.upload import upload

_SIGN: Final = 1 << 63


def rows_on_device(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """These rows of [num_rows, vocab_size]; all of them in their order are the tensor itself."""
    if [*rows] == [*range(len(logits))]:
        return logits
    return logits.index_select(0, upload(torch.tensor(rows, dtype=torch.int64), logits.device))


def plain_draws(numbers: SlotNumbers, slots: NDArray[np.int64]) -> PlainDraws:
    """What a back end is told of these slots' draws."""
    streams = noise_streams(numbers.seeds[slots], numbers.next_indices[slots])
    return PlainDraws(numbers.temperatures[slots], streams, slots, BROKEN_ROW)


def sample_on_device(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Draw one token id per row of [num_rows, vocab_size], on its device: [num_rows] int64, BROKEN_ROW as in the sampler."""
    wide, device = logits.float(), logits.device
    greatest = wide.amax(-1, keepdim=True)
    ids = torch.arange(wide.shape[1], device=device)
    temperatures = [draw.sampling.temperature for draw in draws]
    scores = (wide - greatest).double()
    if any(temperatures):
        hot = upload(torch.tensor([temperature or 1.0 for temperature in temperatures], dtype=torch.float64), device)
        streams = [_signed(int(noise_stream(draw.sampling.seed, draw.token_index))) for draw in draws]
        noise = _noise(upload(torch.tensor(streams), device).unsqueeze(1), ids)
        is_drawn = upload(torch.tensor([temperature > 0 for temperature in temperatures]), device).unsqueeze(1)
        scores = torch.where(is_drawn, scores / hot.unsqueeze(1) + noise, scores)
    # Of equals the lowest id, which argmax does not promise on every device.
    winners = torch.where(scores == scores.amax(-1, keepdim=True), ids, wide.shape[1]).amin(-1)
    return torch.where(greatest.squeeze(1).isfinite(), winners, BROKEN_ROW)


def _noise(streams: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, [num_rows, num_ids] fp64: SplitMix64 in signed numbers, which wrap as unsigned ones do."""
    state = streams + (token_ids + 1) * _signed(int(GOLDEN))
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        state = (state ^ _shifted(state, shift)) * _signed(int(factor))
    uniform = (_shifted(state ^ _shifted(state, 31), 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def _shifted(state: Tensor, count: int) -> Tensor:
    """To the right, zeros coming in."""
    return (state >> count) & ((1 << (64 - count)) - 1)


def _signed(number: int) -> int:
    """The signed number with the same 64 bits."""
    return (number ^ _SIGN) - _SIGN
