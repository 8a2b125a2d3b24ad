"""The Triton kernels as machine code of devices that are not there, and the table that says how they are cut."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels.choice import has_triton
from kernels.triton_tuning import INTERPRETER, NoTuning, next_power_of_two, read_table
from tests.thorough import IS_THOROUGH, a_share

if has_triton():
    import triton

    from tests.kernels.triton_launches import compiled, launches_of

pytestmark = [
    pytest.mark.covers("M05"),
    pytest.mark.skipif(not has_triton(), reason="Triton is not installed; make setup does that"),
]
# Bytes of shared memory that a block may have: CUDA C++ Programming Guide, "Features and Technical Specifications".
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
MOST_SPILLED = 512  # bytes of a thread's registers that attention's may keep in memory
# Which instructions multiply tiles.
TENSOR_CORES = {80: ["mma.sync"], 90: ["mma.sync", "wgmma.mma_async"]}
ARITHMETIC = r"\b(?:mma\.sync|wgmma\.mma_async)[\w.:]*|\bex2[\w.]*|\bshfl\.sync\.bfly[\w.]*"
NAMES = {
    "attend_split",
    "attend_whole",
    "copy_blocks",
    "greatest_of_rows",
    "linear",
    "merge_parts",
    "rms_norm",
    "rotate",
    "rotate_and_write",
    "silu_gate",
    "winners_of_rows",
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path) -> Iterator[None]:
    """Compile, and find nothing that an earlier run has compiled."""
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        yield


@pytest.mark.covers("M06")
@pytest.mark.parametrize("capability", [80, 90])
def test_all_that_a_model_launches_compiles_without_contraction_many_spills_or_too_much_memory(
    capability: int, tmp_path: Path
) -> None:
    launches = launches_of(capability, torch.bfloat16, 128)
    assert {launch.kernel.__name__ for launch in launches} == NAMES
    attending = set()
    # One launch of each kernel says most. Of the newer device's attention, which has more shapes, all are compared below.
    names = [launch.kernel.__name__ for launch in launches]
    some = {
        (name, number if name.startswith("attend_") and capability == 90 else 0): launch
        for number, (name, launch) in enumerate(zip(names, launches, strict=True))
    }
    for launch in launches if IS_THOROUGH else some.values():
        found = compiled(launch, capability)
        ptx, name = found.asm["ptx"], launch.kernel.__name__
        assert len(found.asm["cubin"]) > 1000
        assert found.metadata.shared <= SHARED_BYTES[capability], name
        assert ".local" not in ptx, f"{name}: an array that is no registers"
        spilled = stack_bytes(found.asm["cubin"], tmp_path / "cubin")
        assert spilled <= (MOST_SPILLED if name in ("attend_split", "attend_whole") else 0), f"{name}: {spilled} bytes"
        # Both schedules of attention have the same bits only where a * b + c stays two roundings. (A bf16 product is an fma, + -0.)
        assert "fma.rn.f32" not in ptx, name
        is_product = name in ("linear", "attend_split", "attend_whole")
        assert any(each in ptx for each in TENSOR_CORES[capability]) == is_product, name
        if name in ("attend_split", "attend_whole"):
            attending.add(frozenset(re.findall(ARITHMETIC, ptx)))
    # A part's arithmetic is one function; where both schedules have the same tiles it comes out alike, with a window and without.
    # Where they do not, the device is asked (triton_agreement.py).
    tuning = read_table().attention(str(capability), "bf16", 128)
    assert len(attending) == (1 if tuning.split.rows == tuning.whole.rows else 2)


@pytest.mark.parametrize(
    ("dtype", "head_dim"), a_share([(torch.bfloat16, 256), (torch.bfloat16, 64), (torch.float32, 256)], 3)
)
def test_attention_of_other_heads_compiles_as_it_was_tuned(dtype: torch.dtype, head_dim: int, tmp_path: Path) -> None:
    attending = [each for each in launches_of(90, dtype, head_dim) if each.kernel.__name__.startswith("attend_")]
    assert {each.kernel.__name__ for each in attending} == {"attend_split", "attend_whole"}
    for launch in attending if dtype is torch.bfloat16 else attending[:1]:  # products of fp32 are unrolled, for seconds
        found = compiled(launch, 90)
        assert found.metadata.shared <= SHARED_BYTES[90]
        if dtype is torch.bfloat16:
            assert stack_bytes(found.asm["cubin"], tmp_path / "cubin") <= MOST_SPILLED


def test_who_merges_a_rows_draws_reads_them_behind_all_that_was_stored() -> None:
    """One after the other, as the interpreter runs programs, no order is ever missed."""
    for launch in launches_of(90, torch.bfloat16, 64):
        if launch.kernel.__name__ in ("greatest_of_rows", "winners_of_rows"):
            ptx = compiled(launch, 90).asm["ptx"]
            (count,) = re.finditer(r"atom\.global\.gpu\.acq_rel\.add", ptx)
            counted = count.start()
            assert "bar.sync" in ptx[:counted], "what other threads have stored may come behind the count"
            assert "ld.global.cg" in ptx[counted:], "a cache of its own may hold what was there before"


def stack_bytes(cubin: bytes, path: Path) -> int:
    """What a thread keeps in memory for want of registers, which only ptxas knows."""
    path.write_bytes(cubin)
    tool = triton.knobs.nvidia.cuobjdump.path
    said = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    (found,) = re.findall(r"\bSTACK:(\d+)", said)
    return int(found)


def test_fp32_is_multiplied_as_fp32() -> None:
    capability = 80
    launches = launches_of(capability, torch.float32, 64)
    linears = [each for each in launches if each.kernel.__name__ == "linear"]
    assert [dict(each.constants)["IS_GATED"] for each in linears[::2]] == [False, True]
    attending = [each for each in launches if each.kernel.__name__ == "attend_split"]
    assert attending
    for launch in [*attending, *a_share(linears, 2)]:
        found = compiled(launch, capability)
        assert not any(each in found.asm["ptx"] for each in TENSOR_CORES[capability])
        assert found.metadata.shared <= SHARED_BYTES[capability]


def test_every_entry_of_the_table_is_whole_and_has_sides_that_triton_takes() -> None:
    table = read_table()
    for device in ("80", "90", INTERPRETER):
        for dtype in ("fp32", "bf16", "fp16"):
            shapes = [shape for is_gated in (False, True) for shape in table.linear(device, dtype, is_gated=is_gated)]
            for shape in shapes:
                assert all(side == next_power_of_two(side) for side in shape[:4])
                assert min(shape[:3]) >= 16  # what a product of tiles takes
            for head_dim in (8, 64, 80, 128, 256):
                attention = table.attention(device, dtype, head_dim)
                schedules = attention.whole, attention.split
                sides = [*attention[:2], *(number for each in schedules for number in each[:2])]
                assert all(side == next_power_of_two(side) for side in sides)
                assert attention.part % attention.tile == 0
                assert min(attention.tile, *(each.rows for each in schedules)) >= 16
            with pytest.raises(NoTuning, match="head_dim 257 in "):
                table.attention(device, dtype, 257)


def test_a_device_gets_its_own_entry_or_the_nearest_older_one() -> None:
    table = read_table()
    found = [table.device(each) for each in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 1), None)]
    assert found == ["80", "80", "80", "90", "90", "120", INTERPRETER]
    with pytest.raises(NoTuning, match="as old as sm_75"):
        table.device((7, 5))
