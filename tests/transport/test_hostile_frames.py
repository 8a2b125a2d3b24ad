"""What no honest sender would send: refused, counted, bounded, and the node goes on."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate

import numpy as np
import psutil
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from zmq.utils.monitor import recv_monitor_message

from connector.landing import Landing
from connector.transport import BlocksLanded, LeaseRef, LinkClosed, NotifyArrived, WriteRefused
from connector.writes import (
    MAX_FRAME_BYTES,
    IncomingNotice,
    IncomingWrite,
    decode,
    decode_described,
    describe,
    gather,
    pack,
)
from proto import baton_pb2 as pb
from tests.thorough import examples
from tests.transport.net import Node, ZmqNet, commit, fill_at_random

SECRET = b"0123456789abcdef"
LEASE = LeaseRef(1, SECRET)
MIB = 1 << 20


class Attacker:
    """libzmq as anybody has it."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []

    def client(self, node: Node, password: bytes | None, watched: int = 0) -> zmq.Socket[bytes]:
        """A DEALER that connects with this password, or without any."""
        client = self._context.socket(zmq.DEALER)
        self._sockets.append(client)
        client.sndhwm = 4
        if password is not None:
            client.plain_username = b"mallory"
            client.plain_password = password
        if watched:
            self._sockets.append(client.get_monitor_socket(watched))
        client.connect(node.transport.endpoint().address)
        return client

    def member(self, node: Node, watched: int = 0) -> zmq.Socket[bytes]:
        """A client that knows the link secret, so is let in."""
        return self.client(node, node.transport.endpoint().link_secret.hex().encode(), watched)

    def next_event(self) -> int:
        """What the monitor of the last watched client says next."""
        assert self._sockets[-1].poll(60_000), "nothing happened to the connection"
        return recv_monitor_message(self._sockets[-1])["event"]

    def stop(self) -> None:
        """Close everything."""
        for client in self._sockets:
            client.close(linger=0)
        self._context.term()


@pytest.fixture
def attacker() -> Iterator[Attacker]:
    """Somebody with bad intentions."""
    made = Attacker()
    yield made
    made.stop()


def assert_still_serves(net: ZmqNet, node: Node) -> None:
    """A good write lands in the last block, which no attack was allowed to touch."""
    sender = net.node("good")
    fill_at_random(sender.memory)
    last = len(node.memory) - 1
    node.transport.admit(2**63, SECRET, [last])
    sender.transport.open("receiver@1/1", node.transport.endpoint())
    sender.transport.write("receiver@1/1", LeaseRef(2**63, SECRET), [(0, 0)])
    net.until(lambda: node.said.landed(2**63) == [0])
    assert np.array_equal(node.memory[last], sender.memory[0])
    assert not node.memory[:last].any()
    assert sender.said.of(LinkClosed) == []


def write_message(pieces: Sequence[tuple[int, int, int]], secret: bytes = SECRET, lease_id: int = 1) -> bytes:
    return pb.DataMessage(
        write=pb.Write(
            lease_id=lease_id,
            secret=secret,
            pieces=[pb.Piece(block_index=i, offset=offset, length=length) for i, offset, length in pieces],
        )
    ).SerializeToString()


@pytest.mark.covers("H13", "H05")
def test_malformed_messages_of_a_member_are_refused_one_by_one(zmq_net: ZmqNet, attacker: Attacker) -> None:
    receiver = zmq_net.node("receiver", 8, 512)
    receiver.transport.admit(1, SECRET, [0, 1, -1])
    good = write_message([(0, 0, 512)])
    attacks: list[list[bytes]] = [
        [b""],
        [b"", b""],
        [b"\x00" * 100],
        [b"\xff" * 1000, b"x" * 512],
        [good],  # a header without its payload
        [good, b""],
        [good, b"x" * 511],
        [good, b"x" * 513],
        [good, b"x" * 512, b""],
        [good[:-3], b"x" * 512],
        [b"x"] * 1000,
        [commit(1), b"x" * 512],
        [write_message([]), b""],
        [write_message([(0, 0, 0)]), b""],
        [write_message([(0, 0, 511)]), b"x" * 511],
        [write_message([(0, 1, 511)]), b"x" * 511],
        [write_message([(0, 512, 512)]), b"x" * 512],
        [write_message([(0, 2**32 - 1, 512)]), b"x" * 512],
        [write_message([(2, 0, 512)]), b"x" * 512],
        [write_message([(2**32 - 1, 0, 512)]), b"x" * 512],
        [write_message([(0, 0, 512), (0, 0, 512)]), b"x" * 1024],
        [write_message([(0, 0, 512)], secret=b"x" * 16), b"x" * 512],
        [write_message([(0, 0, 512)], secret=b""), b"x" * 512],
        [write_message([(0, 0, 512)], lease_id=2), b"x" * 512],
        [write_message([(0, 0, 2**32 - 1)]), b"x" * 512],
        [write_message([(0, 0, 512)] * 100_000), b"x" * 512],
    ]
    client = attacker.member(receiver)
    for frames in attacks:
        client.send_multipart(frames)
    client.send(commit(7))
    zmq_net.until(lambda: bool(receiver.said.of(NotifyArrived)))
    assert len(receiver.said.of(WriteRefused)) == len(attacks)
    assert sum(receiver.counts("writes_refused").values()) == len(attacks)
    assert_still_serves(zmq_net, receiver)


@pytest.mark.covers("H13", "H09")
def test_a_granted_write_with_a_made_up_checksum_is_refused(zmq_net: ZmqNet, attacker: Attacker) -> None:
    receiver = zmq_net.node("receiver", 8, 512)
    receiver.transport.admit(1, SECRET, [0])
    client = attacker.member(receiver)
    client.send_multipart([write_message([(0, 0, 512)]), b"x" * 512])
    client.send(commit(7))
    zmq_net.until(lambda: bool(receiver.said.of(NotifyArrived)))
    assert [(refused.lease_id, refused.code) for refused in receiver.said.of(WriteRefused)] == [(1, pb.CHECKSUM)]
    assert receiver.said.landed(1) == []


@pytest.mark.covers("H13")
def test_a_member_that_floods_a_receiver_that_hangs_is_held_up_not_stored(zmq_net: ZmqNet, attacker: Attacker) -> None:
    receiver = zmq_net.node("receiver", 8, 512)
    client = attacker.member(receiver)
    chance = random.Random(0)
    noise = chance.randbytes(MIB)
    process = psutil.Process()
    rss_before = process.memory_info().rss
    receiver.said.may_go_on.clear()  # at the first refusal
    num_sent = 0
    while client.poll(500, zmq.POLLOUT) and num_sent < 400:
        sizes = chance.choice([[MIB], [100, MIB], [MIB, 100], [1000] * 1000])
        client.send_multipart([noise[: size - chance.randrange(50)] for size in sizes], copy=False)
        num_sent += 1
    assert process.memory_info().rss - rss_before < 100 * MIB
    assert num_sent < 100, "the receiver's side took it all"
    receiver.said.may_go_on.set()
    client.send(commit(7))
    zmq_net.until(lambda: bool(receiver.said.of(NotifyArrived)))
    assert len(receiver.said.of(WriteRefused)) == num_sent
    assert_still_serves(zmq_net, receiver)


@pytest.mark.covers("H13")
def test_a_frame_over_the_limit_ends_the_connection_unread(zmq_net: ZmqNet, attacker: Attacker) -> None:
    receiver = zmq_net.node("receiver", 8, 512)
    client = attacker.member(receiver, watched=zmq.EVENT_DISCONNECTED)
    client.send_multipart([commit(1), b"\0" * (64 * MIB)], copy=False)
    attacker.next_event()
    assert_still_serves(zmq_net, receiver)
    assert receiver.said.of(WriteRefused) == []
    assert receiver.said.of(NotifyArrived) == []


@pytest.mark.covers("H13", "H05")
@pytest.mark.parametrize("password", [None, b"x", b"0" * 32, b"0" * 255])
def test_a_stranger_sends_no_frame(zmq_net: ZmqNet, attacker: Attacker, password: bytes | None) -> None:
    receiver = zmq_net.node("receiver", 8, 512)
    receiver.transport.admit(1, SECRET, [0])
    failed = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_DISCONNECTED
    client = attacker.client(receiver, password, failed | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    with suppress(zmq.Again):  # it may have been turned away by now
        client.send_multipart([write_message([(0, 0, 512)]), b"x" * 512], zmq.NOBLOCK)
    assert attacker.next_event() & failed
    assert_still_serves(zmq_net, receiver)
    assert receiver.said.of(WriteRefused) == []


@pytest.mark.covers("H13")
@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x00" * 4096,
        b"\xff" + b"\x00" * 8 + b"\x7f\x03\x01PLAIN" + b"\x00" * 500,  # a greeting gone wrong
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f" + random.Random(2).randbytes(4096),
        random.Random(1).randbytes(100_000),
    ],
)
def test_tcp_garbage_disturbs_nobody(zmq_net: ZmqNet, garbage: bytes) -> None:
    receiver = zmq_net.node("receiver", 8, 512)
    host, port = receiver.transport.endpoint().address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        try:
            connection.sendall(garbage)
        except ConnectionError:
            assert len(garbage) > 4096, "thrown out before it could say much"
        assert_still_serves(zmq_net, receiver)
    assert receiver.said.of(WriteRefused) == []


# ---------------------------------------------------------------- without sockets


@pytest.mark.covers("H13")
@settings(deadline=None, max_examples=examples(300, 3))
@given(st.lists(st.binary(max_size=200), max_size=4))
def test_random_frames_decode_to_a_refusal_or_to_what_they_say(frames: list[bytes]) -> None:
    match decode(frames):
        case WriteRefused(lease_id, code, reason):
            assert (lease_id, code) == (0, pb.TRANSFER_FAILED)
            assert reason
        case IncomingNotice(payload):
            assert pb.DataMessage.FromString(payload).WhichOneof("kind") == "commit"
        case IncomingWrite() as write:
            assert write.begins == tuple(accumulate((span.length for span in write.spans[:-1]), initial=0))
            assert len(write.source) == write.num_bytes
            assert write.num_bytes <= MAX_FRAME_BYTES


@pytest.mark.covers("H13", "H09")
@settings(deadline=None, max_examples=examples(300, 3))
@given(st.data())
def test_a_good_write_with_any_bit_flipped_never_lands_as_something_else(data: st.DataObject) -> None:
    source = np.arange(4 * 64, dtype=np.uint8).reshape(4, 64)
    (write,) = pack(LEASE, [(0, 1), (1, 3)], 64)
    header, payload = gather(source, write)
    frames = [bytearray(header), bytearray(payload.tobytes())]
    frame = data.draw(st.sampled_from(frames))
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[bit // 8] ^= 1 << bit % 8

    memory = np.zeros((8, 64), np.uint8)
    events: list[object] = []
    landing = Landing(memory, events.append)
    landing.admit(LEASE.lease_id, LEASE.secret, [2, 5])
    arrived = decode([bytes(frame) for frame in frames])
    if isinstance(arrived, IncomingWrite) and (running := landing.begin(arrived, "sender")) is not None:
        landing.finish(running)
    assert all(isinstance(event, WriteRefused) for event in events)
    assert not memory[[0, 1, 3, 4, 6, 7]].any()


@pytest.mark.covers("H13", "H09")
@settings(deadline=None, max_examples=examples(300, 3))
@given(st.data())
def test_a_good_header_with_any_bit_flipped_never_lands_as_something_else(data: st.DataObject) -> None:
    source = np.arange(4 * 64, dtype=np.uint8).reshape(4, 64)
    (write,) = pack(LEASE, [(0, 1), (1, 3)], 64)
    header = bytearray(describe(source, write))
    bit = data.draw(st.integers(0, 8 * len(header) - 1))
    header[bit // 8] ^= 1 << bit % 8

    memory = np.zeros((8, 64), np.uint8)
    events: list[object] = []
    landing = Landing(memory, events.append)
    landing.admit(LEASE.lease_id, LEASE.secret, [2, 5])
    arrived = decode_described(bytes(header), source)
    if isinstance(arrived, IncomingWrite) and (running := landing.begin(arrived, "sender")) is not None:
        landing.finish(running)
    for event in events:  # a piece that is lost from the header may leave the other one as it was
        assert isinstance(event, WriteRefused | BlocksLanded)
        for i in event.block_indices if isinstance(event, BlocksLanded) else ():
            assert np.array_equal(memory[[2, 5][i]], source[[1, 3][i]])
    assert not memory[[0, 1, 3, 4, 6, 7]].any()


@pytest.mark.covers("H13")
@settings(deadline=None, max_examples=examples(300, 3))
@given(st.binary(max_size=200))
def test_random_headers_decode_to_a_refusal_or_to_spans_of_the_peers_memory(header: bytes) -> None:
    arrived = decode_described(header, np.zeros((4, 64), np.uint8))
    if isinstance(arrived, IncomingWrite):
        for span, begin in zip(arrived.spans, arrived.begins, strict=True):
            assert begin >= 0 and begin % 64 + span.length <= 64 and begin + span.length <= len(arrived.source)
    else:
        assert (arrived.lease_id, arrived.code) == (0, pb.TRANSFER_FAILED)
