"""Tile shapes for kernels/triton_table.json: which are worth a try, and which of those that were timed are kept. Pure.

Of products the table's list stays: how large tiles are, and for how many rows (kernels/triton_tuning.py); looked for is how each
is run. Of attention a tile and a part, which fix the order of summation, go with one schedule for chunks and one for decode. A
candidate counts by the product of its times over all cases. Shapes that give other bits than those beside them are passed over.
fp16 takes bf16's shapes: as many bytes, and the same instructions. Not here: compiling and timing (kernel_tuner.py).
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final, NamedTuple

from kernels.triton_tuning import AttentionTuning, LinearShapes, LinearTuning, Schedule, Table, fitting_shape

HEAD_DIMS: Final = (128, 64, 256)
DTYPES: Final = {"bf16": ("bf16", "fp16"), "fp32": ("fp32",)}  # what is measured -> whose shapes it gives
ITEMSIZES: Final = {"bf16": 2, "fp32": 4}
_DESCRIPTORS_FROM: Final = (9, 0)  # compute capability
_LEAST_BYTES: Final = (
    48 << 10
)  # on their way to a multiprocessor at any time; fewer cannot fill the time that one takes
_MOST_SUMS: Final = 128  # of a product, in a thread's registers
_MOST_MIXED: Final = 64  # of attention: scores and weights have registers, too
# Products of fp32 are unrolled: larger ones compile for minutes.
_MOST_UNROLLED: Final = 1 << 17  # query rows x positions x numbers of a head
Times = Mapping[Any, Sequence[float]]  # by candidate: seconds of each case; those that do not run are not there


class Device(NamedTuple):
    """What is asked of a GPU before anything is compiled."""

    capability: tuple[int, int]
    num_processors: int
    shared_bytes: int  # that a program may have

    @property
    def name(self) -> str:
        """In the table."""
        return str(10 * self.capability[0] + self.capability[1])


class LinearCandidate(NamedTuple):
    """One way to run one slot of a list of shapes."""

    dtype: str
    is_gated: bool
    slot: int
    shape: LinearTuning


class AttentionCandidate(NamedTuple):
    """One schedule of one of both kernels."""

    dtype: str
    head_dim: int
    tile: int
    part: int
    is_split: bool
    schedule: Schedule

    @property
    def tuning(self) -> AttentionTuning:
        """With this schedule for both kernels."""
        return AttentionTuning(self.tile, self.part, self.schedule, self.schedule)


Candidate = LinearCandidate | AttentionCandidate


def candidates_of(table: Table, device: Device) -> list[Candidate]:
    """All that is worth a try, what matters most first; the table's own shapes are among them."""
    found: list[Candidate] = []
    place = table.device(device.capability)
    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            found += attention_candidates(dtype, head_dim, table.attention(place, dtype, head_dim), device)
        for is_gated in (False, True):
            for slot, shape in enumerate(table.linear(place, dtype, is_gated=is_gated)):
                tried = linear_candidates(shape, ITEMSIZES[dtype], device, is_gated=is_gated)
                found += [LinearCandidate(dtype, is_gated, slot, each) for each in tried]
    return list(dict.fromkeys(found))


def linear_candidates(slot: LinearTuning, itemsize: int, device: Device, *, is_gated: bool) -> Iterator[LinearTuning]:
    """Ways to run tiles of this size; the table's own first."""
    yield slot
    tiles = slot.rows + (1 + is_gated) * slot.columns
    sums = (1 + is_gated) * slot.rows * slot.columns
    warps_tried = (4, 8) if sums >= 128 * 128 else (4,)
    can_describe = (False, True) if itemsize == 2 and device.capability >= _DESCRIPTORS_FROM else (False,)
    depths, stages_tried = ((64, 128, 256), (3, 4, 6)) if itemsize == 2 else ((32, 64), (2, 3))
    for depth, warps, stages, by_descriptor in product(depths, warps_tried, stages_tried, can_describe):
        num_bytes = tiles * depth * stages * itemsize
        is_worth = (_LEAST_BYTES if itemsize == 2 else 0) <= num_bytes <= device.shared_bytes
        if is_worth and sums <= _MOST_SUMS * 32 * warps:
            found = slot._replace(depth=depth, warps=warps, stages=stages, by_descriptor=by_descriptor)
            if found != slot:
                yield found


def attention_candidates(
    dtype: str, head_dim: int, own: AttentionTuning, device: Device
) -> Iterator[AttentionCandidate]:
    """Schedules of both kernels for each tile and part, the table's own first; none for what a chunk cannot run with."""
    yield AttentionCandidate(dtype, head_dim, own.tile, own.part, False, own.whole)
    yield AttentionCandidate(dtype, head_dim, own.tile, own.part, True, own.split)
    if dtype == "fp32":
        cuts = [(16, 512), (32, 512)]
        whole = split = [Schedule(rows, 4, 2) for rows in (16, 32)]
    else:
        cuts = [(64, 512), (64, 256), (64, 1024), (128, 512), (32, 512)][: 5 if head_dim > HEAD_DIMS[0] else 4]
        whole = [Schedule(*each) for each in product((64, 128), (4, 8), (2, 3, 5))]
        split = [Schedule(*each) for each in product((16,), (1, 2, 4), (3, 5))]
        split += [Schedule(64, warps, stages) for warps, stages in product((4, 8), (3, 5))]
    for tile, part in cuts:
        for is_split, schedules in ((False, whole), (True, split)):
            tried = [
                each for each in schedules if _fits(tile, each, head_dim, ITEMSIZES[dtype], device, is_split=is_split)
            ]
            if not tried and not is_split:
                break
            yield from (AttentionCandidate(dtype, head_dim, tile, part, is_split, each) for each in tried)


def _fits(tile: int, schedule: Schedule, head_dim: int, itemsize: int, device: Device, *, is_split: bool) -> bool:
    rows, warps, stages = schedule
    mixed = rows * head_dim // (32 * warps)  # numbers of a thread
    if itemsize == 4:
        return rows * tile * head_dim <= _MOST_UNROLLED
    # Half a tile's keys and values are enough where Triton keeps none of them for instructions that read shared memory.
    tiles = tile * stages if is_split else 2 * tile * stages
    has_room = (rows + tiles) * head_dim * itemsize <= device.shared_bytes
    least = min(_MOST_MIXED, head_dim // 2) if rows > 16 else 1  # more warps would each have little to multiply
    return has_room and least <= mixed <= _MOST_MIXED


def served_slot(shapes: LinearShapes, num_rows: int, out_features: int, device: Device) -> int:
    """Which slot of a list a product takes."""
    return shapes.index(fitting_shape(shapes, num_rows, out_features, device.num_processors))


def score(times: Sequence[float]) -> float:
    """The logarithm of their product; the less the better."""
    return sum(map(math.log, times))


def ranked_linears(shapes: LinearShapes, dtype: str, times: Times, *, is_gated: bool) -> list[list[LinearTuning]]:
    """For each slot of a list its candidates, the fastest first; the table's own where none was timed."""
    found = []
    for slot, shape in enumerate(shapes):
        timed = [each for each in times if isinstance(each, LinearCandidate) and each[:3] == (dtype, is_gated, slot)]
        timed.sort(key=lambda each: score(times[each]))
        found.append([each.shape for each in timed] or [shape])
    return found


def agreed(ranked: Sequence[Sequence[LinearTuning]], agreeing: Callable[[LinearShapes], LinearShapes]) -> LinearShapes:
    """The first of each slot whose bits are those of the last slot's first; a slot that has none is left out."""
    left = [list(each) for each in ranked]
    while True:
        shapes = tuple(each[0] for each in left)
        found = agreeing(shapes)
        if len(found) == len(shapes):
            return shapes
        left = [each if each[0] in found else each[1:] for each in left]
        left = [each for each in left if each]


def ranked_attention(dtype: str, head_dim: int, times: Times) -> list[AttentionTuning]:
    """A tile and a part with a schedule for chunks and one for decode, the fastest first."""
    timed = [each for each in times if isinstance(each, AttentionCandidate) and each[:2] == (dtype, head_dim)]
    pairs = [
        (score(times[whole]) + score(times[split]), AttentionTuning(*whole[2:4], whole.schedule, split.schedule))
        for whole, split in product(timed, timed)
        if whole[2:4] == split[2:4] and not whole.is_split and split.is_split
    ]
    return [tuning for _, tuning in sorted(pairs, key=lambda pair: pair[0])]


def with_measured(
    table: Mapping[str, Any],
    device: str,
    attention: Mapping[tuple[str, int], AttentionTuning],
    linear: Mapping[tuple[str, bool], LinearShapes],
) -> dict[str, Any]:
    """The file's content with a device's entries replaced: by (dtype, greatest head_dim), and by (dtype, is_gated)."""
    changed: dict[str, Any] = copy.deepcopy(dict(table))
    changed["devices"][device] = {
        "measured": True,
        "attention": [
            {
                "dtypes": list(DTYPES[dtype]),
                "max_head_dim": head_dim,
                "tile": tuning.tile,
                "part": tuning.part,
                "whole": tuning.whole._asdict(),
                "split": tuning.split._asdict(),
            }
            for (dtype, head_dim), tuning in sorted(attention.items())
        ],
        "linear": [
            {
                "dtypes": list(DTYPES[dtype]),
                **{name: list(map(_written, linear[dtype, name == "gated"])) for name in ("plain", "gated")},
            }
            for dtype in dict.fromkeys(dtype for dtype, _ in sorted(linear))
        ],
    }
    return changed


def _written(shape: LinearTuning) -> dict[str, int]:
    """Without what need not be said."""
    defaults = LinearTuning._field_defaults
    return {name: value for name, value in shape._asdict().items() if name not in defaults or value != defaults[name]}


def table_text(value: object, indent: str = "") -> str:
    """The file's JSON as people read it: what holds nothing that holds anything is one line."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not any(isinstance(each, dict | list) for each in inner):
        return json.dumps(value)
    deeper = indent + "  "
    if isinstance(value, dict):
        lines = [f"{deeper}{json.dumps(name)}: {table_text(each, deeper)}" for name, each in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    return "[\n" + ",\n".join(deeper + table_text(each, deeper) for each in inner) + f"\n{indent}]"
