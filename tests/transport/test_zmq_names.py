"""Names in zmq addresses: which work, and what a slow name server holds up."""

from __future__ import annotations

import socket
import threading
from typing import Any

import numpy as np
import pytest
import zmq

from connector.transport import LinkClosed, NotifyArrived
from connector.zmq_options import Place
from connector.zmq_transport import ZmqTransport
from proto import baton_pb2 as pb
from tests.transport.net import ZmqNet, commit


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
    assert arrived.wait(10)
    sender.stop()
    receiver.stop()


@pytest.mark.covers("P04")
def test_a_slow_name_server_delays_no_other_link(zmq_net: ZmqNet, monkeypatch: pytest.MonkeyPatch) -> None:
    may_answer = threading.Event()
    look_up = socket.getaddrinfo

    def slow(host: str, *rest: Any, **more: Any) -> Any:
        if host.endswith(".example"):
            assert may_answer.wait(10)
            host = "localhost" if host == "slow.example" else "none.invalid"
        return look_up(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    sender, receiver = zmq_net.node("sender"), zmq_net.node("receiver")
    right = receiver.transport.endpoint()
    port = right.address.rpartition(":")[2]
    for name in ("slow", "none", "closed"):
        address = f"tcp://{name}.example:{port}"
        sender.transport.open(
            f"{name}@1/1", pb.Endpoint(transport="zmq", address=address, link_secret=right.link_secret)
        )
        sender.transport.notify(f"{name}@1/1", commit(2))
    sender.transport.close("closed@1/1")
    sender.transport.open("receiver@1/1", receiver.transport.endpoint())
    sender.transport.notify("receiver@1/1", commit(1))
    zmq_net.until(lambda: len(receiver.said.of(NotifyArrived)) == 1)
    assert receiver.said.of(NotifyArrived)[0].payload == commit(1)
    may_answer.set()
    zmq_net.until(lambda: len(receiver.said.of(NotifyArrived)) == 2 and len(sender.said.of(LinkClosed)) == 2)
    assert receiver.said.of(NotifyArrived)[1].payload == commit(2)
    reasons = {event.link_id: event.reason for event in sender.said.of(LinkClosed)}
    assert reasons.pop("closed@1/1") == "closed" and "none.example" in reasons.pop("none@1/1") and not reasons
