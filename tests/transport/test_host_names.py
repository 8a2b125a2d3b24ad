"""Names in link addresses: which work, and what a slow name server holds up."""

from __future__ import annotations

import socket
import threading
from typing import Any

import numpy as np
import pytest
import zmq

from connector import sender_thread
from connector.host_names import named_host, with_address
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
