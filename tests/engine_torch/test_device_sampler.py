"""Draws where the logits are equal those of the host's sampler, and what cannot be drawn there is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from engine import device_sampler
from engine.device_sampler import rows_on_device, sample_on_device
from engine.draw import Draw, is_decided_by_logits
from engine.plan import BROKEN_ROW, SamplingParams
from engine.sampler import sample

VOCAB_SIZE = 4099


@pytest.mark.covers("Q09")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_device_draws_what_the_host_draws(dtype: torch.dtype, fresh_seed: int) -> None:
    rng = Random(fresh_seed)
    generator = torch.Generator().manual_seed(fresh_seed)
    for _ in range(40):
        num_rows = rng.randint(1, 9)
        logits = (3 * torch.randn(num_rows, VOCAB_SIZE, generator=generator)).to(dtype)
        draws = [
            Draw(SamplingParams(rng.choice([0.0, 1e-30, 0.3, 1.0, 5.0]), rng.getrandbits(64)), rng.randint(0, 5000))
            for _ in range(num_rows)
        ]
        assert all(map(is_decided_by_logits, draws))
        assert sample_on_device(logits, draws).tolist() == sample(logits, draws)


def test_of_equal_logits_the_lowest_id_is_the_greedy_one_and_a_row_without_numbers_is_broken() -> None:
    logits = torch.zeros(4, 7)
    logits[0, [5, 3]] = 1.0
    logits[1] = float("nan")
    logits[2, 6] = float("inf")
    draws = [Draw(SamplingParams(temperature, 1), 0) for temperature in (0.0, 0.0, 1.0, 0.0)]
    assert sample_on_device(logits, draws).tolist() == [3, BROKEN_ROW, BROKEN_ROW, 0]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1e-40, 1),  # fp32 has no quotients by it
        SamplingParams(1.0, 1, top_k=4),
        SamplingParams(1.0, 1, top_p=0.5),
        SamplingParams(1.0, 1, min_p=0.1),
        SamplingParams(0.0, 1, logit_bias=((3, 1.0),)),
        SamplingParams(0.0, 1, stop_token_ids=frozenset({3}), min_tokens=2),
    ],
)
def test_what_needs_more_than_a_temperature_is_left_to_the_host(params: SamplingParams) -> None:
    assert not is_decided_by_logits(Draw(params, 0))


class WaitsForNothing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails where something goes to a device in another way than by upload(), as the host's lists and indices would, or comes back.

    Where there is a device torch makes a tensor of a list there before any mode can see it: that is noticed where there is none.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kinds = {arg.device.type for arg in args if isinstance(arg, Tensor) and arg.dim()}
        to = (kwargs or {}).get("device")
        if kinds and to is not None:
            kinds.add(torch.device(to).type)
        is_read = func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "cuda"
        assert len(kinds) <= 1 and not is_read, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def test_what_is_drawn_on_a_device_waits_for_nothing_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a step could not be launched before the one before it is done."""

    def uploaded(numbers: Tensor, device: torch.device) -> Tensor:
        return torch.empty(numbers.shape, dtype=numbers.dtype, device=device)

    monkeypatch.setattr(device_sampler, "upload", uploaded)
    draws = [Draw(SamplingParams(temperature, 1), 0) for temperature in (0.8, 0.0)]
    with FakeTensorMode(), WaitsForNothing():  # type: ignore[no-untyped-call]
        logits = torch.empty((4, VOCAB_SIZE), device="cuda")
        chosen = rows_on_device(logits, [1, 3])
        drawn = sample_on_device(chosen, draws)
        assert chosen.shape == (2, VOCAB_SIZE) and drawn.shape == (2,) and drawn.device.type == "cuda"
        assert rows_on_device(logits, range(4)) is logits
        for wait in (drawn.cpu, lambda: bool(drawn.any())):
            with pytest.raises(AssertionError, match="waits for the device"):
                wait()
        if not torch.cuda.is_available():
            with pytest.raises(AssertionError, match="waits for the device"):
                torch.tensor([1.0], device="cuda")


def test_rows_are_chosen_in_the_order_in_which_they_are_named() -> None:
    logits = torch.arange(12).view(4, 3)
    assert rows_on_device(logits, [3, 1]).tolist() == [[9, 10, 11], [3, 4, 5]]
