"""KV memory with a device's side of its own, on the CPU: what a GPU would do, but for the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from engine.block_pool import BlockPool
from engine.device import HostCopies
from engine.kv_memory import KvMemory, Mirror, runs
from engine.local_engine import LocalEngine
from engine.model import Model, load_model
from engine.plan import Plan, PrefillChunk, Runner, SamplingParams, SlotStart
from engine.reserve import ReserveConfig
from engine.runner import TorchRunner
from engine.saving import SaveRules
from engine.scheduler import Scheduler, SchedulerConfig
from engine.sequence import SequenceSpec
from proto import baton_pb2 as pb
from proto.block_key import block_keys
from tests.cores import nodes
from tests.cores.moving_world import MovingWorld, decode_nodes, dispatch_of
from tests.cores.nodes import BLOCK_SIZE, MAX_MODEL_LEN
from tests.cores.pair import Pair
from tests.engine_torch.conftest import VOCAB_SIZE, ModelDirs
from tests.kernels_choice import KERNELS

SEEDS = (11, 12, 13)
MIRRORS: tuple[Mirror, ...] = (True, "direct")


@pytest.fixture(scope="module")
def model(model_dirs: ModelDirs) -> Model:
    return load_model(model_dirs("group1", "fp32"), "auto", KERNELS)


class MirroredPair(Pair):
    """Both production cores over TorchRunners whose blocks lie on two sides."""

    def __init__(self, model: Model, mirror: Mirror = True) -> None:
        self.memories: list[KvMemory] = []

        def machine(num_blocks: int, num_slots: int) -> tuple[NDArray[np.uint8], Runner]:
            memory = KvMemory(model.config, BLOCK_SIZE, num_blocks, model.dtype, mirror=mirror)
            self.memories.append(memory)
            return memory.bytes, TorchRunner(model, memory, num_slots, MAX_MODEL_LEN)

        super().__init__(machine)

    def tokens(self, name: str, prompt: list[int], num_tokens: int, num_branches: int) -> list[list[int]]:
        """Of each branch, through prefill, handoff and decode."""
        heard = self.complete(
            pb.Dispatch(
                request_id=name,
                branches=[pb.Branch(choice=choice, seed=SEEDS[choice]) for choice in range(num_branches)],
                prompt_token_ids=prompt,
                sampling=pb.Sampling(temperature=0.9, max_tokens=num_tokens),
            )
        )
        assert not heard.errors
        found = [heard.of_choice(choice).by_index() for choice in range(num_branches)]
        return [[tokens[index][0] for index in range(num_tokens)] for tokens in found]


def alone(model: Model, prompt: list[int], num_tokens: int, seed: int) -> list[int]:
    memory = KvMemory(model.config, BLOCK_SIZE, 32, model.dtype)
    scheduler = Scheduler(SchedulerConfig(1, 32, MAX_MODEL_LEN), BlockPool(32, BLOCK_SIZE), b"key")
    runner = TorchRunner(model, memory, 1, MAX_MODEL_LEN)
    spec = SequenceSpec("s", tuple(prompt), 0, SamplingParams(0.9, seed), num_tokens, frozenset(), ())
    return LocalEngine(scheduler, runner).generate([spec])["s"]


@pytest.mark.parametrize("num_tokens_of_prompt", [1, 7, 16, 21])  # a block is 4, a chunk 8
@pytest.mark.parametrize("num_branches", [1, 3])
@pytest.mark.parametrize("mirror", MIRRORS)
def test_a_handoff_between_devices_gives_the_tokens_of_one_engine(
    model: Model, monkeypatch: pytest.MonkeyPatch, num_tokens_of_prompt: int, num_branches: int, mirror: Mirror
) -> None:
    monkeypatch.setattr(nodes, "VOCAB_SIZE", VOCAB_SIZE)
    pair = MirroredPair(model, mirror)
    prompt = list(range(40, 40 + num_tokens_of_prompt))
    expected = [alone(model, prompt, 9, seed) for seed in SEEDS[:num_branches]]
    assert pair.tokens("first", prompt, 9, num_branches) == expected
    # Now both nodes hold the prompt's full blocks on their devices. What the decode node's transport had for them, or what
    # anything wrote there since, must not come back; and what the prefill node computed is still there to be sent.
    pair.memories[1].bytes[:] = 255  # NaN
    assert pair.tokens("again", prompt, 9, num_branches) == expected
    longer = [*prompt, *range(90, 97)]
    assert pair.tokens("longer", longer, 9, 1) == [alone(model, longer, 9, SEEDS[0])]


@pytest.mark.parametrize("mirror", MIRRORS)
def test_a_result_is_told_when_the_chunks_blocks_are_in_host_memory_wherever_the_chunk_was_cut(
    model: Model, mirror: Mirror
) -> None:
    memory = KvMemory(model.config, BLOCK_SIZE, 8, model.dtype, mirror=mirror)
    runner = TorchRunner(model, memory, 2, MAX_MODEL_LEN)
    start = SlotStart(0, 1, SamplingParams(0.0, 0), 0, 0)
    for first, end, block_ids in ((0, 6, (5, 2)), (6, 7, ()), (7, 15, (7, 0))):
        chunk = PrefillChunk(0, 1, first, tuple(range(first, end)), block_ids, samples=False)
        runner.run(Plan(0, (start,) if first == 0 else (), chunks=(chunk,)))
        on_device = memory.tensor.view(torch.uint8).reshape(memory.bytes.shape).numpy()
        assert np.array_equal(memory.bytes, on_device)
    assert memory.bytes[[5, 2, 7, 0]].any(-1).all()


@pytest.mark.covers("H01", "Q09")
@pytest.mark.parametrize("chunks", [(6, 7), (6, 8, 10, 15), (5, 6, 7, 16)])
@pytest.mark.parametrize("is_drawn_there", [True, False])
@pytest.mark.parametrize("mirror", MIRRORS)
def test_a_step_that_is_read_late_does_not_take_a_block_back_to_what_it_was_when_only_half_of_it_was_written(
    model: Model, chunks: tuple[int, ...], is_drawn_there: bool, mirror: Mirror
) -> None:
    """The second chunk is launched before the first one is read, as on a device; a sender would send what the first one left."""
    memory = KvMemory(model.config, BLOCK_SIZE, 8, model.dtype, mirror=mirror)
    runner = TorchRunner(model, memory, 2, MAX_MODEL_LEN, is_asynchronous=True)
    start = SlotStart(0, 1, SamplingParams(0.8, 7, top_p=1.0 if is_drawn_there else 0.9), 0, 0)
    launched = []
    for number, (first, end) in enumerate(zip((0, *chunks), chunks, strict=False)):
        new_block_ids = (5, 2, 7, 0) if not number else ()
        chunk = PrefillChunk(0, 1, first, tuple(range(first, end)), new_block_ids, samples=end == chunks[-1])
        launched.append(runner.launch(Plan(number, () if number else (start,), chunks=(chunk,))))
        if number:
            launched[number - 1].read()
    launched[-1].read()
    on_device = memory.tensor.view(torch.uint8).reshape(memory.bytes.shape).numpy()
    assert np.array_equal(memory.bytes, on_device) and memory.bytes[[5, 2]].any(-1).all()


@pytest.mark.parametrize("mirror", MIRRORS)
def test_only_the_named_blocks_are_copied(model: Model, mirror: Mirror) -> None:
    memory = KvMemory(model.config, BLOCK_SIZE, 6, model.dtype, mirror=mirror)
    assert memory.is_mirrored and memory.is_direct is (mirror == "direct")
    memory.tensor.fill_(1.0)
    assert not memory.bytes.any()
    memory.from_device([4, 1])
    assert [bool(block.any()) for block in memory.bytes] == [False, True, False, False, True, False]
    memory.bytes[:] = 0
    memory.to_device([4, 0])
    assert [bool(block.any()) for block in memory.tensor] == [False, True, True, True, False, True]
    memory.from_device([])
    memory.to_device([])


@given(st.lists(st.integers(0, 30), unique=True))
def test_neighbours_in_the_pool_go_in_one_piece(block_ids: list[int]) -> None:
    pieces = list(runs(block_ids))
    assert [block for first, end in pieces for block in range(first, end)] == block_ids
    assert all(end != first for (_, end), (first, _) in pairwise(pieces))


@pytest.mark.covers("Q09")
@pytest.mark.parametrize("blocks_at_once", [0, 1, 2, 5, 6])
def test_many_blocks_go_to_the_device_and_back_in_portions(
    model: Model, blocks_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = KvMemory(model.config, BLOCK_SIZE, 6, model.dtype, mirror=True)
    monkeypatch.setattr("engine.kv_memory._PORTION_BYTES", blocks_at_once * memory.block_bytes)
    gathered: list[int] = []
    gather = memory.gather

    def counted(block_ids: Sequence[int]) -> Tensor:
        gathered.append(len(block_ids))
        return gather(block_ids)

    monkeypatch.setattr(memory, "gather", counted)
    memory.bytes[:] = np.arange(6, dtype=np.uint8)[:, None] + 1
    order = [4, 0, 5, 1, 3]
    memory.to_device(order)
    on_device = memory.tensor.view(torch.uint8).reshape(memory.bytes.shape)
    assert on_device[:, 0].tolist() == [1, 2, 0, 4, 5, 6]
    memory.bytes[:] = 0
    memory.from_device(order)
    assert memory.bytes[:, -1].tolist() == [1, 2, 0, 4, 5, 6]
    assert sum(gathered) == 5 and max(gathered) == min(max(blocks_at_once, 1), 5)


def test_on_a_cpu_both_sides_are_one(model: Model) -> None:
    memory = KvMemory(model.config, BLOCK_SIZE, 2, model.dtype)
    memory.tensor[1] = 1.0
    memory.to_device([1])
    assert not memory.is_mirrored and memory.bytes[1].any() and torch.all(memory.tensor[1] == 1)


@pytest.mark.covers("D08", "H02")
@pytest.mark.parametrize("num_said", [2, 9, 18])
@pytest.mark.parametrize("mirror", MIRRORS)
def test_a_move_between_devices_gives_the_tokens_of_one_engine(
    model: Model, monkeypatch: pytest.MonkeyPatch, num_said: int, mirror: Mirror
) -> None:
    """What decode rows wrote lies on the device alone, until a plan names it."""
    monkeypatch.setattr(nodes, "VOCAB_SIZE", VOCAB_SIZE)

    def machine(num_blocks: int, num_slots: int) -> tuple[NDArray[np.uint8], Runner]:
        memory = KvMemory(model.config, BLOCK_SIZE, num_blocks, model.dtype, mirror=mirror)
        return memory.bytes, TorchRunner(model, memory, num_slots, MAX_MODEL_LEN)

    world = MovingWorld(*decode_nodes(2, num_blocks=32), new_machine=machine)
    prompt = list(range(40, 46))
    world.start("decode-0", dispatch_of("r", prompt, max_tokens=40, temperature=0.9))
    (stream,) = world.streams.values()
    while len(stream.token_ids) < num_said:
        assert world.do_something()
    world.drain("decode-0")
    world.run()
    assert stream.end == "finished" and world.happened["moved"] == 1
    assert stream.token_ids == alone(model, prompt, 40, SEEDS[0])


@pytest.mark.covers("W01")
@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("mirror", MIRRORS)
def test_what_is_saved_is_on_the_hosts_side_when_it_is_to_be_copied(
    model: Model, is_asynchronous: bool, mirror: Mirror
) -> None:
    """Of who gives way, and of who is done: what decoding wrote, too, of which nothing else is ever brought there."""
    memory = KvMemory(model.config, BLOCK_SIZE, 16, model.dtype, mirror=mirror)
    rules = SaveRules(of_preempted=True, of_finished=True)
    config = SchedulerConfig(4, 64, MAX_MODEL_LEN, reserve=ReserveConfig("none"), saves=rules)
    scheduler = Scheduler(config, BlockPool(16, BLOCK_SIZE), b"key")
    runner = TorchRunner(model, memory, 4, MAX_MODEL_LEN, is_asynchronous=is_asynchronous)
    for number in range(3):
        prompt = tuple(range(40 + number, 55 + number))
        scheduler.submit(SequenceSpec(number, prompt, 0, SamplingParams(0.0, 0), 20, frozenset(), ()))
    num_saved = 0
    while scheduler.has_sequences:
        plan = scheduler.plan()
        assert plan is not None
        scheduler.complete(runner.run(plan))
        for save in scheduler.take_saves():
            block_ids = [block_id for _, block_id in save.blocks]
            on_device = memory.tensor[block_ids].reshape(len(block_ids), -1).view(torch.uint8).numpy()
            assert np.array_equal(memory.bytes[block_ids], on_device) and on_device.any(-1).all()
            num_saved += 1
            scheduler.saved(save.save_id)
    assert num_saved == 3 + scheduler.num_preempted > 3


@pytest.mark.covers("H02")
@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("mirror", MIRRORS)
def test_what_decoding_wrote_is_on_the_hosts_side_when_a_prompt_that_begins_so_is_handed_over(
    model: Model, is_asynchronous: bool, mirror: Mirror
) -> None:
    """A chat's second turn, on the node that said the first: the prefix cache gives it blocks that no chunk has written."""
    memory = KvMemory(model.config, BLOCK_SIZE, 32, model.dtype, mirror=mirror)
    scheduler = Scheduler(SchedulerConfig(2, 64, MAX_MODEL_LEN), BlockPool(32, BLOCK_SIZE), b"key")
    runner = TorchRunner(model, memory, 2, MAX_MODEL_LEN, is_asynchronous=is_asynchronous)

    def spec(name: str, token_ids: tuple[int, ...], max_new_tokens: int, *, lends: bool) -> SequenceSpec:
        keys = tuple(block_keys(b"key", token_ids, BLOCK_SIZE))
        return SequenceSpec(name, token_ids, 0, SamplingParams(0.0, 0), max_new_tokens, frozenset(), keys, lends)

    prompt = tuple(range(40, 46))
    said = LocalEngine(scheduler, runner).generate([spec("first", prompt, 14, lends=False)])["first"]
    turn = (*prompt, *said, *range(60, 64))
    scheduler.submit(spec("second", turn, 1, lends=True))
    plan = scheduler.plan()
    assert plan is not None and plan.chunks[0].start >= len(prompt) + BLOCK_SIZE, (
        "completion tokens are among those found"
    )
    scheduler.complete(runner.run(plan))
    block_ids = list(scheduler.block_ids("second"))[: len(turn) // BLOCK_SIZE]
    on_device = memory.tensor[block_ids].reshape(len(block_ids), -1).view(torch.uint8).numpy()
    assert np.array_equal(memory.bytes[block_ids], on_device) and on_device.any(-1).all()


@pytest.mark.covers("H01", "Q09")
def test_a_device_that_copies_by_itself_is_waited_for_behind_its_copies(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU a copy is done at once; here it is done when the device, or a step's event, is waited for."""
    memory = KvMemory(model.config, BLOCK_SIZE, 8, model.dtype, mirror="direct")
    under_way: list[tuple[Tensor, Tensor]] = []

    class LateCopies(HostCopies):
        """Knows which copies were begun before it."""

        def __init__(self, *tensors: Tensor) -> None:
            super().__init__(*tensors)
            self.before = len(under_way)

        def wait(self) -> list[Tensor]:
            land(self.before)
            return super().wait()

    def land(count: int) -> None:
        for to, of in under_way[:count]:
            to.copy_(of)
        del under_way[:count]

    monkeypatch.setattr("engine.kv_memory.begin_copy", lambda to, of: under_way.append((to, of.clone())))
    monkeypatch.setattr("engine.kv_memory.wait_for", lambda device: land(len(under_way)))
    monkeypatch.setattr("engine.runner.HostCopies", LateCopies)
    runner = TorchRunner(model, memory, 2, MAX_MODEL_LEN, is_asynchronous=True)
    start = SlotStart(0, 1, SamplingParams(0.8, 7), 0, 0)
    chunk = PrefillChunk(0, 1, 0, tuple(range(40, 47)), (5, 2), samples=True)
    launched = runner.launch(Plan(0, (start,), chunks=(chunk,)))
    on_device = memory.tensor.view(torch.uint8).reshape(memory.bytes.shape).numpy()
    assert under_way and not memory.bytes.any()
    launched.read()
    assert not under_way and np.array_equal(memory.bytes, on_device) and on_device[[5, 2]].any(-1).all()
    memory.bytes[:] = 0
    memory.from_device([2])
    assert not under_way and np.array_equal(memory.bytes[2], on_device[2])
