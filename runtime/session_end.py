"""One end of a session: its numbers, its unacknowledged messages, its timers. Driven by the table in session.py; as pure as that.

`receive(input, now)` and `tick(now)` return outputs for the shell, to be performed in order. What goes onto the wire is pulled,
not pushed: while a stream is there, its writer takes `next_frame(now)` until that is None, and waits for WakeWriter. A frame
that was pulled and lost with its stream is pulled again on the next one.

    unacknowledged   [ acked+1 … sent | … last given ]      sent: highest number ever pulled
                               ^ cursor: next to pull; back to acked+1 when a stream is attached

Streams are numbered by whoever makes them: a dialer's end (OpenStream), a listener's shell (Called).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

from proto import baton_pb2 as pb
from runtime.session import PROTOCOL, Action, Event, Peer, SessionTiming, State, step
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
    Message,
    OpenStream,
    Output,
    Refused,
    Send,
    StreamEnded,
    Superseded,
    Up,
    WakeWriter,
)

MAX_NAME_CHARS: Final = 255
# What says more of the peer's process than that its session is lost.
_LOSSES: Final = {Fate.PORT_REFUSED: Loss.DIED, Fate.REPLACED: Loss.DIED, Fate.HUNG_UP: Loss.HUNG_UP}
_UP: Final = (State.OPEN, State.ATTACHED)
_DOWN: Final = (State.BROKEN, State.DETACHED)


def hello_problem(hello: pb.Hello, me: Peer) -> str | None:
    """Why this Hello is not for us: field, value and what was expected; None if it is."""
    if hello.protocol != PROTOCOL:
        return f"protocol is {hello.protocol}, this process speaks {PROTOCOL}"
    if hello.to_incarnation != me.incarnation:
        return f"to_incarnation is {hello.to_incarnation:016x}, this process is {me.incarnation:016x}"
    if not hello.peer.name or not hello.peer.incarnation or not hello.session_id:
        return "peer.name, peer.incarnation and session_id must be set"
    if len(hello.peer.name) > MAX_NAME_CHARS:
        return f"peer.name has {len(hello.peer.name)} characters, at most {MAX_NAME_CHARS} are taken"
    return None


class SessionEnd:
    """One end of one session, from its first dial (or Hello) until it is lost."""

    def __init__(self, me: Peer, peer: Peer, session_id: int, timing: SessionTiming, *, dial_at: float | None) -> None:
        """A dialer's end dials at the instant `dial_at`; a listener's has None there and waits for Called."""
        self.peer = peer
        self.session_id = session_id
        self.state = State.AWAITED if dial_at is None else State.CONNECTING
        self._me = me
        self._timing = timing
        self.stream: int | None = None  # the attached one, or the one being dialed
        self._last_stream = 0
        self._hello_due = False
        # numbers
        self._kept: deque[tuple[Message, int]] = (
            deque()
        )  # unacknowledged: (message, bytes); the first has number acked + 1
        self._kept_bytes = 0
        self._acked = 0
        self._sent = 0
        self._cursor = 1
        self._received = 0
        # timers, in seconds of the shell's monotonic clock
        self._dial_at = dial_at
        self._dial_ends_at: float | None = None
        self._backoff_s = timing.backoff_min_s
        self._was_up = False
        self._attached_at = 0.0
        self._heard_at = 0.0
        self._beat_at = 0.0  # when something must be sent at the latest
        self._keepalive_at = 0.0  # the same without what came meanwhile; a listener's load rides on it
        self._beat_due = False
        # counts
        self.frames_resent = 0
        self.resumes = 0

    # ---------------------------------------------------------------- for the shell

    def receive(self, what: Input, now: float) -> list[Output]:
        """Take one input; the shell has called tick(now) before."""
        match what:
            case FrameArrived(stream, frame):
                return self._take_frame(stream, frame, now)
            case Send(message):
                return self._send(message, now)
            case StreamEnded(stream, fate, reason):
                return self._step(self._end_event(stream, fate), now, reason=reason, loss=_LOSSES.get(fate))
            case Called(stream, hello):
                if self.state is not State.LOST:
                    self._trim(hello.last_received)
                return self._step(Event.CALLED, now, reason="replaced by a newer stream", stream=stream)
            case Superseded(reason):
                return self._step(Event.SUPERSEDED, now, reason=reason, loss=Loss.DIED)
            case HangUp():
                return self._step(Event.HANG_UP, now, reason="hung up", loss=Loss.HUNG_UP)

    def tick(self, now: float) -> list[Output]:
        """Fire every timer that is due.

        A loop that was held up reads its timers before its sockets: what came meanwhile is not silence. So the time by which
        the earliest timer is late does not count against the peer, and a moment is left to read what there is.
        """
        out: list[Output] = []
        timing = self._timing
        deadline = self.next_deadline()
        if deadline is not None and now - deadline > timing.late_s:
            self._heard_at += now - deadline + timing.late_s
        if self.state in _UP and now >= self._heard_at + timing.silence_s:
            out += self._step(Event.SILENCE, now, reason=f"nothing came for {timing.silence_s:g} s")
        if self.state in _DOWN and now >= self._heard_at + timing.grace_s:
            out += self._step(Event.GRACE_OVER, now, reason=f"nothing came for {timing.grace_s:g} s")
        if self._dial_ends_at is not None and now >= self._dial_ends_at:
            out += self._step(Event.DIAL_FAILED, now, reason=f"no Hello within {timing.dial_timeout_s:g} s")
        if self._dial_at is not None and now >= self._dial_at:
            out += self._step(Event.DIAL_DUE, now)
        if self.state in _UP and not self._beat_due and now >= self._beat_at:
            self._beat_due = True
            out.append(WakeWriter())
        return out

    def next_deadline(self) -> float | None:
        """When tick must be called at the latest; None only before the first Hello of a listener, and when lost."""
        if self.state in _UP:  # nothing is dialed then
            silent_at = self._heard_at + self._timing.silence_s
            # Once the beat is due the writer knows, and is held up by the stream.
            return silent_at if self._beat_due else min(silent_at, self._beat_at)
        due = [at for at in (self._dial_at, self._dial_ends_at) if at is not None]
        if self.state in _DOWN:
            due.append(self._heard_at + self._timing.grace_s)
        return min(due, default=None)

    def next_frame(self, stream: int, now: float) -> pb.Frame | None:
        """What this stream's writer must write next: Hello, then messages, then an acknowledgement if one is due."""
        if stream != self.stream:
            return None
        if self._hello_due:
            self._hello_due = False
            frame = pb.Frame(hello=self._hello())
        elif self.state not in _UP:
            return None
        elif self._cursor <= self._acked + len(self._kept):
            message, _ = self._kept[
                self._cursor - self._acked - 1
            ]  # a deque: cheap near its ends, and resends are rare
            self.frames_resent += self._cursor <= self._sent
            self._sent = max(self._sent, self._cursor)
            frame = pb.Frame(seq=self._cursor)
            if isinstance(message, pb.RouterMessage):
                frame.router.CopyFrom(message)
            else:
                frame.node.CopyFrom(message)
            self._cursor += 1
        elif self._beat_due:
            frame = pb.Frame()
        else:
            return None
        frame.ack = self._received
        if self.state is not State.ATTACHED or frame.WhichOneof("body") is None:  # a node's load rides on those
            self._keepalive_at = now + self._timing.keepalive_s
        self._beat_at = self._keepalive_at
        self._beat_due = now >= self._beat_at
        return frame

    @property
    def num_unacknowledged(self) -> int:
        """Messages of this side that the peer may not have."""
        return len(self._kept)

    def accepts(self, hello: pb.Hello) -> bool:
        """Listener: whether this Hello can be the peer's; it cannot have received what was never sent."""
        return Peer(hello.peer.name, hello.peer.incarnation) == self.peer and hello.last_received <= self._sent

    def snapshot(self) -> Mapping[str, object]:
        """All that decides what this end does next, JSON-able; instants of the shell's clock end in `_at`."""
        return {
            "peer": self.peer.name,
            "state": self.state.name,
            "stream": self.stream,
            "unacknowledged": len(self._kept),
            "unacknowledged_bytes": self._kept_bytes,
            "acked": self._acked,
            "sent": self._sent,
            "cursor": self._cursor,
            "received": self._received,
            "hello_due": self._hello_due,
            "beat_due": self._beat_due,
            "beat_at": self._beat_at,
            "keepalive_at": self._keepalive_at,
            "heard_at": self._heard_at,
            "was_up": self._was_up,
            "attached_at": self._attached_at,
            "dial_at": self._dial_at,
            "dial_ends_at": self._dial_ends_at,
            "backoff_s": self._backoff_s,
            "frames_resent": self.frames_resent,
            "resumes": self.resumes,
        }

    # ---------------------------------------------------------------- inputs into events

    def _end_event(self, stream: int, fate: Fate) -> Event:
        if stream != self.stream:
            return Event.STALE
        if fate in (Fate.REFUSED, Fate.REPLACED, Fate.HUNG_UP):
            return Event.REFUSED
        if self.state in _UP:
            return Event.STREAM_ENDED
        return Event.PORT_REFUSED if fate is Fate.PORT_REFUSED else Event.DIAL_FAILED

    def _take_frame(self, stream: int, frame: pb.Frame, now: float) -> list[Output]:
        if stream != self.stream:
            return self._step(Event.STALE, now)
        if self.state not in _UP:
            return self._take_welcome(frame, now)
        body = frame.WhichOneof("body")
        problem = self._frame_problem(frame, body)
        if problem is not None:
            return self._step(Event.VIOLATION, now, reason=problem)
        self._heard_at = now
        self._trim(frame.ack)
        if body == "load":
            return [LoadArrived(frame.load)]
        if body is None:
            return []
        if frame.seq <= self._received:
            return self._step(Event.REPEAT, now)
        self._received = frame.seq
        return self._step(Event.MESSAGE, now, message=frame.node if body == "node" else frame.router)

    def _take_welcome(self, frame: pb.Frame, now: float) -> list[Output]:
        """The first frame on a stream that we opened."""
        if frame.WhichOneof("body") != "hello":
            return self._step(Event.DIAL_FAILED, now, reason="the first frame is not a Hello")
        hello = frame.hello
        problem = hello_problem(hello, self._me)
        is_peer = Peer(hello.peer.name, hello.peer.incarnation) == self.peer
        if problem is None and not is_peer:
            problem = f"{hello.peer.name} {hello.peer.incarnation:016x} answers in the place of {self.peer.name}"
        if problem is None and hello.session_id != self.session_id:
            problem = "the answer is for another session"
        if problem is None and not self._acked <= hello.last_received <= self._sent:
            problem = f"last_received is {hello.last_received}, not from {self._acked} to {self._sent}"
        if problem is not None:
            return self._step(Event.REFUSED, now, reason=problem, loss=None if is_peer else Loss.DIED)
        self._trim(hello.last_received)
        return self._step(Event.WELCOMED, now)

    def _frame_problem(self, frame: pb.Frame, body: str | None) -> str | None:
        """What the peer did wrong on an attached stream (h11 calls it a remote protocol error)."""
        if frame.ack > self._sent:
            return f"ack is {frame.ack}, sent were {self._sent}"
        is_dialer = self.state is State.OPEN
        if body in (None, "load"):
            if frame.seq:
                return f"frame {frame.seq} has no message"
            return None if body is None or is_dialer else "a load report from a router"
        if body != ("node" if is_dialer else "router"):
            return f"a {body} frame does not belong here"
        if not (frame.node if is_dialer else frame.router).WhichOneof("kind"):
            return f"message {frame.seq} is empty"
        if not frame.seq:
            return "a message has no number"
        if frame.seq > self._received + 1:
            return f"message {frame.seq} came behind {self._received}"
        return None

    def _send(self, message: Message, now: float) -> list[Output]:
        size, timing = message.ByteSize(), self._timing
        if size > timing.max_message_bytes:
            reason = f"a message of {size} bytes, {timing.max_message_bytes} allowed"
        elif len(self._kept) >= timing.max_unacked_messages or self._kept_bytes + size > timing.max_unacked_bytes:
            reason = f"{len(self._kept)} messages, {self._kept_bytes} bytes are unacknowledged"
        else:
            return self._step(Event.SEND, now, message=message)
        return self._step(Event.OVERFLOW, now, reason=reason)

    # ---------------------------------------------------------------- actions into outputs

    def _step(
        self,
        event: Event,
        now: float,
        *,
        reason: str = "",
        stream: int | None = None,
        message: Message | None = None,
        loss: Loss | None = None,
    ) -> list[Output]:
        before = self.state
        self.state, actions = step(before, event)
        out: list[Output] = []
        for action in actions:
            out += self._perform(action, now, reason, stream, message, loss or Loss.UNKNOWN)
        if self.state is State.LOST and before is not State.LOST:
            self._kept.clear()
            self._kept_bytes = 0
            self._dial_at = None
        return out

    def _perform(
        self, action: Action, now: float, reason: str, stream: int | None, message: Message | None, loss: Loss
    ) -> list[Output]:
        match action:  # what every message takes comes first
            case Action.KEEP if message is not None:
                size = message.ByteSize()
                self._kept.append((message, size))
                self._kept_bytes += size
            case Action.WAKE_WRITER:
                return [WakeWriter()]
            case Action.DELIVER if message is not None:
                return [Deliver(message)]
            case Action.ACK_SOON:
                self._beat_at = min(self._beat_at, now + self._timing.ack_s)
            case Action.OPEN_STREAM:
                self._last_stream += 1
                self.stream = self._last_stream
                self._hello_due = True
                self._dial_at = None
                self._dial_ends_at = now + self._timing.dial_timeout_s
                return [OpenStream(self.stream)]
            case Action.CLOSE_STREAM:
                return self._close_stream(reason, loss)
            case Action.ATTACH:
                self._attach(stream, now)
            case Action.REDIAL if now - self._attached_at >= self._timing.backoff_max_s:
                self._backoff_s = self._timing.backoff_min_s
                self._dial_at = now
            case Action.REDIAL | Action.RETRY_LATER:
                self._dial_at = now + self._backoff_s
                self._backoff_s = min(2 * self._backoff_s, self._timing.backoff_max_s)
            case Action.REPORT_UP:
                return [Up(is_resumed=self.resumes > 0)]
            case Action.REPORT_BROKEN:
                return [Broken(reason)]
            case Action.REPORT_REFUSED:
                return [Refused(reason)]
            case Action.REPORT_LOST:
                return [Lost(reason, loss)]
        return []

    def _close_stream(self, reason: str, loss: Loss) -> list[Output]:
        stream, self.stream = self.stream, None
        self._hello_due = False
        self._beat_due = False
        self._dial_ends_at = None
        fate = Fate.ENDED
        if self.state is State.LOST:
            fate = Fate.HUNG_UP if loss is Loss.HUNG_UP else Fate.REFUSED
        return [] if stream is None else [CloseStream(stream, fate, reason)]

    def _attach(self, stream: int | None, now: float) -> None:
        if stream is not None:  # a listener's: our Hello is still to be said
            self.stream = stream
            self._hello_due = True
        self.resumes += self._was_up
        self._was_up = True
        self._dial_ends_at = None
        self._attached_at = self._heard_at = now
        self._cursor = self._acked + 1
        self._beat_at = self._keepalive_at = now + self._timing.ack_s

    def _trim(self, ack: int) -> None:
        """Forget what the peer has; a smaller number than before comes from a Hello that was overtaken."""
        while self._acked < ack:
            _, size = self._kept.popleft()
            self._kept_bytes -= size
            self._acked += 1
        self._cursor = max(self._cursor, self._acked + 1)

    def _hello(self) -> pb.Hello:
        return pb.Hello(
            peer=self._me.to_proto(),
            to_incarnation=self.peer.incarnation,
            session_id=self.session_id,
            protocol=PROTOCOL,
            last_received=self._received,
        )
