"""A request's one deadline goes from node to node with every message, and bounds every wait there."""

from __future__ import annotations

import pytest

from connector.transport import BlocksLanded, NotifyArrived, RevokeDone
from node import events as ev
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey
from tests.cores.nodes import ROUTER, Decode, Prefill, commit, grant, only
from tests.cores.test_prefill_core import done, plans

KEY = AttemptKey("r", 0, 0)
PROMPT = list(range(1, 8))
LEFT_MS = 1500  # less than a call may take (2 s), and than a Reserve may wait for room (5 s)


@pytest.mark.covers("R17", "P06")
def test_what_a_sender_says_of_the_deadline_grows_less_and_no_call_waits_beyond_it() -> None:
    prefill = Prefill()
    actions = prefill.dispatch(KEY, PROMPT, 4, now=10.0, ms_left=LEFT_MS)
    (step,) = plans(actions)
    reserve = only(actions, ev.SendReserve)
    assert reserve.request.ms_left == LEFT_MS
    assert reserve.request.wait_ms == LEFT_MS, "it waits for room beyond the deadline"
    assert reserve.timeout_s == pytest.approx(2 * LEFT_MS / 1000), "the wait, and the time for the call itself"
    prefill.core.receive(ev.ReserveAnswered(KEY, grant(1, 7, life_ms=1500)), 10.25)
    renew = only(list(prefill.core.tick(10.75)), ev.SendRenew)
    assert renew.timeout_s == pytest.approx(0.75)
    sent = only(list(prefill.core.receive(done(step, 3), 11.0)), ev.NotifyLink)
    assert sent.message.commit.ms_left == 500


@pytest.mark.covers("R17")
def test_a_release_says_how_long_the_attempt_is_to_be_fenced() -> None:
    prefill = Prefill()
    prefill.dispatch(KEY, PROMPT, 4, ms_left=LEFT_MS)
    cancel = pb.RouterMessage(cancel=pb.Cancel(key=KEY.to_proto(), ms_left=LEFT_MS))
    prefill.core.receive(ev.FromRouter(ROUTER, cancel), 0.0)
    actions = list(prefill.core.receive(ev.ReserveAnswered(KEY, grant(1, 7)), 0.5))
    assert only(actions, ev.SendRelease).request.ms_left == 1000


@pytest.mark.covers("R17")
def test_a_commit_with_less_time_than_its_lease_ends_by_it() -> None:
    decode = Decode()
    lease = decode.reserve(KEY, PROMPT, 4).lease
    decode.core.receive(BlocksLanded(lease.lease_id, (0, 1), 0, "prefill-0"), 1.0)
    message = pb.DataMessage.FromString(commit(KEY, lease, PROMPT, 9, 4))
    message.commit.ms_left = LEFT_MS
    decode.core.receive(NotifyArrived("link", message.SerializeToString()), 1.0)
    decode.core.receive(RevokeDone(lease.lease_id), 1.0)
    assert decode.core.next_deadline() == 1.0 + LEFT_MS / 1000
    errors = [
        action.message.error
        for action in decode.core.tick(1.0 + LEFT_MS / 1000)
        if isinstance(action, ev.ToRouter) and action.message.HasField("error")
    ]
    assert [(error.code, error.key) for error in errors] == [(pb.DEADLINE, KEY.to_proto())]
