"""A node's side of all its sessions: serves the streams that routers open, tells what came and which router was lost.

Not here: the rules (session.py), which session a stream belongs to (session_book.py), and the gRPC server itself; the node's
servicer delegates to `Session`:

    async def Session(self, request_iterator, context):
        await self._sessions.Session(request_iterator, context)

A stream has two tasks, one that reads and one that writes, and its handler, which waits for the word to close it. A reader or
writer that is slow holds up its own stream and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Final, Protocol, assert_never

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from proto import baton_pb2 as pb
from runtime.bell import Bell
from runtime.logs import log_event
from runtime.session import Peer, SessionTiming
from runtime.session_book import MAX_SESSIONS, Admitted, SessionBook
from runtime.session_driver import STATUS, SessionDriver, surface, write_frames
from runtime.session_end import MAX_NAME_CHARS, SessionEnd
from runtime.session_events import (
    Broken,
    Called,
    CloseStream,
    Deliver,
    Fate,
    FrameArrived,
    HangUp,
    LoadArrived,
    Lost,
    OpenStream,
    Output,
    Refused,
    Send,
    StreamEnded,
    Superseded,
    Up,
    WakeWriter,
)

if TYPE_CHECKING:
    from proto.baton_pb2_grpc import _MaybeAsyncIterator, _ServicerContext

LOG = logging.getLogger(__name__)
_CLOSE_S: Final = 1.0


class SessionHandler(Protocol):
    """Hears of sessions, on the loop; must neither block nor raise."""

    def on_message(self, router: Peer, message: pb.RouterMessage) -> None:
        """The router's next message, in order, once."""

    def on_lost(self, router: Peer) -> None:
        """The session is gone: all of this router's work here ends."""


@dataclass(slots=True, eq=False)
class _Stream:
    number: int
    wake: Bell
    closing: asyncio.Future[CloseStream]
    handler: asyncio.Task[None]


async def _ended(handlers: set[asyncio.Task[None]]) -> tuple[set[asyncio.Task[None]], set[asyncio.Task[None]]]:
    """Those that have, and those that have not within _CLOSE_S."""
    return await asyncio.wait(handlers, timeout=_CLOSE_S) if handlers else (set(), set())


class SessionServer:
    """All sessions of one node process. Make and use it on the running loop."""

    def __init__(
        self, me: Peer, handler: SessionHandler, load: Callable[[], pb.LoadReport], timing: SessionTiming
    ) -> None:
        self._handler = handler
        self._load = load
        self._timing = timing
        self._book = SessionBook(me, timing)
        self._drivers: dict[SessionEnd, SessionDriver] = {}
        self._streams: dict[int, _Stream] = {}
        self._stream_numbers = count(1)
        self._is_closed = False
        self._refused: dict[str, str] = {}  # by router, oldest first: why it got no session last
        self._past_frames_resent = 0  # of sessions that are lost
        self._past_resumes = 0

    async def Session(self, request_iterator: _MaybeAsyncIterator[pb.Frame], context: _ServicerContext) -> None:
        """Serve one stream from its Hello to its end."""
        del request_iterator  # frames are read from the context
        hello = await self._read_hello(context)
        # By itself and not with the first frame: a write that is cancelled goes on inside gRPC, and abort would then fail to send
        # the same metadata a second time, with the call left hanging.
        await context.send_initial_metadata(())  # type: ignore[misc]  # generated: the type of the sync context comes first
        if self._is_closed:  # since the stream was opened: nobody is there any more who would do what it asks
            await context.abort(STATUS[Fate.ENDED], "this incarnation of the node has ended")
        admission = self._book.admit(hello)
        if not isinstance(admission, Admitted):
            self._tell_refusal(hello.peer.name[:MAX_NAME_CHARS], admission.reason)
            await context.abort(STATUS[admission.fate], admission.reason)
        self._refused.pop(hello.peer.name, None)
        if admission.superseded is not None:
            self._drivers[admission.superseded].feed(Superseded(f"the router opened session {hello.session_id:016x}"))
        driver = self._driver(admission.session)
        number = next(self._stream_numbers)
        handler: asyncio.Task[None] | None = asyncio.current_task()
        assert handler is not None
        stream = _Stream(number, Bell(), asyncio.get_running_loop().create_future(), handler)
        self._streams[number] = stream
        driver.feed(Called(number, hello))
        if admission.session.stream != number:  # feed ticks first, and its grace was over
            del self._streams[number]
            await context.abort(STATUS[Fate.REFUSED], "the session was lost here")
        reader = asyncio.create_task(self._read(driver, number, context), name=f"session reader {number}")
        writer = asyncio.create_task(self._write(driver, stream, context), name=f"session writer {number}")
        try:
            for task in (reader, writer):
                task.add_done_callback(surface)
            closing = await stream.closing
        finally:
            reader.cancel()
            writer.cancel()
            driver.feed(StreamEnded(number, Fate.ENDED, "the router closed the stream"))
            del self._streams[number]
            await asyncio.wait((reader, writer))  # neither touches the context once the handler has returned
        if closing.fate is not Fate.HUNG_UP:
            await context.abort(STATUS[closing.fate], closing.reason)

    def send(self, router: Peer, message: pb.NodeMessage) -> None:
        """Give the router's session its next message; dropped if that session is lost."""
        session = self._book.find(router)
        if session is not None:
            self._drivers[session].feed(Send(message))

    def knows(self, router: Peer) -> bool:
        """Whether the router has a session that is not lost."""
        return self._book.find(router) is not None

    @property
    def num_unacknowledged(self) -> int:
        """Messages that routers may not have; what was meant for a router that is lost is not among them."""
        return sum(session.num_unacknowledged for session in self._book.sessions())

    async def close(self) -> None:
        """End every session, and take no other; the routers hear of it on their streams. The handler hears no more of them."""
        self._is_closed = True
        for session in self._book.sessions():
            self._drivers[session].feed(HangUp())
            if session in self._drivers:  # feed ticks first, and its grace was over
                self._forget(session)
        handlers = {stream.handler for stream in self._streams.values()}
        _, stuck = await _ended(handlers)
        for handler in stuck:  # the end of its call waits behind a frame that a peer that hangs does not take
            handler.cancel()
        await _ended(stuck)

    def snapshot(self) -> Mapping[str, object]:
        """Each router's session, and counts over all sessions since the start; JSON-able."""
        sessions = self._book.sessions()
        return {
            "peers": {session.peer.name: session.snapshot() for session in sessions},
            "frames_resent": self._past_frames_resent + sum(session.frames_resent for session in sessions),
            "resumes": self._past_resumes + sum(session.resumes for session in sessions),
        }

    # ---------------------------------------------------------------- sessions

    def _driver(self, session: SessionEnd) -> SessionDriver:
        if session not in self._drivers:
            self._drivers[session] = SessionDriver(session, lambda output: self._perform(session, output))
        return self._drivers[session]

    def _perform(self, session: SessionEnd, output: Output) -> None:
        router = session.peer
        match output:
            case WakeWriter():  # with every token
                if session.stream is not None:
                    self._streams[session.stream].wake.ring()
            case CloseStream(number):
                stream = self._streams[number]
                if not stream.closing.done():
                    stream.closing.set_result(output)
            case Deliver(message):
                assert isinstance(message, pb.RouterMessage)  # the session refuses the other direction
                self._handler.on_message(router, message)
            case Up(is_resumed):
                log_event(LOG, logging.INFO, "session_up", router=router.name, is_resumed=is_resumed)
            case Broken(reason):
                log_event(LOG, logging.WARNING, "session_broken", router=router.name, reason=reason)
            case Lost(reason):
                log_event(LOG, logging.WARNING, "session_lost", router=router.name, reason=reason)
                self._forget(session)
                self._handler.on_lost(router)
            case OpenStream() | Refused() | LoadArrived():
                raise AssertionError(f"{output} is a dialer's")
            case _:
                assert_never(output)

    def _tell_refusal(self, router: str, reason: str) -> None:
        """Log it, if it is news: a router dials again and again, for as long as its registry names who is not here any more."""
        if self._refused.pop(router, None) != reason:
            log_event(LOG, logging.WARNING, "session_refused", router=router, reason=reason)
        self._refused[router] = reason
        if len(self._refused) > MAX_SESSIONS:
            del self._refused[next(iter(self._refused))]

    def _forget(self, session: SessionEnd) -> None:
        self._book.strike(session)
        self._drivers.pop(session).stop()
        self._past_frames_resent += session.frames_resent
        self._past_resumes += session.resumes

    # ---------------------------------------------------------------- streams

    async def _read_hello(self, context: _ServicerContext) -> pb.Hello:
        try:
            async with asyncio.timeout(self._timing.silence_s):
                frame = await context.read()
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no Hello came")
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first frame does not parse")
        if not isinstance(frame, pb.Frame) or frame.WhichOneof("body") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first frame is not a Hello")
        return frame.hello

    async def _read(self, driver: SessionDriver, number: int, context: _ServicerContext) -> None:
        reason = "the router closed the stream"
        try:
            while isinstance(frame := await context.read(), pb.Frame):
                driver.feed(FrameArrived(number, frame))
        except DecodeError:
            reason = "a frame does not parse"
        except grpc.aio.BaseError:
            reason = "the stream is over"
        driver.feed(StreamEnded(number, Fate.ENDED, reason))

    async def _write(self, driver: SessionDriver, stream: _Stream, context: _ServicerContext) -> None:
        async def write(frame: pb.Frame) -> None:
            if frame.WhichOneof("body") is None:
                frame.load.CopyFrom(self._load())
            await context.write(frame)

        try:
            await write_frames(driver, stream.number, stream.wake, write)
        except grpc.aio.BaseError:
            LOG.debug("event=session_write_failed stream=%d", stream.number)  # over: the reader tells the session
