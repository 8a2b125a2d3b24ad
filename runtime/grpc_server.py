"""A gRPC server of this process, which with certificates counts whom it refuses. Decides nothing of that: unheard.py.

Of a handshake that fails gRPC's library tells nobody (its log apart, which names neither side). What it tells: that a connection
begins its handshake, when it asks for the certificate to show, and in each call who makes it. Here both are heard.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio

from runtime.alarm import Alarm
from runtime.credentials import ChannelOptions, Credentials
from runtime.unheard import Unheard

_KINDS: Final = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]
    Context = grpc.aio.ServicerContext[Any, Any]


class GrpcServer:
    """Make and use it on the running loop. `on_refused` is called there, once for each connection refused."""

    def __init__(
        self,
        credentials: Credentials,
        on_refused: Callable[[], None],
        options: ChannelOptions = (),
        max_calls: int | None = None,
        unheard: Unheard | None = None,
    ) -> None:
        self._credentials = credentials
        self._on_refused = on_refused
        self._unheard = Unheard() if unheard is None else unheard
        self._loop = asyncio.get_running_loop()
        self._alarm = Alarm(self._loop, self._tick)
        # Without certificates nobody is refused, and calls need not pay for the count.
        interceptors = [_Noting(self._called)] if credentials.is_encrypted else []
        self.server = grpc.aio.server(interceptors=interceptors, options=options, maximum_concurrent_rpcs=max_calls)

    def bind(self, address: str) -> int:
        """Listen there; the port. Raises RuntimeError if it cannot."""
        return self._credentials.bind(self.server, address, self._on_handshake)

    async def stop(self, grace_s: float) -> None:
        """End every call, those under way after so long."""
        await self.server.stop(grace_s)
        self._alarm.cancel()

    def _on_handshake(self) -> None:
        """On a thread of gRPC's."""
        try:
            self._loop.call_soon_threadsafe(self._begin)
        except RuntimeError:
            return  # the loop is closed: the process ends

    def _begin(self) -> None:
        self._count(self._unheard.begin(self._loop.time()))

    def _called(self, address: str) -> None:
        self._count(self._unheard.call(address, self._loop.time()))

    def _tick(self) -> None:
        self._count(self._unheard.tick(self._loop.time()))

    def _count(self, num_refused: int) -> None:
        for _ in range(num_refused):
            self._on_refused()
        self._alarm.arm(self._unheard.next_deadline())


class _Noting(grpc.aio.ServerInterceptor):
    """Tells who calls. Only handlers hear that, so each is wrapped, in one of its own sort: gRPC asks if it is a generator."""

    def __init__(self, called: Callable[[str], None]) -> None:
        self._called = called

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # no such method: whoever calls nothing else passes for refused
        (kind,) = (kind for kind in _KINDS if getattr(handler, kind) is not None)
        changed: Handler = handler._replace(**{kind: self._wrapped(getattr(handler, kind))})  # type: ignore[attr-defined]
        return changed

    def _wrapped(self, handle: Callable[[Any, Context], Any]) -> Callable[[Any, Context], Any]:
        if inspect.isasyncgenfunction(handle):

            async def answers(request: Any, context: Context) -> AsyncIterator[Any]:
                self._called(context.peer())
                async with aclosing(handle(request, context)) as replies:
                    async for reply in replies:
                        yield reply

            return answers

        async def answer(request: Any, context: Context) -> Any:
            self._called(context.peer())
            return await handle(request, context)

        return answer
