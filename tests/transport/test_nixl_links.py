"""nixl links whose senders die, hang or are none: what they could still write into is not given to anybody before they cannot."""

from __future__ import annotations

import signal
import socket
import time
from contextlib import ExitStack
from typing import Any, cast

import numpy as np
import psutil
import pytest

from connector import nixl_agent, nixl_receiver, nixl_sender
from connector.link_channel import Channel, FrameKind
from connector.transport import LeaseRef, LinkClosed, NotifyArrived, RevokeDone
from connector.writes import pack
from proto import baton_pb2 as pb
from tests.stopping import stop
from tests.transport.net import WAIT_S, NixlNet, Node, commit, fill_at_random
from tests.transport.peer import BLOCK_BYTES, NUM_BLOCKS, SECRET, pattern
from tests.transport.peer_process import Peer, peer


def receiver_of(net: NixlNet, sender: Peer) -> Node:
    """A node into whose lease 1 the peer has written its block 0."""
    receiver = net.node("receiver", NUM_BLOCKS, BLOCK_BYTES)
    receiver.transport.admit(1, SECRET, [2])
    sender.begin(receiver.transport.endpoint())
    net.until(lambda: receiver.said.landed(1) == [0] and bool(receiver.said.of(NotifyArrived)))
    assert (receiver.memory[2] == pattern(0)).all()
    return receiver


def assert_still_serves(net: NixlNet, receiver: Node) -> None:
    """Another sender's write lands."""
    good = net.node("good", NUM_BLOCKS, BLOCK_BYTES)
    fill_at_random(good.memory)
    receiver.transport.admit(9, SECRET, [3])
    good.transport.open("receiver@1/9", receiver.transport.endpoint())
    good.transport.write("receiver@1/9", LeaseRef(9, SECRET), [(0, 1)])
    net.until(lambda: receiver.said.landed(9) == [0])
    assert np.array_equal(receiver.memory[3], good.memory[1])


@pytest.mark.covers("H08", "H07")
def test_the_leases_of_a_killed_sender_are_quiet_and_others_go_on(nixl_net: NixlNet) -> None:
    with peer("nixl") as sender:
        receiver = receiver_of(nixl_net, sender)
        sender.kill()
        receiver.transport.revoke(1)
        nixl_net.until(lambda: receiver.said.of(RevokeDone) == [RevokeDone(1)])
    assert receiver.transport.snapshot()["leases_quarantined"] == 0
    assert_still_serves(nixl_net, receiver)


@pytest.mark.covers("H08")
def test_a_sender_that_hangs_keeps_an_ended_lease_in_quarantine_until_its_link_is_torn_down(
    nixl_net: NixlNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_receiver, "_STOP_S", 1.5)
    with peer("nixl") as sender:
        receiver = receiver_of(nixl_net, sender)
        stop(sender.process.pid)
        began = time.monotonic()
        receiver.transport.revoke(1)
        assert receiver.transport.snapshot()["leases_quarantined"] == 1 and receiver.said.of(RevokeDone) == []
        nixl_net.until(lambda: receiver.said.of(RevokeDone) == [RevokeDone(1)])
        assert time.monotonic() - began >= 1.5
        assert_still_serves(nixl_net, receiver)
        sender.process.send_signal(signal.SIGCONT)
        sender.wait_for("LinkClosed")


@pytest.mark.covers("H08")
def test_leases_that_end_one_after_the_other_do_not_put_off_the_end_of_a_sender_that_hangs(
    nixl_net: NixlNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_receiver, "_STOP_S", 1.0)
    with peer("nixl") as sender:
        receiver = nixl_net.node("receiver", NUM_BLOCKS, BLOCK_BYTES)
        for lease_id in range(1, 5):
            receiver.transport.admit(lease_id, SECRET, [lease_id - 1])
        sender.begin(receiver.transport.endpoint())
        nixl_net.until(lambda: all(receiver.said.landed(lease_id) == [0] for lease_id in range(1, 5)))
        stop(sender.process.pid)
        for lease_id in range(1, 4):
            receiver.transport.revoke(lease_id)
            time.sleep(0.9)  # never as long as a sender is given
        assert RevokeDone(1) in receiver.said.of(RevokeDone), "no answer about others is awaited for it"
        receiver.transport.revoke(4)
        nixl_net.until(lambda: len(receiver.said.of(RevokeDone)) == 4)


@pytest.mark.covers("H08")
def test_a_sender_that_lives_says_that_it_has_stopped_and_keeps_its_link(nixl_net: NixlNet) -> None:
    sender = nixl_net.node("sender", NUM_BLOCKS, BLOCK_BYTES)
    receiver = nixl_net.node("receiver", NUM_BLOCKS, BLOCK_BYTES)
    fill_at_random(sender.memory)
    sender.transport.open("receiver@1/1", receiver.transport.endpoint())
    for lease_id in range(1, 6):
        receiver.transport.admit(lease_id, SECRET, [0, 1])
        sender.transport.write("receiver@1/1", LeaseRef(lease_id, SECRET), [(0, 2), (1, 3)])
        nixl_net.until(lambda lease_id=lease_id: len(receiver.said.landed(lease_id)) == 2)  # type: ignore[misc]
        receiver.transport.revoke(lease_id)
        nixl_net.until(lambda lease_id=lease_id: receiver.said.of(RevokeDone)[-1:] == [RevokeDone(lease_id)])  # type: ignore[misc]
    assert sender.said.of(LinkClosed) == []


def test_a_node_on_loopback_listens_nowhere_else(nixl_net: NixlNet) -> None:
    sender, receiver = nixl_net.node("sender"), nixl_net.node("receiver")
    sender.transport.open("receiver@1/1", receiver.transport.endpoint())
    sender.transport.notify("receiver@1/1", commit(1))
    nixl_net.until(lambda: bool(receiver.said.of(NotifyArrived)))
    listening = [each.laddr.ip for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert len(listening) >= 4, "two of ours, two of UCX"
    assert set(listening) == {"127.0.0.1"}


WRONG_SECRET = pb.LinkHello(sender="mallory@1", link_secret=b"x" * 16, num_blocks=1, block_bytes=1).SerializeToString()


@pytest.mark.covers("H13")
@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x01\xff\xff\xff\xff",
        b"\x01\x02\x00\x00\x00\xff\xff",
        b"\x03\x00\x00\x00\x00",
        b"\x01" + len(WRONG_SECRET).to_bytes(4, "little") + WRONG_SECRET,
    ],
)
def test_who_says_something_else_is_not_let_in(nixl_net: NixlNet, words: bytes) -> None:
    receiver = nixl_net.node("receiver", NUM_BLOCKS, BLOCK_BYTES)
    host, _, port = receiver.transport.endpoint().address.rpartition(":")
    with socket.create_connection((host, int(port)), 20) as stranger:
        stranger.sendall(words)
        assert stranger.recv(1) == b""
    nixl_net.until(lambda: receiver.transport.snapshot()["links_refused"] == 1)
    assert_still_serves(nixl_net, receiver)


@pytest.mark.covers("H13")
def test_a_sender_that_was_let_in_and_says_what_none_says_loses_its_link_alone(nixl_net: NixlNet) -> None:
    receiver = nixl_net.node("receiver", NUM_BLOCKS, BLOCK_BYTES)
    endpoint = receiver.transport.endpoint()
    host, _, port = endpoint.address.rpartition(":")
    hello = pb.LinkHello(sender="mallory@1", link_secret=endpoint.link_secret).SerializeToString()
    for kind, body in ((6, b""), (7, b"\xff"), (10, b"\xff"), (99, b"")):
        with socket.create_connection((host, int(port)), 20) as stranger:
            stranger.sendall(b"\x01" + len(hello).to_bytes(4, "little") + hello)
            assert stranger.recv(1) == b"\x02"
            stranger.sendall(bytes([kind]) + len(body).to_bytes(4, "little") + body)
            while stranger.recv(65536):
                pass
    assert_still_serves(nixl_net, receiver)


def read_exactly(stranger: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        more = stranger.recv(num_bytes - len(data))
        assert more
        data += more
    return data


def read_frame(stranger: socket.socket) -> bytes:
    """The body of the next frame."""
    return read_exactly(stranger, int.from_bytes(read_exactly(stranger, 5)[1:], "little"))


@pytest.mark.covers("H13")
def test_a_receiver_that_says_to_have_more_blocks_than_anybody_has_is_not_listed_block_by_block(
    nixl_net: NixlNet,
) -> None:
    right = nixl_net.node("receiver", NUM_BLOCKS, BLOCK_BYTES).transport.endpoint()
    host, _, port = right.address.rpartition(":")
    hello = pb.LinkHello(sender="sender@1", link_secret=right.link_secret).SerializeToString()
    with socket.create_connection((host, int(port)), 20) as to_right:
        to_right.sendall(b"\x01" + len(hello).to_bytes(4, "little") + hello)
        welcome = pb.LinkWelcome.FromString(read_frame(to_right))
        assert welcome.num_blocks == NUM_BLOCKS
        welcome.num_blocks = (1 << 22) + 1
        sender = nixl_net.node("sender", NUM_BLOCKS, BLOCK_BYTES)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(20)
            endpoint = pb.Endpoint()
            endpoint.CopyFrom(right)
            endpoint.address = "{}:{}".format(*listener.getsockname())
            sender.transport.open("mallory@1/1", endpoint)
            mallory, _ = listener.accept()
            with mallory:
                read_frame(mallory)
                said = welcome.SerializeToString()
                mallory.sendall(b"\x02" + len(said).to_bytes(4, "little") + said)
                nixl_net.until(lambda: bool(sender.said.of(LinkClosed)))
    (closed,) = sender.said.of(LinkClosed)
    assert "4194305 blocks" in closed.reason


class _Crowd:
    """Senders that come to a nixl receiver at once, each of whose agents takes its time and does nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, agent_s: float) -> None:
        self.num_made = 0
        self._agent_s = agent_s
        self._real = nixl_agent.NixlLibrary.agent
        monkeypatch.setattr(nixl_agent.NixlLibrary, "agent", lambda *its: self._make(*its))

    def _make(self, library: nixl_agent.NixlLibrary, name: str, memory: Any) -> Any:
        if "<guest" not in name:
            return self._real(library, name, memory)
        time.sleep(self._agent_s)
        self.num_made += 1
        return self

    def metadata(self) -> bytes:
        return b""

    def close(self) -> None:
        pass

    def come(self, receiver: Node, number: int, stack: ExitStack) -> None:
        endpoint = receiver.transport.endpoint()
        host, _, port = endpoint.address.rpartition(":")
        hello = pb.LinkHello(sender="guest@1", link_secret=endpoint.link_secret).SerializeToString()
        for _ in range(number):
            guest = stack.enter_context(socket.create_connection((host, int(port)), 20))
            guest.sendall(b"\x01" + len(hello).to_bytes(4, "little") + hello)


@pytest.mark.covers("P04")
def test_links_get_their_turns_while_a_crowd_is_let_in(nixl_net: NixlNet, monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = _Crowd(monkeypatch, 0.1)
    sender, receiver = nixl_net.node("sender"), nixl_net.node("receiver")
    sender.transport.open("receiver@1/1", receiver.transport.endpoint())
    sender.transport.notify("receiver@1/1", commit(1))
    nixl_net.until(lambda: bool(receiver.said.of(NotifyArrived)))
    with ExitStack() as stack:
        crowd.come(receiver, 24, stack)
        sender.transport.notify("receiver@1/1", commit(2))
        nixl_net.until(lambda: len(receiver.said.of(NotifyArrived)) == 2)
        assert crowd.num_made < 24


@pytest.mark.covers("H08")
def test_a_sender_that_stops_in_time_keeps_its_link_though_a_crowd_is_let_in(
    nixl_net: NixlNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_receiver, "_STOP_S", 1.0)
    crowd = _Crowd(monkeypatch, 0.02)
    sender, receiver = nixl_net.node("sender"), nixl_net.node("receiver")
    receiver.transport.admit(1, SECRET, [0])
    sender.transport.open("receiver@1/1", receiver.transport.endpoint())
    sender.transport.write("receiver@1/1", LeaseRef(1, SECRET), [(0, 1)])
    nixl_net.until(lambda: receiver.said.landed(1) == [0])
    with ExitStack() as stack:
        crowd.come(receiver, 130, stack)
        receiver.transport.revoke(1)
        nixl_net.until(lambda: receiver.said.of(RevokeDone) == [RevokeDone(1)])
        sender.transport.notify("receiver@1/1", commit(1))
        nixl_net.until(lambda: bool(receiver.said.of(NotifyArrived)))
    assert sender.said.of(LinkClosed) == []


def test_no_agent_is_made_for_who_has_given_up(nixl_net: NixlNet, monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = _Crowd(monkeypatch, 0.0)
    receiver = nixl_net.node("receiver")
    receiver.said.may_go_on.clear()
    sender = nixl_net.node("sender")
    sender.transport.open("receiver@1/1", receiver.transport.endpoint())
    sender.transport.notify("receiver@1/1", commit(1))  # the receiver's thread hangs behind it
    nixl_net.until(lambda: bool(receiver.said.of(NotifyArrived)))
    with ExitStack() as stack:
        crowd.come(receiver, 5, stack)
    receiver.said.may_go_on.set()
    give_up_at = time.monotonic() + WAIT_S
    while receiver.transport.snapshot()["links_refused"] != 5:
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
    assert crowd.num_made == 0


def test_a_sender_reads_a_welcome_that_lies_there_before_it_says_that_it_is_too_late() -> None:
    here, there = socket.socketpair()
    here.setblocking(False)
    said = list[object]()
    sender = nixl_sender.NixlSender(cast(Any, None), np.zeros((8, 64), np.uint8), "sender", said.append)
    link = nixl_sender._Link("link", Channel(here))
    link.must_open_by = 0.0
    sender._links["link"] = link
    sender._selector.register(link.channel, 1, "link")
    Channel(there).send(FrameKind.OVER, b"")
    sender._serve_link(link, 0)
    assert said == [LinkClosed("link", "not let in: the peer sent OVER out of turn")], "what was there was read first"
    sender._mailbox.close()
    sender._close_all()
    there.close()


class _AllAtOnce:
    """An agent of which nothing is done when it is looked at, and all that is under way when it is looked at again."""

    def __init__(self) -> None:
        self.moving: list[int] = []
        self.num_looks = 0

    def put(self, number: int, sources: object, block_ids: object) -> None:
        self.moving.append(number)
        self.num_looks = 0

    def finished(self) -> list[int]:
        self.num_looks += 1
        done = self.moving if self.num_looks == 2 else []
        self.moving = [number for number in self.moving if number not in done]
        return done


@pytest.mark.covers("H08")
def test_a_sender_sleeps_only_while_something_moves_or_nothing_is_left_to_move() -> None:
    """What is moved between two looks leaves nothing under way: whoever slept then would wait for ever with writes in its queue."""
    here, there = socket.socketpair()
    here.setblocking(False)
    memory = np.zeros((8, 64), np.uint8)
    sender = nixl_sender.NixlSender(cast(Any, None), memory, "sender", lambda event: None)
    link, agent, lease = nixl_sender._Link("link", Channel(here)), _AllAtOnce(), LeaseRef(1, SECRET)
    for block_id in range(8):  # more than move at once
        link.queue.extend(pack(lease, [(block_id, block_id)], 64))
    link.queue.append(b"commit")
    sender._move(link, cast(Any, agent))
    assert link.sending.attached(range(8))
    sender._move(link, cast(Any, agent))
    while link.sending.num_moving:
        sender._move(link, cast(Any, agent))
    assert not link.queue
    link.channel.flush()
    kinds = [frame.kind for frame in Channel(there).receive() if frame.kind is not FrameKind.MOVING]
    assert kinds == [FrameKind.ATTACH, *[FrameKind.WRITE] * 8, FrameKind.NOTICE]
    sender._mailbox.close()
    sender._close_all()
    link.channel.close()
    there.close()
