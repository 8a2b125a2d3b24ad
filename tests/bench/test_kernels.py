"""The benchmark of kernels: both sides of a case give the same, its limit counts what it must; how tile shapes are chosen."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from bench.graph_clock import copies_for
from bench.kernel_cases import AttentionCase, Case, GatherCase, LinearCase, pair_of
from bench.kernel_tuning import (
    DTYPES,
    HEAD_DIMS,
    AttentionCandidate,
    Device,
    LinearCandidate,
    agreed,
    candidates_of,
    ranked_attention,
    ranked_linears,
    table_text,
    with_measured,
)
from bench.kernels import PROG, cases_of, check, main
from bench.page import page
from kernels.choice import has_triton
from kernels.torch_reference import TorchKernels
from kernels.triton_tuning import TABLE, AttentionTuning, LinearShapes, LinearTuning, Schedule, Table, read_table

READ = read_table()
HOPPER = Device((9, 0), 132, 227 << 10)
AMPERE = Device((8, 0), 108, 163 << 10)
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
@pytest.mark.parametrize(
    ("flags", "word"),
    [([], "need a GPU"), (["--tune", "on"], "need a GPU"), (["--device", "cpu", "--tune", "on"], "--tune")],
)
def test_without_a_gpu_it_ends_in_one_sentence(flags: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(PROG)
    assert said.count("\n") == 1
    assert word in said


def test_a_candidate_counts_by_the_product_of_its_times_and_the_tables_own_stays_where_none_ran() -> None:
    shapes = READ.linear("90", "bf16", is_gated=False)
    slow, fast, odd = (LinearCandidate("bf16", False, 1, shapes[1]._replace(depth=depth)) for depth in (64, 128, 256))
    gated = LinearCandidate("bf16", True, 1, shapes[1])
    times = {slow: [2.0, 2.0], fast: [1.0, 3.0], odd: [0.5, 9.0], gated: [0.1, 0.1]}
    ranked = ranked_linears(shapes, "bf16", times, is_gated=False)
    assert ranked[1] == [fast.shape, slow.shape, odd.shape]
    assert [each for slot, each in enumerate(ranked) if slot != 1] == [[s] for s in (shapes[0], *shapes[2:])]


def test_shapes_whose_bits_disagree_are_passed_over_for_the_next_best() -> None:
    large, middle, small = (LinearTuning(size, size, 64, 4, 3) for size in (128, 64, 32))
    odd = [middle._replace(depth=256), middle._replace(depth=128), large]
    asked = []

    def agreeing(shapes: LinearShapes) -> LinearShapes:
        asked.append(shapes)
        return tuple(shape for shape in shapes if shape not in odd)

    ranked = [[large], [*odd[:2], middle], [small, small._replace(depth=32)]]
    assert agreed(ranked, agreeing) == (middle, small)  # no large one is left
    assert len(asked) == 3
    assert ranked[1][0] == odd[0]  # as it was


def test_attention_takes_the_tile_and_the_part_whose_best_schedules_are_fastest_together() -> None:
    quick, slow = Schedule(64, 4, 2), Schedule(16, 1, 3)
    times = {
        AttentionCandidate("bf16", 128, tile, 512, is_split, schedule): [seconds]
        for tile, is_split, schedule, seconds in (
            (64, False, quick, 2.0),
            (64, False, slow, 1.0),
            (64, True, quick, 4.0),
            (64, True, slow, 8.0),
            (32, False, quick, 0.5),  # and 10 for decode
            (32, True, quick, 10.0),
            (128, False, quick, 0.1),  # decode does not run with it
        )
    }
    ranked = ranked_attention("bf16", 128, times)
    assert ranked[0] == AttentionTuning(64, 512, slow, quick)
    assert ranked[1] == AttentionTuning(32, 512, quick, quick)
    assert len(ranked) == 5
    assert ranked_attention("bf16", 64, times) == []


def test_what_was_measured_replaces_one_devices_entries_and_is_found_again() -> None:
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    schedule = Schedule(32, 8, 3)
    attention = {("bf16", head_dim): AttentionTuning(64, head_dim * 4, schedule, schedule) for head_dim in (128, 64)}
    shapes = tuple(shape._replace(depth=64) for shape in READ.linear("90", "bf16", is_gated=False))
    changed = with_measured(table, "90", attention, {("bf16", False): shapes, ("bf16", True): shapes[:1]})
    assert changed["devices"]["80"] == table["devices"]["80"]
    assert changed["devices"]["90"]["measured"] is True
    assert changed["devices"]["90"]["linear"][0]["plain"][0].keys() >= {"rows", "above"}
    assert "up_to" not in changed["devices"]["90"]["linear"][0]["plain"][0]  # it may serve any number
    found = Table(changed["devices"])
    for dtype in ("bf16", "fp16"):
        assert found.attention("90", dtype, 48).part == 256
        assert found.attention("90", dtype, 65) == attention["bf16", 128]
        assert found.linear("90", dtype, is_gated=False) == shapes
        assert found.linear("90", dtype, is_gated=True) == shapes[:1]


def test_the_table_is_written_as_it_is_read() -> None:
    text = TABLE.read_text(encoding="utf-8")
    assert table_text(json.loads(text)) + "\n" == text
    assert json.loads(table_text({"a": [], "b": [[1, 2], {}]})) == {"a": [], "b": [[1, 2], {}]}


@pytest.mark.parametrize("device", [HOPPER, AMPERE], ids=lambda device: device.name)
def test_candidates_are_shapes_that_triton_takes_in_reasonable_time(device: Device) -> None:
    candidates = candidates_of(READ, device)
    assert len(set(candidates)) == len(candidates)
    assert 150 < len(candidates) < 350, "compiled and timed within a minute and a half"
    for each in candidates:
        if isinstance(each, AttentionCandidate):
            assert each.part % each.tile == 0
            assert min(each.schedule.rows, each.tile) >= 16
            assert each.dtype != "fp32" or each.schedule.rows * each.tile <= 1024, "compiles for minutes"
        else:
            assert (
                each.shape.stages * each.shape.depth * (each.shape.rows + each.shape.columns) * 2 <= device.shared_bytes
            )
            assert not each.shape.by_descriptor or device is HOPPER


def test_the_tables_own_shapes_are_among_the_candidates_and_its_slots_stay() -> None:
    candidates = set(candidates_of(READ, HOPPER))
    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            own = READ.attention("90", dtype, head_dim)
            for is_split, schedule in ((False, own.whole), (True, own.split)):
                assert AttentionCandidate(dtype, head_dim, own.tile, own.part, is_split, schedule) in candidates
        for is_gated in (False, True):
            slots = READ.linear("90", dtype, is_gated=is_gated)
            for slot, shape in enumerate(slots):
                tried = {
                    each.shape
                    for each in candidates
                    if isinstance(each, LinearCandidate) and each[:3] == (dtype, is_gated, slot)
                }
                assert shape in tried
                assert len(tried) > 1
                design = [(each.rows, each.columns, each.above, each.up_to) for each in tried]
                assert set(design) == {(shape.rows, shape.columns, shape.above, shape.up_to)}


@pytest.mark.skipif(not has_triton(), reason="Triton is not installed; make setup does that")
def test_each_slot_of_the_table_is_timed_with_products_that_it_serves() -> None:
    from bench.kernel_tuner import cases_for

    for candidate in candidates_of(READ, HOPPER):
        cases = cases_for(READ, HOPPER, candidate)
        assert cases
        if isinstance(candidate, LinearCandidate):
            shapes = READ.linear("90", candidate.dtype, is_gated=candidate.is_gated)
            assert all(isinstance(case, LinearCase) and case.is_gated == candidate.is_gated for case in cases)
            assert shapes[candidate.slot][:2] == candidate.shape[:2]
        else:
            assert all(isinstance(case, AttentionCase) and (case.num_rows == 1) == candidate.is_split for case in cases)


def test_its_page_says_what_it_was_measured_on_and_where_torch_is_faster() -> None:
    case: dict[str, Any] = {
        "case": "linear 1 x 2 x 3",
        "ours_s": 2e-6,
        "torch_s": 1e-6,
        "limit_s": 5e-7,
        "limit_is": "bytes",
    }
    case |= {"ours_by_torch": 2.0, "ours_by_limit": 4.0, "copies": 7, "torch_way": ""}
    faster = case | {"case": "decode 1 x 2", "ours_by_torch": 0.5, "torch_way": "flash_attention"}
    result: dict[str, Any] = {
        "command": PROG,
        "date": "2026-11-27",
        "machine": {"cores": 1, "cpu_model": "C", "python": "3"},
    }
    result |= {"settings": {"device": "cuda", "dtype": "bf16", "rounds": 9}, "device": "NVIDIA H200", "torch": "2.11"}
    result |= {"triton": "3.6.0", "kernels": "triton-sm90-1", "bytes_per_s": 4e12, "operations_per_s": 7e14}
    text = page(result | {"cases": [case, faster], "broken": ["gather: out of memory"]})
    for said in (
        "NVIDIA H200, torch 2.11, Triton 3.6.0, bf16",
        "R 4000 GB/s",
        "F 700.0 T",
        "- Not measured: gather: out",
    ):
        assert said in text
    assert "| linear 1 x 2 x 3 | 2.0 | 1.0 | 0.5 | bytes | **2.00** | 4.00 |  | 7 |" in text
    assert "| 0.50 | 4.00 | flash_attention | 7 |" in text
