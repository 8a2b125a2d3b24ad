"""A node of several ranks computes the bits of a node of one: logits, and every byte of KV, in whatever batch, cut and phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.distributed import HashStore  # type: ignore[attr-defined]

from engine import ranks
from engine.batch import Segment, build_batch
from engine.block_pool import BlockPool
from engine.config_values import ModelError
from engine.device import CPU
from engine.kv_memory import KvMemory
from engine.local_engine import LocalEngine
from engine.make_model import make_model
from engine.model import Model, load_model
from engine.model_config import read_model_config
from engine.model_sizes import SIZES, ModelSize
from engine.plan import DecodeRow, Decodes, Plan, PrefillChunk, Runner, SamplingParams, SlotStart
from engine.probe import find_inexactness
from engine.ranks import join_ranks
from engine.runner import TorchRunner
from engine.scheduler import Scheduler, SchedulerConfig
from engine.sequence import SequenceSpec
from engine.split import Split, check_split
from kernels.choice import WeightDtype
from kernels.interface import AttentionBatch, Kernels
from tests.engine_torch.conftest import TINY
from tests.engine_torch.rank_threads import RankThreads, rank_threads
from tests.engine_torch.test_row_bits import Scenario, scenarios, tokens
from tests.kernels.back_ends import BACK_ENDS, TRITON
from tests.kernels_choice import KERNELS

SHAPES: dict[str, ModelSize] = {
    "plain": replace(TINY, num_layers=2, vocab_size=261),  # a vocabulary that does not divide
    "biases": replace(TINY, num_layers=2, ties_embeddings=True, settings={"attention_bias": True, "mlp_bias": True}),
    "qwen2": replace(SIZES["qwen2-tiny"], num_layers=2),
    "qwen3": replace(SIZES["qwen3-tiny"], num_layers=2),
    "mistral": replace(SIZES["mistral-tiny"], num_layers=2),
    "odd": replace(
        TINY, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=24, hidden_size=148, intermediate_size=204
    ),
}
MakeModel = Callable[[str, str], Path]


@dataclass(frozen=True, slots=True)
class Pairing:
    """A model, whole and in parts."""

    whole: Model
    parts: RankThreads


@pytest.fixture(scope="module")
def split_dirs(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    @cache
    def make(shape: str, dtype: str) -> Path:
        path = tmp_path_factory.mktemp("split") / f"{shape}-{dtype}"
        make_model(SHAPES[shape], dtype, 0, path)
        return path

    return make


CASES: list[tuple[str, str, str, int, WeightDtype]] = [
    *(
        (kernels, shape, dtype, size, "auto")
        for kernels in ("cpu", "torch")
        for shape, size in (("plain", 2), ("biases", 2), ("odd", 4))
        for dtype in ("fp32", "bf16")
    ),
    *(("cpu", shape, "bf16", 2, "auto") for shape in ("qwen2", "qwen3", "mistral")),
    ("torch", "qwen3", "fp32", 2, "auto"),
    ("cpu", "odd", "fp16", 2, "auto"),
    ("cpu", "biases", "bf16", 2, "int8"),
]


@pytest.fixture(scope="module", params=CASES, ids=str)
def pairing(request: pytest.FixtureRequest, split_dirs: MakeModel) -> Iterator[Pairing]:
    kernels, shape, dtype, size, weight_dtype = request.param
    path = split_dirs(shape, dtype)
    whole = load_model(path, dtype, kernels, weight_dtype=weight_dtype)
    with rank_threads(path, dtype, kernels, size, weight_dtype) as parts:
        yield Pairing(whole, parts)


@pytest.mark.covers("H14", "M06")
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(scenario=scenarios())
def test_logits_and_kv_have_the_bits_of_one_rank_whatever_the_number_of_ranks(
    pairing: Pairing, scenario: Scenario
) -> None:
    config, size = pairing.whole.config, scenario.block_size
    memories = [KvMemory(config, size, len(scenario.block_order), pairing.whole.dtype) for _ in range(2)]
    for memory in memories:
        memory.tensor.fill_(float("nan"))
    free = iter(scenario.block_order)
    tables = [[next(free) for _ in range(-(-length // size))] for length in scenario.lengths]
    done = [0] * len(tables)
    for step in scenario.steps:
        segments = []
        for sequence, count in step:
            start = done[sequence]
            segments.append(Segment(tokens(sequence)[start : start + count], start, tables[sequence], count))
            done[sequence] += count
        expected = pairing.whole.forward(build_batch(segments, size), memories[0].tensor)
        heads = {model.split: memories[1].part(model.split).tensor for model in pairing.parts.models}
        found = pairing.parts.each(lambda model: model.forward(build_batch(segments, size), heads[model.split]))  # noqa: B023
        assert all(torch.equal(each, expected) for each in found)
    assert np.array_equal(memories[0].bytes, memories[1].bytes)


@pytest.mark.covers("M06")
def test_ranks_probe_themselves_together(pairing: Pairing) -> None:
    assert set(pairing.parts.each(find_inexactness)) == {None}


def tokens_of(runner: Runner, num_blocks: int) -> dict[object, list[int]]:
    """Sequences that share blocks, are cut into chunks, give way and come back, with everything that is said of a token."""
    scheduler = Scheduler(SchedulerConfig(3, 32, 256), BlockPool(num_blocks, 16), b"key")
    prompt = tuple(tokens(0))
    specs = [
        SequenceSpec(length, prompt[:length], 0, SamplingParams(temperature, 7, num_logprobs=3), 60, frozenset(), ())
        for length, temperature in ((70, 0.0), (31, 0.9), (64, 0.9), (50, 0.0), (120, 0.7))
    ]
    told = dict(LocalEngine(scheduler, runner).generate(specs))
    assert scheduler.num_preempted > 0
    return told


@pytest.mark.covers("H14")
@pytest.mark.parametrize("mirror", [False, True], ids=["cpu", "device"])
def test_a_runner_with_followers_says_what_one_alone_says(split_dirs: MakeModel, mirror: bool) -> None:
    """Also where each rank has a device's side of its own."""
    path = split_dirs("odd", "bf16")
    whole = load_model(path, "bf16", KERNELS)
    alone = KvMemory(whole.config, 16, 20, "bf16")
    expected = tokens_of(TorchRunner(whole, alone, 3, 256), 20)
    shared = KvMemory(whole.config, 16, 20, "bf16")
    with (
        rank_threads(path, "bf16", KERNELS, 4) as parts,
        parts.runner(shared, 3, 256, mirror=mirror) as runner,
    ):
        assert tokens_of(runner, 20) == expected
    assert mirror or np.array_equal(shared.bytes, alone.bytes)


@pytest.mark.covers("H14")
def test_where_ranks_have_devices_each_copies_its_heads_before_a_step_is_told(split_dirs: MakeModel) -> None:
    """What a chunk wrote, what a plan says is leaving, what arrived: as on a device of one rank."""
    path = split_dirs("odd", "fp32")
    whole = load_model(path, "fp32", KERNELS)
    sampling, prompt = SamplingParams(0.0, 0), tuple(tokens(0)[:40])
    start, again = SlotStart(0, 1, sampling, 0, 0), SlotStart(1, 1, sampling, 0, 0)
    plans = (
        Plan(0, (start,), chunks=(PrefillChunk(0, 1, 0, prompt[:33], (3, 1, 2), samples=True),)),
        Plan(1, decodes=Decodes.of(DecodeRow(0, 1, 33, ()))),
        Plan(2, leaving_block_ids=(2,)),  # no rows: what a decode row wrote is on its way
        Plan(
            3,
            (again,),
            chunks=(PrefillChunk(1, 1, 32, prompt[32:], (5, 4, 0), samples=True),),
            arrived_block_ids=(5, 4),
        ),
    )

    def through(runner: TorchRunner, data: np.ndarray) -> Iterator[tuple[list[int], bytes]]:
        for plan in plans:
            if plan.arrived_block_ids:
                data[5], data[4] = data[3], data[1]
            yield runner.run(plan).token_ids.tolist(), data[[3, 1, 2, 5, 4, 0]].tobytes()

    alone = KvMemory(whole.config, 16, 8, "fp32", mirror=True)
    expected = list(through(TorchRunner(whole, alone, 2, 256), alone.bytes))
    shared = KvMemory(whole.config, 16, 8, "fp32")
    with (
        rank_threads(path, "fp32", KERNELS, 4) as parts,
        parts.runner(shared, 2, 256, mirror=True) as runner,
    ):
        assert list(through(runner, shared.bytes)) == expected
    assert len({data for _, data in expected}) == 3, "the decode row's KV is told with the third step, not with its own"


def test_a_rank_that_waits_in_vain_for_another_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "PATIENCE", timedelta(seconds=0.5))
    store = HashStore()
    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(lambda rank: join_ranks(Split(rank, 2), store, CPU), range(2)))
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        both[0].gathered(torch.zeros(1, 1))


@pytest.mark.covers("H14", "M06")
@pytest.mark.parametrize("kernels", BACK_ENDS, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_part_of_a_products_columns_has_the_bits_of_the_whole(kernels: Kernels, dtype: torch.dtype) -> None:
    for width_in, width_out in ((100, 60), (576, 576), (1536, 576), (4864, 128)):
        generator = torch.Generator().manual_seed(width_in)
        weight = torch.randn(width_out, width_in, generator=generator).to(dtype)
        x = torch.randn(40, width_in, generator=generator).to(dtype)
        whole = kernels.pack_linear(weight)(x)
        for split in (Split(0, 2), Split(1, 2), Split(2, 4), Split(1, 3)):
            part = split.part(width_out)
            linear = kernels.pack_linear(weight[part])
            assert all(torch.equal(linear(x[:count]), whole[:count, part]) for count in (1, 2, 7, 40))


@pytest.mark.covers("H14", "M06")
@pytest.mark.parametrize(
    "kernels", [each for each in BACK_ENDS if each not in TRITON], ids=lambda kernels: kernels.name
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [1, 16])
def test_attention_over_some_of_a_pools_heads_has_the_bits_of_attention_over_all(
    kernels: Kernels, dtype: torch.dtype, block_size: int
) -> None:
    num_kv_heads, group, head_dim, num_rows = 4, 2, 24, 150
    num_blocks = -(-num_rows // block_size)
    generator = torch.Generator().manual_seed(1)
    shape = (num_blocks, 2, 2, block_size, num_kv_heads, head_dim)
    queries = torch.randn(num_rows, num_kv_heads * group, head_dim, generator=generator).to(dtype)
    keys, values = torch.randn(2, num_rows, num_kv_heads, head_dim, generator=generator).to(dtype)
    spans = [[0, 100, 0], *([row, 1, row] for row in range(100, num_rows))]  # a chunk, then each by itself
    tables = torch.arange(num_blocks).flip(0).repeat(len(spans), 1)
    positions = torch.arange(num_rows)
    writes = (num_blocks - 1 - positions // block_size) * block_size + positions % block_size
    batch = AttentionBatch(np.array(spans, np.int32), tables, writes)
    whole, parts = torch.full(shape, float("nan"), dtype=dtype), torch.full(shape, float("nan"), dtype=dtype)
    attention = kernels.step_attention(whole, batch, num_kv_heads * group)
    attention.write(1, keys, values)
    expected = attention.attend(1, queries, 70)
    for rank in range(2):
        heads, of_queries = Split(rank, 2).part(num_kv_heads), Split(rank, 2).part(num_kv_heads * group)
        attention = kernels.step_attention(parts[..., heads, :], batch, num_kv_heads * group // 2)
        attention.write(1, keys[:, heads], values[:, heads])
        found = attention.attend(1, queries[:, of_queries].contiguous(), 70)
        assert torch.equal(found, expected[:, of_queries])
    assert torch.equal(parts.view(torch.uint8), whole.view(torch.uint8))


@pytest.mark.parametrize("size", range(1, 9))
def test_parts_are_equal_but_for_the_last_ones_and_together_everything_in_order(size: int) -> None:
    for count in range(40):
        parts = [range(count)[Split(rank, size).part(count)] for rank in range(size)]
        assert [index for part in parts for index in part] == list(range(count))
        assert all(len(part) <= Split(0, size).width(count) for part in parts)
        if count % size == 0:
            assert {len(part) for part in parts} == {count // size}


@pytest.mark.covers("H14")
@pytest.mark.parametrize(
    ("size", "sentence"),
    [
        (3, "--tp 3: the model's num_key_value_heads 4 cannot be cut into 3 equal parts"),
        (8, "--tp 8: the model's num_key_value_heads 4 cannot be cut into 8 equal parts"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_by_the_name_of_what_cannot(
    split_dirs: MakeModel, size: int, sentence: str
) -> None:
    config = read_model_config(split_dirs("odd", "fp32"))
    with pytest.raises(ModelError, match=f"^{sentence}$"):
        check_split(config, size)
    for name, other in (
        ("hidden_size", replace(config, hidden_size=202)),
        ("intermediate_size", replace(config, intermediate_size=202)),
    ):
        with pytest.raises(ModelError, match=f"^--tp 4: the model's {name} 202 cannot be cut into 4 equal parts$"):
            check_split(other, 4)


def test_triton_refuses_in_one_sentence_to_compute_a_part_of_the_heads(split_dirs: MakeModel) -> None:
    with pytest.raises(ModelError, match=r"^--tp 2: Triton does not compute a part of the heads"):
        load_model(split_dirs("plain", "fp32"), "fp32", "triton", split=Split(0, 2))
