"""A one-sided transport: writes land unasked, so an ended lease's blocks wait until nobody can write there any more."""

from __future__ import annotations

import numpy as np
import pytest

from connector.transport import BlocksLanded, BlocksTaken, LeaseRef, LinkClosed, RevokeDone, WriteRefused
from proto import baton_pb2 as pb
from tests.transport.net import MemoryNet, Node, fill_at_random

LEASE = LeaseRef(1, b"0123456789abcdef")


def open_pair(net: MemoryNet) -> tuple[Node, Node]:
    sender = net.node("sender", 4, 64)
    receiver = net.node("receiver", 4, 64)
    fill_at_random(sender.memory)
    sender.transport.open("receiver@1/1", receiver.transport.endpoint())
    receiver.transport.admit(LEASE.lease_id, LEASE.secret, [2, 3])
    return sender, receiver


def take(net: MemoryNet, *kinds: str) -> None:
    """These steps, in order."""
    for kind in kinds:
        due = [step.kind for step in net.hub.due()]
        net.hub.step(due.index(kind))


ATTACHED = ("take", "deliver", "return")


@pytest.mark.covers("H08")
def test_a_write_that_was_on_its_way_lands_in_an_ended_lease_which_is_quiet_only_when_its_sender_has_stopped(
    one_sided_net: MemoryNet,
) -> None:
    sender, receiver = open_pair(one_sided_net)
    sender.transport.write("receiver@1/1", LEASE, [(0, 0)])
    take(one_sided_net, *ATTACHED, "take")
    receiver.transport.revoke(LEASE.lease_id)
    take(one_sided_net, "land")
    assert np.array_equal(receiver.memory[2], sender.memory[0])
    assert receiver.transport.snapshot()["leases_quarantined"] == 1
    sender.transport.write("receiver@1/1", LEASE, [(1, 1)])
    take(one_sided_net, "return", "deliver", "deliver")  # "stop" there, the write that does not count, "stopped" here
    assert receiver.said.of(RevokeDone) == [RevokeDone(LEASE.lease_id)]
    one_sided_net.hub.run()
    assert not receiver.memory[3].any(), "written behind the stop"
    assert receiver.said.of(BlocksLanded) == [] and sender.said.taken(LEASE.lease_id) == [1, 0]


@pytest.mark.covers("H08")
def test_a_sender_that_does_not_say_that_it_stopped_loses_its_link_and_writes_nothing_more(
    one_sided_net: MemoryNet,
) -> None:
    sender, receiver = open_pair(one_sided_net)
    sender.transport.write("receiver@1/1", LEASE, [(0, 0)])
    take(one_sided_net, *ATTACHED, "take")
    assert "drop" not in [step.kind for step in one_sided_net.hub.due()]
    receiver.transport.revoke(LEASE.lease_id)
    take(one_sided_net, "drop")
    assert receiver.said.of(RevokeDone) == [RevokeDone(LEASE.lease_id)]
    one_sided_net.hub.run()
    assert not receiver.memory.any()
    assert sender.said.of(LinkClosed) == [LinkClosed("receiver@1/1", "dropped by the receiver")]
    assert sender.said.of(BlocksTaken) == []


@pytest.mark.covers("H08")
def test_a_sender_that_has_gone_has_stopped_once_what_it_had_sent_has_landed(one_sided_net: MemoryNet) -> None:
    sender, receiver = open_pair(one_sided_net)
    sender.transport.write("receiver@1/1", LEASE, [(0, 0)])
    take(one_sided_net, *ATTACHED, "take")
    receiver.transport.revoke(LEASE.lease_id)
    sender.transport.stop()
    assert receiver.said.of(RevokeDone) == []
    take(one_sided_net, "land", "deliver", "deliver")
    assert receiver.memory[2].any() and receiver.said.of(RevokeDone) == [RevokeDone(LEASE.lease_id)]
    assert one_sided_net.hub.pending() == 0


@pytest.mark.covers("H05")
def test_nobody_learns_where_an_ended_lease_lies(one_sided_net: MemoryNet) -> None:
    sender, receiver = open_pair(one_sided_net)
    receiver.transport.revoke(LEASE.lease_id)
    assert receiver.said.of(RevokeDone) == [RevokeDone(LEASE.lease_id)]  # nobody had been told
    sender.transport.write("receiver@1/1", LEASE, [(0, 0)])
    one_sided_net.hub.run()
    assert [refused.code for refused in receiver.said.of(WriteRefused)] == [pb.LEASE_EXPIRED]
    assert not receiver.memory.any() and sender.said.taken(LEASE.lease_id) == [0]


def test_a_source_is_read_no_more_only_when_the_write_is_known_to_have_landed(one_sided_net: MemoryNet) -> None:
    sender, _ = open_pair(one_sided_net)
    sender.transport.write("receiver@1/1", LEASE, [(0, 0)])
    take(one_sided_net, *ATTACHED, "take", "land", "deliver")
    assert sender.said.taken(LEASE.lease_id) == []
    take(one_sided_net, "return")
    assert sender.said.taken(LEASE.lease_id) == [0]
