"""A node of several ranks computes the bits of a node of one: logits, and every byte of KV, in whatever batch, cut and phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from engine.batch import Segment, build_batch
from engine.block_pool import BlockPool
from engine.config_values import ModelError
from engine.kv_memory import KvMemory
from engine.local_engine import LocalEngine
from engine.make_model import make_model
from engine.model import Model, load_model
from engine.model_config import read_model_config
from engine.model_sizes import SIZES, ModelSize
from engine.plan import Runner, SamplingParams
from engine.probe import find_inexactness
from engine.runner import TorchRunner
from engine.scheduler import Scheduler, SchedulerConfig
from engine.sequence import SequenceSpec
from engine.split import Split, check_split
from kernels.choice import WeightDtype
from tests.engine_torch.conftest import TINY
from tests.engine_torch.rank_threads import RankThreads, rank_threads
from tests.engine_torch.test_row_bits import Scenario, scenarios, tokens
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
    ranks: RankThreads


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
    with rank_threads(path, dtype, kernels, size, weight_dtype) as ranks:
        yield Pairing(whole, ranks)


@pytest.mark.covers("H14", "M06")
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
        heads = {model.split: memories[1].part(model.split).tensor for model in pairing.ranks.models}
        found = pairing.ranks.each(lambda model: model.forward(build_batch(segments, size), heads[model.split]))  # noqa: B023
        assert all(torch.equal(each, expected) for each in found)
    assert np.array_equal(memories[0].bytes, memories[1].bytes)


@pytest.mark.covers("M06")
def test_ranks_probe_themselves_together(pairing: Pairing) -> None:
    assert set(pairing.ranks.each(find_inexactness)) == {None}


def tokens_of(runner: Runner, num_blocks: int) -> dict[object, list[int]]:
    """Sequences that share blocks, are cut into chunks, give way and come back, with everything that is said of a token."""
    scheduler = Scheduler(SchedulerConfig(3, 32, 256), BlockPool(num_blocks, 16), b"key")
    prompt = tuple(tokens(0))
    specs = [
        SequenceSpec(length, prompt[:length], 0, SamplingParams(temperature, 7, num_logprobs=3), 60, frozenset(), ())
        for length, temperature in ((70, 0.0), (31, 0.9), (64, 0.9), (50, 0.0), (120, 0.7))
    ]
    return dict(LocalEngine(scheduler, runner).generate(specs))


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
        rank_threads(path, "bf16", KERNELS, 4) as ranks,
        ranks.runner(shared, 3, 256, mirror=mirror) as runner,
    ):
        assert tokens_of(runner, 20) == expected
    assert mirror or np.array_equal(shared.bytes, alone.bytes)


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
