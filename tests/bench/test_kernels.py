"""The benchmark of kernels: both sides of a case give the same, its limit counts what it must; how tile shapes are chosen."""

from __future__ import annotations

import json

import pytest
import torch

from bench.graph_clock import copies_for
from bench.kernel_cases import AttentionCase, Case, GatherCase, LinearCase, pair_of
from bench.kernel_tuning import HEAD_DIMS, attention_candidates, fastest, linear_candidates, with_measured
from bench.kernels import PROG, cases_of, check, main
from kernels.torch_reference import TorchKernels
from kernels.triton_tuning import TABLE, AttentionTuning, LinearTuning, Table

CPU = torch.device("cpu")
SMALL: list[Case] = [
    AttentionCase(3, 70, 1, 4, 2, 16),
    AttentionCase(1, 70, 70, 4, 2, 16),
    AttentionCase(2, 70, 20, 4, 2, 16),
    LinearCase(5, 32, 48),
    LinearCase(5, 32, 48, is_gated=True),
    GatherCase(3, 256),
]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_both_sides_give_the_same_from_each_copy_of_the_inputs(case: Case) -> None:
    pair = pair_of(case, TorchKernels(), torch.float32, CPU, num_copies=2)
    found = [call() for call in pair.ours]
    assert len(found) == len(pair.torchs) == 2
    for ours, call in zip(found, pair.torchs, strict=True):
        torch.testing.assert_close(ours, call(), rtol=1e-4, atol=1e-5)
    assert not torch.equal(*found)
    check(pair)
    assert bool(pair.torch_way) == isinstance(case, AttentionCase)
    with pytest.raises(ValueError, match="differ by"):
        check(pair._replace(torchs=pair.torchs[::-1]))


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_nothing_that_is_read_or_written_is_left_out(case: Case) -> None:
    if isinstance(case, GatherCase):
        assert (case.num_bytes(4), case.num_operations) == (2 * 3 * 256, 0)
    elif isinstance(case, LinearCase):
        num_weights = (1 + case.is_gated) * 32 * 48
        assert case.num_bytes(4) == 4 * (5 * 32 + num_weights + 5 * 48)
        assert (case.copied_bytes(4), case.num_operations) == (4 * num_weights, 2 * 5 * num_weights)
    elif isinstance(case, AttentionCase):
        seen = sum(case.num_positions - row for row in range(case.num_rows)) * case.num_sequences
        assert case.num_operations == 4 * seen * 4 * 16
        rows = case.num_sequences * case.num_rows
        assert case.num_bytes(4) == 4 * (2 * case.num_sequences * 70 * 2 * 16 + 2 * rows * 4 * 16)
        assert case.copied_bytes(4) == 4 * 2 * case.num_sequences * 70 * 2 * 16


def test_so_many_copies_that_no_cache_holds_one_until_its_next_turn() -> None:
    assert copies_for(32 << 20, 50 << 20) == 7  # 224 MiB for 4 x 50
    assert copies_for(50 << 20, 50 << 20) == 5
    assert copies_for(1 << 30, 50 << 20) == 1
    assert copies_for(1 << 20, 50 << 20) == 16
    assert copies_for(1 << 20, 0) == 1


def test_cases_have_names_of_their_own() -> None:
    for device in ("cpu", "cuda"):
        names = [case.name for case in cases_of(device)]
        assert len(set(names)) == len(names) > 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what the test misses")
@pytest.mark.parametrize(("flags", "word"), [([], "need a GPU"), (["--device", "cpu", "--tune", "on"], "--tune")])
def test_without_a_gpu_it_ends_in_one_sentence(flags: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(PROG)
    assert said.count("\n") == 1
    assert word in said


def test_the_fastest_over_all_cases_is_kept_and_what_does_not_run_is_passed_over() -> None:
    tried = [AttentionTuning(16, 32, part, 4, 2) for part in (256, 512, 1024, 2048)]
    times = {256: [2.0, 2.0], 512: [], 1024: [1.0, 3.0], 2048: [0.5, 9.0]}
    assert fastest(iter(tried), lambda tuning: times[tuning.part]).part == 1024
    with pytest.raises(ValueError, match="no tile shape runs"):
        fastest(iter(tried), lambda _: [])


def test_what_was_measured_replaces_one_devices_entries_and_is_found_again() -> None:
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    attention = {("bf16", head_dim): AttentionTuning(32, 64, head_dim * 4, 8, 3) for head_dim in (128, 64)}
    linear = {"bf16": LinearTuning(32, 64, 128, 8, 3)}
    changed = with_measured(table, "90", attention, linear)
    assert changed["devices"]["80"] == table["devices"]["80"]
    assert changed["devices"]["90"]["measured"] is True
    assert table["devices"]["90"]["measured"] is False
    found = Table(changed["devices"])
    assert found.attention("90", "bf16", 48).part == 256
    assert found.attention("90", "bf16", 65).part == 512
    assert found.linear("90", "bf16") == linear["bf16"]


@pytest.mark.parametrize("itemsize", [2, 4])
def test_candidates_are_shapes_that_triton_takes_in_reasonable_time(itemsize: int) -> None:
    for head_dim in HEAD_DIMS:
        shapes = list(attention_candidates(head_dim, itemsize))
        assert len(set(shapes)) == len(shapes) >= 24
        for shape in shapes:
            assert shape.part % shape.tile == 0
            assert min(shape.rows, shape.tile) >= 16
            assert itemsize == 2 or shape.rows * shape.tile <= 1024, "compiles for minutes"
    linear = list(linear_candidates(itemsize))
    assert len(set(linear)) == len(linear) >= 24
