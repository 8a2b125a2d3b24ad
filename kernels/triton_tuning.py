"""Tile shapes of the Triton kernels, by device, dtype and head size: reads kernels/triton_table.json and chooses from it. Pure.

What fixes an order of summation (how positions are cut into tiles and parts) follows from the device and the model alone, and is
part of the back end's name and of the fingerprint. What does not may be chosen by load: how many rows and columns a tile of a
product has, since each number of it is one chain over the inner dimension, whatever lies beside it. That two shapes of a table give
the same bits is asked of the device before they are used together (triton_agreement.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

TABLE: Final = Path(__file__).resolve().parent / "triton_table.json"
INTERPRETER: Final = "interpreter"


_ANY: Final = 1 << 30  # more rows than there are


class Schedule(NamedTuple):
    """How one of both kernels of kernels/triton_attention.py runs."""

    rows: int  # query rows (tokens x query heads of a KV head) of a program
    warps: int
    stages: int  # of the loop over tiles: a table is looked up first, so two stages bring one tile


class AttentionTuning(NamedTuple):
    """Of kernels/triton_attention.py."""

    tile: int  # positions that are multiplied at once
    part: int  # positions that decode gives to one program
    whole: Schedule  # of attend_whole
    split: Schedule  # of attend_split and merge_parts


class LinearTuning(NamedTuple):
    """One shape of kernels/triton_linear.py."""

    rows: int
    columns: int  # of the result; a gated one has two weights' rows for each
    depth: int  # numbers of a row that are multiplied at once
    warps: int
    stages: int
    by_descriptor: bool = False  # tiles are fetched by the device's own copy engine (TMA, sm_90 and later)
    above: int = 0  # for products of more rows than this, and of at most `up_to`
    up_to: int = _ANY


LinearShapes = tuple[LinearTuning, ...]  # from the largest to the smallest; the last one is for any number of rows
_FULL: Final = (
    0.6  # of the multiprocessors: a larger tile that keeps so many busy is better than a smaller one on all of them
)


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
                whole, split = (Schedule(**entry[name]) for name in ("whole", "split"))
                return AttentionTuning(entry["tile"], entry["part"], whole, split)
        raise NoTuning(f"the Triton kernels have no tile shapes for head_dim {head_dim} in {dtype} on {device}")

    def linear(self, device: str, dtype: str, *, is_gated: bool) -> LinearShapes:
        """For dtype "fp32", "bf16" or "fp16"; a gated one has two weights."""
        for entry in self._devices[device]["linear"]:
            if dtype in entry["dtypes"]:
                return tuple(LinearTuning(**shape) for shape in entry["gated" if is_gated else "plain"])
        raise NoTuning(f"the Triton kernels have no tile shapes for {dtype} on {device}")


class OneShape(Table):
    """A table that says one thing of attention, or of products, whatever it is asked: what a tuner tries."""

    def __init__(self, table: Table, attention: AttentionTuning | None, linear: LinearTuning | None) -> None:
        super().__init__(table._devices)
        self._attention, self._linear = attention, linear

    def attention(self, device: str, dtype: str, head_dim: int) -> AttentionTuning:
        """The one that is tried."""
        return self._attention or super().attention(device, dtype, head_dim)

    def linear(self, device: str, dtype: str, *, is_gated: bool) -> LinearShapes:
        """The one that is tried."""
        if self._linear is None:
            return super().linear(device, dtype, is_gated=is_gated)
        return (self._linear._replace(above=0, up_to=_ANY),)


def fitting_shape(shapes: LinearShapes, num_rows: int, out_features: int, num_processors: int) -> LinearTuning:
    """The largest that keeps a device of so many multiprocessors busy; where none does, the smallest."""
    fitting = [shape for shape in shapes if shape.above < num_rows <= shape.up_to]
    for shape in fitting:
        if -(-num_rows // shape.rows) * -(-out_features // shape.columns) >= _FULL * num_processors:
            return shape
    return fitting[-1]


def read_table(path: Path = TABLE) -> Table:
    """The table that is shipped, or another one."""
    return Table(json.loads(path.read_text(encoding="utf-8"))["devices"])


def next_power_of_two(number: int) -> int:
    """The least that is not smaller; tiles have such sides."""
    return 1 << max(0, number - 1).bit_length()
