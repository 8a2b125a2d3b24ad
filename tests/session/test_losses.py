"""What an end of a session says of the other's process when the session is lost."""

from __future__ import annotations

import pytest

from proto import baton_pb2 as pb
from runtime.session import Peer
from runtime.session_events import CloseStream, Fate, FrameArrived, HangUp, Loss, Lost, StreamEnded, Superseded
from tests.session.clocks import tick_on_time
from tests.session.test_session_end import SESSION_ID, node_hello, open_dialer, open_listener


@pytest.mark.covers("R12", "R19", "C06")
@pytest.mark.parametrize(
    ("fate", "loss"),
    [
        (Fate.PORT_REFUSED, Loss.DIED),
        (Fate.REPLACED, Loss.DIED),
        (Fate.REFUSED, Loss.UNKNOWN),
        (Fate.HUNG_UP, Loss.HUNG_UP),
        (None, Loss.UNKNOWN),  # silence
    ],
)
def test_a_loss_says_whether_the_node_s_process_has_ended(fate: Fate | None, loss: Loss) -> None:
    end = open_dialer()
    end.receive(StreamEnded(1, Fate.ENDED, "reset"), 1.0)
    end.tick(1.0)
    outputs = tick_on_time(end, 60.0) if fate is None else end.receive(StreamEnded(2, fate, "why"), 1.1)
    (lost,) = (output for output in outputs if isinstance(output, Lost))
    assert lost.loss is loss


@pytest.mark.covers("R19", "C06")
def test_another_process_in_the_node_s_place_says_that_it_died_and_a_node_without_the_session_does_not() -> None:
    for hello, loss in (
        (node_hello(peer=Peer("node", 6)), Loss.DIED),
        (node_hello(session_id=SESSION_ID + 1), Loss.UNKNOWN),
    ):
        end = open_dialer()
        end.receive(StreamEnded(1, Fate.ENDED, "reset"), 1.0)
        end.tick(1.0)
        (lost,) = (o for o in end.receive(FrameArrived(2, pb.Frame(hello=hello)), 1.1) if isinstance(o, Lost))
        assert lost.loss is loss
    (lost,) = (o for o in open_dialer().receive(Superseded("restarted"), 0.1) if isinstance(o, Lost))
    assert lost.loss is Loss.DIED


def test_who_hangs_up_says_so_and_who_has_lost_the_session_says_that() -> None:
    for what, fate in ((HangUp(), Fate.HUNG_UP), (Superseded("x"), Fate.REFUSED)):
        (closed,) = (o for o in open_listener().receive(what, 0.1) if isinstance(o, CloseStream))
        assert closed.fate is fate
