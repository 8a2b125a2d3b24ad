"""Encrypted links: whoever was told the link secret gets in, nobody else, and a node never does less than it was told to."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from connector.transport import LeaseRef, LinkClosed, WriteRefused
from connector.zmq_curve import KeyPair, sender_keys
from proto import baton_pb2 as pb
from tests.transport.net import Node, ZmqNet, fill_at_random

SECRET = b"0123456789abcdef"
FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)


class Stranger:
    """libzmq as anybody has it."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []

    def open(self, node: Node, keys: KeyPair | None, password: bytes | None = None, server: bytes = b"") -> int:
        """Try to open a link; what libzmq's monitor says of the handshake."""
        client = self._context.socket(zmq.DEALER)
        client.reconnect_ivl = -1  # or it tries again, and is counted again
        endpoint = node.transport.endpoint()
        if keys is not None:
            client.curve_publickey, client.curve_secretkey = keys.public, keys.secret
            client.curve_serverkey = z85.encode(server or endpoint.curve_key)
        if password is not None:
            client.plain_username, client.plain_password = b"mallory", password
        monitor = client.get_monitor_socket(FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._sockets += [client, monitor]
        client.connect(endpoint.address)
        with suppress(zmq.Again):  # it may have been refused already: then nobody would ever take it
            client.send(b"hello", zmq.NOBLOCK)
        assert monitor.poll(60_000), "nothing happened to the connection"
        return recv_monitor_message(monitor)["event"]

    def stop(self) -> None:
        for each in self._sockets:
            each.close(linger=0)
        self._context.term()


@pytest.fixture
def stranger() -> Iterator[Stranger]:
    made = Stranger()
    yield made
    made.stop()


def refused(node: Node) -> int:
    number = node.transport.snapshot()["links_refused"]
    assert isinstance(number, int)
    return number


def wait_for_refusals(node: Node, number: int) -> None:
    """They are counted by a thread that says nothing of it."""
    give_up_at = time.monotonic() + 60
    while refused(node) < number:
        assert time.monotonic() < give_up_at, f"{refused(node)} refusals are counted"
        time.sleep(0.005)


def assert_serves(net: ZmqNet, node: Node, name: str = "good") -> None:
    sender = net.node(name)
    fill_at_random(sender.memory)
    node.transport.admit(7, SECRET, [3])
    sender.transport.open("receiver@1/1", node.transport.endpoint())
    sender.transport.write("receiver@1/1", LeaseRef(7, SECRET), [(0, 0)])
    net.until(lambda: node.said.landed(7) == [0])
    assert np.array_equal(node.memory[3], sender.memory[0])
    assert node.counts("kv_bytes_received") == {name: 512}, "it is known by name, though CURVE carries none"
    node.transport.revoke(7)


@pytest.mark.covers("X03", "H13")
def test_strangers_are_refused_and_counted_and_the_node_goes_on(curve_net: ZmqNet, stranger: Stranger) -> None:
    receiver = curve_net.node("receiver")
    secret = receiver.transport.endpoint().link_secret
    unknown = KeyPair(*zmq.curve_keypair())
    assert stranger.open(receiver, unknown) & FAILED
    assert stranger.open(receiver, sender_keys(secret[::-1])) & FAILED
    wait_for_refusals(receiver, 2)
    assert stranger.open(receiver, None) & FAILED  # no key at all
    assert stranger.open(receiver, None, secret.hex().encode()) & FAILED  # the secret, for all to read
    wait_for_refusals(receiver, 4)
    assert receiver.said.of(WriteRefused) == []
    assert_serves(curve_net, receiver)
    assert refused(receiver) == 4


@pytest.mark.covers("X03")
def test_a_sender_that_takes_somebody_else_for_the_receiver_says_nothing(curve_net: ZmqNet, stranger: Stranger) -> None:
    receiver, other = curve_net.node("receiver"), curve_net.node("other")
    keys = sender_keys(receiver.transport.endpoint().link_secret)
    assert stranger.open(receiver, keys, server=other.transport.endpoint().curve_key) & FAILED
    assert stranger.open(receiver, keys) == zmq.EVENT_HANDSHAKE_SUCCEEDED


@pytest.mark.covers("X03")
@pytest.mark.parametrize("is_receiver_encrypted", [False, True])
def test_a_node_neither_sends_in_the_clear_nor_to_who_would_not(is_receiver_encrypted: bool) -> None:
    with ZmqNet(is_encrypted=is_receiver_encrypted) as net:
        receiver = net.node("receiver")
        net.is_encrypted = not is_receiver_encrypted
        sender = net.node("sender")
        sender.transport.open("receiver@1/1", receiver.transport.endpoint())
        net.until(lambda: bool(sender.said.of(LinkClosed)))
        (closed,) = sender.said.of(LinkClosed)
        assert closed.reason.endswith("--tls-dir is everybody's or nobody's")


@pytest.mark.covers("X03", "H13")
@pytest.mark.parametrize("key", [b"x", b"x" * 31, b"x" * 33, b"\x00" * 32])
def test_an_endpoint_with_a_bad_key_closes_its_link_and_nothing_else(curve_net: ZmqNet, key: bytes) -> None:
    receiver, sender = curve_net.node("receiver"), curve_net.node("sender")
    endpoint = pb.Endpoint()
    endpoint.CopyFrom(receiver.transport.endpoint())
    endpoint.curve_key = key
    sender.transport.open("receiver@1/1", endpoint)
    curve_net.until(lambda: bool(sender.said.of(LinkClosed)))
    assert_serves(curve_net, receiver)


@pytest.mark.covers("X03")
def test_the_payload_cannot_be_read_on_the_wire(curve_net: ZmqNet) -> None:
    """And can be without CURVE, or the test would find nothing."""
    seen = {}
    for is_encrypted in (False, True):
        curve_net.is_encrypted = is_encrypted
        receiver, sender = curve_net.node(f"receiver{is_encrypted}"), curve_net.node(f"sender{is_encrypted}")
        sender.memory[0] = np.frombuffer(b"the prompt's KV!" * 32, np.uint8)
        receiver.transport.admit(1, SECRET, [0])
        with Tap(receiver.transport.endpoint().address) as tap:
            endpoint = pb.Endpoint()
            endpoint.CopyFrom(receiver.transport.endpoint())
            endpoint.address = tap.address
            sender.transport.open("receiver@1/1", endpoint)
            sender.transport.write("receiver@1/1", LeaseRef(1, SECRET), [(0, 0)])
            curve_net.until(lambda receiver=receiver: receiver.said.landed(1) == [0])  # type: ignore[misc]
        seen[is_encrypted] = b"the prompt's KV!" in tap.bytes, SECRET in tap.bytes
        assert len(tap.bytes) > 512
    assert seen == {False: (True, True), True: (False, False)}


class Tap:
    """Passes one connection on, and keeps what it was given by who connected."""

    def __init__(self, target: str) -> None:
        self._target = ("127.0.0.1", int(target.rpartition(":")[2]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.bytes = b""
        self._threads: list[threading.Thread] = []
        self._ends: list[socket.socket] = []

    def __enter__(self) -> Tap:
        self._run(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        for end in self._ends:
            end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in (*self._ends, self._listener):
            end.close()

    def _run(self, what: object, *arguments: object) -> None:
        thread = threading.Thread(target=what, args=arguments)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(self._target)
        self._ends += [near, far]
        self._run(self._pass_on, near, far, True)
        self._run(self._pass_on, far, near, False)

    def _pass_on(self, source: socket.socket, target: socket.socket, is_kept: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if is_kept:
                    self.bytes += data
                target.sendall(data)
        except OSError:
            assert source.fileno() >= 0, "closed under a thread that reads it"
