"""numba's attention: what it reads, what it spoils not, and when it is chosen; its bits are in test_row_bits."""

from __future__ import annotations

import importlib
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import choice
from kernels.choice import choose_kernels, has_numba
from kernels.interface import AttentionBatch
from tests.kernels.back_ends import NUMBA, REFERENCE

pytestmark = [
    pytest.mark.covers("M04"),
    pytest.mark.skipif(not has_numba(), reason="numba is not installed; make setup does that"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def attended(kv: Tensor, queries: Tensor, positions: list[int], *, by_numba: bool, window: int | None = None) -> Tensor:
    """One row of each of several sequences, 20 blocks of 16 each, in layer 1 of 2."""
    spans = np.array([(row, 1, position) for row, position in enumerate(positions)], np.int32)
    tables = torch.arange(20 * len(positions)).view(len(positions), 20)
    batch = AttentionBatch(spans, tables, torch.zeros(len(positions), dtype=torch.int64))
    kernels = NUMBA[0] if by_numba else REFERENCE
    return kernels.step_attention(kv, batch, queries.shape[1]).attend(1, queries, window)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(6, 2, 64), (4, 4, 24), (7, 1, 8)])
def test_each_dtype_is_read_as_it_is_stored(dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    num_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(1)
    kv = torch.randn((80, 2, 2, 16, num_kv_heads, head_dim), generator=generator)
    # Also what only subnormal numbers of fp16 hold, and nothing.
    kv[:, :, 1, ::3] *= 2.0**-20
    kv[:, :, 1, 1::5] = 0
    kv = kv.to(dtype)
    queries = torch.randn((4, num_heads, head_dim), generator=generator).to(dtype)
    for window in (None, 1, 70):
        found = attended(kv, queries, [0, 2, 150, 319], by_numba=True, window=window)
        expected = attended(kv, queries, [0, 2, 150, 319], by_numba=False, window=window)
        bound = 2e-6 if dtype is torch.float32 else 1e-2
        torch.testing.assert_close(found.float(), expected.float(), rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("plane", [0, 1])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_numbers_that_are_none_break_their_own_row_and_no_other(dtype: torch.dtype, plane: int, broken: float) -> None:
    generator = torch.Generator().manual_seed(2)
    kv = torch.randn((60, 2, 2, 16, 1, 16), generator=generator).to(dtype)
    queries = torch.ones((3, 2, 16), dtype=dtype)
    right = attended(kv, queries, [100, 100, 100], by_numba=True)
    kv[20 + 3, 1, plane, 2] = broken
    found = attended(kv, queries, [100, 100, 100], by_numba=True)
    assert not found[1].isfinite().all()
    assert torch.equal(found[[0, 2]], right[[0, 2]])
    kv[20 + 3, 1, plane, 2] = 0
    kv[20 + 6, 1, plane, 5] = broken  # position 101: behind what the row sees
    assert attended(kv, queries, [100, 100, 100], by_numba=True).isfinite().all()


def test_it_is_what_computes_where_nothing_was_compiled_and_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert choose_kernels("numba").shortfall == ""
    monkeypatch.setattr(choice, "library_path", lambda _: tmp_path / "none")
    found = choose_kernels("cpu")
    assert found.kernels.name == NUMBA[0].name
    assert found.kernels.name.startswith("numba-")
    assert "C++ compiler" in found.shortfall
    monkeypatch.setitem(sys.modules, "kernels.numba_kernels", None)
    broken = choose_kernels("cpu")
    assert broken.kernels.name == REFERENCE.name
    assert "C++ compiler; numba cannot be used: " in broken.shortfall
    monkeypatch.setattr(choice, "has_numba", lambda: False)
    found = choose_kernels("numba")
    assert (found.kernels.name, found.shortfall.partition(" (")[0]) == (REFERENCE.name, "numba is not installed")


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where machine code is kept meanwhile."""
    importlib.import_module("kernels.numba_functions")  # which sets it, too
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    return tmp_path


def twice() -> Any:
    """As another process would have it."""

    def double(number):  # type: ignore[no-untyped-def]
        return 2 * number

    return importlib.import_module("kernels.numba_functions").compiled()(double)


def test_what_a_full_disk_does_not_take_is_compiled_all_the_same(shelf: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        assert twice()(3) == 6
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path for path in shelf.rglob("*") if path.is_file() and path.stat().st_size] == []


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
@pytest.mark.parametrize("left", [b"", bytes(4096), b"\x80\x05\x95"])
def test_what_a_loss_of_power_has_spoiled_is_compiled_anew_and_kept(shelf: Path, ending: str, left: bytes) -> None:
    assert twice()(3) == 6
    (file,) = shelf.rglob(f"*.{ending}")
    file.write_bytes(left)
    assert twice()(3) == 6
    found = twice()
    assert found(3) == 6 and sum(found.stats.cache_hits.values()) == 1, "it was compiled once more"
