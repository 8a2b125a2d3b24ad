"""Which way a link goes, and that all ways lead into the same leases."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import cast

import numpy as np
import pytest
import zmq

from connector import nixl_agent
from connector.choosing import ChoosingTransport, HostMemory, TransportChoice, choose_transports
from connector.transport import Answered, LeaseRef, LinkClosed, NotifyArrived, RevokeDone, WriteRefused
from connector.zmq_options import LOOPBACK, Place
from engine.shared_bytes import SharedBytes
from proto import baton_pb2 as pb
from tests.transport.net import WAIT_S, Recorder, answer, commit, fill_at_random

SECRET = b"0123456789abcdef"
LEASE = LeaseRef(1, SECRET)


class ChoosingNode:
    """A node with the transports of its choice."""

    def __init__(self, choice: TransportChoice, name: str, changed: threading.Condition) -> None:
        self.shared = SharedBytes(8, 512)
        self.memory = self.shared.bytes
        self.said = Recorder(changed)
        self.transport: ChoosingTransport = choose_transports(
            choice,
            HostMemory(self.memory, lambda: self.shared.descriptor),
            (name, 1),
            self.said,
            LOOPBACK,
            is_encrypted=False,
        )

    def shows(self, name: str) -> Mapping[str, object]:
        return cast(Mapping[str, object], self.transport.snapshot()[name])


class ChoosingNet:
    """Such nodes, and waiting for what they say."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.nodes: list[ChoosingNode] = []

    def node(self, choice: TransportChoice, name: str) -> ChoosingNode:
        self.nodes.append(ChoosingNode(choice, name, self._changed))
        fill_at_random(self.nodes[-1].memory, seed=len(self.nodes))
        return self.nodes[-1]

    def until(self, is_reached: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(is_reached, WAIT_S), "what was waited for has not come in time"


@pytest.fixture
def choosing() -> Iterator[ChoosingNet]:
    made = ChoosingNet()
    yield made
    for node in made.nodes:
        node.transport.stop()


def as_of_another_host(endpoints: list[pb.Endpoint]) -> list[pb.Endpoint]:
    """What the same node would say from elsewhere."""
    for endpoint in endpoints:
        if endpoint.transport == "shm":
            endpoint.address = "00000000-0000-0000-0000-000000000000/" + endpoint.address.partition("/")[2]
    return endpoints


@pytest.mark.covers("H12", "H02")
@pytest.mark.parametrize(
    ("of_sender", "of_receiver", "is_one_host", "expected"),
    [
        ("auto", "auto", True, "shm"),
        ("auto", "auto", False, "zmq"),
        ("auto", "zmq", True, "zmq"),
        ("zmq", "auto", True, "zmq"),
        ("shm", "auto", True, "shm"),
        ("auto", "shm", True, "shm"),
    ],
)
def test_a_link_takes_shared_memory_on_one_host_else_zmq_or_what_was_forced(
    choosing: ChoosingNet, of_sender: TransportChoice, of_receiver: TransportChoice, is_one_host: bool, expected: str
) -> None:
    assert_goes_over(choosing, of_sender, of_receiver, is_one_host, expected)


def assert_goes_over(
    choosing: ChoosingNet, of_sender: TransportChoice, of_receiver: TransportChoice, is_one_host: bool, expected: str
) -> None:
    """A link between two nodes of these choices carries KV, a notification and its answer that way, and counts it."""
    sender, receiver = choosing.node(of_sender, "sender"), choosing.node(of_receiver, "receiver")
    receiver.transport.admit(LEASE.lease_id, LEASE.secret, [3, 1])
    endpoints = receiver.transport.endpoints()
    sender.transport.open("receiver@1/1", endpoints if is_one_host else as_of_another_host(endpoints))
    sender.transport.write("receiver@1/1", LEASE, [(0, 5), (1, 6)])
    sender.transport.notify("receiver@1/1", commit(1))
    choosing.until(lambda: bool(receiver.said.of(NotifyArrived)) and len(sender.said.taken(1)) == 2)
    assert np.array_equal(receiver.memory[[3, 1]], sender.memory[[5, 6]])
    receiver.transport.answer(receiver.said.of(NotifyArrived)[0].reply_to, answer(1))
    choosing.until(lambda: bool(sender.said.of(Answered)))
    assert sender.shows("links") == {"receiver@1/1": expected}
    assert {name: n for name, n in sender.shows("bytes_sent_over").items() if n} == {expected: 1024}
    assert sender.shows("kv_bytes_sent") == {"receiver": 1024}
    assert receiver.shows("kv_bytes_received") == {"sender": 1024}
    sender.transport.close("receiver@1/1")
    choosing.until(lambda: bool(sender.said.of(LinkClosed)))
    assert sender.shows("links") == {}


@pytest.mark.covers("H12")
@pytest.mark.skipif(
    not nixl_agent.is_installed(), reason="NIXL is not installed: pip install -c constraints.txt -e '.[nixl]'"
)
@pytest.mark.parametrize(
    ("of_sender", "of_receiver", "is_one_host", "expected"),
    [
        ("auto", "auto", False, "nixl"),
        ("auto", "auto", True, "shm"),
        ("nixl", "auto", True, "nixl"),
        ("auto", "nixl", True, "nixl"),
        ("zmq", "auto", False, "zmq"),
        ("auto", "zmq", False, "zmq"),
    ],
)
def test_a_link_takes_nixl_where_both_have_it_and_rdma_but_not_on_one_host(
    choosing: ChoosingNet,
    monkeypatch: pytest.MonkeyPatch,
    of_sender: TransportChoice,
    of_receiver: TransportChoice,
    is_one_host: bool,
    expected: str,
) -> None:
    monkeypatch.setattr(nixl_agent, "has_rdma", lambda: True)
    assert_goes_over(choosing, of_sender, of_receiver, is_one_host, expected)


@pytest.mark.covers("H12")
def test_nixl_is_none_of_the_choices_without_the_library_without_rdma_or_where_links_are_encrypted(
    choosing: ChoosingNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_agent, "has_rdma", lambda: True)
    monkeypatch.setattr(nixl_agent, "_PACKAGES", ())
    assert [each.transport for each in choosing.node("auto", "bare").transport.endpoints()] == ["shm", "zmq"]
    with pytest.raises(nixl_agent.NixlFault, match=r"\[nixl\]"):
        choosing.node("nixl", "bare")
    monkeypatch.undo()
    monkeypatch.setattr(nixl_agent, "has_rdma", lambda: False)
    assert [each.transport for each in choosing.node("auto", "slow").transport.endpoints()] == ["shm", "zmq"]
    shared = SharedBytes(1, 512)
    with pytest.raises(ValueError, match="encrypts nothing"):
        choose_transports(
            "nixl",
            HostMemory(shared.bytes, lambda: shared.descriptor),
            ("node", 1),
            lambda event: None,
            LOOPBACK,
            is_encrypted=True,
        )


@pytest.mark.covers("H12")
@pytest.mark.parametrize(
    ("of_sender", "of_receiver", "reason"),
    [
        ("shm", "zmq", "the receiver offers zmq, this node has shm"),
        ("zmq", "shm", "the receiver offers shm, this node has zmq"),
        ("shm", "auto", "the receiver offers shm, zmq, this node has shm"),  # not of this host
    ],
)
def test_ends_without_a_way_in_common_hear_so_at_once(
    choosing: ChoosingNet, of_sender: TransportChoice, of_receiver: TransportChoice, reason: str
) -> None:
    sender, receiver = choosing.node(of_sender, "sender"), choosing.node(of_receiver, "receiver")
    sender.transport.open("receiver@1/1", as_of_another_host(receiver.transport.endpoints()))
    sender.transport.write("receiver@1/1", LEASE, [(0, 5)])
    assert sender.said.all() == [LinkClosed("receiver@1/1", f"no way there: {reason}")]
    sender.transport.open("nobody@1/1", [])
    assert sender.said.of(LinkClosed)[1].reason.startswith("no way there: the receiver offers nothing")


@pytest.mark.covers("H08", "H05")
def test_a_lease_is_one_over_all_ways_written_once_and_quiet_once(choosing: ChoosingNet) -> None:
    receiver = choosing.node("auto", "receiver")
    near, far = choosing.node("shm", "near"), choosing.node("zmq", "far")
    receiver.memory[:] = 0
    receiver.transport.admit(1, SECRET, [0, 1, 2])
    for sender, block_index in ((near, 0), (far, 0), (far, 1), (near, 1)):
        link_id = f"receiver@1/{block_index}"
        if link_id not in sender.shows("links"):
            sender.transport.open(link_id, receiver.transport.endpoints())
        num_arrived = len(receiver.said.of(NotifyArrived)) + 1
        sender.transport.write(link_id, LEASE, [(block_index, block_index)])
        sender.transport.notify(link_id, commit(1))
        choosing.until(lambda n=num_arrived: len(receiver.said.of(NotifyArrived)) >= n)  # type: ignore[misc]
    assert sorted(receiver.said.landed(1)) == [0, 1]
    assert len(receiver.said.of(WriteRefused)) == 2
    assert np.array_equal(receiver.memory[0], near.memory[0])
    assert np.array_equal(receiver.memory[1], far.memory[1])
    assert receiver.shows("kv_bytes_received") == {"near": 512, "far": 512}
    receiver.transport.revoke(1)
    assert receiver.said.of(RevokeDone) == [RevokeDone(1)]


def keeping_out(endpoints: list[pb.Endpoint]) -> list[pb.Endpoint]:
    """A receiver that is reached over shm and lets nobody in that way."""
    for endpoint in endpoints:
        if endpoint.transport == "shm":
            endpoint.link_secret = b"x" * 16
    return endpoints


@pytest.mark.covers("H12")
def test_a_way_that_led_nowhere_is_taken_last_and_again_after_a_while(choosing: ChoosingNet) -> None:
    sender, receiver = choosing.node("auto", "sender"), choosing.node("auto", "receiver")
    endpoints = keeping_out(receiver.transport.endpoints())
    sender.transport.open("receiver@1/1", endpoints)
    choosing.until(lambda: bool(sender.said.of(LinkClosed)))
    sender.transport.open("receiver@1/2", endpoints)
    assert sender.shows("links") == {"receiver@1/2": "zmq"}
    sender.transport.notify("receiver@1/2", commit(1))
    choosing.until(lambda: bool(receiver.said.of(NotifyArrived)))
    sender.transport.open("receiver@1/3", endpoints[:1])  # no other way
    choosing.until(lambda: len(sender.said.of(LinkClosed)) == 2)
    assert "not let in" in sender.said.of(LinkClosed)[1].reason
    other = choosing.node("auto", "other")  # nothing is wrong with the way to somebody else
    sender.transport.open("other@1/1", other.transport.endpoints())
    assert sender.shows("links")["other@1/1"] == "shm"


@pytest.mark.covers("H12")
def test_a_way_is_not_avoided_for_ever_nor_because_a_link_was_closed_that_has_served(choosing: ChoosingNet) -> None:
    sender, receiver = choosing.node("auto", "sender"), choosing.node("auto", "receiver")
    sender.transport.avoid_s = 0.0
    endpoints = receiver.transport.endpoints()
    sender.transport.open("receiver@1/1", keeping_out(receiver.transport.endpoints()))
    choosing.until(lambda: bool(sender.said.of(LinkClosed)))
    sender.transport.open("receiver@1/2", endpoints)
    assert sender.shows("links") == {"receiver@1/2": "shm"}
    other = choosing.node("auto", "other")
    other.transport.open("receiver@1/1", endpoints)
    other.transport.write("receiver@1/1", LEASE, [(0, 5)])
    choosing.until(lambda: other.said.taken(1) == [0])
    other.transport.close("receiver@1/1")
    choosing.until(lambda: bool(other.said.of(LinkClosed)))
    other.transport.open("receiver@1/2", endpoints)
    assert other.shows("links") == {"receiver@1/2": "shm"}


@pytest.mark.covers("H12")
def test_a_way_that_is_closed_for_being_stuck_before_it_carried_anything_is_taken_last(choosing: ChoosingNet) -> None:
    sender, receiver = choosing.node("auto", "sender"), choosing.node("auto", "receiver")
    endpoints = receiver.transport.endpoints()
    sender.transport.open("receiver@1/1", endpoints)
    sender.transport.close("receiver@1/1")
    choosing.until(lambda: bool(sender.said.of(LinkClosed)))
    sender.transport.open("receiver@1/2", endpoints)
    assert sender.shows("links") == {"receiver@1/2": "zmq"}


@pytest.mark.covers("H12", "A10")
def test_a_way_on_which_all_was_dropped_has_carried_nothing(choosing: ChoosingNet) -> None:
    sender, receiver = choosing.node("auto", "sender"), choosing.node("zmq", "receiver")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        right = receiver.transport.endpoints()[0]
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        wrong = pb.Endpoint(transport="zmq", address=address, link_secret=right.link_secret)
        sender.transport.open("receiver@1/1", [wrong, right])
        sender.transport.write("receiver@1/1", LEASE, [(0, 5)])
        sender.transport.drop("receiver@1/1", LEASE)
        choosing.until(lambda: sender.said.taken(1) == [0])
        sender.transport.close("receiver@1/1")
        choosing.until(lambda: bool(sender.said.of(LinkClosed)))
        sender.transport.open("receiver@1/2", [wrong, right])
        sender.transport.notify("receiver@1/2", commit(1))
        choosing.until(lambda: bool(receiver.said.of(NotifyArrived)))


@pytest.mark.covers("H12")
def test_a_host_without_abstract_sockets_leaves_zmq_to_auto_and_is_an_error_for_shm(
    choosing: ChoosingNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden() -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("connector.shm_receiver.listen", forbidden)
    assert [endpoint.transport for endpoint in choosing.node("auto", "boxed").transport.endpoints()] == ["zmq"]
    with pytest.raises(PermissionError):
        choosing.node("shm", "boxed")


@pytest.mark.covers("H12")
def test_a_host_whose_memory_cannot_be_sealed_leaves_zmq_to_auto_and_is_an_error_for_shm(
    choosing: ChoosingNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsealed(_: SharedBytes) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(SharedBytes, "descriptor", property(unsealed))
    choices: tuple[TransportChoice, ...] = ("auto", "zmq")
    for choice in choices:
        offered = choosing.node(choice, "old").transport.endpoints()
        assert [endpoint.transport for endpoint in offered] == ["zmq"]
    with pytest.raises(OSError, match="Invalid argument"):
        choosing.node("shm", "old")


def test_a_transport_that_cannot_be_made_takes_the_others_down_again() -> None:
    shared = SharedBytes(1, 512)
    before = {*threading.enumerate()}  # an earlier test's may end meanwhile
    with pytest.raises(zmq.ZMQError):
        choose_transports(
            "auto",
            HostMemory(shared.bytes, lambda: shared.descriptor),
            ("node", 1),
            lambda event: None,
            Place("192.0.2.1"),
            is_encrypted=False,
        )
    assert {*threading.enumerate()} <= before


def test_all_threads_are_watched(choosing: ChoosingNet) -> None:
    assert len(choosing.node("auto", "both").transport.ended) == 4
    assert len(choosing.node("shm", "one").transport.ended) == 2
