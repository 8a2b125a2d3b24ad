"""zmq links whose peers go without a word: who is left finds it, and lives."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Final

import pytest

from bench.namespaces import network, why_not
from connector.transport import BlocksTaken, LeaseRef, LinkClosed
from proto import baton_pb2 as pb
from tests.transport.net import ZmqNet, fill_at_random
from tests.transport.peer import BLOCK_BYTES, NUM_BLOCKS, SECRET
from tests.transport.peer_process import peer
from tests.transport.tcp_proxy import TcpProxy

WHY_NOT: Final = why_not()


@pytest.mark.covers("P04", "C03")
def test_a_receiver_that_was_behind_when_a_sender_broke_off_lives_and_goes_on(zmq_net: ZmqNet) -> None:
    """libzmq ends a process that sends a heartbeat then, 0.4 s later as it was once set."""
    sender = zmq_net.node("sender", 64, BLOCK_BYTES)
    fill_at_random(sender.memory)
    with peer("zmq", "127.0.0.1", "held") as receiver:
        receiver.begin(None)
        there = receiver.endpoint
        with TcpProxy(int(there.address.rpartition(":")[2])) as proxy:
            through = pb.Endpoint(transport="zmq", address=proxy.address, link_secret=there.link_secret)
            sender.transport.open("receiver@1/1", through)
            writes = [(i, i % NUM_BLOCKS) for i in range(64)]
            for source in writes:
                sender.transport.write("receiver@1/1", LeaseRef(1, SECRET), [source])
            receiver.wait_for("BlocksLanded")
            num_forwarded = 0
            while num_forwarded != (num_forwarded := proxy.num_forwarded):
                time.sleep(0.3)
            assert 0 < len(sender.said.of(BlocksTaken)) < len(writes), "the link is full"
            proxy.cut()
            zmq_net.until(lambda: bool(sender.said.of(LinkClosed)))
        time.sleep(1.5)
        assert receiver.process.poll() is None
        receiver.let_go()
        sender.transport.open("receiver@1/2", there)
        sender.transport.notify("receiver@1/2", pb.DataMessage(commit=pb.Commit(lease_id=1)).SerializeToString())
        receiver.wait_for("NotifyArrived")


@pytest.mark.covers("P04", "C03")
@pytest.mark.skipif(WHY_NOT is not None, reason=f"{WHY_NOT}")
def test_an_idle_link_to_a_host_that_is_cut_off_is_found_and_closed() -> None:
    with network(("sender", "receiver")) as net, ExitStack() as peers:
        with net.entered("receiver"):
            receiver = peers.enter_context(peer("zmq", net.address("receiver")))
        with net.entered("sender"):
            sender = peers.enter_context(peer("zmq", net.address("sender")))
        receiver.begin(None)
        sender.begin(receiver.endpoint)
        receiver.wait_for("NotifyArrived")
        net.cut("sender", "receiver")
        began = time.monotonic()
        sender.wait_for("LinkClosed")
        assert time.monotonic() - began < 20
