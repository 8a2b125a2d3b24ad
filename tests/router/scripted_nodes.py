"""A prefill and a decode node that do what a test says, over real sessions; no model, no KV.

Both are gRPC servers with the nodes' own session server. A script is a coroutine that gets each dispatched attempt and answers
it as one node or the other. What routers sent is recorded.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import grpc.aio

from bench.session_service import SessionService
from proto import baton_pb2 as pb
from proto import baton_pb2_grpc as pb_grpc
from runtime.session import Peer, SessionTiming
from runtime.session_driver import CHANNEL_OPTIONS
from runtime.session_server import SessionServer

FINGERPRINT = pb.Fingerprint(
    architecture="scripted",
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
    dtype="none",
    block_size=16,
    weights="0",
    kernels="none",
)


class ScriptedNode:
    """One node process, as far as a router can tell."""

    def __init__(self, name: str, role: pb.Role.ValueType, max_model_len: int, timing: SessionTiming) -> None:
        self.peer = Peer(name, secrets.randbelow(2**64 - 1) + 1)
        self._role = role
        self._max_model_len = max_model_len
        self._sessions = SessionServer(self.peer, self, pb.LoadReport, timing)
        self._server = grpc.aio.server(options=CHANNEL_OPTIONS)
        self._router: Peer | None = None
        self._port = 0
        self.dispatches: list[pb.Dispatch] = []
        self.cancels: list[pb.Cancel] = []
        self.on_dispatch: Callable[[pb.Dispatch], None] = lambda dispatch: None

    async def __aenter__(self) -> Self:
        pb_grpc.add_NodeServicer_to_server(SessionService(self._sessions), self._server)
        self._port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._sessions.close()
        await self._server.stop(0)

    def entry(self) -> pb.NodeEntry:
        """What the registry would say."""
        return pb.NodeEntry(
            node=self.peer.to_proto(),
            role=self._role,
            grpc_address=f"127.0.0.1:{self._port}",
            http_address="127.0.0.1:1",
            fingerprint=FINGERPRINT,
            num_blocks=64,
            max_num_seqs=8,
            max_model_len=self._max_model_len,
        )

    def on_message(self, router: Peer, message: pb.RouterMessage) -> None:
        """SessionHandler."""
        self._router = router
        if message.WhichOneof("kind") == "cancel":
            self.cancels.append(message.cancel)
        else:
            self.dispatches.append(message.dispatch)
            self.on_dispatch(message.dispatch)

    def on_lost(self, router: Peer) -> None:
        """SessionHandler."""

    def send(self, router: Peer, message: pb.NodeMessage) -> None:
        """Say something to a router."""
        self._sessions.send(router, message)

    @property
    def router(self) -> Peer:
        """The router that spoke last."""
        assert self._router is not None
        return self._router


@dataclass(frozen=True, slots=True)
class ScriptedAttempt:
    """What a script answers."""

    dispatch: pb.Dispatch
    prefill: ScriptedNode
    decode: ScriptedNode

    @property
    def key(self) -> pb.AttemptKey:
        """Its fence."""
        branch = self.dispatch.branches[0]
        return pb.AttemptKey(request_id=self.dispatch.request_id, choice=branch.choice, attempt=self.dispatch.attempt)

    @property
    def num_generated(self) -> int:
        """The index of the attempt's first token."""
        return len(self.dispatch.branches[0].generated_token_ids)

    def prefill_says(
        self, first_index: int, token_ids: Sequence[int], finish: pb.FinishReason.ValueType = pb.FINISH_UNSPECIFIED
    ) -> None:
        """Tokens of the prefill node, with logprobs if they are asked for; those of the prompt with its first token."""
        self.prefill.send(self.prefill.router, self._batch(first_index, token_ids, finish, from_receiver=False))

    def decode_says(
        self, first_index: int, token_ids: Sequence[int], finish: pb.FinishReason.ValueType = pb.FINISH_UNSPECIFIED
    ) -> None:
        """Tokens of the decode node, with logprobs if they are asked for."""
        self.decode.send(self.prefill.router, self._batch(first_index, token_ids, finish, from_receiver=True))

    def prefill_fails(
        self,
        code: pb.ErrorCode.ValueType,
        retryable: bool = True,
        retry_after_ms: int = 0,
        commit_unanswered: bool = False,
    ) -> None:
        """A PD Error of the prefill node."""
        error = self._error(code, retryable, retry_after_ms)
        error.error.commit_unanswered = commit_unanswered
        self.prefill.send(self.prefill.router, error)

    def decode_fails(self, code: pb.ErrorCode.ValueType, retryable: bool = True, token_ids: Sequence[int] = ()) -> None:
        """A PD Error of the decode node; `token_ids` are all of the completion so far, or none is told."""
        error = self._error(code, retryable, retry_after_ms=0)
        error.error.completion_token_ids.extend(token_ids)
        self.decode.send(self.prefill.router, error)

    def _batch(
        self, first_index: int, token_ids: Sequence[int], finish: pb.FinishReason.ValueType, *, from_receiver: bool
    ) -> pb.NodeMessage:
        tokens = pb.BranchTokens(key=self.key, first_index=first_index, token_ids=token_ids, finish=finish)
        sampling = self.dispatch.sampling
        if sampling.HasField("num_logprobs"):
            tokens.logprobs.extend([scores(token_id, sampling.num_logprobs) for token_id in token_ids])
        if sampling.prompt_logprobs and not from_receiver and first_index == self.num_generated:
            prompt = self.dispatch.prompt_token_ids[1:]
            tokens.prompt_logprobs.extend([scores(token_id, sampling.num_logprobs) for token_id in prompt])
        return pb.NodeMessage(tokens=pb.TokenBatch(branches=[tokens], from_receiver=from_receiver))

    def _error(self, code: pb.ErrorCode.ValueType, retryable: bool, retry_after_ms: int) -> pb.NodeMessage:
        message = f"PD Error {pb.ErrorCode.Name(code)}: as scripted"
        return pb.NodeMessage(
            error=pb.PDError(
                code=code, message=message, retryable=retryable, key=self.key, retry_after_ms=retry_after_ms
            )
        )


Script = Callable[[ScriptedAttempt], Awaitable[None]]


@dataclass(slots=True)
class ScriptedPair:
    """One node of each role and the script that they follow; scripts that fail show in `aclose`."""

    prefill: ScriptedNode
    decode: ScriptedNode
    script: Script
    tasks: list[asyncio.Future[None]] = field(default_factory=list)

    def start(self) -> None:
        """Follow the script from now on."""
        self.prefill.on_dispatch = self._begin

    def _begin(self, dispatch: pb.Dispatch) -> None:
        """The script plays every branch by itself."""
        for branch in dispatch.branches:
            alone = pb.Dispatch()
            alone.CopyFrom(dispatch)
            del alone.branches[:]
            alone.branches.append(branch)
            self._play(alone)

    def _play(self, dispatch: pb.Dispatch) -> None:
        attempt = ScriptedAttempt(dispatch, self.prefill, self.decode)
        self.tasks.append(asyncio.ensure_future(self.script(attempt)))

    async def close(self) -> None:
        """End what still runs; raise what a script raised."""
        for task in self.tasks:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def scores(token_id: int, num_top: int) -> pb.TokenLogprobs:
    """What the scripted nodes say of a token: -1/4 for itself where it is even, and then the likeliest, else -2."""
    top = [token_id, *range(num_top)] if token_id % 2 == 0 else [*range(300, 300 + num_top)]
    likeliest = [pb.TopLogprob(token_id=each, logprob=-0.25 - 0.25 * rank) for rank, each in enumerate(top)]
    return pb.TokenLogprobs(logprob=-0.25 if token_id % 2 == 0 else -8.0, top=likeliest[:num_top])


def replying(token_ids: Sequence[int], finish: pb.FinishReason.ValueType = pb.FINISH_LENGTH) -> Script:
    """A script that completes to these tokens: the first one left by the prefill node, the rest one by one by the decode node."""

    async def script(attempt: ScriptedAttempt) -> None:
        first = attempt.num_generated
        is_only = len(token_ids) == first + 1
        attempt.prefill_says(first, token_ids[first : first + 1], finish if is_only else pb.FINISH_UNSPECIFIED)
        if is_only:
            return
        attempt.decode_says(first, token_ids[first : first + 1])
        for index in range(first + 1, len(token_ids)):
            is_last = index == len(token_ids) - 1
            attempt.decode_says(index, token_ids[index : index + 1], finish if is_last else pb.FINISH_UNSPECIFIED)
            await asyncio.sleep(0)

    return script
