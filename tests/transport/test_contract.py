"""What every transport must do, run against each of them; of one-sided ones test_one_sided.py says what is different."""

from __future__ import annotations

import numpy as np
import pytest

from connector.transport import Answered, BlocksLanded, LeaseRef, LinkClosed, NotifyArrived, RevokeDone, WriteRefused
from proto import baton_pb2 as pb
from tests.transport.conftest import made
from tests.transport.net import Net, Node, ThreadedNet, answer, commit, fill_at_random

LEASE = LeaseRef(0x1234_5678_9ABC_DEF0, b"0123456789abcdef")
MIB = 1 << 20


def pair(net: Net, num_blocks: int = 8, block_bytes: int = 512) -> tuple[Node, Node]:
    """A sender with random memory, a receiver, and the link "receiver@1/1" between them."""
    sender = net.node("sender", num_blocks, block_bytes)
    receiver = net.node("receiver", num_blocks, block_bytes)
    fill_at_random(sender.memory)
    sender.transport.open("receiver@1/1", receiver.transport.endpoint())
    return sender, receiver


def drain(net: Net, sender: Node, receiver: Node, link_id: str = "receiver@1/1") -> None:
    """Wait until all that was given to the link has been dealt with."""
    num_before = len(receiver.said.of(NotifyArrived))
    sender.transport.notify(link_id, commit(99))
    net.until(lambda: len(receiver.said.of(NotifyArrived)) > num_before)


@pytest.mark.covers("H02")
@pytest.mark.parametrize("block_bytes", [512, 1000, 100_000, MIB, MIB + 1, 3 * MIB])
def test_blocks_arrive_bit_identical_wherever_the_lease_puts_them(net: Net, block_bytes: int) -> None:
    sender, receiver = pair(net, num_blocks=8, block_bytes=block_bytes)
    receiver.transport.admit(LEASE.lease_id, LEASE.secret, [5, 0, 7, 2])
    blocks = [(0, 3), (1, 1), (2, 6), (3, 4)]
    sender.transport.write("receiver@1/1", LEASE, blocks[:3])
    sender.transport.write("receiver@1/1", LEASE, blocks[3:])
    net.until(lambda: len(receiver.said.landed(LEASE.lease_id)) == 4)
    assert sorted(receiver.said.landed(LEASE.lease_id)) == [0, 1, 2, 3]
    assert np.array_equal(receiver.memory[[5, 0, 7, 2]], sender.memory[[3, 1, 6, 4]])
    assert not receiver.memory[[1, 3, 4, 6]].any()
    net.until(lambda: len(sender.said.taken(LEASE.lease_id)) == 4)
    assert sender.said.taken(LEASE.lease_id) == [0, 1, 2, 3]


@pytest.mark.covers("H02")
def test_more_small_blocks_than_one_message_holds_all_arrive(net: Net) -> None:
    sender, receiver = pair(net, num_blocks=3000, block_bytes=512)
    receiver.transport.admit(LEASE.lease_id, LEASE.secret, range(3000))
    sender.transport.write("receiver@1/1", LEASE, [(i, 2999 - i) for i in range(3000)])
    net.until(lambda: len(receiver.said.landed(LEASE.lease_id)) == 3000)
    assert np.array_equal(receiver.memory, sender.memory[::-1])
    assert sender.counts("kv_bytes_sent") == {"receiver": 3000 * 512}
    assert receiver.counts("kv_bytes_received") == {"sender": 3000 * 512}


@pytest.mark.covers("H04")
def test_a_notification_arrives_behind_every_earlier_write_of_its_link(net: Net) -> None:
    sender, receiver = pair(net, num_blocks=64, block_bytes=40_000)
    for n in range(8):
        receiver.transport.admit(n + 1, LEASE.secret, range(8 * n, 8 * n + 8))
        sender.transport.write("receiver@1/1", LeaseRef(n + 1, LEASE.secret), [(i, 8 * n + i) for i in range(8)])
        sender.transport.notify("receiver@1/1", commit(n + 1))
    net.until(lambda: len(receiver.said.of(NotifyArrived)) == 8)
    landed: dict[int, int] = {}
    notified: list[int] = []
    for event in receiver.said.all():
        if isinstance(event, NotifyArrived):
            notified.append(pb.DataMessage.FromString(event.payload).commit.lease_id)
            assert landed[notified[-1]] == 8
        elif isinstance(event, BlocksLanded):
            landed[event.lease_id] = landed.get(event.lease_id, 0) + len(event.block_indices)
    assert notified == list(range(1, 9))


@pytest.mark.covers("H04")
def test_a_block_with_a_piece_missing_has_not_landed_when_the_commit_comes(net: Net) -> None:
    receiver = net.node("receiver", 2, 2 * MIB)
    other_cut = net.node("other", 2, MIB)  # its blocks are half as long, so half of each arrives
    other_cut.transport.open("receiver@1/2", receiver.transport.endpoint())
    receiver.transport.admit(LEASE.lease_id, LEASE.secret, [0, 1])
    other_cut.transport.write("receiver@1/2", LEASE, [(0, 0), (1, 1)])
    drain(net, other_cut, receiver, "receiver@1/2")
    assert receiver.said.landed(LEASE.lease_id) == []
    assert receiver.said.of(WriteRefused) == []


def test_source_blocks_may_change_once_they_are_taken(net: Net) -> None:
    sender, receiver = pair(net, num_blocks=4, block_bytes=3 * MIB)
    original = sender.memory.copy()
    receiver.transport.admit(LEASE.lease_id, LEASE.secret, [0, 1, 2, 3])
    sender.transport.write("receiver@1/1", LEASE, [(i, i) for i in range(4)])
    for i in range(4):
        net.until(lambda i=i: i in sender.said.taken(LEASE.lease_id))  # type: ignore[misc]
        sender.memory[i] = 0xEE
    net.until(lambda: len(receiver.said.landed(LEASE.lease_id)) == 4)
    assert np.array_equal(receiver.memory, original)


def hang(net: Net, sender: Node, receiver: Node) -> None:
    """The receiver's thread hangs from here on, where it has one, and the link is open."""
    if isinstance(net, ThreadedNet):
        receiver.said.may_go_on.clear()
    drain(net, sender, receiver)


def until_heard(net: Net, sender: Node) -> None:
    """Wait until the sender's thread, where it has one, has heard all that it was told."""
    if isinstance(net, ThreadedNet):
        num_before = len(sender.said.of(LinkClosed))
        sender.transport.open(f"nobody@1/{num_before}", pb.Endpoint())
        net.until(lambda: len(sender.said.of(LinkClosed)) > num_before)


@pytest.mark.covers("A10", "H08")
def test_writes_that_are_dropped_are_given_back_once_and_nobody_waits_behind_them(net: Net) -> None:
    other = LeaseRef(2, LEASE.secret)
    sender, receiver = pair(net, num_blocks=65, block_bytes=MIB)
    receiver.transport.admit(LEASE.lease_id, LEASE.secret, range(64))
    receiver.transport.admit(other.lease_id, other.secret, [64])
    hang(net, sender, receiver)
    for block_id in range(64):  # more than goes on its way at once
        sender.transport.write("receiver@1/1", LEASE, [(block_id, block_id)])
    sender.transport.write("receiver@1/1", other, [(0, 64)])
    until_heard(net, sender)
    sender.transport.drop("receiver@1/1", LEASE)
    sender.transport.drop("receiver@1/1", LEASE)
    sender.transport.drop("gone@1/1", other)
    until_heard(net, sender)
    receiver.said.may_go_on.set()
    net.until(lambda: sender.said.taken(2) == [0] and len(sender.said.taken(LEASE.lease_id)) == 64)
    drain(net, sender, receiver)
    assert sorted(sender.said.taken(LEASE.lease_id)) == list(range(64))
    assert receiver.said.landed(2) == [0]
    assert sender.counts("kv_bytes_sent")["receiver"] <= 40 * MIB, "all of it crossed the wire"
    landed = sorted(receiver.said.landed(LEASE.lease_id))
    assert np.array_equal(receiver.memory[[*landed, 64]], sender.memory[[*landed, 64]])
    assert receiver.said.of(WriteRefused) == []


@pytest.mark.covers("H08")
@pytest.mark.parametrize("kind", ["zmq", "shm"])
def test_a_dropped_block_is_given_back_behind_its_pieces_that_are_under_way(kind: str) -> None:
    with made(kind) as net:
        sender, receiver = pair(net, num_blocks=6, block_bytes=9 * MIB)  # no message ends where a block does
        receiver.transport.admit(LEASE.lease_id, LEASE.secret, range(6))
        hang(net, sender, receiver)
        for block_id in (0, 3):
            sender.transport.write("receiver@1/1", LEASE, [(i, i) for i in range(block_id, block_id + 3)])
        until_heard(net, sender)
        sender.transport.drop("receiver@1/1", LEASE)
        until_heard(net, sender)
        assert 0 < sender.counts("kv_bytes_sent")["receiver"] < 54 * MIB
        assert 5 not in sender.said.taken(LEASE.lease_id)
        receiver.said.may_go_on.set()
        net.until(lambda: len(sender.said.taken(LEASE.lease_id)) == 6)
        drain(net, sender, receiver)
        assert sorted(sender.said.taken(LEASE.lease_id)) == list(range(6))
        assert 5 not in receiver.said.landed(LEASE.lease_id)


@pytest.mark.covers("H05")
@pytest.mark.parametrize(
    ("lease", "block_index", "named_lease_id"),
    [
        (LeaseRef(LEASE.lease_id, b"wrong secret 456"), 0, 0),
        (LeaseRef(LEASE.lease_id, b""), 0, 0),
        (LeaseRef(7, LEASE.secret), 0, 0),  # never admitted
        (LeaseRef(8, LEASE.secret), 0, 0),  # revoked
        (LEASE, 2, LEASE.lease_id),  # held already
        (LEASE, 3, LEASE.lease_id),  # outside of the lease
        (LEASE, 2**32 - 1, LEASE.lease_id),
    ],
)
def test_a_write_without_the_right_is_refused_counted_and_touches_nothing(
    net: Net, lease: LeaseRef, block_index: int, named_lease_id: int
) -> None:
    sender, receiver = pair(net)
    receiver.transport.admit(LEASE.lease_id, LEASE.secret, [3, 4, -1])
    receiver.transport.admit(8, LEASE.secret, [5])
    receiver.transport.revoke(8)
    sender.transport.write("receiver@1/1", lease, [(block_index, 0)])
    drain(net, sender, receiver)
    (refused,) = receiver.said.of(WriteRefused)
    assert refused.lease_id == named_lease_id
    assert not receiver.memory.any()
    assert sum(receiver.counts("writes_refused").values()) == 1
    assert receiver.counts("kv_bytes_received") == {}
    sender.transport.write("receiver@1/1", LEASE, [(0, 1), (1, 2)])
    drain(net, sender, receiver)
    assert np.array_equal(receiver.memory[[3, 4]], sender.memory[[1, 2]])


@pytest.mark.covers("H05")
def test_one_bad_span_refuses_its_whole_message(net: Net) -> None:
    sender, receiver = pair(net)
    receiver.transport.admit(LEASE.lease_id, LEASE.secret, [3, 4, -1])
    sender.transport.write("receiver@1/1", LEASE, [(0, 0), (1, 1), (2, 2)])
    drain(net, sender, receiver)
    assert [refused.code for refused in receiver.said.of(WriteRefused)] == [pb.TRANSFER_FAILED]
    assert not receiver.memory.any()


@pytest.mark.covers("H05")
def test_a_block_that_landed_cannot_be_written_again(two_sided_net: Net) -> None:
    net = two_sided_net
    sender, receiver = pair(net)
    receiver.transport.admit(LEASE.lease_id, LEASE.secret, [3, 4])
    sender.transport.write("receiver@1/1", LEASE, [(0, 0)])
    sender.transport.write("receiver@1/1", LEASE, [(0, 1)])
    drain(net, sender, receiver)
    assert [refused.lease_id for refused in receiver.said.of(WriteRefused)] == [LEASE.lease_id]
    assert np.array_equal(receiver.memory[3], sender.memory[0])
    assert receiver.said.landed(LEASE.lease_id) == [0]


@pytest.mark.covers("H08")
def test_each_admitted_lease_that_is_revoked_becomes_quiet_exactly_once(net: Net) -> None:
    sender, receiver = pair(net)
    receiver.transport.admit(1, LEASE.secret, [0, 1])
    receiver.transport.admit(2, LEASE.secret, [2, 3])
    sender.transport.write("receiver@1/1", LeaseRef(2, LEASE.secret), [(0, 0), (1, 1)])
    drain(net, sender, receiver)
    for lease_id in (1, 2, 1, 2, 3):
        receiver.transport.revoke(lease_id)
    net.until(lambda: len(receiver.said.of(RevokeDone)) == 2)
    drain(net, sender, receiver)
    assert sorted(event.lease_id for event in receiver.said.of(RevokeDone)) == [1, 2]
    assert receiver.transport.snapshot()["leases_admitted"] == 0
    assert receiver.transport.snapshot()["leases_quarantined"] == 0


def test_admitting_a_lease_twice_or_a_block_that_is_not_there_is_a_bug(net: Net) -> None:
    receiver = net.node("receiver", num_blocks=8)
    receiver.transport.admit(1, LEASE.secret, [0])
    with pytest.raises(ValueError, match="already"):
        receiver.transport.admit(1, LEASE.secret, [1])
    with pytest.raises(ValueError, match="outside"):
        receiver.transport.admit(2, LEASE.secret, [8])
    with pytest.raises(ValueError, match="outside"):
        receiver.transport.write("x@1/1", LEASE, [(0, 8)])


def test_an_answer_reaches_the_link_that_asked_and_no_other(net: Net) -> None:
    sender, receiver = pair(net)
    other = net.node("other")
    other.transport.open("receiver@1/7", receiver.transport.endpoint())
    sender.transport.notify("receiver@1/1", commit(1))
    other.transport.notify("receiver@1/7", commit(2))
    net.until(lambda: len(receiver.said.of(NotifyArrived)) == 2)
    for arrived in receiver.said.of(NotifyArrived):
        receiver.transport.answer(arrived.reply_to, answer(pb.DataMessage.FromString(arrived.payload).commit.lease_id))
    net.until(lambda: bool(sender.said.of(Answered)) and bool(other.said.of(Answered)))
    assert sender.said.of(Answered) == [Answered("receiver@1/1", answer(1))]
    assert other.said.of(Answered) == [Answered("receiver@1/7", answer(2))]


def test_answers_longer_than_a_socket_takes_arrive_whole_and_in_order(net: Net) -> None:
    sender, receiver = pair(net)
    for lease_id in (1, 2, 3):
        sender.transport.notify("receiver@1/1", commit(lease_id))
    net.until(lambda: len(receiver.said.of(NotifyArrived)) == 3)
    payloads = [bytes([number]) * (1 << 20) for number in range(3)]
    for arrived, payload in zip(receiver.said.of(NotifyArrived), payloads, strict=True):
        receiver.transport.answer(arrived.reply_to, payload)
    net.until(lambda: len(sender.said.of(Answered)) == 3)
    assert [each.payload for each in sender.said.of(Answered)] == payloads


def test_an_answer_to_a_link_that_is_gone_does_nothing(net: Net) -> None:
    sender, receiver = pair(net)
    sender.transport.notify("receiver@1/1", commit(1))
    net.until(lambda: bool(receiver.said.of(NotifyArrived)))
    sender.transport.close("receiver@1/1")
    net.until(lambda: bool(sender.said.of(LinkClosed)))
    receiver.transport.answer(receiver.said.of(NotifyArrived)[0].reply_to, answer(1))
    sender.transport.open("receiver@1/2", receiver.transport.endpoint())
    drain(net, sender, receiver, "receiver@1/2")
    assert sender.said.of(Answered) == []


@pytest.mark.covers("H13")
@pytest.mark.parametrize(
    "payload", [b"", b"\xff" * 40, answer(1), pb.DataMessage(write=pb.Write()).SerializeToString()]
)
def test_a_notification_that_is_no_commit_is_refused(net: Net, payload: bytes) -> None:
    sender, receiver = pair(net)
    sender.transport.notify("receiver@1/1", payload)
    drain(net, sender, receiver)
    assert len(receiver.said.of(NotifyArrived)) == 1  # drain's own
    assert [refused.lease_id for refused in receiver.said.of(WriteRefused)] == [0]


def test_the_commit_of_a_million_tokens_arrives(net: Net) -> None:
    """As many as a node's --max-model-len may be."""
    sender, receiver = pair(net)
    token_ids = [131_071] * ((1 << 20) - 1)
    long = pb.DataMessage(commit=pb.Commit(lease_id=1, prompt_token_ids=token_ids)).SerializeToString()
    sender.transport.notify("receiver@1/1", long)
    drain(net, sender, receiver)
    assert receiver.said.of(NotifyArrived)[0].payload == long
    assert sender.said.of(LinkClosed) == []


def test_a_closed_link_says_so_once_and_takes_nothing_more(net: Net) -> None:
    sender, receiver = pair(net)
    receiver.transport.admit(LEASE.lease_id, LEASE.secret, [0, 1])
    drain(net, sender, receiver)
    sender.transport.close("receiver@1/1")
    sender.transport.close("receiver@1/1")
    sender.transport.write("receiver@1/1", LEASE, [(0, 0)])
    sender.transport.notify("receiver@1/1", commit(1))
    net.until(lambda: bool(sender.said.of(LinkClosed)))
    sender.transport.open("receiver@1/2", receiver.transport.endpoint())
    drain(net, sender, receiver, "receiver@1/2")
    assert sender.said.of(LinkClosed) == [LinkClosed("receiver@1/1", "closed")]
    assert sender.said.taken(LEASE.lease_id) == []
    assert len(receiver.said.of(NotifyArrived)) == 2
    assert sender.transport.snapshot()["links"] == 1


@pytest.mark.covers("H05")
def test_a_link_with_a_wrong_secret_or_to_nobody_closes_once(net: Net) -> None:
    sender, receiver = pair(net)
    right = receiver.transport.endpoint()
    wrong = [
        pb.Endpoint(transport=right.transport, address=right.address, link_secret=b"x" * 16),
        pb.Endpoint(transport=right.transport, address=right.address, link_secret=b"x" * 4096),
        pb.Endpoint(transport=right.transport, address=right.address),
        pb.Endpoint(transport="carrier pigeon", address=right.address, link_secret=right.link_secret),
        pb.Endpoint(transport=right.transport, address="inproc://zeromq.zap.01", link_secret=right.link_secret),
        pb.Endpoint(transport=right.transport, address="tcp://127.0.0.1:99999999", link_secret=right.link_secret),
        pb.Endpoint(),
    ]
    for number, endpoint in enumerate(wrong):
        sender.transport.open(f"wrong/{number}", endpoint)
        sender.transport.notify(f"wrong/{number}", commit(1))
    net.until(lambda: len(sender.said.of(LinkClosed)) == len(wrong))
    drain(net, sender, receiver)
    assert sorted(event.link_id for event in sender.said.of(LinkClosed)) == [f"wrong/{n}" for n in range(len(wrong))]
    assert len(receiver.said.of(NotifyArrived)) == 1


def test_links_to_a_node_that_stops_close_once_and_others_go_on(net: Net) -> None:
    sender, receiver = pair(net)
    other = net.node("other")
    sender.transport.open("other@1/1", other.transport.endpoint())
    drain(net, sender, receiver)
    drain(net, sender, other, "other@1/1")
    receiver.transport.stop()
    net.until(lambda: bool(sender.said.of(LinkClosed)))
    drain(net, sender, other, "other@1/1")
    assert [event.link_id for event in sender.said.of(LinkClosed)] == ["receiver@1/1"]


def test_a_stopped_transport_says_nothing_more_and_takes_calls_without_effect(net: Net) -> None:
    sender, receiver = pair(net)
    receiver.transport.admit(LEASE.lease_id, LEASE.secret, [0])
    drain(net, sender, receiver)
    sender.transport.stop()
    num_events = len(sender.said.all())
    sender.transport.stop()
    sender.transport.open("receiver@1/2", receiver.transport.endpoint())
    sender.transport.write("receiver@1/1", LEASE, [(0, 0)])
    sender.transport.notify("receiver@1/1", commit(1))
    sender.transport.close("receiver@1/1")
    other = net.node("other")
    other.transport.open("receiver@1/3", receiver.transport.endpoint())
    drain(net, other, receiver, "receiver@1/3")
    assert len(sender.said.all()) == num_events
    assert not receiver.memory.any()
