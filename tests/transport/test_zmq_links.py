"""zmq links that break, hang, or lie, over real sockets and through a real proxy."""

from __future__ import annotations

import gc
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import zmq

from connector.transport import Answered, BlocksTaken, LeaseRef, LinkClosed, NotifyArrived, RevokeDone, WriteRefused
from connector.zmq_options import Place
from connector.zmq_sender import ZmqSender
from connector.zmq_transport import ZmqTransport
from proto import baton_pb2 as pb
from tests.transport.net import WAIT_S, Node, Recorder, ZmqNet, answer, commit, fill_at_random
from tests.transport.tcp_proxy import TcpProxy

SECRET = b"0123456789abcdef"
MIB = 1 << 20


def port_of(node: Node) -> int:
    return int(node.transport.endpoint().address.rpartition(":")[2])


def endpoint_through(proxy: TcpProxy, node: Node) -> pb.Endpoint:
    return pb.Endpoint(transport="zmq", address=proxy.address, link_secret=node.transport.endpoint().link_secret)


@pytest.fixture
def brisk_thread_switches() -> Iterator[None]:
    """Let Python change threads in the middle of a copy of many blocks."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval_s)


def ignore(event: object) -> None:
    """An `emit` whose events nobody needs."""


def seconds_until_closed(net: ZmqNet, sender: Node) -> float:
    began = time.monotonic()
    net.until(lambda: bool(sender.said.of(LinkClosed)))
    return time.monotonic() - began


@pytest.mark.covers("H09", "H11")
def test_a_byte_flipped_on_the_wire_is_found_and_hurts_that_lease_only(zmq_net: ZmqNet) -> None:
    sender = zmq_net.node("sender", 3, MIB)
    receiver = zmq_net.node("receiver", 3, MIB)
    fill_at_random(sender.memory)
    for i in range(3):
        receiver.transport.admit(i + 1, SECRET, [i])
    with TcpProxy(port_of(receiver), flip_at=MIB + MIB // 2) as proxy:
        sender.transport.open("receiver@1/1", endpoint_through(proxy, receiver))
        for i in range(3):
            sender.transport.write("receiver@1/1", LeaseRef(i + 1, SECRET), [(0, i)])
            sender.transport.notify("receiver@1/1", commit(i + 1))
        zmq_net.until(lambda: len(receiver.said.of(NotifyArrived)) == 3)
        assert proxy.num_flipped == 1
    assert [(refused.lease_id, refused.code) for refused in receiver.said.of(WriteRefused)] == [(2, pb.CHECKSUM)]
    assert [receiver.said.landed(i + 1) for i in range(3)] == [[0], [], [0]]
    assert np.array_equal(receiver.memory[[0, 2]], sender.memory[[0, 2]])
    assert np.count_nonzero(receiver.memory[1] != sender.memory[1]) == 1
    assert receiver.counts("writes_refused") == {"CHECKSUM": 1}


def test_a_connection_that_is_cut_closes_its_link_once_and_does_not_come_back(zmq_net: ZmqNet) -> None:
    sender = zmq_net.node("sender", 64, MIB)
    receiver = zmq_net.node("receiver", 64, MIB)
    receiver.transport.admit(1, SECRET, range(64))
    receiver.said.may_go_on.clear()  # behind the first blocks: however late the cut comes, it comes in the middle
    with TcpProxy(port_of(receiver)) as proxy:
        sender.transport.open("receiver@1/1", endpoint_through(proxy, receiver))
        sender.transport.write("receiver@1/1", LeaseRef(1, SECRET), [(i, i) for i in range(64)])
        zmq_net.until(lambda: bool(receiver.said.landed(1)))
        proxy.cut()
        zmq_net.until(lambda: bool(sender.said.of(LinkClosed)))
        receiver.said.may_go_on.set()
        sender.transport.write("receiver@1/1", LeaseRef(1, SECRET), [(0, 0)])
        sender.transport.open("receiver@1/2", endpoint_through(proxy, receiver))  # the proxy still stands
        sender.transport.notify("receiver@1/2", commit(1))
        zmq_net.until(lambda: bool(receiver.said.of(NotifyArrived)))
    closed = [event.link_id for event in sender.said.of(LinkClosed)]
    assert closed[0] == "receiver@1/1"
    assert "receiver@1/1" not in closed[1:]
    assert len(receiver.said.landed(1)) < 64


@pytest.mark.parametrize("is_mute", [False, True])
@pytest.mark.usefixtures("nodes_own_times")
def test_a_peer_that_stops_reading_at_all_ends_in_a_closed_link(zmq_net: ZmqNet, is_mute: bool) -> None:
    sender = zmq_net.node("sender", 64, MIB)
    receiver = zmq_net.node("receiver", 64, MIB)
    receiver.transport.admit(1, SECRET, range(64))
    with TcpProxy(port_of(receiver)) as proxy:
        sender.transport.open("receiver@1/1", endpoint_through(proxy, receiver))
        sender.transport.notify("receiver@1/1", commit(1))
        zmq_net.until(lambda: bool(receiver.said.of(NotifyArrived)))
        proxy.stop_forwarding()
        if is_mute:  # nor does it say that it gives up, like a process that was stopped: only TCP is left to notice
            proxy.keep_answers_back()
        sender.transport.write("receiver@1/1", LeaseRef(1, SECRET), [(i, i) for i in range(64)])
        assert seconds_until_closed(zmq_net, sender) < 20
    assert len(sender.said.taken(1)) < 64


def test_a_refused_connection_closes_the_link_at_once(zmq_net: ZmqNet) -> None:
    sender = zmq_net.node("sender")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: connecting is refused
        address = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
        sender.transport.open("nobody@1/1", pb.Endpoint(transport="zmq", address=address, link_secret=SECRET))
        assert seconds_until_closed(zmq_net, sender) < 20  # not by giving up
    assert sender.said.of(LinkClosed) == [LinkClosed("nobody@1/1", "could not connect")]


@pytest.mark.covers("P04")
@pytest.mark.usefixtures("nodes_own_times")
def test_a_black_hole_delays_no_other_link_and_is_given_up(zmq_net: ZmqNet) -> None:
    sender = zmq_net.node("sender")
    receiver = zmq_net.node("receiver")
    receiver.transport.admit(1, SECRET, [0])
    with socket.create_server(("127.0.0.1", 0)) as hole:  # its kernel accepts, nobody reads
        address = f"tcp://127.0.0.1:{hole.getsockname()[1]}"
        sender.transport.open("hole@1/1", pb.Endpoint(transport="zmq", address=address, link_secret=SECRET))
        sender.transport.write("hole@1/1", LeaseRef(1, SECRET), [(0, 0)])
        sender.transport.open("receiver@1/1", receiver.transport.endpoint())
        sender.transport.write("receiver@1/1", LeaseRef(1, SECRET), [(0, 0)])
        zmq_net.until(lambda: receiver.said.landed(1) == [0])
        assert sender.said.of(LinkClosed) == []
        assert seconds_until_closed(zmq_net, sender) < 20
    assert [event.link_id for event in sender.said.of(LinkClosed)] == ["hole@1/1"]
    assert sender.said.taken(1) == [0]  # the good link's; a link that is not open reads no source


@pytest.mark.covers("P04")
def test_a_receiver_whose_thread_hangs_delays_no_other_link(zmq_net: ZmqNet) -> None:
    sender = zmq_net.node("sender", 64, MIB)
    stuck = zmq_net.node("stuck", 64, MIB)
    good = zmq_net.node("good", 16, MIB)
    fill_at_random(sender.memory)
    stuck.transport.admit(1, SECRET, range(64))
    good.transport.admit(2, SECRET, range(16))
    stuck.said.may_go_on.clear()
    sender.transport.open("stuck@1/1", stuck.transport.endpoint())
    sender.transport.open("good@1/1", good.transport.endpoint())
    sender.transport.write("stuck@1/1", LeaseRef(1, SECRET), [(i, i) for i in range(64)])
    zmq_net.until(lambda: bool(stuck.said.landed(1)))
    sender.transport.write("good@1/1", LeaseRef(2, SECRET), [(i, i) for i in range(16)])
    zmq_net.until(lambda: len(good.said.landed(2)) == 16)
    assert np.array_equal(good.memory, sender.memory[:16])
    assert len(stuck.said.landed(1)) <= 4  # its first message: it really hangs
    assert len(sender.said.taken(1)) < 64  # and its link really is full
    stuck.said.may_go_on.set()  # in time: the link is as good as before
    zmq_net.until(lambda: len(stuck.said.landed(1)) == 64)
    assert np.array_equal(stuck.memory, sender.memory)
    assert sender.said.of(LinkClosed) == []


@pytest.mark.covers("H02")
def test_a_closed_link_is_quiet_once_libzmq_reads_no_source_any_more(zmq_net: ZmqNet) -> None:
    sender = zmq_net.node("sender", 64, MIB)
    stuck = zmq_net.node("stuck", 64, MIB)
    fill_at_random(sender.memory)
    original = sender.memory.copy()
    stuck.transport.admit(1, SECRET, range(64))
    stuck.said.may_go_on.clear()
    sender.transport.open("stuck@1/1", stuck.transport.endpoint())
    sender.transport.write("stuck@1/1", LeaseRef(1, SECRET), [(i, i) for i in range(64)])
    zmq_net.until(lambda: bool(stuck.said.landed(1)))
    sender.transport.close("stuck@1/1")
    zmq_net.until(lambda: bool(sender.said.of(LinkClosed)))
    taken = sender.said.taken(1)
    assert len(taken) < 64  # libzmq had some of it
    sender.memory[:] = 0xEE  # the next owner's bytes
    stuck.said.may_go_on.set()
    sender.transport.open("stuck@1/2", stuck.transport.endpoint())
    sender.transport.notify("stuck@1/2", commit(2))
    zmq_net.until(lambda: bool(stuck.said.of(NotifyArrived)))
    landed = stuck.said.landed(1)
    assert np.array_equal(stuck.memory[landed], original[landed])
    assert stuck.said.of(WriteRefused) == [] and sender.said.taken(1) == taken


@pytest.mark.covers("H08")
@pytest.mark.usefixtures("brisk_thread_switches")
def test_a_lease_revoked_while_a_write_runs_is_quiet_only_after_the_copy(zmq_net: ZmqNet) -> None:
    sender = zmq_net.node("sender", 1024, 1024)
    receiver = zmq_net.node("receiver", 1024, 1024)
    sender.memory[:] = 0xAA
    sender.transport.open("receiver@1/1", receiver.transport.endpoint())
    loop_thread = threading.get_ident()
    num_waited = 0
    for lease_id in range(1, 401):  # a running copy is met in every tenth or so
        receiver.memory[:] = 0
        receiver.transport.admit(lease_id, SECRET, range(1024))
        sender.transport.write("receiver@1/1", LeaseRef(lease_id, SECRET), [(i, i) for i in range(1024)])
        while not receiver.memory[0, 0]:  # from here the message's copy runs, block by block, on the receiver's thread
            pass
        receiver.transport.revoke(lease_id)
        done = RevokeDone(lease_id)
        zmq_net.until(lambda done=done: done in receiver.said.all())  # type: ignore[misc]
        num_waited += receiver.said.thread_of(done) != loop_thread
        receiver.memory[:] = 0xEE  # the next owner's bytes
        sender.transport.notify("receiver@1/1", commit(lease_id))
        zmq_net.until(lambda n=lease_id: len(receiver.said.of(NotifyArrived)) == n)  # type: ignore[misc]
        assert (receiver.memory == 0xEE).all()
        if num_waited == 3:
            break
    assert len(receiver.said.of(RevokeDone)) == lease_id
    assert num_waited, "no revoke ever met a running copy"


def test_a_notification_that_no_receiver_would_take_closes_the_link(zmq_net: ZmqNet) -> None:
    sender = zmq_net.node("sender")
    receiver = zmq_net.node("receiver")
    sender.transport.open("receiver@1/1", receiver.transport.endpoint())
    sender.transport.notify("receiver@1/1", b"x" * (4 * MIB + 1))
    zmq_net.until(lambda: bool(sender.said.of(LinkClosed)))
    assert "4194305 bytes" in sender.said.of(LinkClosed)[0].reason


def test_stop_ends_every_thread_within_a_second_also_with_stuck_links(zmq_net: ZmqNet) -> None:
    receiver = zmq_net.node("receiver", 64, MIB)
    said: list[object] = []
    sender = ZmqTransport(np.zeros((64, MIB), np.uint8), "sender", 1, said.append)
    with socket.create_server(("127.0.0.1", 0)) as hole, TcpProxy(port_of(receiver)) as proxy:
        address = f"tcp://127.0.0.1:{hole.getsockname()[1]}"
        sender.open("hole@1/1", pb.Endpoint(transport="zmq", address=address, link_secret=SECRET))
        sender.open("receiver@1/1", endpoint_through(proxy, receiver))
        sender.notify("receiver@1/1", commit(1))
        zmq_net.until(lambda: bool(receiver.said.of(NotifyArrived)))
        proxy.stop_forwarding()
        sender.write("receiver@1/1", LeaseRef(1, SECRET), [(i, i) for i in range(64)])
        began = time.monotonic()
        sender.stop()
        assert time.monotonic() - began < 8  # not when a stuck link is given up
    num_threads = sum(thread.name.startswith("zmq-") for thread in threading.enumerate())
    assert num_threads == 2  # the other node's


@pytest.mark.usefixtures("nodes_own_times")
def test_a_thread_that_stop_does_not_wait_for_leaves_nothing_open_when_it_ends(zmq_net: ZmqNet) -> None:
    changed = threading.Condition()
    said = Recorder(changed)
    held = ZmqTransport(np.zeros((1, 512), np.uint8), "held", 1, said)
    said.may_go_on.clear()
    sender = zmq_net.node("sender")
    sender.transport.open("held@1/1", held.endpoint())
    sender.transport.notify("held@1/1", commit(1))
    with changed:
        assert changed.wait_for(lambda: bool(said.all()), WAIT_S)  # its thread is in `emit`, and stays there
    held.stop()
    assert not all(ended.done() for ended in held.ended)
    said.may_go_on.set()
    for ended in held.ended:
        ended.result(timeout=20)
    del held
    gc.collect()  # an open socket or context would warn here, and warnings are errors


def test_a_host_that_cannot_be_bound_raises_and_leaves_nothing() -> None:
    before = {*threading.enumerate()}  # an earlier test's may end meanwhile
    with pytest.raises(zmq.ZMQError, match="assign requested address"):
        ZmqTransport(np.zeros((1, 512), np.uint8), "node", 1, ignore, Place("192.0.2.1"))
    assert {*threading.enumerate()} <= before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_of_a_bug_says_so_and_the_transport_can_still_be_stopped(zmq_net: ZmqNet) -> None:
    def fail(event: object) -> None:
        raise RuntimeError("a bug in whoever takes the events")

    broken = ZmqTransport(np.zeros((1, 512), np.uint8), "broken", 1, fail)
    assert not any(ended.done() for ended in broken.ended)
    sender = zmq_net.node("sender")
    sender.transport.open("broken@1/1", broken.endpoint())
    sender.transport.notify("broken@1/1", commit(1))
    broken.open("nobody@1/1", pb.Endpoint())
    for ended in broken.ended:
        assert ended.result(timeout=10) is None
    zmq_net.until(lambda: bool(sender.said.of(LinkClosed)))
    broken.stop()


@pytest.mark.parametrize("node_id", ["", "a@b", "a\n", "x" * 240])
def test_a_node_id_that_does_not_fit_into_the_handshake_is_refused_at_start(node_id: str) -> None:
    with pytest.raises(ValueError, match="node id"):
        ZmqTransport(np.zeros((1, 512), np.uint8), node_id, 1, ignore)


@pytest.mark.parametrize(
    "memory", [np.zeros(512, np.uint8), np.zeros((2, 8), np.float32), np.zeros((8, 8), np.uint8).T[1:]]
)
def test_a_memory_that_blocks_cannot_be_cut_from_is_refused_at_start(memory: np.ndarray) -> None:
    with pytest.raises(ValueError, match="contiguous uint8"):
        ZmqTransport(memory, "node", 1, ignore)


@pytest.mark.covers("H05")
def test_an_answer_comes_behind_the_blocks_that_were_sent_before_it(
    zmq_net: ZmqNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyzmq tells of what libzmq has let go of on a thread of its own, which may get its turn late."""
    late: list[Callable[[], None]] = []
    take_back = ZmqSender._take_back
    monkeypatch.setattr(ZmqSender, "_take_back", lambda *its: late.append(partial(take_back, *its)))
    num_blocks = 4
    sender, receiver = (zmq_net.node(name, num_blocks, MIB) for name in ("sender", "receiver"))
    receiver.transport.admit(1, SECRET, range(num_blocks))
    sender.transport.open("receiver@1/1", receiver.transport.endpoint())
    for block_id in range(num_blocks):
        sender.transport.write("receiver@1/1", LeaseRef(1, SECRET), [(block_id, block_id)])
    sender.transport.notify("receiver@1/1", commit(1))
    zmq_net.until(lambda: bool(receiver.said.of(NotifyArrived)))
    give_up_at = time.monotonic() + WAIT_S
    while len(late) < num_blocks:  # nobody is woken by that
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
    (notice,) = receiver.said.of(NotifyArrived)
    receiver.transport.answer(notice.reply_to, answer(1))
    time.sleep(0.2)
    assert not sender.said.of(Answered)
    for tell in (*late[:0:-1], late[0]):  # in any order: what wakes the thread comes first
        tell()
    zmq_net.until(lambda: bool(sender.said.of(Answered)))
    told = [type(event) for event in sender.said.all() if isinstance(event, BlocksTaken | Answered)]
    assert told == [BlocksTaken] * num_blocks + [Answered]


@pytest.mark.covers("H05")
def test_no_block_is_given_back_that_was_copied_in_part_and_lent_in_part(
    zmq_net: ZmqNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[Callable[[], None]] = []
    take_back = ZmqSender._take_back
    monkeypatch.setattr(ZmqSender, "_take_back", lambda *its: late.append(partial(take_back, *its)))
    sender, receiver = (zmq_net.node(name, 12, 3 * MIB) for name in ("sender", "receiver"))
    receiver.transport.admit(1, SECRET, range(12))
    sender.transport.open("receiver@1/1", receiver.transport.endpoint())
    # Messages of 4 MiB: of each four blocks the second goes in part with the first and in part with the third, which lies apart.
    sender.transport.write("receiver@1/1", LeaseRef(1, SECRET), [(i, i ^ (i >> 1 & 1)) for i in range(12)])
    sender.transport.notify("receiver@1/1", commit(1))
    zmq_net.until(lambda: bool(receiver.said.of(NotifyArrived)))
    give_up_at = time.monotonic() + WAIT_S
    while len(late) < 3:
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
    assert not {1, 5, 9} & {*sender.said.taken(1)}
    for tell in late:
        tell()
    zmq_net.until(lambda: len(sender.said.taken(1)) == 12)
    assert sorted(sender.said.taken(1)) == list(range(12))


@pytest.mark.covers("H05")
def test_no_block_is_given_back_while_a_piece_of_it_waits_to_be_sent(zmq_net: ZmqNet) -> None:
    num_blocks, block_bytes = 40, MIB + 1024  # a long piece and a short one each, more than the two kernels hold
    sender, receiver = (zmq_net.node(name, num_blocks, block_bytes) for name in ("sender", "receiver"))
    receiver.transport.admit(1, SECRET, range(num_blocks))
    receiver.said.may_go_on.clear()
    sender.transport.open("receiver@1/1", receiver.transport.endpoint())
    for block_id in range(num_blocks):
        sender.transport.write("receiver@1/1", LeaseRef(1, SECRET), [(block_id, block_id)])
    assert isinstance(sender.transport, ZmqTransport)
    zmq_sender = sender.transport._sender
    assert isinstance(zmq_sender, ZmqSender)
    handed, lent = -1, set[int]()
    # Until nobody takes any more, or its thread stands still; what was taken is looked at first: nothing is lent a second time.
    while handed != (handed := sum(sender.counts("kv_bytes_sent").values())) or not lent:
        time.sleep(0.3)
        taken = {block_id for said in sender.said.of(BlocksTaken) for block_id in said.block_indices}
        link = zmq_sender._links.get("receiver@1/1")
        loans = () if link is None else tuple(link.loans.copy().values())
        lent = {span.block_index for loan in loans for span in loan.write.spans}
        assert not lent & taken
    assert 0 < handed < num_blocks * block_bytes
    receiver.said.may_go_on.set()
    zmq_net.until(lambda: len(receiver.said.landed(1)) == num_blocks)
