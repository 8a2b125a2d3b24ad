"""Both shells of a session without gRPC: what runtime/session_dialer.py and runtime/session_server.py do, around the same ends.

Every end is ticked before each input, and whatever it asks for is done in order; then its writer pulls frames, if it was woken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, assert_never

from proto import baton_pb2 as pb
from runtime.session import Peer, SessionTiming
from runtime.session_book import Admitted, SessionBook
from runtime.session_end import SessionEnd
from runtime.session_events import (
    Broken,
    Called,
    CloseStream,
    Deliver,
    Fate,
    FrameArrived,
    HangUp,
    Input,
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
from tests.sim.deadlines import Deadlines
from tests.sim.kernel import Process
from tests.sim.stream import Stream, Wire


class RouterHears(Protocol):
    """As runtime/session_dialer.py SessionHandler."""

    def on_up(self, node: Peer) -> None: ...
    def on_broken(self, node: Peer) -> None: ...
    def on_lost(self, node: Peer, loss: Loss) -> None: ...
    def on_message(self, node: Peer, message: pb.NodeMessage) -> None: ...
    def on_load(self, node: Peer, load: pb.LoadReport) -> None: ...


class NodeHears(Protocol):
    """As runtime/session_server.py SessionHandler."""

    def on_message(self, router: Peer, message: pb.RouterMessage) -> None: ...
    def on_lost(self, router: Peer) -> None: ...


Tell = Callable[[str, str], None]  # the log: what, why


@dataclass(slots=True, eq=False)
class _Line:
    peer: Peer
    host: str
    end: SessionEnd
    stream: Stream | None = None
    is_woken: bool = False


class Dialer:
    """A router's side of all its sessions."""

    def __init__(self, process: Process, me: Peer, wire: Wire, hears: RouterHears, tell: Tell) -> None:
        self._process = process
        self._me = me
        self._wire = wire
        self._hears = hears
        self._tell = tell
        self._kernel = wire.kernel
        self._timing = SessionTiming()
        self._lines: dict[Peer, _Line] = {}
        self._touched: dict[SessionEnd, None] = {}
        self._deadlines = Deadlines()
        self._rng = wire.kernel.rng(f"sessions of {process.label}")

    def dial(self, entry: pb.NodeEntry) -> None:
        """Open a session with this node process and keep it."""
        peer = Peer(entry.node.name, entry.node.incarnation)
        host = entry.grpc_address.partition(":")[0]
        if peer in self._lines:
            self._lines[peer].host = host
            return
        for line in [line for line in self._lines.values() if line.peer.name == peer.name]:
            self._end(line, Superseded(f"restarted as {peer.incarnation:016x}"))
        self._lines[peer] = _Line(peer, host, self._new_end(peer, 0.0))

    def hang_up(self, peer: Peer) -> None:
        """Forget the session with this node process."""
        if (line := self._lines.get(peer)) is not None:
            self._end(line, HangUp())

    def hang_up_all(self) -> None:
        """The router ends in order."""
        for line in list(self._lines.values()):
            self._end(line, HangUp())

    def send(self, peer: Peer, message: pb.RouterMessage) -> None:
        """Give the session its next message; dropped where there is none."""
        if (line := self._lines.get(peer)) is not None:
            self._feed(line, Send(message))

    def tick(self) -> None:
        """Fire what is due at every end."""
        due = self._deadlines.due(self._process.clock())
        for line in [line for line in self._lines.values() if line.end in due]:
            self._tick(line)
            self._write(line)

    def next_deadline(self) -> float | None:
        """When tick must be called, by the process's clock."""
        return self._deadlines.first()

    def streams(self) -> list[Stream]:
        """Of every node the newest one, if any is open or being dialed."""
        return [line.stream for line in self._lines.values() if line.stream is not None]

    def take_touched(self) -> list[SessionEnd]:
        """Ends that had an input since this was asked last."""
        touched, self._touched = self._touched, {}
        return list(touched)

    def ends(self) -> list[SessionEnd]:
        """Every session's end."""
        return [line.end for line in self._lines.values()]

    # ---------------------------------------------------------------- DialerSide

    def connected(self, stream: Stream) -> None:
        """Write the Hello."""
        if (line := self._line_of(stream)) is not None:
            line.is_woken = True
            self._write(line)

    def frame_came(self, stream: Stream, frame: pb.Frame) -> None:
        """From the node."""
        if (line := self._line_of(stream)) is not None:
            self._feed(line, FrameArrived(stream.number, frame))

    def ended(self, stream: Stream, fate: Fate, reason: str) -> None:
        """The stream is over."""
        if (line := self._line_of(stream)) is not None:
            self._feed(line, StreamEnded(stream.number, fate, reason))

    def _line_of(self, stream: Stream) -> _Line | None:
        return next((line for line in self._lines.values() if line.stream is stream), None)

    # ---------------------------------------------------------------- the ends

    def _new_end(self, peer: Peer, delay_s: float) -> SessionEnd:
        session_id = self._rng.getrandbits(63) + 1
        end = SessionEnd(self._me, peer, session_id, self._timing, dial_at=self._process.clock() + delay_s)
        self._deadlines.changed(end)
        return end

    def _end(self, line: _Line, how: HangUp | Superseded) -> None:
        del self._lines[line.peer]  # first: no new session follows
        self._feed(line, how)

    def _feed(self, line: _Line, what: Input) -> None:
        end = line.end
        self._touched[end] = None
        self._tick(line)
        self._perform_all(line, end, end.receive(what, self._process.clock()))
        self._write(line)

    def _tick(self, line: _Line) -> None:
        self._deadlines.changed(line.end)
        self._perform_all(line, line.end, line.end.tick(self._process.clock()))

    def _perform_all(self, line: _Line, end: SessionEnd, outputs: list[Output]) -> None:
        for output in outputs:
            self._perform(line, end, output)

    def _perform(self, line: _Line, end: SessionEnd, output: Output) -> None:
        peer = line.peer
        match output:
            case OpenStream(number):
                line.stream = Stream(self._wire, self._process, self, number, line.host)
                line.is_woken = False
            case CloseStream():
                if line.stream is not None:
                    line.stream.close_by_dialer()
                    line.stream = None
            case WakeWriter():
                line.is_woken = True
            case Deliver(message):
                assert isinstance(message, pb.NodeMessage)
                self._hears.on_message(peer, message)
            case LoadArrived(load):
                self._hears.on_load(peer, load)
            case Up(is_resumed):
                self._kernel.count("sessions resumed", int(is_resumed))
                self._tell("session up", f"with {peer.name}{', resumed' if is_resumed else ''}")
                self._hears.on_up(peer)
            case Broken(reason):
                self._tell("session broken", f"with {peer.name}: {reason}")
                self._hears.on_broken(peer)
            case Refused(reason):
                self._tell("session refused", f"by {peer.name}: {reason}")
                self._begin_again(line, end)
            case Lost(reason, loss):
                self._tell("session lost", f"with {peer.name}: {reason}")
                self._begin_again(line, end)
                self._hears.on_lost(peer, loss)
            case _:
                assert_never(output)

    def _begin_again(self, line: _Line, end: SessionEnd) -> None:
        if self._lines.get(line.peer) is line and line.end is end:
            line.end = self._new_end(line.peer, self._timing.backoff_max_s)

    def _write(self, line: _Line) -> None:
        """The writer's turn. It writes nothing before the connection is there."""
        stream = line.stream
        if stream is None or not stream.is_connected or not line.is_woken:
            return
        self._deadlines.changed(line.end)
        while (frame := line.end.next_frame(stream.number, self._process.clock())) is not None:
            stream.send_up(frame)
        line.is_woken = False


class Listener:
    """A node's side of all its sessions."""

    def __init__(
        self, process: Process, me: Peer, hears: NodeHears, load: Callable[[], pb.LoadReport], tell: Tell
    ) -> None:
        self._process = process
        self._hears = hears
        self._load = load
        self._tell = tell
        self._book = SessionBook(me, SessionTiming())
        self._streams: dict[int, Stream] = {}  # by our number
        self._numbers: dict[Stream, int] = {}
        self._ends: dict[int, SessionEnd] = {}  # by our number of the stream
        self._woken: dict[SessionEnd, None] = {}
        self._touched: dict[SessionEnd, None] = {}
        self._deadlines = Deadlines()
        self._num_streams = 0

    def knows(self, router: Peer) -> bool:
        """Whether the router has a session that is not lost."""
        return self._book.find(router) is not None

    @property
    def num_unacknowledged(self) -> int:
        """As SessionServer: messages that routers may not have."""
        return sum(int(str(end.snapshot()["unacknowledged"])) for end in self._book.sessions())

    def send(self, router: Peer, message: pb.NodeMessage) -> None:
        """Give the router's session its next message; dropped if that session is lost."""
        if (end := self._book.find(router)) is not None:
            self._feed(end, Send(message))

    def hang_up_all(self) -> None:
        """The node ends in order."""
        for end in self._book.sessions():
            self._feed(end, HangUp())
            self._book.strike(end)

    def tick(self) -> None:
        """Fire what is due at every end."""
        for end in self._deadlines.due(self._process.clock()):
            self._deadlines.changed(end)
            self._perform_all(end, end.tick(self._process.clock()))
            self._write(end)

    def next_deadline(self) -> float | None:
        """When tick must be called, by the process's clock."""
        return self._deadlines.first()

    def streams(self) -> list[Stream]:
        """Every stream whose Hello was taken and that is not over."""
        return list(self._streams.values())

    def take_touched(self) -> list[SessionEnd]:
        """Ends that had an input since this was asked last."""
        touched, self._touched = self._touched, {}
        return list(touched)

    def ends(self) -> list[SessionEnd]:
        """Every session's end."""
        return list(self._book.sessions())

    # ---------------------------------------------------------------- ListenerSide

    def frame_came(self, stream: Stream, frame: pb.Frame) -> None:
        """From the router; the first frame says which session it is."""
        number = self._numbers.get(stream)
        if number is None:
            self._take_hello(stream, frame)
        else:
            self._feed(self._ends[number], FrameArrived(number, frame))

    def ended(self, stream: Stream, reason: str) -> None:
        """The stream is over."""
        if stream in self._numbers:
            self._forget(stream, reason)

    def _take_hello(self, stream: Stream, frame: pb.Frame) -> None:
        if frame.WhichOneof("body") != "hello":
            stream.close_by_listener(Fate.ENDED, "the first frame is not a Hello")
            return
        admission = self._book.admit(frame.hello)
        if not isinstance(admission, Admitted):
            self._tell("session refused", f"to {frame.hello.peer.name}: {admission.reason}")
            stream.close_by_listener(admission.fate, admission.reason)
            return
        if admission.superseded is not None:
            self._feed(admission.superseded, Superseded("the router opened another session"))
        self._num_streams += 1
        number = self._num_streams
        self._streams[number], self._numbers[stream], self._ends[number] = stream, number, admission.session
        self._feed(admission.session, Called(number, frame.hello))
        if admission.session.stream != number and stream in self._numbers:
            del self._streams[number], self._numbers[stream], self._ends[number]
            stream.close_by_listener(Fate.REFUSED, "the session was lost here")

    def _forget(self, stream: Stream, reason: str) -> None:
        number = self._numbers.pop(stream)
        end = self._ends.pop(number)
        self._feed(end, StreamEnded(number, Fate.ENDED, reason))
        del self._streams[number]

    # ---------------------------------------------------------------- the ends

    def _feed(self, end: SessionEnd, what: Input) -> None:
        self._touched[end] = None
        self._deadlines.changed(end)
        self._perform_all(end, end.tick(self._process.clock()))
        self._perform_all(end, end.receive(what, self._process.clock()))
        self._write(end)

    def _perform_all(self, end: SessionEnd, outputs: list[Output]) -> None:
        for output in outputs:
            self._perform(end, output)

    def _perform(self, end: SessionEnd, output: Output) -> None:
        router = end.peer
        match output:
            case CloseStream(number, fate, reason):
                stream = self._streams[number]
                stream.close_by_listener(fate, reason)
                if stream in self._numbers:
                    self._forget(stream, "closed here")
            case WakeWriter():
                self._woken[end] = None
            case Deliver(message):
                assert isinstance(message, pb.RouterMessage)
                self._hears.on_message(router, message)
            case Up(is_resumed):
                self._tell("session up", f"with {router.name}{', resumed' if is_resumed else ''}")
            case Broken(reason):
                self._tell("session broken", f"with {router.name}: {reason}")
            case Lost(reason):
                self._tell("session lost", f"with {router.name}: {reason}")
                self._book.strike(end)
                self._hears.on_lost(router)
            case OpenStream() | Refused() | LoadArrived():
                raise AssertionError(f"{output} is a dialer's")
            case _:
                assert_never(output)

    def _write(self, end: SessionEnd) -> None:
        if end not in self._woken:
            return
        del self._woken[end]
        if (number := end.stream) is None:
            return
        self._deadlines.changed(end)
        while (frame := end.next_frame(number, self._process.clock())) is not None:
            if frame.WhichOneof("body") is None:
                frame.load.CopyFrom(self._load())
            self._streams[number].send_down(frame)
