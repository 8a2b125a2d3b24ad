"""One end of a session by itself: numbers, bounds, timers, and what a hostile peer may send it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from proto import baton_pb2 as pb
from runtime.session import PROTOCOL, IllegalTransition, Peer, SessionTiming, State
from runtime.session_book import MAX_LOST_IDS, MAX_SESSIONS, Admitted, NotAdmitted, SessionBook
from runtime.session_end import SessionEnd
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
    Refused,
    Send,
    StreamEnded,
    Superseded,
    Up,
    WakeWriter,
)
from tests.session.clocks import tick_on_time

ROUTER = Peer("router", 7)
NODE = Peer("node", 5)
TIMING = SessionTiming()
SESSION_ID = 99


def cancel(number: int) -> pb.RouterMessage:
    return pb.RouterMessage(cancel=pb.Cancel(key=pb.AttemptKey(attempt=number)))


def error(number: int, text: str = "") -> pb.NodeMessage:
    return pb.NodeMessage(error=pb.PDError(retry_after_ms=number, message=text))


def node_hello(
    last_received: int = 0,
    *,
    peer: Peer = NODE,
    to_incarnation: int = 7,
    session_id: int = SESSION_ID,
    protocol: int = PROTOCOL,
) -> pb.Hello:
    return pb.Hello(
        peer=peer.to_proto(),
        to_incarnation=to_incarnation,
        session_id=session_id,
        protocol=protocol,
        last_received=last_received,
    )


def router_hello(last_received: int = 0, *, peer: Peer = ROUTER, session_id: int = SESSION_ID) -> pb.Hello:
    return node_hello(last_received, peer=peer, to_incarnation=NODE.incarnation, session_id=session_id)


def open_dialer(now: float = 0.0, timing: SessionTiming = TIMING) -> SessionEnd:
    """A router's end, open on stream 1."""
    end = SessionEnd(ROUTER, NODE, SESSION_ID, timing, dial_at=now)
    assert end.tick(now) == [OpenStream(1)]
    frame = end.next_frame(1, now)
    assert frame is not None and frame.hello.session_id == SESSION_ID
    assert end.receive(FrameArrived(1, pb.Frame(hello=node_hello())), now) == [WakeWriter(), Up(is_resumed=False)]
    return end


def open_listener(now: float = 0.0) -> SessionEnd:
    """A node's end, attached to stream 1."""
    end = SessionEnd(NODE, ROUTER, SESSION_ID, TIMING, dial_at=None)
    assert end.receive(Called(1, router_hello()), now) == [WakeWriter(), Up(is_resumed=False)]
    frame = end.next_frame(1, now)
    assert frame is not None and frame.WhichOneof("body") == "hello"
    return end


def pulled(end: SessionEnd, stream: int, now: float = 0.0) -> list[tuple[int, int]]:
    """Everything that the writer of this stream finds: (seq, ack)."""
    frames = []
    while (frame := end.next_frame(stream, now)) is not None:
        frames.append((frame.seq, frame.ack))
    return frames


@pytest.mark.covers("R12")
def test_unacknowledged_messages_are_sent_again_from_the_number_that_the_peer_asks_for() -> None:
    end = open_dialer()
    for number in range(4):
        end.receive(Send(cancel(number)), 0.0)
    assert pulled(end, 1) == [(1, 0), (2, 0), (3, 0), (4, 0)]
    end.receive(FrameArrived(1, pb.Frame(ack=1)), 0.1)
    assert end.snapshot()["unacknowledged"] == 3
    end.receive(StreamEnded(1, Fate.ENDED, "cut"), 1.0)
    end.receive(Send(cancel(4)), 1.0)
    assert end.tick(1.0) == [OpenStream(2)]
    assert pulled(end, 2, 1.0) == [(0, 0)], "nothing numbered before the peer's Hello"
    assert Up(is_resumed=True) in end.receive(FrameArrived(2, pb.Frame(hello=node_hello(2))), 1.1)
    assert pulled(end, 2, 1.1) == [(3, 0), (4, 0), (5, 0)]
    assert end.frames_resent == 2


@pytest.mark.covers("R12")
def test_a_repeated_message_is_dropped_and_acknowledged_again() -> None:
    end = open_listener()
    first = FrameArrived(1, pb.Frame(seq=1, router=cancel(0)))
    assert end.receive(first, 0.0) == [Deliver(cancel(0))]
    end.tick(TIMING.ack_s)
    assert pulled(end, 1, TIMING.ack_s) == [(0, 1)]
    assert end.receive(first, 0.1) == []
    end.tick(0.1 + TIMING.ack_s)
    assert pulled(end, 1, 0.1 + TIMING.ack_s) == [(0, 1)]


@pytest.mark.covers("R12")
def test_messages_are_acknowledged_within_50_ms_and_a_quiet_end_says_something_every_250_ms() -> None:
    end = open_listener()
    now = 0.0
    for _ in range(5):
        deadline = end.next_deadline()
        assert deadline is not None and deadline - now <= 0.25
        now = deadline
        assert end.tick(now) == [WakeWriter()]
        assert pulled(end, 1, now) == [(0, 0)]
        end.receive(FrameArrived(1, pb.Frame()), now)
    end.receive(FrameArrived(1, pb.Frame(seq=1, router=cancel(0))), now)
    deadline = end.next_deadline()
    assert deadline is not None and deadline - now <= 0.05


@pytest.mark.covers("R12")
def test_a_node_that_sends_message_after_message_tells_its_load_as_often_as_a_quiet_one() -> None:
    end = open_listener()
    told_at = [0.0]
    for now in (each / 100 for each in range(1, 500)):
        end.receive(FrameArrived(1, pb.Frame()), now)
        end.receive(Send(error(1)), now)
        end.tick(now)
        frames = pulled(end, 1, now)
        assert frames[0][0], "messages come first"
        told_at += [now for seq, _ in frames if not seq]
    assert max(later - earlier for earlier, later in pairwise(told_at)) <= 0.25
    assert len(told_at) <= 1 + 5.0 / TIMING.keepalive_s, "once is enough"


@pytest.mark.covers("R12")
def test_a_blocked_writer_is_woken_once_and_does_not_spin_the_timer() -> None:
    end = open_listener()
    assert end.tick(0.2) == [WakeWriter()]
    assert end.tick(0.4) == []
    assert end.next_deadline() == TIMING.silence_s


@pytest.mark.covers("C10")
def test_silence_breaks_the_stream_and_then_loses_the_session() -> None:
    end = open_dialer()
    assert tick_on_time(end, 1.49) == [WakeWriter()]
    broken = end.tick(1.5)
    assert [type(output) for output in broken] == [CloseStream, Broken, OpenStream]
    assert end.next_deadline() == 2.0
    assert [type(output) for output in end.tick(2.0)] == [CloseStream, Lost]
    assert end.next_deadline() is None


@pytest.mark.covers("C10")
def test_what_arrives_after_the_grace_finds_the_session_lost() -> None:
    end = open_listener()
    assert [type(output) for output in tick_on_time(end, 60.0)] == [WakeWriter, CloseStream, Broken, Lost]
    assert end.receive(FrameArrived(1, pb.Frame(seq=1, router=cancel(0))), 60.0) == []
    assert end.receive(Called(2, router_hello()), 60.0) == []
    assert end.stream is None


@pytest.mark.covers("R12", "C10")
def test_a_loop_that_was_held_up_does_not_take_its_own_absence_for_the_peers_silence() -> None:
    end = open_dialer()
    assert end.tick(5.0) == [WakeWriter()], "5 s went by unread: the peer may have written all the time"
    end.receive(FrameArrived(1, pb.Frame(seq=0)), 5.0)
    assert [type(output) for output in tick_on_time(end, 7.0)][-1] is Lost, "from here on it is the peer that is silent"


@pytest.mark.covers("R12")
def test_a_refused_port_loses_a_broken_session_at_once_but_not_one_that_never_was_up() -> None:
    end = open_dialer()
    end.receive(StreamEnded(1, Fate.ENDED, "reset"), 1.0)
    end.tick(1.0)
    assert [type(o) for o in end.receive(StreamEnded(2, Fate.PORT_REFUSED, ""), 1.001)] == [CloseStream, Lost]
    fresh = SessionEnd(ROUTER, NODE, SESSION_ID, TIMING, dial_at=0.0)
    fresh.tick(0.0)
    assert fresh.receive(StreamEnded(1, Fate.PORT_REFUSED, ""), 0.0) == [CloseStream(1, Fate.ENDED, reason="")]
    assert fresh.next_deadline() == 0.05


@pytest.mark.covers("R12")
def test_redials_back_off_from_50_ms_and_a_long_lived_stream_is_redialed_at_once() -> None:
    end = SessionEnd(ROUTER, NODE, SESSION_ID, TIMING, dial_at=0.0)
    now, waits = 0.0, []
    for stream in range(1, 7):
        assert end.tick(now) == [OpenStream(stream)]
        end.receive(StreamEnded(stream, Fate.ENDED, ""), now)
        deadline = end.next_deadline()
        assert deadline is not None
        waits.append(round(deadline - now, 6))
        now = deadline
    assert waits == [0.05, 0.1, 0.2, 0.4, 0.5, 0.5]
    end.tick(now)
    end.receive(FrameArrived(7, pb.Frame(hello=node_hello())), now)
    end.receive(StreamEnded(7, Fate.ENDED, ""), now + 1.0)
    assert end.tick(now + 1.0) == [OpenStream(8)]


@pytest.mark.covers("R12")
def test_over_the_bound_of_messages_or_bytes_the_session_is_lost_and_its_buffer_is_gone() -> None:
    for timing, text in (
        (SessionTiming(max_unacked_messages=3), ""),
        (SessionTiming(max_unacked_bytes=3_000), "x" * 900),
    ):
        end = open_dialer(timing=timing)
        big = pb.RouterMessage(cancel=pb.Cancel(key=pb.AttemptKey(request_id=text)))
        for _ in range(3):
            end.receive(Send(big), 0.0)
        assert end.state is State.OPEN
        assert [type(output) for output in end.receive(Send(big), 0.0)] == [CloseStream, Lost]
        assert end.snapshot()["unacknowledged"] == end.snapshot()["unacknowledged_bytes"] == 0
        assert end.receive(Send(big), 0.0) == []


HOSTILE_TO_NODE = {
    "gap": pb.Frame(seq=2, router=cancel(0)),
    "no body": pb.Frame(seq=1),
    "no number": pb.Frame(router=cancel(0)),
    "wrong direction": pb.Frame(seq=1, node=error(0)),
    "empty message": pb.Frame(seq=1, router=pb.RouterMessage()),
    "acknowledges what was never sent": pb.Frame(ack=1),
    "second Hello": pb.Frame(hello=router_hello()),
    "a router has no load": pb.Frame(load=pb.LoadReport()),
    "numbered load": pb.Frame(seq=1, load=pb.LoadReport()),
}


@pytest.mark.covers("R12")
@pytest.mark.parametrize("case", HOSTILE_TO_NODE)
def test_a_frame_against_the_rules_ends_its_stream_and_no_more(case: str) -> None:
    end = open_listener()
    outputs = end.receive(FrameArrived(1, HOSTILE_TO_NODE[case]), 0.1)
    assert [type(output) for output in outputs] == [CloseStream, Broken]
    assert end.receive(Called(2, router_hello()), 0.2) == [WakeWriter(), Up(is_resumed=True)]
    assert end.receive(FrameArrived(2, pb.Frame(seq=1, router=cancel(0))), 0.3) == [Deliver(cancel(0))]


@pytest.mark.covers("C06")
@pytest.mark.parametrize(
    "hello",
    [
        node_hello(peer=Peer("node", 6)),
        node_hello(peer=Peer("other", 5)),
        node_hello(to_incarnation=8),
        node_hello(session_id=98),
        node_hello(protocol=PROTOCOL + 1),
        node_hello(1),
    ],
    ids=["restarted node", "other node", "for another router", "other session", "protocol", "got what was never sent"],
)
def test_a_dialer_takes_no_answer_from_anybody_else(hello: pb.Hello) -> None:
    end = SessionEnd(ROUTER, NODE, SESSION_ID, TIMING, dial_at=0.0)
    end.tick(0.0)
    outputs = end.receive(FrameArrived(1, pb.Frame(hello=hello)), 0.1)
    assert [type(output) for output in outputs] == [CloseStream, Refused]
    assert end.state is State.LOST


@pytest.mark.covers("C06")
def test_a_peer_that_has_forgotten_what_it_acknowledged_has_lost_the_session() -> None:
    end = open_dialer()
    end.receive(Send(cancel(0)), 0.0)
    pulled(end, 1)
    end.receive(FrameArrived(1, pb.Frame(ack=1)), 0.1)
    end.receive(StreamEnded(1, Fate.ENDED, ""), 1.0)
    end.tick(1.0)
    outputs = end.receive(FrameArrived(2, pb.Frame(hello=node_hello(0))), 1.1)
    assert [type(output) for output in outputs] == [CloseStream, Lost]


def test_a_load_report_is_passed_on_unnumbered() -> None:
    end = open_dialer()
    report = pb.LoadReport(running=3)
    assert end.receive(FrameArrived(1, pb.Frame(load=report)), 0.1) == [LoadArrived(report)]
    assert end.snapshot()["received"] == 0


@pytest.mark.covers("R12")
def test_a_newer_stream_replaces_the_older_whose_frames_count_no_more() -> None:
    end = open_listener()
    end.receive(Send(error(0)), 0.0)
    assert pulled(end, 1) == [(1, 0)]
    outputs = end.receive(Called(2, router_hello()), 0.1)
    assert outputs == [CloseStream(1, Fate.ENDED, reason="replaced by a newer stream"), WakeWriter()]
    assert end.receive(FrameArrived(1, pb.Frame(seq=1, router=cancel(0))), 0.1) == []
    assert end.receive(StreamEnded(1, Fate.ENDED, ""), 0.1) == []
    assert pulled(end, 1) == []
    assert pulled(end, 2) == [(0, 0), (1, 0)]


@pytest.mark.covers("R12")
def test_a_dial_without_an_answer_is_given_up_and_a_first_frame_that_is_no_hello_ends_it() -> None:
    end = SessionEnd(ROUTER, NODE, SESSION_ID, TIMING, dial_at=0.0)
    end.tick(0.0)
    assert end.next_deadline() == TIMING.dial_timeout_s
    assert [type(output) for output in end.tick(TIMING.dial_timeout_s)] == [CloseStream]
    assert end.tick(1.05) == [OpenStream(2)]
    outputs = end.receive(FrameArrived(2, pb.Frame(seq=1, node=error(0))), 1.1)
    assert [type(output) for output in outputs] == [CloseStream]
    assert end.state is State.CONNECTING


def test_hanging_up_and_being_superseded_end_a_session_from_everywhere() -> None:
    assert [type(o) for o in open_dialer().receive(HangUp(), 0.1)] == [CloseStream]
    assert [type(o) for o in open_listener().receive(Superseded("x"), 0.1)] == [CloseStream, Lost]
    connecting = SessionEnd(ROUTER, NODE, SESSION_ID, TIMING, dial_at=0.0)
    assert connecting.receive(Send(cancel(0)), 0.0) == [], "dropped: there is no session yet"
    assert connecting.receive(HangUp(), 0.0) == []
    assert connecting.next_deadline() is None


def test_the_shell_s_own_mistakes_raise() -> None:
    with pytest.raises(IllegalTransition):
        open_dialer().receive(Called(2, router_hello()), 0.1)


# ---------------------------------------------------------------- the book


def admitted(book: SessionBook, hello: pb.Hello) -> SessionEnd:
    admission = book.admit(hello)
    assert isinstance(admission, Admitted), admission
    admission.session.receive(Called(1, hello), 0.0)
    return admission.session


@pytest.mark.covers("C06")
def test_a_hello_for_another_incarnation_or_protocol_is_refused_for_good() -> None:
    book = SessionBook(NODE, TIMING)
    for hello, fate in (
        (node_hello(peer=ROUTER, to_incarnation=4), Fate.REPLACED),
        (node_hello(peer=ROUTER, to_incarnation=4, protocol=PROTOCOL + 1), Fate.REPLACED),
        (node_hello(peer=ROUTER, to_incarnation=5, protocol=PROTOCOL + 1), Fate.REFUSED),
        (node_hello(peer=Peer("", 7), to_incarnation=5), Fate.REFUSED),
        (node_hello(peer=ROUTER, to_incarnation=5, last_received=3), Fate.REFUSED),
    ):
        admission = book.admit(hello)
        assert isinstance(admission, NotAdmitted) and admission.fate is fate
    assert book.sessions() == ()


@pytest.mark.covers("R12", "C06")
def test_a_lost_session_is_not_resumed_and_another_id_or_incarnation_supersedes() -> None:
    book = SessionBook(NODE, TIMING)
    first = admitted(book, router_hello())
    assert book.admit(router_hello()) == Admitted(first, superseded=None)
    restarted = Peer("router", 8)
    admission = book.admit(router_hello(peer=restarted, session_id=100))
    assert isinstance(admission, Admitted) and admission.superseded is first
    first.receive(Superseded(""), 0.0)
    book.strike(first)
    assert isinstance(book.admit(router_hello()), NotAdmitted)
    assert book.find(restarted) is admission.session and book.find(ROUTER) is None


def test_the_book_is_bounded() -> None:
    book = SessionBook(NODE, TIMING)
    for number in range(1, MAX_LOST_IDS + 10):
        end = admitted(book, router_hello(session_id=number))
        end.receive(HangUp(), 0.0)
        book.strike(end)
    assert isinstance(book.admit(router_hello(session_id=MAX_LOST_IDS)), NotAdmitted)
    for number in range(MAX_SESSIONS):
        admitted(book, router_hello(peer=Peer(f"router-{number}", 1)))
    admission = book.admit(router_hello(peer=Peer("one-too-many", 1)))
    assert isinstance(admission, NotAdmitted) and admission.fate is Fate.ENDED
