"""Who gets into a shm receiver, and what no honest sender would send or show: refused, bounded, and the node goes on."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import random
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from connector.link_channel import Channel, ChannelBroken, FrameKind
from connector.peer_memory import F_SEAL_FUTURE_WRITE, PeerMemory
from connector.shm_socket import find_connection
from connector.transport import LeaseRef, LinkClosed, NotifyArrived, WriteRefused
from engine.shared_bytes import SharedBytes
from proto import baton_pb2 as pb
from tests.transport.net import Node, ShmNet, commit, fill_at_random

SECRET = b"0123456789abcdef"
MIB = 1 << 20


def assert_still_serves(net: ShmNet, node: Node) -> None:
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


def hello(node: Node, num_blocks: int = 8, block_bytes: int = 512, sender: str = "mallory@1") -> pb.LinkHello:
    secret = node.transport.endpoint().link_secret
    return pb.LinkHello(sender=sender, link_secret=secret, num_blocks=num_blocks, block_bytes=block_bytes)


@contextmanager
def connected(node: Node) -> Iterator[socket.socket]:
    """A connection to a node, with which the test can do what it likes; reading waits."""
    connection = find_connection(node.transport.endpoint())
    assert connection is not None
    with connection:
        connection.settimeout(20)
        yield connection


@contextmanager
def member(node: Node, memory: SharedBytes) -> Iterator[tuple[socket.socket, Channel]]:
    """A connection that the node has let in."""
    num_blocks, block_bytes = memory.bytes.shape
    with connected(node) as connection:
        channel = Channel(connection)
        channel.send_hello(hello(node, num_blocks, block_bytes).SerializeToString(), memory.descriptor)
        assert [frame.kind for frame in channel.receive()] == [FrameKind.WELCOME]
        yield connection, channel


def assert_thrown_out(connection: socket.socket) -> None:
    """Nothing was said to it but the end."""
    try:
        assert connection.recv(1) == b""
    except ConnectionResetError:
        return  # the same, where not all that it sent was read


def num_open(file_id: tuple[int, int]) -> int:
    """Descriptors of this process that stand for this file (device, inode)."""
    found = 0
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):  # another thread's, closed meanwhile
            about = os.fstat(int(number))
            found += (about.st_dev, about.st_ino) == file_id
    return found


def unsealed() -> int:
    descriptor = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(descriptor, 0, 4096)
    return descriptor


def sparse() -> int:
    descriptor = os.memfd_create("sparse", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 4096)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE)
    return descriptor


def file() -> int:
    with tempfile.TemporaryFile() as on_disk:
        on_disk.write(bytes(4096))
        on_disk.flush()
        return os.dup(on_disk.fileno())


def good() -> int:
    shared = SharedBytes(8, 512)
    return os.dup(shared.descriptor)


@pytest.mark.covers("H13", "H05")
@pytest.mark.parametrize(
    ("make_descriptor", "change", "reason"),
    [
        (unsealed, {"num_blocks": 1, "block_bytes": 4096}, "not sealed"),
        (sparse, {"num_blocks": 1, "block_bytes": 4096}, "only 0 of"),
        (file, {"num_blocks": 1, "block_bytes": 4096}, "no memfd"),
        (lambda: os.open("/dev/zero", os.O_RDONLY), {}, "0 bytes for"),
        (lambda: os.dup(0), {}, "for 8 blocks"),
        (good, {"num_blocks": 9}, "for 9 blocks"),
        (good, {"num_blocks": 7}, "for 7 blocks"),
        (good, {"num_blocks": 0, "block_bytes": 0}, "for 0 blocks"),
        (good, {"num_blocks": 2**32 - 1, "block_bytes": 2**64 - 1}, "for 4294967295 blocks"),
        (good, {"sender": ""}, "no name"),
        (good, {"sender": "a\nb@1"}, "no name"),
        (good, {"link_secret": b""}, "wrong link secret"),
        (good, {"link_secret": b"x" * 16}, "wrong link secret"),
        (good, {"link_secret": b"x" * 2000}, "a frame of kind 1"),
    ],
)
def test_a_hello_that_does_not_hold_lets_nobody_in(
    shm_net: ShmNet,
    make_descriptor: Callable[[], int],
    change: dict[str, object],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    receiver = shm_net.node("receiver")
    greeting = hello(receiver)
    for name, value in change.items():
        setattr(greeting, name, value)
    descriptor = make_descriptor()
    about = os.fstat(descriptor)
    file_id = (about.st_dev, about.st_ino)
    num_before = num_open(file_id)
    try:
        with connected(receiver) as connection:
            Channel(connection).send_hello(greeting.SerializeToString(), descriptor)
            assert_thrown_out(connection)
    finally:
        os.close(descriptor)
    assert receiver.transport.snapshot()["links_refused"] == 1
    assert reason in caplog.text
    assert num_open(file_id) == num_before - 1  # none of what came along was kept
    assert_still_serves(shm_net, receiver)


@pytest.mark.covers("H13")
@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x00" * 4096,
        b"\x01\x00\x00\x00\x00",  # a HELLO without a body, without a descriptor
        b"\x03\x00\x00\x00\x00",  # a WRITE before any HELLO
        b"\x01\xff\xff\xff\xff" + b"x" * 1000,
        random.Random(1).randbytes(100_000),
    ],
)
def test_garbage_disturbs_nobody(shm_net: ShmNet, garbage: bytes) -> None:
    receiver = shm_net.node("receiver")
    with connected(receiver) as connection:
        connection.sendall(garbage)
        assert_thrown_out(connection)
    assert receiver.transport.snapshot()["links_refused"] == 1
    assert_still_serves(shm_net, receiver)
    assert receiver.said.of(WriteRefused) == []


@pytest.mark.covers("H13")
@pytest.mark.usefixtures("nodes_own_times")
def test_connections_that_say_nothing_are_bounded_and_thrown_out(shm_net: ShmNet) -> None:
    receiver = shm_net.node("receiver")
    silent = [find_connection(receiver.transport.endpoint()) for _ in range(100)]
    for connection in silent:
        assert connection is not None
        connection.settimeout(20)
        assert_thrown_out(connection)
        connection.close()
    assert receiver.transport.snapshot()["links_refused"] == 100
    assert_still_serves(shm_net, receiver)


@pytest.mark.covers("H13")
@pytest.mark.parametrize(
    "frame",
    [
        b"\x00\x00\x00\x00\x00",
        b"\x07\x00\x00\x00\x00",
        b"\x03\xff\xff\xff\x7f",  # 2 GiB are to come
        b"\x01\x00\x00\x00\x00",
        b"\x02\x00\x00\x00\x00",
        b"\x04\x00\x00\x00\x00",
        b"\x06\x00\x00\x00\x00",
    ],
)
def test_a_member_that_breaks_the_frames_loses_its_link_only(shm_net: ShmNet, frame: bytes) -> None:
    receiver = shm_net.node("receiver")
    with member(receiver, SharedBytes(8, 512)) as (connection, _):
        connection.sendall(frame)
        assert_thrown_out(connection)
    assert_still_serves(shm_net, receiver)


@pytest.mark.covers("H13", "H05")
def test_malformed_writes_of_a_member_are_refused_one_by_one(shm_net: ShmNet) -> None:
    receiver = shm_net.node("receiver", 8, 512)
    receiver.transport.admit(1, SECRET, [0, 1, -1])
    memory = SharedBytes(4, 512)

    def write(*pieces: tuple[int, int, int, int], secret: bytes = SECRET, lease_id: int = 1) -> bytes:
        made = [pb.Piece(block_index=i, source_block=s, offset=o, length=n) for i, s, o, n in pieces]
        return pb.DataMessage(write=pb.Write(lease_id=lease_id, secret=secret, pieces=made)).SerializeToString()

    attacks = [
        b"",
        b"\xff" * 1000,
        write(),
        write((0, 4, 0, 512)),  # beyond its own memory
        write((0, 2**32 - 1, 0, 512)),
        write((0, 3, 1, 512)),
        write((0, 3, 2**32 - 1, 2**32 - 1)),
        write((0, 0, 0, 0)),
        write((0, 0, 0, 511)),
        write((2, 0, 0, 512)),
        write((2**32 - 1, 0, 0, 512)),
        write((0, 0, 0, 512), (0, 1, 0, 512)),
        write((0, 0, 0, 512), secret=b""),
        write((0, 0, 0, 512), lease_id=2),
        write(*[(0, 0, 0, 512)] * 5000),
        commit(1),
    ]
    with member(receiver, memory) as (connection, channel):
        connection.settimeout(20)
        kinds: list[FrameKind] = []
        for attack in attacks:
            channel.send(FrameKind.WRITE, attack)
        channel.send(FrameKind.NOTICE, b"no commit")
        channel.send(FrameKind.NOTICE, commit(7))
        while len(kinds) < len(attacks):
            kinds += [frame.kind for frame in channel.receive()]
    assert kinds == [FrameKind.TAKEN] * len(attacks)
    shm_net.until(lambda: bool(receiver.said.of(NotifyArrived)))
    assert len(receiver.said.of(WriteRefused)) == len(attacks) + 1
    assert_still_serves(shm_net, receiver)


@pytest.mark.covers("H13")
def test_a_member_that_reads_no_answer_is_bounded_and_thrown_out(shm_net: ShmNet) -> None:
    receiver = shm_net.node("receiver")
    with member(receiver, SharedBytes(8, 512)) as (_, channel):
        channel.send(FrameKind.NOTICE, commit(1))
        shm_net.until(lambda: bool(receiver.said.of(NotifyArrived)))
        reply_to = receiver.said.of(NotifyArrived)[0].reply_to
        for _ in range(100):
            receiver.transport.answer(reply_to, b"x" * MIB)
        num_answers = 0
        with pytest.raises(ChannelBroken, match=r"^connection lost$"):  # what fitted into the sockets, then the end
            while True:
                num_answers += len(channel.receive())
        assert num_answers < 10
    assert_still_serves(shm_net, receiver)


@pytest.mark.covers("H13")
def test_a_receiver_that_speaks_out_of_turn_loses_the_link(shm_net: ShmNet) -> None:
    sender = shm_net.node("sender")
    for number, said in enumerate((FrameKind.TAKEN, FrameKind.ANSWER, FrameKind.WRITE)):
        name = f"baton-{random.Random(number).randbytes(16).hex()}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(b"\0" + name.encode())
            listener.listen()
            boot_id = shm_net.node(f"n{number}").transport.endpoint().address.partition("/")[0]
            endpoint = pb.Endpoint(transport="shm", address=f"{boot_id}/{name}", link_secret=SECRET)
            sender.transport.open(f"liar@1/{number}", endpoint)
            connection, _ = listener.accept()
            Channel(connection).send(said, b"")
            shm_net.until(lambda n=number: len(sender.said.of(LinkClosed)) == n + 1)  # type: ignore[misc]
            connection.close()
    assert all("out of turn" in closed.reason for closed in sender.said.of(LinkClosed))


@pytest.mark.covers("H12")
@pytest.mark.parametrize(
    "change",
    [
        lambda address: "00000000-0000-0000-0000-000000000000/" + address.partition("/")[2],  # another host's
        lambda address: address[:-1] + ("0" if address[-1] != "0" else "1"),
        lambda address: address.partition("/")[0] + "/\0",
        lambda address: f"{address.partition('/')[0]}/not-baton-{os.getpid()}",
        lambda address: address + "x" * 200,
        lambda address: "",
    ],
)
def test_an_endpoint_of_another_host_or_of_nobody_is_not_reached(shm_net: ShmNet, change: Callable[[str], str]) -> None:
    receiver = shm_net.node("receiver")
    endpoint = receiver.transport.endpoint()
    reached = find_connection(endpoint)
    assert reached is not None
    reached.close()
    endpoint.address = change(endpoint.address)
    with socket.socket(socket.AF_UNIX) as another_program:
        another_program.bind(b"\0" + f"not-baton-{os.getpid()}".encode())
        another_program.listen()
        assert find_connection(endpoint) is None


@pytest.mark.covers("H05")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_is_neither_let_in_nor_spoken_to(shm_net: ShmNet) -> None:
    python = shutil.which("python3", path="/usr/bin:/bin")
    if python is None:
        pytest.skip("no Python that every user may run")
    receiver = shm_net.node("receiver")
    boot_id, _, name = receiver.transport.endpoint().address.partition("/")
    own_name = f"baton-{os.urandom(16).hex()}"
    script = f"""
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(b"\\0{own_name}")
listener.listen()
guest = socket.socket(socket.AF_UNIX)
guest.settimeout(20)
guest.connect(b"\\0{name}")
print(guest.recv(1), flush=True)
sys.stdin.read()
"""
    command = [python, "-I", "-c", script]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, user=65534, group=65534, cwd="/"
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "b''\n"
        assert receiver.transport.snapshot()["links_refused"] == 1
        own = pb.Endpoint(transport="shm", address=f"{boot_id}/{own_name}", link_secret=SECRET)
        assert find_connection(own) is None
        other.kill()


# ---------------------------------------------------------------- without sockets


def test_memory_of_a_peer_lies_where_huge_pages_begin_and_is_all_of_it() -> None:
    huge = 2 << 20
    for num_blocks in (3, 4097, 8192):  # less than a huge page, a little more, two of them
        shared = SharedBytes(num_blocks, 512)
        shared.bytes[:] = np.random.default_rng(num_blocks).integers(0, 256, shared.bytes.shape, np.uint8)
        peers = [PeerMemory(shared.descriptor, num_blocks, 512) for _ in range(3)]
        for peer in peers:
            while not peer.populate_some():
                pass
            assert np.array_equal(peer.bytes, shared.bytes)
            assert shared.bytes.nbytes < huge or peer.bytes.ctypes.data % huge == 0


@pytest.mark.parametrize("num_blocks", [8, 8192])
def test_memory_of_a_peer_cannot_be_written(num_blocks: int) -> None:
    shared = SharedBytes(num_blocks, 512)
    peer = PeerMemory(shared.descriptor, num_blocks, 512)
    shared.bytes[7, 511] = 9
    assert peer.bytes[7, 511] == 9
    with pytest.raises(ValueError, match="read-only"):
        peer.bytes[0, 0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        peer.bytes.flags.writeable = True
    with pytest.raises(PermissionError):
        mmap.mmap(shared.descriptor, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)
