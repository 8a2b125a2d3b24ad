"""What happens to KV on its way from one node to the other: a slow link is waited for, and a flipped bit is refused."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from bench.free_port import free_port
from engine.plan import SamplingParams
from engine.sequence import SequenceSpec
from proto import baton_pb2 as pb
from tests.node.test_process import TIMEOUT_S
from tests.node.test_two_nodes import Stream, TestRouter, alone, cluster, dispatch_of, until_free
from tests.transport.tcp_proxy import TcpProxy

HOST: Final = "127.0.0.2"  # where others find the decode node: the way there leads through proxies
LIFE_S: Final = 3.0
BYTES_PER_S: Final = 500_000


@asynccontextmanager
async def through_proxies(
    model_dir: Path, tmp_path: Path, **of_kv: Any
) -> AsyncIterator[tuple[TestRouter, pb.NodeEntry, pb.NodeEntry, TcpProxy]]:
    """A prefill node whose KV goes to the decode node through the proxy, by zmq."""
    with ExitStack() as stack:
        ports = {name: free_port() for name in ("http", "grpc", "kv")}
        proxies = {
            name: stack.enter_context(TcpProxy(port, host=HOST, port=port, **(of_kv if name == "kv" else {})))
            for name, port in ports.items()
        }
        where = [word for name, port in ports.items() for word in (f"--{name}-port", str(port))]
        both = ("--transport", "zmq", "--lease-life-s", str(LIFE_S), "--num-blocks", "400")
        async with cluster(model_dir, tmp_path, both, (*both, "--advertise", HOST, *where)) as (
            router,
            prefill,
            decode,
        ):
            assert decode.grpc_address == f"{HOST}:{ports['grpc']}"
            yield router, prefill, decode, proxies["kv"]


def specs_of(num: int, length: int, seed: int) -> list[SequenceSpec]:
    draw = random.Random(seed)
    return [
        SequenceSpec(
            sequence_id=f"r{index}",
            token_ids=tuple(draw.randrange(256) for _ in range(length)),
            num_generated=0,
            sampling=SamplingParams(temperature=1.0, seed=draw.getrandbits(64)),
            max_new_tokens=8,
            stop_token_ids=frozenset(),
            block_keys=(),
        )
        for index in range(num)
    ]


async def metrics_of(node: pb.NodeEntry) -> str:
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as http:
        return (await http.get(f"http://{node.http_address}/metrics")).text


@pytest.mark.covers("H11", "H07")
def test_a_link_that_is_slow_is_waited_for_however_many_lease_lives_it_takes(
    model_dir: Path, tmp_path: Path, fresh_seed: int
) -> None:
    """All of it is queued at once, so that the last one's Commit is behind everybody's blocks."""
    specs = specs_of(8, 450, fresh_seed)

    async def serve() -> dict[str, list[int]]:
        async with through_proxies(model_dir, tmp_path, bytes_per_s=BYTES_PER_S) as (router, prefill, decode, kv):
            begin = asyncio.get_running_loop().time()
            for spec in specs:
                router.streams[str(spec.sequence_id)] = Stream()
                message = pb.RouterMessage(dispatch=dispatch_of(spec, decode))
                router.dialer.send(prefill.node.name, prefill.node.incarnation, message)
            for stream in router.streams.values():
                await stream.end.wait()
                assert stream.error is None, stream.error
            assert asyncio.get_running_loop().time() - begin > 2 * LIFE_S < kv.num_forwarded / BYTES_PER_S
            await until_free(prefill)
            await until_free(decode)
            return {name: stream.token_ids for name, stream in router.streams.items()}

    assert asyncio.run(serve()) == alone(model_dir, specs)


@pytest.mark.covers("H09")
def test_a_bit_that_flips_between_two_nodes_is_refused_and_the_attempt_can_be_made_again(
    model_dir: Path, tmp_path: Path, fresh_seed: int
) -> None:
    specs = specs_of(1, 200, fresh_seed)

    async def serve() -> list[int]:
        async with through_proxies(model_dir, tmp_path, flip_at=100_000) as (router, prefill, decode, kv):
            dispatch = dispatch_of(specs[0], decode)
            first = router.streams["r0"] = Stream()
            router.dialer.send(prefill.node.name, prefill.node.incarnation, pb.RouterMessage(dispatch=dispatch))
            await first.end.wait()
            assert kv.num_flipped == 1 and first.from_receiver == 0
            assert first.error is not None and first.error.retryable, first.error
            assert 'baton_node_writes_refused_total{code="CHECKSUM"} 1.0' in await metrics_of(decode)
            dispatch.attempt = 1
            again = router.streams["r0"] = Stream()
            router.dialer.send(prefill.node.name, prefill.node.incarnation, pb.RouterMessage(dispatch=dispatch))
            await again.end.wait()
            assert again.error is None and again.from_receiver
            await until_free(prefill)
            await until_free(decode)
            return again.token_ids

    assert asyncio.run(serve()) == alone(model_dir, specs)["r0"]
