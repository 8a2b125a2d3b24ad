"""Links under pressure, most over shm: many peers at once, peers that come and go, no descriptor left, no page waited for."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from connector.nixl_agent import is_installed
from connector.peer_memory import PeerMemory
from connector.shm_socket import find_connection
from connector.transport import BlocksLanded, LeaseRef, LinkClosed, NotifyArrived
from engine.shared_bytes import SharedBytes
from proto import baton_pb2 as pb
from tests.transport.net import WAIT_S, ShmNet, commit, fill_at_random

SECRET = b"0123456789abcdef"
MIB = 1 << 20


def held() -> tuple[int, int, int]:
    """Descriptors, mappings of KV memory and threads of this process."""
    num_mapped = Path("/proc/self/maps").read_text(encoding="ascii").count("/memfd:baton-kv")
    return sum(1 for _ in Path("/proc/self/fd").iterdir()), num_mapped, threading.active_count()


def until_held(most: tuple[int, int, int]) -> None:
    """Wait until no more than that is held; an earlier test's may go meanwhile."""
    deadline = time.monotonic() + WAIT_S
    while any(now > bound for now, bound in zip(held(), most, strict=True)):
        assert time.monotonic() < deadline, f"{held()}, at most {most} expected"


# The first KV of a process that has few descriptors left. A process of its own: libzmq and UCX end the one that has too few.
FEW_DESCRIPTORS = """
import sys
from connector.transport import LeaseRef, LinkClosed, NotifyArrived
from tests.transport.net import NixlNet, ZmqNet, commit
from tests.transport.test_shm_pressure import SECRET, no_descriptor_left
is_zmq, num_left = sys.argv[1] == "zmq", int(sys.argv[2])
with ZmqNet() if is_zmq else NixlNet() as net:
    sender, receiver = net.node("sender"), net.node("receiver")
    endpoint = receiver.transport.endpoint()
    receiver.transport.admit(1, SECRET, [0])
    sender.transport.open("receiver@1/1", endpoint)
    sender.transport.notify("receiver@1/1", commit(1))
    net.until(lambda: bool(receiver.said.of(NotifyArrived)))
    with no_descriptor_left(but=num_left):
        if not is_zmq:
            sender.transport.open("receiver@1/2", endpoint)
            net.until(lambda: bool(sender.said.of(LinkClosed)))
        sender.transport.write("receiver@1/1", LeaseRef(1, SECRET), [(0, 0)])
        net.until(lambda: receiver.said.landed(1) == [0] == sender.said.taken(1))
    assert not any(end.done() for node in (sender, receiver) for end in node.transport.ended)
"""


@contextmanager
def no_descriptor_left(but: int = 0) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers = [os.dup(0)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (fillers[0] + 1 + but, hard))
        while True:
            try:
                fillers.append(os.dup(0))
            except OSError:
                break
        for _ in range(but):
            os.close(fillers.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers:
            os.close(filler)


def test_a_thousand_links_that_come_and_go_leave_nothing_behind(shm_net: ShmNet) -> None:
    sender, receiver = shm_net.node("sender"), shm_net.node("receiver")
    before = held()
    for number in range(1000):
        link_id = f"receiver@1/{number}"
        sender.transport.open(link_id, receiver.transport.endpoint())
        if number % 10 == 0:  # the others are closed wherever they are by then
            num_arrived = len(receiver.said.of(NotifyArrived))
            sender.transport.notify(link_id, commit(1))
            shm_net.until(lambda n=num_arrived: len(receiver.said.of(NotifyArrived)) > n)  # type: ignore[misc]
        sender.transport.close(link_id)
        shm_net.until(lambda n=number: len(sender.said.of(LinkClosed)) > n)  # type: ignore[misc]
    assert {closed.reason for closed in sender.said.of(LinkClosed)} == {"closed"}
    until_held(before)
    assert receiver.transport.snapshot()["links_refused"] == 0


def test_many_peers_that_come_at_once_are_all_let_in(shm_net: ShmNet) -> None:
    receiver, sender = shm_net.node("receiver"), shm_net.node("sender")
    receiver.said.may_go_on.clear()
    sender.transport.open("receiver@1/0", receiver.transport.endpoint())
    sender.transport.notify("receiver@1/0", commit(1))
    shm_net.until(lambda: bool(receiver.said.of(NotifyArrived)))  # its thread hangs, and all the others come meanwhile
    for number in range(1, 200):
        sender.transport.open(f"receiver@1/{number}", receiver.transport.endpoint())
        sender.transport.notify(f"receiver@1/{number}", commit(1))
    other = shm_net.node("other")
    sender.transport.open("other@1/0", other.transport.endpoint())
    sender.transport.notify("other@1/0", commit(1))
    shm_net.until(lambda: bool(other.said.of(NotifyArrived)))  # so the 199 have knocked
    receiver.said.may_go_on.set()
    shm_net.until(lambda: len(receiver.said.of(NotifyArrived)) == 200 or bool(sender.said.of(LinkClosed)))
    assert sender.said.of(LinkClosed) == []
    assert receiver.transport.snapshot()["links_refused"] == 0


def test_asking_whether_somebody_is_there_counts_as_no_refused_link(shm_net: ShmNet) -> None:
    sender, receiver = shm_net.node("sender"), shm_net.node("receiver")
    for _ in range(100):
        assert sender.transport.reaches(receiver.transport.endpoint())  # type: ignore[union-attr]
    sender.transport.open("receiver@1/1", receiver.transport.endpoint())
    sender.transport.notify("receiver@1/1", commit(1))
    shm_net.until(lambda: bool(receiver.said.of(NotifyArrived)))
    assert receiver.transport.snapshot()["links_refused"] == 0


@pytest.mark.covers("C05")
@pytest.mark.usefixtures("nodes_own_times")
def test_a_receiver_without_a_descriptor_left_accepts_as_soon_as_there_is_one(shm_net: ShmNet) -> None:
    sender, receiver = shm_net.node("sender"), shm_net.node("receiver")
    sender.transport.open("receiver@1/1", receiver.transport.endpoint())
    sender.transport.notify("receiver@1/1", commit(1))
    shm_net.until(lambda: bool(receiver.said.of(NotifyArrived)))
    name = receiver.transport.endpoint().address.rpartition("/")[2]
    with socket.socket(socket.AF_UNIX) as guest:
        guest.settimeout(20)
        with no_descriptor_left():
            guest.connect(b"\0" + name.encode())
            sender.transport.notify("receiver@1/1", commit(2))
            shm_net.until(lambda: len(receiver.said.of(NotifyArrived)) == 2)  # it goes on, and does not spin:
            before = time.thread_time(), time.process_time()
            threading.Event().wait(0.5)
            assert time.process_time() - before[1] < 0.25
        assert guest.recv(1) == b""  # it was accepted, and had nothing to say
    sender.transport.open("receiver@1/2", receiver.transport.endpoint())
    sender.transport.notify("receiver@1/2", commit(3))
    shm_net.until(lambda: len(receiver.said.of(NotifyArrived)) == 3)


@pytest.mark.covers("C05")
def test_a_sender_without_a_descriptor_left_fails_the_link_and_not_the_node(shm_net: ShmNet) -> None:
    sender, receiver = shm_net.node("sender"), shm_net.node("receiver")
    endpoint = receiver.transport.endpoint()
    with no_descriptor_left():
        assert find_connection(endpoint) is None
        sender.transport.open("receiver@1/1", endpoint)
        shm_net.until(lambda: bool(sender.said.of(LinkClosed)))
    sender.transport.open("receiver@1/2", endpoint)
    sender.transport.notify("receiver@1/2", commit(1))
    shm_net.until(lambda: bool(receiver.said.of(NotifyArrived)))


@pytest.mark.covers("C05")
@pytest.mark.parametrize(("kind", "num_left"), [("zmq", 0), ("zmq", 3), ("nixl", 30)])
def test_a_process_that_is_short_of_descriptors_moves_kv_and_lives(kind: str, num_left: int) -> None:
    if kind == "nixl" and not is_installed():
        pytest.skip("NIXL is not installed")
    command = [sys.executable, "-c", FEW_DESCRIPTORS, kind, str(num_left)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert ended.returncode == 0, ended.stderr


def test_no_page_is_populated_or_mapped_while_a_first_transfer_runs(shm_net: ShmNet) -> None:
    num_blocks = 64
    sender, receiver = shm_net.node("sender", num_blocks, MIB), shm_net.node("receiver", num_blocks, MIB)
    sender.memory[:] = 7
    receiver.transport.admit(1, SECRET, range(num_blocks))
    sender.transport.open("receiver@1/1", receiver.transport.endpoint())
    sender.transport.notify("receiver@1/1", commit(1))  # its arrival says that the link is open
    shm_net.until(lambda: bool(receiver.said.of(NotifyArrived)))
    before = resource.getrusage(resource.RUSAGE_SELF)
    sender.transport.write("receiver@1/1", LeaseRef(1, SECRET), [(i, i) for i in range(num_blocks)])
    shm_net.until(lambda: len(receiver.said.landed(1)) == num_blocks)
    after = resource.getrusage(resource.RUSAGE_SELF)
    num_pages = num_blocks * MIB // resource.getpagesize()
    # A fault maps 16 pages at most (fault_around_bytes); what is left over is Python's own allocating.
    # So are major ones, of which memory in memory has none: code that came from the disk.
    num_faults = after.ru_minflt - before.ru_minflt + after.ru_majflt - before.ru_majflt
    assert num_faults < num_pages / 16 / 4
    assert (receiver.memory == 7).all()


@pytest.mark.covers("P04")
def test_memory_of_a_peer_is_let_go_on_a_thread_of_its_own() -> None:
    shared = SharedBytes(4, MIB)
    peer = PeerMemory(shared.descriptor, 4, MIB)
    while not peer.populate_some():
        pass
    held_before = held()
    where: list[int] = []

    weakref.finalize(peer.bytes, lambda: where.append(threading.get_ident()))
    peer.release()
    until_held((held_before[0], held_before[1] - 1, held_before[2]))
    assert where
    assert threading.get_ident() not in where


def inherited() -> list[str]:
    """What a program that this process starts has open, each by what it is: `socket:[6393584]`."""
    command = ["/bin/ls", "-l", "/proc/self/fd"]
    told = subprocess.run(command, close_fds=False, capture_output=True, text=True, check=True).stdout
    return [line.rpartition(" -> ")[2] for line in told.splitlines() if " -> " in line]


def test_a_program_that_a_node_starts_inherits_neither_memory_nor_sockets(shm_net: ShmNet) -> None:
    of_others = set(inherited())  # gRPC's in this process, say, of tests before this one
    shm_net.node("node")
    seen = inherited()
    assert any("/proc/" in each for each in seen)
    assert not [each for each in seen if each not in of_others and ("memfd" in each or "socket" in each)]


def test_links_to_two_senders_with_memory_of_different_cuts_stand_side_by_side(shm_net: ShmNet) -> None:
    receiver = shm_net.node("receiver", 8, 512)
    good, odd = shm_net.node("good", 8, 512), shm_net.node("odd", 2, 5000)
    fill_at_random(good.memory)
    receiver.transport.admit(1, SECRET, [3])
    odd.transport.open("receiver@1/1", receiver.transport.endpoint())
    odd.transport.write("receiver@1/1", LeaseRef(1, SECRET), [(0, 1)])
    odd.transport.notify("receiver@1/1", commit(1))
    good.transport.open("receiver@1/1", receiver.transport.endpoint())
    shm_net.until(lambda: bool(receiver.said.of(NotifyArrived)))
    assert receiver.said.of(BlocksLanded) == []
    good.transport.write("receiver@1/1", LeaseRef(1, SECRET), [(0, 4)])
    shm_net.until(lambda: receiver.said.landed(1) == [0])
    assert np.array_equal(receiver.memory[3], good.memory[4])
    assert pb.ErrorCode.Name(pb.TRANSFER_FAILED) in receiver.counts("writes_refused")
