"""Tile shapes of the Triton kernels, by device, dtype and head size: reads kernels/triton_table.json and chooses from it. Pure.

Shapes follow from the device and the model alone. They fix orders of summation, so they are part of the back end's name (and of
the fingerprint), and nothing may choose them by load: not the number of rows, not their lengths.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

TABLE: Final = Path(__file__).resolve().parent / "triton_table.json"
INTERPRETER: Final = "interpreter"


class AttentionTuning(NamedTuple):
    """Of kernels/triton_attention.py."""

    rows: int  # query rows (tokens x query heads of a KV head) of a program
    tile: int  # positions that are multiplied at once
    part: int  # positions that decode gives to one program
    warps: int
    stages: int  # how many tiles are on their way at once


class LinearTuning(NamedTuple):
    """Of kernels/triton_linear.py."""

    rows: int
    columns: int
    depth: int  # numbers of a row that are multiplied at once
    warps: int
    stages: int


class NoTuning(ValueError):
    """Nothing in the table fits; the message is one sentence."""


class Table:
    """What the file holds. Raises NoTuning where it holds nothing that fits."""

    def __init__(self, devices: Mapping[str, Any]) -> None:
        self._devices = devices

    def device(self, capability: tuple[int, int] | None) -> str:
        """The entry for a compute capability: its own, or the nearest older one; None: the interpreter's."""
        if capability is None:
            return INTERPRETER
        number = 10 * capability[0] + capability[1]
        older = [int(name) for name in self._devices if name != INTERPRETER and int(name) <= number]
        if not older:
            raise NoTuning(f"the Triton kernels have no tile shapes for devices as old as sm_{number}")
        return str(max(older))

    def attention(self, device: str, dtype: str, head_dim: int) -> AttentionTuning:
        """For dtype "fp32", "bf16" or "fp16"."""
        for entry in self._devices[device]["attention"]:
            if dtype in entry["dtypes"] and head_dim <= entry["max_head_dim"]:
                return AttentionTuning(*(int(entry[name]) for name in AttentionTuning._fields))
        raise NoTuning(f"the Triton kernels have no tile shapes for head_dim {head_dim} in {dtype} on {device}")

    def linear(self, device: str, dtype: str) -> LinearTuning:
        """For dtype "fp32", "bf16" or "fp16"."""
        for entry in self._devices[device]["linear"]:
            if dtype in entry["dtypes"]:
                return LinearTuning(*(int(entry[name]) for name in LinearTuning._fields))
        raise NoTuning(f"the Triton kernels have no tile shapes for {dtype} on {device}")


class OneShape(Table):
    """A table that says one thing of attention, or of products, whatever it is asked: what a tuner tries."""

    def __init__(self, table: Table, attention: AttentionTuning | None, linear: LinearTuning | None) -> None:
        super().__init__(table._devices)
        self._attention, self._linear = attention, linear

    def attention(self, device: str, dtype: str, head_dim: int) -> AttentionTuning:
        """The one that is tried."""
        return self._attention or super().attention(device, dtype, head_dim)

    def linear(self, device: str, dtype: str) -> LinearTuning:
        """The one that is tried."""
        return self._linear or super().linear(device, dtype)


def read_table(path: Path = TABLE) -> Table:
    """The table that is shipped, or another one."""
    return Table(json.loads(path.read_text(encoding="utf-8"))["devices"])


def next_power_of_two(number: int) -> int:
    """The least that is not smaller; tiles have such sides."""
    return 1 << max(0, number - 1).bit_length()
