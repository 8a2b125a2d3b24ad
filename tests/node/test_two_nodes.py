"""A prefill and a decode node as real processes, with the test as their router: tokens equal one engine alone."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import httpx
import pytest

from engine.block_pool import BlockPool
from engine.kv_memory import KvMemory
from engine.local_engine import LocalEngine
from engine.model import load_model
from engine.plan import SamplingParams
from engine.runner import TorchRunner
from engine.scheduler import Scheduler, SchedulerConfig
from engine.sequence import SequenceSpec
from proto import baton_pb2 as pb
from runtime.session import Peer, SessionTiming
from runtime.session_dialer import SessionDialer
from runtime.session_events import Loss
from tests.kernels_choice import KERNELS
from tests.node.test_process import TIMEOUT_S, flags, running

SIZES = ("--num-blocks", "200", "--max-model-len", "512", "--max-num-batched-tokens", "48", "--max-num-seqs", "16")


@dataclass(slots=True)
class Stream:
    """One request as its client would see it."""

    token_ids: list[int] = field(default_factory=list)
    from_receiver: int = 0
    is_decoding: asyncio.Event = field(default_factory=asyncio.Event)
    end: asyncio.Event = field(default_factory=asyncio.Event)
    error: pb.PDError | None = None


class TestRouter:
    """The least that a router does: two sessions, tokens by index."""

    __test__ = False

    def __init__(self, nodes: list[pb.NodeEntry]) -> None:
        self.streams: dict[str, Stream] = {}
        self._up = {Peer(entry.node.name, entry.node.incarnation): asyncio.Event() for entry in nodes}
        self.dialer = SessionDialer(Peer("router", 1), self, SessionTiming(silence_s=100, grace_s=100))
        for entry in nodes:
            self.dialer.dial(entry)

    async def ready(self) -> None:
        for up in self._up.values():
            await up.wait()

    def on_up(self, node: Peer) -> None:
        self._up[node].set()

    def on_broken(self, node: Peer) -> None:
        pass  # by the node, if this process stood still: all that was said is said again

    def on_lost(self, node: Peer, loss: Loss) -> None:
        raise AssertionError(f"{node.name} was lost")

    def on_load(self, node: Peer, load: pb.LoadReport) -> None:
        pass

    def on_message(self, node: Peer, message: pb.NodeMessage) -> None:
        if message.WhichOneof("kind") == "error":
            stream = self.streams[message.error.key.request_id]
            stream.error = message.error
            stream.end.set()
            return
        for branch in message.tokens.branches:
            stream = self.streams[branch.key.request_id]
            stream.from_receiver += message.tokens.from_receiver
            assert branch.first_index <= len(stream.token_ids)  # no gap
            # The nodes' sessions have no common order: the sender's token may come behind all of the receiver's.
            stream.token_ids[branch.first_index : branch.first_index + len(branch.token_ids)] = branch.token_ids
            if stream.from_receiver > 1:  # the first one repeats the sender's token
                stream.is_decoding.set()
            if branch.finish:
                stream.end.set()


def entry_of(ready: dict[str, str], state: dict[str, str]) -> pb.NodeEntry:
    peer = pb.PeerId(name=state["node_id"], incarnation=int(state["incarnation"], 16))
    return pb.NodeEntry(node=peer, grpc_address=ready["grpc"], http_address=ready["http"])


@asynccontextmanager
async def cluster(
    model_dir: Path, tmp_path: Path, of_prefill: Sequence[str] = (), of_decode: Sequence[str] = ()
) -> AsyncIterator[tuple[TestRouter, pb.NodeEntry, pb.NodeEntry]]:
    """One node of each role, with flags of its own, and sessions with both; all blocks must be free again at the end."""
    arguments = flags(model_dir, *SIZES)
    with (
        running("prefill_node", [*arguments, *of_prefill], tmp_path / "p.json") as (prefill_process, prefill_ready),
        running("decode_node", [*arguments, *of_decode], tmp_path / "d.json") as (decode_process, decode_ready),
    ):
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as http, asyncio.timeout(120):
            entries = [
                entry_of(ready, (await http.get(f"http://{ready['http']}/state")).json())
                for ready in (prefill_ready, decode_ready)
            ]
        router = TestRouter(entries)
        try:
            async with asyncio.timeout(120):
                await router.ready()
                yield router, entries[0], entries[1]
        finally:
            await router.dialer.close()
        for process in (prefill_process, decode_process):
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == 0


async def state_of(entry: pb.NodeEntry) -> dict[str, dict[str, int]]:
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as http:
        answer = await http.get(f"http://{entry.http_address}/state")
    state: dict[str, dict[str, int]] = json.loads(answer.text)
    return state


async def until_free(entry: pb.NodeEntry) -> dict[str, dict[str, int]]:
    """The state once no block is used, leased or quarantined; A10 allows a second, and machines that stand still more."""
    async with asyncio.timeout(30):
        while True:
            state = await state_of(entry)
            if sum(state["blocks"][kind] for kind in ("used", "leased", "quarantined")) == 0:
                return state


def alone(
    model_dir: Path, specs: list[SequenceSpec], weight_dtype: Literal["auto", "int8"] = "auto"
) -> dict[str, list[int]]:
    """What one engine alone generates."""
    model = load_model(model_dir, "fp32", KERNELS, weight_dtype=weight_dtype)
    pool, memory = BlockPool(200, 16), KvMemory(model.config, 16, 200, "fp32")
    scheduler = Scheduler(SchedulerConfig(4, 64, 512), pool, b"alone")
    return LocalEngine(scheduler, TorchRunner(model, memory, 4, 512)).generate(specs)  # type: ignore[return-value]


@pytest.mark.covers("D07", "P01", "H01")
def test_tokens_equal_one_engine_alone_and_the_kv_crossed_the_wire(
    model_dir: Path, tmp_path: Path, fresh_seed: int
) -> None:
    draw = random.Random(fresh_seed)
    # Around block (16) and chunk (48) borders, greedy and seeded.
    lengths = (1, 15, 16, 17, 31, 47, 48, 49, 96, 97, 130, 200)
    specs = [
        SequenceSpec(
            sequence_id=f"r{length}",
            token_ids=tuple(draw.randrange(256) for _ in range(length)),
            num_generated=0,
            sampling=SamplingParams(temperature=draw.choice((0.0, 1.0)), seed=draw.getrandbits(64)),
            max_new_tokens=draw.choice((1, 2, 40)),
            stop_token_ids=frozenset(),
            block_keys=(),
        )
        for length in lengths
    ]

    async def serve() -> dict[str, list[int]]:
        async with cluster(model_dir, tmp_path) as (router, prefill, decode):
            for spec in specs:
                name = str(spec.sequence_id)
                router.streams[name] = Stream()
                message = pb.RouterMessage(dispatch=dispatch_of(spec, decode))
                router.dialer.send(prefill.node.name, prefill.node.incarnation, message)
            for stream in router.streams.values():
                await stream.end.wait()
                assert stream.error is None
            for spec in specs:
                assert (router.streams[str(spec.sequence_id)].from_receiver > 0) == (spec.max_new_tokens > 1)
            sent, received = await until_free(prefill), await until_free(decode)
            num_bytes = sent["kv_bytes_sent"][decode.node.name]
            assert num_bytes > 0
            assert received["kv_bytes_received"][prefill.node.name] == num_bytes
            return {name: stream.token_ids for name, stream in router.streams.items()}

    assert asyncio.run(serve()) == alone(model_dir, specs)


@pytest.mark.covers("A10", "P08")
def test_a_cancelled_request_leaves_no_block_taken_on_either_node(model_dir: Path, tmp_path: Path) -> None:
    # So long that it still runs when it is cancelled, however late.
    spec = SequenceSpec("r", tuple(range(1, 100)), 0, SamplingParams(0.0, 0), 3900, frozenset(), ())
    sizes = ("--num-blocks", "300", "--max-model-len", "4096")

    async def serve() -> None:
        async with cluster(model_dir, tmp_path, sizes, sizes) as (router, prefill, decode):
            stream = router.streams["r"] = Stream()
            message = pb.RouterMessage(dispatch=dispatch_of(spec, decode))
            router.dialer.send(prefill.node.name, prefill.node.incarnation, message)
            await stream.is_decoding.wait()
            cancel = pb.RouterMessage(cancel=pb.Cancel(key=pb.AttemptKey(request_id="r"), ms_left=60_000))
            for node in (prefill, decode):
                router.dialer.send(node.node.name, node.node.incarnation, cancel)
            for node in (prefill, decode):
                assert (await until_free(node))["blocks"]["cached"] > 0  # its prefix stays
            assert not stream.end.is_set()

    asyncio.run(serve())


@pytest.mark.covers("H10", "M04")
@pytest.mark.parametrize("decode_dtype", ["int8", "auto"])
def test_nodes_with_weights_in_8_bits_hand_over_to_each_other_and_to_no_others(
    model_dir: Path, tmp_path: Path, decode_dtype: str
) -> None:
    spec = SequenceSpec("r", tuple(range(1, 100)), 0, SamplingParams(1.0, 0), 300, frozenset(), ())
    flags_of_dtypes = [("--weight-dtype", "int8"), ("--weight-dtype", decode_dtype)]

    async def serve() -> Stream:
        async with cluster(model_dir, tmp_path, *flags_of_dtypes) as (router, prefill, decode):
            stream = router.streams["r"] = Stream()
            message = pb.RouterMessage(dispatch=dispatch_of(spec, decode))
            router.dialer.send(prefill.node.name, prefill.node.incarnation, message)
            await stream.end.wait()
            received = (await until_free(decode))["kv_bytes_received"]
            assert bool(received) == (decode_dtype == "int8"), "whether KV crossed the wire"
            return stream

    stream = asyncio.run(serve())
    if decode_dtype == "int8":
        assert {"r": stream.token_ids} == alone(model_dir, [spec], "int8")
        assert stream.token_ids != alone(model_dir, [spec])["r"], "8 bits are not seen in the tokens"
    else:
        assert stream.error is not None and stream.error.code == pb.INCOMPATIBLE and "kernels" in stream.error.message


def dispatch_of(spec: SequenceSpec, decode: pb.NodeEntry) -> pb.Dispatch:
    return pb.Dispatch(
        request_id=str(spec.sequence_id),
        attempt=0,
        branches=[pb.Branch(choice=0, seed=spec.sampling.seed)],
        prompt_token_ids=spec.token_ids,
        sampling=pb.Sampling(temperature=spec.sampling.temperature, max_tokens=spec.max_new_tokens),
        target=pb.Target(node=decode.node, grpc_address=decode.grpc_address),
        ms_left=60_000,
    )
