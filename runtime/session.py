"""Session: the conversation of a router and a node, ordered and exactly once across the streams that it lives on.

Job      the legal states of both ends and what each event does to them. Nothing else.
Not here the numbers, buffers and timers that an end keeps (session_end.py); which Hello belongs to which session of a node
         (session_book.py); streams, sockets and the clock (session_dialer.py for the router, session_server.py for the node).
Shape    step(state, event) -> (state, actions). Total over legal pairs; an illegal pair raises.

Theory of operation
-------------------
    dialer    CONNECTING --WELCOMED--> OPEN --STREAM_ENDED--> BROKEN --WELCOMED--> OPEN
                                                                | PORT_REFUSED, REFUSED, GRACE_OVER
                                                                v
                                                               LOST
                                                                ^ SUPERSEDED, GRACE_OVER
    listener  AWAITED ----CALLED-----> ATTACHED --STREAM_ENDED--> DETACHED --CALLED--> ATTACHED

Each end numbers its messages 1, 2, 3 …, keeps what is not acknowledged, and sends it again on the next stream, behind the peer's
Hello and from the number that this Hello asks for. The receiver takes only the next number: a smaller one is a repeat, a larger
one cannot happen on an ordered stream, so the peer or the path is broken and the stream ends.

Nothing numbered is sent on a stream before the peer's Hello has come on it. So a Hello that arrives late, from a dialer that has
given that session up, may well open it, but never carries work.

Two kinds of protocol errors: what the *peer* does wrong is the event VIOLATION and costs the stream; what our own shell does
wrong is IllegalTransition. LOST is final: a shell that goes on dialing makes a new Session with another session_id.

Shells tick before they receive: what arrives after the grace, in a process that hung, finds the session lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NamedTuple

from proto import baton_pb2 as pb

PROTOCOL: Final = 1  # both ends must speak the same


class Peer(NamedTuple):
    """A process at one end: a restarted one has the same name and another incarnation."""

    name: str
    incarnation: int

    def to_proto(self) -> pb.PeerId:
        """The message form."""
        return pb.PeerId(name=self.name, incarnation=self.incarnation)


@dataclass(frozen=True, slots=True)
class SessionTiming:
    """Times in seconds and bounds of one session; equal on both ends, though nothing breaks if they differ."""

    ack_s: float = 0.04  # promised within 50 ms: the rest is for the loop
    keepalive_s: float = 0.2  # promised every 250 ms
    silence_s: float = 1.5  # a stream on which nothing came for so long is broken
    grace_s: float = 2.0  # since the last frame: then the session is lost
    late_s: float = 0.25  # a timer that fires later than this says that we were away, not the peer
    dial_timeout_s: float = 1.0  # from dialing to the peer's Hello
    backoff_min_s: float = 0.05
    backoff_max_s: float = 0.5  # a quarter of the grace, so that a healed path is found within it
    max_unacked_messages: int = 65_536
    # What waits for a peer that comes back: prompts (80 of a million tokens), or what was said of some (3 MiB of logprobs each).
    max_unacked_bytes: int = 256 << 20
    max_message_bytes: int = 16 << 20  # of one; gRPC is told to take frames a little larger


class State(Enum):
    __hash__ = object.__hash__  # members are single objects; Enum's own is written in Python, and asked for every frame

    CONNECTING = auto()  # dialer: never up
    OPEN = auto()  # dialer: a stream with both Hellos
    BROKEN = auto()  # dialer: no stream, the grace runs
    AWAITED = auto()  # listener: made for a Hello that it has not taken yet
    ATTACHED = auto()  # listener: a stream with the peer's Hello
    DETACHED = auto()  # listener: no stream, the grace runs
    LOST = auto()  # both: final


class Event(Enum):
    __hash__ = object.__hash__

    DIAL_DUE = auto()  # dialer: start, or the backoff has passed
    DIAL_FAILED = auto()  # dialer: no Hello came of it
    PORT_REFUSED = auto()  # dialer: nobody listens there
    REFUSED = auto()  # dialer: the peer is somebody else, or has lost or ended the session
    WELCOMED = auto()  # dialer: the peer's Hello on the stream that we opened
    CALLED = auto()  # listener: a stream with a Hello for this session
    SUPERSEDED = auto()  # the peer opened another session, or restarted
    MESSAGE = auto()  # the next number
    REPEAT = auto()  # a number that was taken before
    STREAM_ENDED = auto()  # the attached one
    VIOLATION = auto()  # the peer broke the rules on the attached stream
    STALE = auto()  # anything from a stream that is not ours any more
    SILENCE = auto()
    GRACE_OVER = auto()
    SEND = auto()  # our side gives a message
    OVERFLOW = auto()  # our side gives one message too many
    HANG_UP = auto()  # our side wants no more of it


class Action(Enum):
    OPEN_STREAM = auto()
    CLOSE_STREAM = auto()
    ATTACH = auto()  # adopt the stream; go back to the first unacknowledged message
    REDIAL = auto()  # at once, unless the stream was short-lived
    RETRY_LATER = auto()  # with backoff
    DELIVER = auto()
    ACK_SOON = auto()
    KEEP = auto()  # number the message and hold it until it is acknowledged
    WAKE_WRITER = auto()
    REPORT_UP = auto()
    REPORT_BROKEN = auto()
    REPORT_REFUSED = auto()  # it was never up
    REPORT_LOST = auto()


class IllegalTransition(Exception):
    """This event cannot happen in this state: a bug of the shell."""


S, E, A = State, Event, Action
Row = tuple[State, tuple[Action, ...]]

TABLE: Final[Mapping[tuple[State, Event], Row]] = {
    # dialer
    (S.CONNECTING, E.DIAL_DUE): (S.CONNECTING, (A.OPEN_STREAM,)),
    (S.CONNECTING, E.DIAL_FAILED): (S.CONNECTING, (A.CLOSE_STREAM, A.RETRY_LATER)),
    (S.CONNECTING, E.PORT_REFUSED): (S.CONNECTING, (A.CLOSE_STREAM, A.RETRY_LATER)),  # nothing is there to be lost
    (S.CONNECTING, E.REFUSED): (S.LOST, (A.CLOSE_STREAM, A.REPORT_REFUSED)),
    (S.CONNECTING, E.WELCOMED): (S.OPEN, (A.ATTACH, A.WAKE_WRITER, A.REPORT_UP)),
    (S.CONNECTING, E.SUPERSEDED): (S.LOST, (A.CLOSE_STREAM,)),
    (S.CONNECTING, E.HANG_UP): (S.LOST, (A.CLOSE_STREAM,)),
    (S.OPEN, E.MESSAGE): (S.OPEN, (A.DELIVER, A.ACK_SOON)),
    (S.OPEN, E.REPEAT): (S.OPEN, (A.ACK_SOON,)),
    (S.OPEN, E.SEND): (S.OPEN, (A.KEEP, A.WAKE_WRITER)),
    (S.OPEN, E.STREAM_ENDED): (S.BROKEN, (A.CLOSE_STREAM, A.REDIAL, A.REPORT_BROKEN)),
    (S.OPEN, E.VIOLATION): (S.BROKEN, (A.CLOSE_STREAM, A.REDIAL, A.REPORT_BROKEN)),
    (S.OPEN, E.SILENCE): (S.BROKEN, (A.CLOSE_STREAM, A.REDIAL, A.REPORT_BROKEN)),
    (S.OPEN, E.REFUSED): (S.LOST, (A.CLOSE_STREAM, A.REPORT_LOST)),  # the peer lost it first and says so
    (S.OPEN, E.SUPERSEDED): (S.LOST, (A.CLOSE_STREAM, A.REPORT_LOST)),
    (S.OPEN, E.OVERFLOW): (S.LOST, (A.CLOSE_STREAM, A.REPORT_LOST)),
    (S.OPEN, E.HANG_UP): (S.LOST, (A.CLOSE_STREAM,)),
    (S.BROKEN, E.DIAL_DUE): (S.BROKEN, (A.OPEN_STREAM,)),
    (S.BROKEN, E.DIAL_FAILED): (S.BROKEN, (A.CLOSE_STREAM, A.RETRY_LATER)),
    (S.BROKEN, E.PORT_REFUSED): (S.LOST, (A.CLOSE_STREAM, A.REPORT_LOST)),
    (S.BROKEN, E.REFUSED): (S.LOST, (A.CLOSE_STREAM, A.REPORT_LOST)),
    (S.BROKEN, E.WELCOMED): (S.OPEN, (A.ATTACH, A.WAKE_WRITER, A.REPORT_UP)),
    (S.BROKEN, E.SEND): (S.BROKEN, (A.KEEP,)),
    (S.BROKEN, E.GRACE_OVER): (S.LOST, (A.CLOSE_STREAM, A.REPORT_LOST)),
    (S.BROKEN, E.SUPERSEDED): (S.LOST, (A.CLOSE_STREAM, A.REPORT_LOST)),
    (S.BROKEN, E.OVERFLOW): (S.LOST, (A.CLOSE_STREAM, A.REPORT_LOST)),
    (S.BROKEN, E.HANG_UP): (S.LOST, (A.CLOSE_STREAM,)),
    # listener
    (S.AWAITED, E.CALLED): (S.ATTACHED, (A.ATTACH, A.WAKE_WRITER, A.REPORT_UP)),
    (S.ATTACHED, E.CALLED): (
        S.ATTACHED,
        (A.CLOSE_STREAM, A.ATTACH, A.WAKE_WRITER),
    ),  # the newer stream replaces the older
    (S.ATTACHED, E.MESSAGE): (S.ATTACHED, (A.DELIVER, A.ACK_SOON)),
    (S.ATTACHED, E.REPEAT): (S.ATTACHED, (A.ACK_SOON,)),
    (S.ATTACHED, E.SEND): (S.ATTACHED, (A.KEEP, A.WAKE_WRITER)),
    (S.ATTACHED, E.STREAM_ENDED): (S.DETACHED, (A.CLOSE_STREAM, A.REPORT_BROKEN)),
    (S.ATTACHED, E.VIOLATION): (S.DETACHED, (A.CLOSE_STREAM, A.REPORT_BROKEN)),
    (S.ATTACHED, E.SILENCE): (S.DETACHED, (A.CLOSE_STREAM, A.REPORT_BROKEN)),
    (S.ATTACHED, E.SUPERSEDED): (S.LOST, (A.CLOSE_STREAM, A.REPORT_LOST)),
    (S.ATTACHED, E.OVERFLOW): (S.LOST, (A.CLOSE_STREAM, A.REPORT_LOST)),
    (S.ATTACHED, E.HANG_UP): (S.LOST, (A.CLOSE_STREAM,)),
    (S.DETACHED, E.CALLED): (S.ATTACHED, (A.ATTACH, A.WAKE_WRITER, A.REPORT_UP)),
    (S.DETACHED, E.SEND): (S.DETACHED, (A.KEEP,)),
    (S.DETACHED, E.GRACE_OVER): (S.LOST, (A.REPORT_LOST,)),
    (S.DETACHED, E.SUPERSEDED): (S.LOST, (A.REPORT_LOST,)),
    (S.DETACHED, E.OVERFLOW): (S.LOST, (A.REPORT_LOST,)),
    (S.DETACHED, E.HANG_UP): (S.LOST, ()),
}

# Races that correct ends produce: no change, no action.
IGNORED: Final[frozenset[tuple[State, Event]]] = frozenset(
    {(s, E.STALE) for s in S if s is not S.AWAITED}
    | {(S.LOST, e) for e in (E.SEND, E.OVERFLOW, E.SUPERSEDED, E.HANG_UP)}
    | {(S.LOST, E.CALLED)}  # its grace ended on the way to us
    | {(S.CONNECTING, e) for e in (E.SEND, E.OVERFLOW)}  # there is no session yet: dropped, as after a loss
)


def step(state: State, event: Event) -> Row:
    """The next state and what to do; raises IllegalTransition for a pair that cannot happen."""
    row = TABLE.get((state, event))
    if row is not None:
        return row
    if (state, event) in IGNORED:
        return state, ()
    raise IllegalTransition(f"{event.name} in {state.name}")
