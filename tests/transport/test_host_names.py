"""Names in link addresses: which work, and what a slow name server holds up."""

from __future__ import annotations

import socket
import threading
from typing import Any

import numpy as np
import pytest
import zmq

from connector import sender_thread
from connector.host_names import find_reachable, named_host, with_address
from connector.nixl_agent import is_installed
from connector.nixl_transport import NixlTransport
from connector.transport import LinkClosed, NotifyArrived
from connector.zmq_options import Place
from connector.zmq_transport import ZmqTransport
from proto import baton_pb2 as pb
from tests.transport.conftest import made
from tests.transport.net import Net, commit


@pytest.mark.parametrize("host", ["::1", "localhost"])
def test_other_names_of_loopback_work_as_well(host: str) -> None:
    arrived = threading.Event()
    memory = np.zeros((1, 512), np.uint8)
    try:
        receiver = ZmqTransport(memory, "receiver", 1, lambda event: arrived.set(), Place(host))
    except zmq.ZMQError as fault:
        pytest.skip(f"this machine has no {host}: {fault}")
    sender = ZmqTransport(memory, "sender", 1, lambda event: None)
    sender.open("receiver@1/1", receiver.endpoint())
    sender.notify("receiver@1/1", commit(1))
    assert arrived.wait(60)
    sender.stop()
    receiver.stop()


@pytest.mark.parametrize(
    ("place", "host"),
    [
        ("tcp://a-b.c:1", "a-b.c"),
        ("localhost:65535", "localhost"),
        *(
            (each, None)
            for each in ("tcp://127.0.0.1:1", "127.0.0.1:1", "[::1]:1", "tcp://[::1]:1", "a:123456", "", "x")
        ),
        ("0b5f-4c/node:7", None),
        ("inproc://zeromq.zap.01", None),
    ],
)
def test_a_name_is_told_from_an_address(place: str, host: str | None) -> None:
    assert named_host(place) == host
    if host is not None:
        assert with_address(place, "10.0.0.1") == place.replace(host, "10.0.0.1")
        assert with_address(place, "fd00::1") == place.replace(host, "[fd00::1]")


@pytest.mark.covers("P04")
@pytest.mark.parametrize("kind", ["zmq", "nixl, one-sided"])
def test_a_slow_name_server_delays_no_other_link(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with made(kind) as net:
        others_go_on(net, monkeypatch)


def others_go_on(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    may_answer = threading.Event()
    look_up = socket.getaddrinfo

    def slow(host: str, *rest: Any, **more: Any) -> Any:
        if host.endswith(".example"):
            assert may_answer.wait(60)
            host = "localhost" if host == "slow.example" else "none.invalid"
        return look_up(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    monkeypatch.setattr(sender_thread, "MAX_LOOK_UPS", 3)
    sender, receiver = net.node("sender"), net.node("receiver")
    right = receiver.transport.endpoint()
    for name in ("slow", "none", "closed", "more"):
        address = right.address.replace("127.0.0.1", f"{name}.example")
        sender.transport.open(
            f"{name}@1/1", pb.Endpoint(transport=right.transport, address=address, link_secret=right.link_secret)
        )
        sender.transport.notify(f"{name}@1/1", commit(2))
    sender.transport.close("closed@1/1")
    sender.transport.open("receiver@1/1", receiver.transport.endpoint())
    sender.transport.notify("receiver@1/1", commit(1))
    net.until(lambda: len(receiver.said.of(NotifyArrived)) == 1)
    assert receiver.said.of(NotifyArrived)[0].payload == commit(1)
    may_answer.set()
    net.until(lambda: len(receiver.said.of(NotifyArrived)) == 2 and len(sender.said.of(LinkClosed)) == 3)
    assert receiver.said.of(NotifyArrived)[1].payload == commit(2)
    reasons = {event.link_id: event.reason for event in sender.said.of(LinkClosed)}
    assert reasons.pop("more@1/1") == "more.example cannot be looked up: too many are under way"
    assert reasons.pop("closed@1/1") == "closed" and "none.example" in reasons.pop("none@1/1") and not reasons


def answering(monkeypatch: pytest.MonkeyPatch, names: dict[str, tuple[str, ...]]) -> None:
    """A name server that has these addresses for these names."""
    look_up = socket.getaddrinfo

    def found(host: str, *rest: Any, **more: Any) -> Any:
        return [each for address in names.get(host, (host,)) for each in look_up(address, *rest, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", found)


@pytest.mark.covers("P04", "H11")
@pytest.mark.parametrize("kind", ["zmq", "nixl, one-sided"])
def test_a_name_that_is_not_found_in_time_ends_its_link_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    may_answer = threading.Event()
    look_up = socket.getaddrinfo

    def slow(host: str, *rest: Any, **more: Any) -> Any:
        assert host != "slow.example" or may_answer.wait(60)
        return look_up("127.0.0.1" if host == "slow.example" else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    monkeypatch.setattr(sender_thread, "FIND_S", 0.3)
    with made(kind) as net:
        sender, receiver = net.node("sender"), net.node("receiver")
        right = receiver.transport.endpoint()
        slow_one = pb.Endpoint()
        slow_one.CopyFrom(right)
        slow_one.address = right.address.replace("127.0.0.1", "slow.example")
        sender.transport.open("receiver@1/1", slow_one)
        sender.transport.notify("receiver@1/1", commit(1))
        net.until(lambda: bool(sender.said.of(LinkClosed)))
        may_answer.set()  # too late
        sender.transport.open("receiver@1/2", right)
        sender.transport.notify("receiver@1/2", commit(2))
        net.until(lambda: bool(receiver.said.of(NotifyArrived)))
        assert sender.said.of(LinkClosed) == [LinkClosed("receiver@1/1", "its name was not found in time")]
        assert [event.payload for event in receiver.said.of(NotifyArrived)] == [commit(2)]


@pytest.mark.parametrize("transport", [ZmqTransport, NixlTransport])
def test_a_name_that_has_an_ipv4_address_leads_to_who_listens_at_its_ipv6_one_only(
    transport: type[ZmqTransport | NixlTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    if transport is NixlTransport and not is_installed():
        pytest.skip("NIXL is not installed")
    answering(monkeypatch, {"both.example": ("127.0.0.1", "::1")})
    arrived = threading.Event()
    memory = np.zeros((1, 512), np.uint8)
    try:
        receiver = transport(memory, "receiver", 1, lambda _: arrived.set(), Place("::1", 0, "both.example"))
    except OSError as fault:
        pytest.skip(f"this machine has no ::1: {fault}")
    sender = transport(memory, "sender", 1, lambda _: None)
    sender.open("receiver@1/1", receiver.endpoint())
    sender.notify("receiver@1/1", commit(1))
    assert arrived.wait(60)
    sender.stop()
    receiver.stop()


def test_of_addresses_that_do_not_answer_the_ipv4_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, {"both.example": ("::1", "127.0.0.1", "127.0.0.2"), "new.example": ("::1",)})
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: connecting is refused
        port = unused.getsockname()[1]
        assert find_reachable(f"both.example:{port}", "both.example") == f"127.0.0.1:{port}"
    assert find_reachable("tcp://both.example:99999", "both.example") == "tcp://127.0.0.1:99999"
    assert find_reachable("new.example:1", "new.example") == "[::1]:1"
