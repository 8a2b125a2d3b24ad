"""shm links whose ends hang, are killed or go on too late, and what they leave behind: nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from connector.shm_transport import ShmTransport
from connector.transport import LeaseRef, LinkClosed, NotifyArrived, RevokeDone, WriteRefused
from engine.shared_bytes import SharedBytes
from proto import baton_pb2 as pb
from tests.transport.net import WAIT_S, Node, ShmNet, commit, fill_at_random
from tests.transport.peer import NUM_BLOCKS, pattern
from tests.transport.peer_process import peer

SECRET = b"0123456789abcdef"
MIB = 1 << 20


def name_of(endpoint: pb.Endpoint) -> str:
    return endpoint.address.rpartition("/")[2]


def abstract_names() -> str:
    return Path("/proc/net/unix").read_text(encoding="ascii", errors="replace")


def num_mapped() -> int:
    """Mappings of KV memory in this process."""
    return Path("/proc/self/maps").read_text(encoding="ascii").count("/memfd:baton-kv")


def until_others_had_ten_turns(net: ShmNet, sender: Node) -> None:
    """Wait until ten messages went out on a link of its own: links take turns, a message each."""
    witness = net.node("witness")
    sender.transport.open("witness@1/1", witness.transport.endpoint())
    for _ in range(10):
        sender.transport.notify("witness@1/1", commit(9))
    net.until(lambda: len(witness.said.of(NotifyArrived)) == 10)


@pytest.mark.covers("H08", "H09")
def test_a_copy_that_comes_too_late_hurts_only_the_lease_of_the_copier(shm_net: ShmNet) -> None:
    sender = shm_net.node("sender", 3, MIB)
    receiver = shm_net.node("receiver", 3, MIB)
    fill_at_random(sender.memory)
    original = sender.memory.copy()
    for i in range(3):
        receiver.transport.admit(i + 1, SECRET, [i])
    receiver.said.may_go_on.clear()  # its thread hangs behind the first write, as a stopped process would
    sender.transport.open("receiver@1/1", receiver.transport.endpoint())
    for i in range(3):
        sender.transport.write("receiver@1/1", LeaseRef(i + 1, SECRET), [(0, i)])
        sender.transport.notify("receiver@1/1", commit(i + 1))
    shm_net.until(lambda: bool(receiver.said.landed(1)))
    until_others_had_ten_turns(shm_net, sender)
    assert sender.counts("kv_bytes_sent") == {"receiver": 3 * MIB}
    sender.transport.close("receiver@1/1")
    shm_net.until(lambda: bool(sender.said.of(LinkClosed)))  # quiet at once, though the receiver has not moved
    assert sender.said.taken(1) == []
    sender.memory[1] = 0xEE  # the next owner's bytes; block 2 stays as it was
    receiver.said.may_go_on.set()
    shm_net.until(lambda: len(receiver.said.of(WriteRefused)) == 1 and receiver.said.landed(3) == [0])
    assert [(refused.lease_id, refused.code) for refused in receiver.said.of(WriteRefused)] == [(2, pb.CHECKSUM)]
    assert [receiver.said.landed(i + 1) for i in range(3)] == [[0], [], [0]]
    assert np.array_equal(receiver.memory[[0, 2]], original[[0, 2]])
    assert (sender.memory[1] == 0xEE).all()


@pytest.mark.covers("H08", "H09")
def test_without_checksums_a_copy_that_ends_behind_the_end_of_its_link_does_not_count(
    unchecked_shm_net: ShmNet,
) -> None:
    net = unchecked_shm_net
    sender, receiver = net.node("sender", 3, MIB), net.node("receiver", 3, MIB)
    fill_at_random(sender.memory)
    for i in range(3):
        receiver.transport.admit(i + 1, SECRET, [i])
    receiver.said.may_go_on.clear()  # its thread hangs behind the first write, as a stopped process would
    sender.transport.open("receiver@1/1", receiver.transport.endpoint())
    for i in range(3):
        sender.transport.write("receiver@1/1", LeaseRef(i + 1, SECRET), [(0, i)])
    sender.transport.notify("receiver@1/1", commit(3))
    net.until(lambda: bool(receiver.said.landed(1)))
    until_others_had_ten_turns(net, sender)
    sender.transport.close("receiver@1/1")
    net.until(lambda: bool(sender.said.of(LinkClosed)))
    sender.memory[1] = 0xEE  # the next owner's bytes; nobody can tell that block 2 stayed as it was
    receiver.said.may_go_on.set()
    net.until(lambda: bool(receiver.said.of(NotifyArrived)))
    refused = [(each.lease_id, each.code) for each in receiver.said.of(WriteRefused)]
    assert refused == [(2, pb.TRANSFER_FAILED), (3, pb.TRANSFER_FAILED)]
    assert [receiver.said.landed(i + 1) for i in range(3)] == [[0], [], []]


def test_a_node_with_checksums_takes_no_write_without(shm_net: ShmNet, unchecked_shm_net: ShmNet) -> None:
    receiver, sender = shm_net.node("receiver"), unchecked_shm_net.node("sender")
    receiver.transport.admit(1, SECRET, [0])
    sender.transport.open("receiver@1/1", receiver.transport.endpoint())
    sender.transport.write("receiver@1/1", LeaseRef(1, SECRET), [(0, 0)])
    shm_net.until(lambda: bool(receiver.said.of(WriteRefused)))
    assert [(each.lease_id, each.code) for each in receiver.said.of(WriteRefused)] == [(1, pb.CHECKSUM)]


@pytest.mark.covers("R11", "H08")
def test_what_a_killed_sender_had_sent_still_arrives_and_nothing_of_it_stays(shm_net: ShmNet) -> None:
    receiver = shm_net.node("receiver", NUM_BLOCKS, MIB)
    for block in range(NUM_BLOCKS):
        receiver.transport.admit(block + 1, SECRET, [block])
    num_before = num_mapped()
    receiver.said.may_go_on.clear()
    with peer() as sender:
        sender.begin(receiver.transport.endpoint())
        shm_net.until(lambda: bool(receiver.said.landed(1)))
        assert num_mapped() == num_before + 1
        assert name_of(sender.endpoint) in abstract_names()
        sender.kill()
    receiver.said.may_go_on.set()
    # However many writes the sender had got out: what arrives is right, and reading a dead process' memory ends nobody.
    deadline = time.monotonic() + WAIT_S
    while num_mapped() > num_before:
        assert time.monotonic() < deadline
    for block in range(NUM_BLOCKS):
        if receiver.said.landed(block + 1):
            assert (receiver.memory[block] == pattern(block)).all()
    assert receiver.said.of(WriteRefused) == []
    assert name_of(sender.endpoint) not in abstract_names()
    for block in range(NUM_BLOCKS):
        receiver.transport.revoke(block + 1)
    shm_net.until(lambda: len(receiver.said.of(RevokeDone)) == NUM_BLOCKS)


@pytest.mark.covers("C05")
def test_links_to_a_killed_receiver_close_at_once(shm_net: ShmNet) -> None:
    sender = shm_net.node("sender", NUM_BLOCKS, MIB)
    with peer() as receiver:
        receiver.begin(None)
        sender.transport.open("peer@7/1", receiver.endpoint)
        sender.transport.write("peer@7/1", LeaseRef(1, SECRET), [(i, i) for i in range(NUM_BLOCKS)])
        receiver.wait_for("BlocksLanded")
        shm_net.until(lambda: len(sender.said.taken(1)) == NUM_BLOCKS)
        began = time.monotonic()
        receiver.kill()
        shm_net.until(lambda: bool(sender.said.of(LinkClosed)))
        assert time.monotonic() - began < 20
        sender.transport.open("peer@7/2", receiver.endpoint)
        shm_net.until(lambda: len(sender.said.of(LinkClosed)) == 2)
    assert sender.said.of(LinkClosed)[1] == LinkClosed("peer@7/2", "could not connect")


@pytest.mark.covers("P04")
@pytest.mark.usefixtures("nodes_own_times")
def test_a_receiver_that_is_stopped_holds_up_no_other_link_and_closing_its_own_is_quiet_at_once(
    shm_net: ShmNet,
) -> None:
    sender = shm_net.node("sender", NUM_BLOCKS, MIB)
    good = shm_net.node("good", NUM_BLOCKS, MIB)
    good.transport.admit(1, SECRET, range(NUM_BLOCKS))
    with peer() as stuck:
        stuck.begin(None)
        sender.transport.open("peer@7/1", stuck.endpoint)
        sender.transport.notify("peer@7/1", commit(1))
        stuck.wait_for("NotifyArrived")
        stuck.process.send_signal(signal.SIGSTOP)
        os.waitpid(stuck.process.pid, os.WUNTRACED)  # until it really stands still
        sender.transport.write("peer@7/1", LeaseRef(1, SECRET), [(0, 0)])
        sender.transport.open("peer@7/2", stuck.endpoint)  # its kernel accepts
        sender.transport.open("good@1/1", good.transport.endpoint())
        sender.transport.write("good@1/1", LeaseRef(1, SECRET), [(i, i) for i in range(NUM_BLOCKS)])
        shm_net.until(lambda: len(good.said.landed(1)) == NUM_BLOCKS)
        shm_net.until(lambda: bool(sender.said.of(LinkClosed)))
        sender.transport.close("peer@7/1")  # as the handoff does when its time is over
        shm_net.until(lambda: len(sender.said.of(LinkClosed)) == 2)
    assert sender.said.of(LinkClosed) == [
        LinkClosed("peer@7/2", "not let in: no handshake in time"),
        LinkClosed("peer@7/1", "closed"),
    ]
    assert sender.counts("kv_bytes_sent")["peer"] == MIB


def test_memory_that_takes_several_turns_to_map_is_mapped_once_per_link_and_unmapped_with_it(shm_net: ShmNet) -> None:
    sender = shm_net.node("sender", 130, MIB)
    receiver = shm_net.node("receiver", 2, MIB)
    sender.memory[129] = 7
    num_before = num_mapped()
    receiver.transport.admit(1, SECRET, [1])
    sender.transport.open("receiver@1/1", receiver.transport.endpoint())
    sender.transport.write("receiver@1/1", LeaseRef(1, SECRET), [(0, 129)])
    shm_net.until(lambda: receiver.said.landed(1) == [0])
    assert (receiver.memory[1] == 7).all()
    assert num_mapped() == num_before + 1
    sender.transport.close("receiver@1/1")
    deadline = time.monotonic() + WAIT_S
    while num_mapped() > num_before:
        assert time.monotonic() < deadline


@pytest.mark.covers("P04")
def test_a_receiver_whose_thread_hangs_delays_no_other_link_and_bounds_what_is_in_flight(shm_net: ShmNet) -> None:
    sender = shm_net.node("sender", 64, MIB)
    stuck = shm_net.node("stuck", 64, MIB)
    good = shm_net.node("good", 16, MIB)
    fill_at_random(sender.memory)
    stuck.transport.admit(1, SECRET, range(64))
    good.transport.admit(2, SECRET, range(16))
    stuck.said.may_go_on.clear()
    sender.transport.open("stuck@1/1", stuck.transport.endpoint())
    sender.transport.open("good@1/1", good.transport.endpoint())
    for begin in range(0, 64, 8):  # a message each
        sender.transport.write("stuck@1/1", LeaseRef(1, SECRET), [(i, i) for i in range(begin, begin + 8)])
    shm_net.until(lambda: bool(stuck.said.landed(1)))
    sender.transport.write("good@1/1", LeaseRef(2, SECRET), [(i, i) for i in range(16)])
    shm_net.until(lambda: len(good.said.landed(2)) == 16)
    assert len(stuck.said.landed(1)) == 8  # it really hangs
    assert sender.said.taken(1) == []
    assert sender.counts("kv_bytes_sent")["stuck"] <= 32 * MIB
    stuck.said.may_go_on.set()
    shm_net.until(lambda: len(stuck.said.landed(1)) == 64 and len(sender.said.taken(1)) == 64)
    assert np.array_equal(stuck.memory, sender.memory)
    assert sender.said.of(LinkClosed) == []


def test_a_long_commit_crosses_in_pieces_and_one_that_no_receiver_would_take_closes_the_link(shm_net: ShmNet) -> None:
    sender = shm_net.node("sender")
    receiver = shm_net.node("receiver")
    sender.transport.open("receiver@1/1", receiver.transport.endpoint())
    long = pb.DataMessage(commit=pb.Commit(prompt_token_ids=range(300_000))).SerializeToString()
    assert len(long) > 4 * 212_992  # more than a socket's buffer takes
    sender.transport.notify("receiver@1/1", long)
    shm_net.until(lambda: bool(receiver.said.of(NotifyArrived)))
    assert receiver.said.of(NotifyArrived)[0].payload == long
    sender.transport.notify("receiver@1/1", b"x" * (4 * MIB + 1))
    shm_net.until(lambda: bool(sender.said.of(LinkClosed)))
    assert "4194305 bytes" in sender.said.of(LinkClosed)[0].reason


def test_nothing_of_a_stopped_transport_stays_and_idle_threads_sleep(shm_net: ShmNet) -> None:
    files_before = {path.name for path in Path("/dev/shm").iterdir()}
    shared = SharedBytes(4, MIB)
    transport = ShmTransport(shared.bytes, shared.descriptor, "node", 1, lambda event: None)
    name = name_of(transport.endpoint())
    assert name in abstract_names()
    assert sum(thread.name.startswith("shm-") for thread in threading.enumerate()) == 2
    for thread in threading.enumerate():
        if thread.name.startswith("shm-"):
            where = Path(f"/proc/self/task/{thread.native_id}/syscall")
            deadline = time.monotonic() + WAIT_S
            while where.read_text().split()[0] == "running":
                assert time.monotonic() < deadline, f"{thread.name} does not sleep"
    transport.stop()
    assert name not in abstract_names()
    assert not any(thread.name.startswith("shm-") for thread in threading.enumerate())
    assert {path.name for path in Path("/dev/shm").iterdir()} <= files_before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_of_a_bug_says_so_and_the_transport_can_still_be_stopped(shm_net: ShmNet) -> None:
    def fail(event: object) -> None:
        raise RuntimeError("a bug in whoever takes the events")

    shared = SharedBytes(1, 512)
    broken = ShmTransport(shared.bytes, shared.descriptor, "broken", 1, fail)
    assert not any(ended.done() for ended in broken.ended)
    sender = shm_net.node("sender")
    sender.transport.open("broken@1/1", broken.endpoint())
    sender.transport.notify("broken@1/1", commit(1))
    broken.open("nobody@1/1", pb.Endpoint())
    for ended in broken.ended:
        assert ended.result(timeout=10) is None
    shm_net.until(lambda: bool(sender.said.of(LinkClosed)))
    broken.stop()
