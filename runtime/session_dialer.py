"""The router's side of all its sessions: dials nodes, keeps the streams up, tells what came and what was lost.

Each node has its own session, tasks and timers, so a black hole delays nobody else. A session that is lost is followed by a new
one (another session_id), until hang_up. Not here: the rules (session.py), and which nodes there are (registry_server.py).

Where a dial fails as unavailable a plain TCP connect asks whether somebody listens: it is refused where a process died, while
gRPC says the same of much else. Not before the dial: a node counts who connects and makes no call (unheard.py). Each stream has
a channel of its own: a channel's reconnect backoff and its view of a connection that a partition swallowed would be a second
opinion on what the session decides.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol, assert_never

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from proto import baton_pb2 as pb
from proto.baton_pb2_grpc import NodeStub
from runtime.bell import Bell
from runtime.credentials import NO_CREDENTIALS, Credentials
from runtime.logs import log_event
from runtime.session import Peer, SessionTiming, State
from runtime.session_driver import CHANNEL_OPTIONS, FATE, SessionDriver, surface, write_frames
from runtime.session_end import SessionEnd
from runtime.session_events import (
    Broken,
    CloseStream,
    Deliver,
    Fate,
    FrameArrived,
    HangUp,
    LoadArrived,
    Loss,
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

LOG = logging.getLogger(__name__)

PARTING_S: Final = 1.0  # twenty times what an acknowledgement may take, half of the grace that it is to save
_PARTING_POLL_S: Final = 0.005

_OWN_CONNECTION: Final = (("grpc.use_local_subchannel_pool", 1),)  # else channels to one address share one


class SessionHandler(Protocol):
    """Hears of sessions, on the loop; must neither block nor raise."""

    def on_up(self, node: Peer) -> None:
        """The session is open; also after a resume."""

    def on_broken(self, node: Peer) -> None:
        """There is no stream at the moment; on_up or on_lost follows within the grace."""

    def on_lost(self, node: Peer, loss: Loss) -> None:
        """The session is gone with all that was sent on it; on_up may follow, for a new one."""

    def on_message(self, node: Peer, message: pb.NodeMessage) -> None:
        """The node's next message, in order, once."""

    def on_load(self, node: Peer, load: pb.LoadReport) -> None:
        """The node's newest load report."""


@dataclass(slots=True, eq=False)
class _Line:
    """What the dialer keeps of one node: where it is, and the session with it."""

    peer: Peer
    address: str
    driver: SessionDriver | None = None  # None only while the line is being made
    wake: Bell = field(default_factory=Bell)  # of the newest stream's writer
    task: asyncio.Task[None] | None = None  # of the newest stream
    last_refusal: str = ""  # already logged
    is_told: bool = False  # logged that it was up, or why it is not; from then on losses say why
    frames_resent: int = 0  # of sessions that are lost
    resumes: int = 0


class SessionDialer:
    """All sessions of one router process. Make and use it on the running loop."""

    def __init__(
        self, me: Peer, handler: SessionHandler, timing: SessionTiming, credentials: Credentials = NO_CREDENTIALS
    ) -> None:
        self._me = me
        self._credentials = credentials
        self._handler = handler
        self._timing = timing
        self._lines: dict[Peer, _Line] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._past_frames_resent = 0  # of nodes that were hung up
        self._past_resumes = 0

    def dial(self, entry: pb.NodeEntry) -> None:
        """Open a session with this node process and keep it; again for the same one: only the address may have changed.

        Another incarnation of a name that is known: the older process is dead, its session is lost at once.
        """
        peer = Peer(entry.node.name, entry.node.incarnation)
        if peer in self._lines:
            self._lines[peer].address = entry.grpc_address
            return
        for line in [line for line in self._lines.values() if line.peer.name == peer.name]:
            self._end(line, Superseded(f"restarted as {peer.incarnation:016x}"))
        line = _Line(peer, entry.grpc_address)
        self._lines[peer] = line
        self._begin_session(line, delay_s=0.0)

    def hang_up(self, name: str, incarnation: int) -> None:
        """Forget the session with this node process; the handler hears no more of it."""
        line = self._lines.get(Peer(name, incarnation))
        if line is not None:
            self._end(line, HangUp())

    def send(self, name: str, incarnation: int, message: pb.RouterMessage) -> None:
        """Give the session its next message; dropped where none is up or to be resumed."""
        line = self._lines.get(Peer(name, incarnation))
        if line is not None and line.driver is not None:
            line.driver.feed(Send(message))

    async def close(self) -> None:
        """Hang up everywhere as soon as all that was said has arrived, and wait until every stream is closed.

        A node that does not answer is given PARTING_S: what runs there for this router ends with the session's grace.
        """
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + PARTING_S
        while any(map(_has_to_say, self._lines.values())) and loop.time() < give_up_at:  # noqa: ASYNC110 - of many sessions
            await asyncio.sleep(_PARTING_POLL_S)
        for line in list(self._lines.values()):
            self._end(line, HangUp())
        if self._tasks:
            await asyncio.wait(self._tasks)

    def snapshot(self) -> Mapping[str, object]:
        """Each node's session, and counts over all sessions since the start; JSON-able."""
        peers: dict[str, object] = {}
        frames_resent, resumes = self._past_frames_resent, self._past_resumes
        for line in self._lines.values():
            frames_resent += line.frames_resent
            resumes += line.resumes
            if line.driver is not None:
                peers[line.peer.name] = {"address": line.address, **line.driver.session.snapshot()}
                frames_resent += line.driver.session.frames_resent
                resumes += line.driver.session.resumes
        return {"peers": peers, "frames_resent": frames_resent, "resumes": resumes}

    # ---------------------------------------------------------------- sessions

    def _begin_session(self, line: _Line, delay_s: float) -> None:
        self._close_books(line)
        session_id = secrets.randbelow(2**64 - 1) + 1
        dial_at = asyncio.get_running_loop().time() + delay_s
        session = SessionEnd(self._me, line.peer, session_id, self._timing, dial_at=dial_at)
        driver = SessionDriver(session, lambda output: self._perform(line, driver, output))
        line.driver = driver

    def _close_books(self, line: _Line) -> None:
        """Stop the line's session, which is lost if there is one, and keep its counts."""
        if line.driver is not None:
            line.driver.stop()
            line.frames_resent += line.driver.session.frames_resent
            line.resumes += line.driver.session.resumes
            line.driver = None

    def _end(self, line: _Line, how: HangUp | Superseded) -> None:
        del self._lines[line.peer]  # first: no new session follows
        if line.driver is not None:
            line.driver.feed(how)
        self._close_books(line)
        self._past_frames_resent += line.frames_resent
        self._past_resumes += line.resumes

    def _perform(self, line: _Line, driver: SessionDriver, output: Output) -> None:
        peer = line.peer
        match output:  # what comes with every token first
            case Deliver(message):
                assert isinstance(message, pb.NodeMessage)  # the session refuses the other direction
                self._handler.on_message(peer, message)
            case WakeWriter():
                line.wake.ring()
            case OpenStream(stream):
                self._open_stream(line, driver, stream)
            case CloseStream(reason=reason):
                if driver.session.state is State.CONNECTING and not line.is_told:
                    line.is_told = True
                    address = line.address
                    log_event(LOG, logging.WARNING, "node_not_reached", node=peer.name, address=address, reason=reason)
                if line.task is not None:
                    line.task.cancel()
                    line.task = None
            case LoadArrived(load):
                self._handler.on_load(peer, load)
            case Up(is_resumed):
                line.last_refusal, line.is_told = "", True
                log_event(LOG, logging.INFO, "session_up", node=peer.name, is_resumed=is_resumed)
                self._handler.on_up(peer)
            case Broken(reason):
                log_event(LOG, logging.WARNING, "session_broken", node=peer.name, reason=reason)
                self._handler.on_broken(peer)
            case Refused(reason):
                if reason != line.last_refusal:
                    line.last_refusal = reason
                    log_event(LOG, logging.WARNING, "session_refused", node=peer.name, reason=reason)
                self._begin_again(line)
            case Lost(_, Loss.HUNG_UP):
                log_event(LOG, logging.INFO, "session_ended", node=peer.name, by="the node, in good order")
                self._begin_again(line)
                self._handler.on_lost(peer, Loss.HUNG_UP)
            case Lost(reason, loss):
                log_event(LOG, logging.WARNING, "session_lost", node=peer.name, reason=reason)
                self._begin_again(line)
                self._handler.on_lost(peer, loss)
            case _:
                assert_never(output)

    def _begin_again(self, line: _Line) -> None:
        if self._lines.get(line.peer) is line:
            self._begin_session(line, delay_s=self._timing.backoff_max_s)

    # ---------------------------------------------------------------- streams

    def _open_stream(self, line: _Line, driver: SessionDriver, stream: int) -> None:
        line.wake = Bell()
        task = asyncio.create_task(
            _run_stream(line.address, self._credentials, driver, stream, line.wake),
            name=f"session stream to {line.peer.name}",
        )
        line.task = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(surface)


def _has_to_say(line: _Line) -> bool:
    """Whether messages are on their way over a stream that is up."""
    if line.driver is None:
        return False
    session = line.driver.session
    return session.state is State.OPEN and session.num_unacknowledged > 0


async def _run_stream(address: str, credentials: Credentials, driver: SessionDriver, stream: int, wake: Bell) -> None:
    """Live one stream from its dial to its end; the session that opened it cancels this task to close it."""
    try:
        await _converse(address, credentials, driver, stream, wake)
        ended = StreamEnded(stream, Fate.HUNG_UP, "it hung up")
    except ConnectionRefusedError:
        ended = StreamEnded(stream, Fate.PORT_REFUSED, f"{address} refuses connections")
    except OSError as error:
        ended = StreamEnded(stream, Fate.ENDED, str(error))
    except DecodeError:
        ended = StreamEnded(stream, Fate.ENDED, "a frame does not parse")
    except grpc.aio.AioRpcError as error:
        fate = FATE.get(error.code(), Fate.ENDED)
        ended = StreamEnded(stream, fate, f"{error.code().name} {error.details()}")
    driver.feed(ended)


async def _converse(address: str, credentials: Credentials, driver: SessionDriver, stream: int, wake: Bell) -> None:
    """Return if the node ends the stream with the status OK; ConnectionRefusedError if nobody listens."""
    is_answered = False
    channel = credentials.channel(address, CHANNEL_OPTIONS + _OWN_CONNECTION)
    try:
        call = NodeStub(channel).Session()
        writer = asyncio.create_task(_write(driver, stream, wake, call), name=f"session writer to {address}")
        writer.add_done_callback(surface)
        try:
            while isinstance(frame := await call.read(), pb.Frame):
                is_answered = True
                driver.feed(FrameArrived(stream, frame))
            if frame is not grpc.aio.EOF:
                raise DecodeError("gRPC gives None for it")
        except grpc.aio.AioRpcError as error:
            if not is_answered and error.code() is grpc.StatusCode.UNAVAILABLE:
                await _probe(address)
            raise
        finally:
            writer.cancel()
            call.cancel()
    finally:
        await channel.close()


async def _write(
    driver: SessionDriver,
    stream: int,
    wake: Bell,
    call: grpc.aio.StreamStreamCall[pb.Frame, pb.Frame],
) -> None:
    try:
        await write_frames(driver, stream, wake, call.write)
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
        LOG.debug("event=session_write_failed reason=%r", error)  # the reader hears why, and tells the session


async def _probe(address: str) -> None:
    """Connect and disconnect; ConnectionRefusedError if every address of the host refuses, else OSError."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    errors: list[OSError] = []
    for family, kind, protocol, _, where in await loop.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM
    ):
        with socket.socket(family, kind, protocol) as attempt:
            attempt.setblocking(False)
            try:
                await loop.sock_connect(attempt, where)
            except OSError as error:
                errors.append(error)
            else:
                return
    raise next((e for e in errors if not isinstance(e, ConnectionRefusedError)), errors[0])
