"""A link with more queued than it carries in a lease life is slow, not stuck: nobody behind that is given up, nor is it closed."""

from __future__ import annotations

import pytest

from connector.transport import BlocksLanded, BlocksTaken
from node import events as ev
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey
from tests.cores.nodes import Decode, Prefill, grant, only
from tests.cores.test_prefill_core import KEY, PROMPT, cancel, done, messages, plans

LIFE_S = 10.0


def committing() -> tuple[Prefill, str]:
    """A prefill core whose blocks and Commit are all queued, at 0 s; and its link."""
    prefill = Prefill()
    steps = plans(prefill.dispatch(KEY, PROMPT, 4))
    opened = only(list(prefill.core.receive(ev.ReserveAnswered(KEY, grant(1, 14)), 0.0)), ev.OpenLink)
    for step in steps:
        prefill.core.receive(done(step, 7), 0.0)
    return prefill, opened.link_id


def errors(actions: list[ev.Action]) -> list[pb.PDError]:
    return [message.error for message in messages(actions) if message.HasField("error")]


@pytest.mark.covers("H11", "H07")
def test_a_commit_behind_blocks_that_are_read_one_by_one_is_waited_for_and_its_lease_renewed() -> None:
    prefill, link = committing()
    out: list[ev.Action] = []
    for index, at in enumerate((6.0, 12.0, 18.0, 24.0)):
        out += prefill.core.tick(at - 1)
        out += prefill.core.receive(BlocksTaken(link, 1, (index,)), at)
    assert len([each for each in out if isinstance(each, ev.SendRenew)]) >= 3 and not errors(out)
    assert not errors(list(prefill.core.tick(24.0 + LIFE_S - 0.1)))
    (error,) = errors(list(prefill.core.tick(24.0 + LIFE_S)))
    assert (error.code, error.commit_unanswered) == (pb.TRANSFER_FAILED, True)


@pytest.mark.covers("H11")
def test_what_the_link_has_read_and_not_delivered_is_waited_for_as_long_as_the_receiver_gets_something() -> None:
    prefill, link = committing()
    prefill.core.receive(BlocksTaken(link, 1, (0, 1, 2, 3)), 0.0)
    for num_landed, at in ((5, 6.0), (9, 12.0), (9, 15.0)):
        assert not errors(list(prefill.core.tick(at)))
        prefill.core.receive(ev.RenewAnswered(KEY, pb.RenewReply(life_ms=10_000, num_landed=num_landed)), at)
    assert not errors(list(prefill.core.tick(21.9)))
    assert errors(list(prefill.core.tick(22.0))), "a lease life behind the last news"


@pytest.mark.covers("R21")
def test_a_lease_that_has_become_something_else_is_waited_for_no_longer_than_a_life() -> None:
    prefill, link = committing()
    prefill.core.receive(BlocksTaken(link, 1, (0, 1, 2, 3)), 0.0)
    prefill.core.receive(ev.RenewAnswered(KEY, pb.RenewReply(life_ms=0, num_landed=9)), 6.0)
    assert errors(list(prefill.core.tick(LIFE_S)))


@pytest.mark.covers("H11")
def test_who_is_cancelled_behind_a_slow_link_does_not_close_it_for_others() -> None:
    prefill, link = committing()
    prefill.core.receive(cancel(KEY), 1.0)
    out: list[ev.Action] = []
    for index, at in enumerate((8.0, 16.0, 24.0)):
        out += prefill.core.tick(at - 1)
        out += prefill.core.receive(BlocksTaken(link, 1, (index,)), at)
    out += prefill.core.tick(24.0 + LIFE_S - 0.1)
    assert not [each for each in out if isinstance(each, ev.CloseLink)]
    assert only(list(prefill.core.tick(24.0 + LIFE_S)), ev.CloseLink).link_id == link, "nothing moves any more"


@pytest.mark.covers("A10", "H11")
def test_what_is_queued_for_who_is_cancelled_is_dropped_and_that_makes_no_stuck_link_look_alive() -> None:
    prefill, link = committing()
    prefill.core.receive(BlocksTaken(link, 1, (0,)), 0.0)
    dropped = only(list(prefill.core.receive(cancel(KEY), 1.0)), ev.DropWrites)
    assert (dropped.link_id, dropped.lease.lease_id) == (link, 1)
    prefill.core.receive(BlocksTaken(link, 1, (2, 3), is_dropped=True), 5.0)
    assert only(list(prefill.core.tick(1.0 + LIFE_S)), ev.CloseLink).link_id == link


@pytest.mark.covers("A10")
def test_who_is_cancelled_with_nothing_queued_frees_its_blocks_and_drops_nothing() -> None:
    prefill, link = committing()
    prefill.core.receive(BlocksTaken(link, 1, (0, 1, 2, 3)), 0.0)
    assert not [each for each in prefill.core.receive(cancel(KEY), 1.0) if isinstance(each, ev.DropWrites)]
    assert prefill.pool.counts().used == 0


@pytest.mark.covers("H07", "H11")
def test_the_answer_to_a_renewal_tells_how_much_its_sender_has_written_whoever_that_was_for() -> None:
    decode = Decode()
    leases = [decode.reserve(key, PROMPT, 4).lease for key in (KEY, AttemptKey("s", 0, 0))]
    decode.core.receive(BlocksLanded(leases[0].lease_id, (0, 1), 64, "prefill-0"), 1.0)
    renew = pb.RenewRequest(lease_id=leases[1].lease_id, secret=leases[1].secret)
    assert only(list(decode.core.receive(ev.RenewAsked(2, renew), 6.0)), ev.AnswerRenew).reply.num_landed == 2
    decode.core.receive(BlocksLanded(leases[1].lease_id, (0,), 64, "prefill-0"), 7.0)
    assert only(list(decode.core.receive(ev.RenewAsked(3, renew), 8.0)), ev.AnswerRenew).reply.num_landed == 3
