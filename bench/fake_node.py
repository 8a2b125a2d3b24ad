"""`python -m bench.fake_node`: a prefill node and decode nodes without a model, for what measures a router (bench.router).

They speak all that a router hears of a node: registration, sessions, Dispatch and Cancel, token batches and load. A prompt takes no
time; the prefill node says the first token, the decode node repeats it and then says one of each stream a step (stepping.py), in
messages of as many branches as the pace says. So what a router costs shows, and nothing else. Nobody hands KV over here.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import grpc.aio
import uvloop

from bench.session_service import SessionService
from bench.stepping import Stepper, Stream, obey
from proto import baton_pb2 as pb
from proto import baton_pb2_grpc as pb_grpc
from runtime.config import knob, load, set_grpc_environment
from runtime.credentials import NO_CREDENTIALS
from runtime.process import die_with_parent
from runtime.registry_client import EmbeddedRegistry, RegistryClient
from runtime.session import Peer, SessionTiming
from runtime.session_driver import CHANNEL_OPTIONS
from runtime.session_server import SessionServer

PROG: Final = "python -m bench.fake_node"
# Tokens that a node may be ahead of what the router has acknowledged: 40,000 a second of four nodes, since it does so every 50 ms.
# Were there room for all of a stream, streams would be over here while the router still reads them, and messages be of one branch.
_MOST_AHEAD: Final = 512
_FINGERPRINT: Final = pb.Fingerprint(
    architecture="fake",
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
    dtype="none",
    block_size=16,
    weights="0",
    kernels="none",
)


@dataclass(frozen=True, slots=True)
class FakeNodeConfig:
    """What the fake nodes are told when they start."""

    router: str = knob(help="registries of the routers, with commas between", metavar="HOST:PORT,…")
    decode: int = knob(1, "decode nodes", low=1, high=1000)
    max_num_seqs: int = knob(100_000, "sequences of each decode node", low=1, high=1 << 20)
    token_ids: str = knob("97,98,99,100,101,102,103,104", "what streams say, over and over", metavar="N,…")
    parent_pid: int = knob(0, "die when the process with this id dies; 0: never", low=0)


class _Node:
    """One node as routers see it."""

    def __init__(self, name: str, role: pb.Role.ValueType, farm: _Farm) -> None:
        self.peer = Peer(name, secrets.randbelow(2**64 - 1) + 1)
        self._role = role
        self._farm = farm
        self._load = pb.LoadReport()
        self.sessions = SessionServer(self.peer, self, lambda: self._load, SessionTiming())
        self._server = grpc.aio.server(options=CHANNEL_OPTIONS)
        self._port = 0

    async def start(self) -> None:
        """Listen on a free port."""
        pb_grpc.add_NodeServicer_to_server(SessionService(self.sessions), self._server)
        self._port = NO_CREDENTIALS.bind(self._server, "127.0.0.1:0")
        await self._server.start()

    async def stop(self) -> None:
        """Hang up in good order."""
        await self.sessions.close()
        await self._server.stop(0)

    def entry(self) -> pb.NodeEntry:
        """For the registry."""
        return pb.NodeEntry(
            node=self.peer.to_proto(),
            role=self._role,
            grpc_address=f"127.0.0.1:{self._port}",
            http_address="127.0.0.1:1",
            fingerprint=_FINGERPRINT,
            num_blocks=1 << 24,
            max_num_seqs=self._farm.config.max_num_seqs,
            max_model_len=1 << 20,
        )

    def on_message(self, router: Peer, message: pb.RouterMessage) -> None:
        """SessionHandler."""
        match message.WhichOneof("kind"):
            case "dispatch":
                self._farm.begin(self, router, message.dispatch)
            case "cancel":
                self._farm.cancel(message.cancel.key)

    def on_lost(self, router: Peer) -> None:
        """SessionHandler."""


@dataclass(slots=True, eq=False)
class _Branch:
    """What is needed to say a stream's next token."""

    router: Peer
    node: _Node
    tokens: pb.BranchTokens  # said again and again, with another index and token


class _Farm:
    """All nodes of this process, and the streams on them."""

    def __init__(self, config: FakeNodeConfig) -> None:
        self.config = config
        self._ids = [int(each) for each in config.token_ids.split(",")]
        self.prefill = _Node("prefill-0", pb.ROLE_PREFILL, self)
        decodes = [_Node(f"decode-{index}", pb.ROLE_DECODE, self) for index in range(config.decode)]
        self._decodes = {node.peer.name: node for node in decodes}
        self.stepper = Stepper(self._say, self._is_behind)

    @property
    def nodes(self) -> list[_Node]:
        """Each of them."""
        return [self.prefill, *self._decodes.values()]

    def begin(self, sender: _Node, router: Peer, dispatch: pb.Dispatch) -> None:
        """A prompt is prefilled and handed over at once."""
        now, receiver = time.monotonic(), self._decodes.get(dispatch.target.node.name, sender)
        first, repeated = pb.NodeMessage(), pb.NodeMessage()
        repeated.tokens.from_receiver = True
        for asked in dispatch.branches:
            key = pb.AttemptKey(request_id=dispatch.request_id, choice=asked.choice, attempt=dispatch.attempt)
            num_told, most = len(asked.generated_token_ids), dispatch.sampling.max_tokens
            tokens = pb.BranchTokens(key=key, first_index=num_told, token_ids=[self._ids[num_told % len(self._ids)]])
            name = dispatch.request_id if not asked.choice else f"{dispatch.request_id}/{asked.choice}"
            stream = Stream(name, most - num_told, now, said_at=[time.monotonic()])
            self.stepper.note(stream)
            if stream.is_over:
                tokens.finish = pb.FINISH_LENGTH
            first.tokens.branches.append(tokens)
            if not stream.is_over:
                repeated.tokens.branches.append(tokens)
                stream.handle = _Branch(router, receiver, tokens)
                self.stepper.add(stream, receiver.peer.name + router.name)
        sender.sessions.send(router, first)
        if repeated.tokens.branches:
            receiver.sessions.send(router, repeated)

    def cancel(self, key: pb.AttemptKey) -> None:
        """A client has gone, or has its answer."""
        self.stepper.remove(key.request_id if not key.choice else f"{key.request_id}/{key.choice}")

    def _say(self, streams: Sequence[Stream]) -> None:
        message = pb.NodeMessage()
        batch = message.tokens
        batch.from_receiver = True
        for stream in streams:
            tokens = stream.handle.tokens
            index = tokens.first_index + 1
            tokens.first_index = index
            tokens.token_ids[0] = self._ids[index % len(self._ids)]
            if stream.is_over:
                tokens.finish = pb.FINISH_LENGTH
        batch.branches.extend([stream.handle.tokens for stream in streams])
        branch: _Branch = streams[0].handle
        branch.node.sessions.send(branch.router, message)

    def _is_behind(self) -> bool:
        return any(node.sessions.num_unacknowledged * self.stepper.group > _MOST_AHEAD for node in self.nodes)


async def _serve(config: FakeNodeConfig) -> None:
    farm = _Farm(config)
    for node in farm.nodes:
        await node.start()
    routers = config.router.split(",")
    clients = [
        RegistryClient([EmbeddedRegistry(each) for each in routers], node.entry, _refused) for node in farm.nodes
    ]
    for client in clients:
        client.start()
    async with asyncio.TaskGroup() as tasks:
        stepping = tasks.create_task(farm.stepper.run())
        await obey(farm.stepper, {})
        stepping.cancel()
    for client in clients:
        await client.deregister()
    for node in farm.nodes:
        await node.stop()


def _refused(sentence: str) -> None:
    raise RuntimeError(sentence)


def main(argv: Sequence[str] | None = None) -> int:
    """Run until stdin closes."""
    config = load(FakeNodeConfig, PROG, "Nodes without a model, to measure a router with.", argv)
    set_grpc_environment()
    die_with_parent(config.parent_pid)
    uvloop.run(_serve(config))
    return 0


if __name__ == "__main__":
    sys.exit(main())
