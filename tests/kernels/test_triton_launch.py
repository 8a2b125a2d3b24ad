"""Launches past Triton's own bookkeeping: what was compiled is launched again only where Triton would have found it, too."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.choice import has_triton

if has_triton():
    import triton

    from kernels.triton_graphs import _uncollected
    from kernels.triton_kernels import _Product
    from kernels.triton_launch import Launcher
    from kernels.triton_tuning import LinearTuning

pytestmark = [
    pytest.mark.covers("M05", "M07"),
    pytest.mark.skipif(not has_triton(), reason="Triton is not installed; make setup does that"),
]


class FakeKernel:
    """What Triton compiles, with parameters (x, count, width, scale, SIZE, IS_LAST), of which it does not specialize for count."""

    def __init__(self) -> None:
        names = ("x", "count", "width", "scale", "SIZE", "IS_LAST")
        self.params = [
            SimpleNamespace(name=name, is_constexpr=name.isupper(), do_not_specialize=name == "count") for name in names
        ]
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[int, tuple[int, ...], tuple[Any, ...]]] = []

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **named: Any) -> FakeCompiled:
        assert named == {"SIZE": 64, "IS_LAST": True, "num_warps": 2, "enable_fp_fusion": False}
        self.compiled.append(arguments)
        return FakeCompiled(self, len(self.compiled))


class FakeCompiled:
    """Machine code."""

    def __init__(self, kernel: FakeKernel, number: int) -> None:
        self.kernel, self.number = kernel, number

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.kernel.launched.append((self.number, grid, arguments))


def test_machine_code_is_used_again_where_nothing_that_triton_specializes_for_has_changed() -> None:
    if triton.knobs.runtime.interpret:
        pytest.skip("the interpreter has no machine code")
    kernel = FakeKernel()
    launch = Launcher(kernel, IS_LAST=True, SIZE=64, num_warps=2)
    x, y = torch.zeros(64), torch.ones(64)
    launch((3,), x, 5, 32, 0.5)
    assert kernel.launched == [(1, (3, 1, 1), (x, 5, 32, 0.5, 64, True))]  # constants in the order of the parameters
    launch((3, 2), y, 16, 32, 0.25)  # other memory, another number that is not specialized for, another float
    assert [number for number, _, _ in kernel.launched] == [1, 1] and kernel.launched[1][1] == (3, 2, 1)
    launch((3,), x, 5, 33, 0.5)  # no multiple of 16
    launch((3,), x.double(), 5, 32, 0.5)
    assert [number for number, _, _ in kernel.launched] == [1, 1, 2, 3]
    launch((3,), y, 7, 33, 0.5)
    launch((3,), x, 7, 32, 0.5)
    assert [number for number, _, _ in kernel.launched[4:]] == [2, 1]


def test_what_was_compiled_for_an_odd_address_is_launched_once() -> None:
    if triton.knobs.runtime.interpret:
        pytest.skip("the interpreter has no machine code")
    kernel = FakeKernel()
    launch = Launcher(kernel, IS_LAST=True, SIZE=64, num_warps=2)
    numbers = torch.zeros(80)
    for _ in range(2):
        launch((1,), numbers[1:65], 5, 32, 0.5)
    launch((1,), numbers[:64], 5, 32, 0.5)
    launch((1,), numbers[4:68], 5, 32, 0.5)  # a multiple of 16 bytes again
    assert [number for number, _, _ in kernel.launched] == [1, 2, 3, 3]


def test_a_descriptor_is_made_anew_for_other_memory_and_for_another_number_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = LinearTuning(64, 16, 16, 4, 2, by_descriptor=True)
    product = _Product(torch.zeros((32, 64)), None, shape, is_gated=False)
    seen: list[Any] = []
    monkeypatch.setattr(product, "_launch", lambda grid, left, *rest: seen.append(left))
    memory, other = torch.zeros((5, 64)), torch.zeros((5, 64))
    for x in (memory, memory, memory[:3], memory[:3], other[:3], memory):
        product(x, torch.zeros((len(x), 32)))
        assert seen[-1].base.data_ptr() == x.data_ptr() and tuple(seen[-1].shape) == tuple(x.shape)
    assert seen[1] is seen[0] and seen[3] is seen[2]  # it takes as long as a launch
    assert seen[0].block_shape == [64, 16]


@pytest.mark.parametrize("is_enabled", [True, False])
def test_nothing_is_collected_while_a_graph_is_captured(is_enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if is_enabled else gc.disable)()
        with pytest.raises(ValueError, match="as it comes"), _uncollected():
            assert not gc.isenabled()
            raise ValueError("as it comes")
        assert gc.isenabled() is is_enabled
    finally:
        (gc.enable if before else gc.disable)()
