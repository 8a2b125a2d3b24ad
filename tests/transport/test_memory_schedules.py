"""The in-memory transport: every order of steps keeps the promises, and faults are where the test puts them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.transport import Answered, BlocksLanded, LeaseRef, LinkClosed, NotifyArrived, RevokeDone, WriteRefused
from proto import baton_pb2 as pb
from tests.thorough import examples
from tests.transport.net import MemoryNet, Node, answer, commit, fill_at_random

SECRET = b"0123456789abcdef"
MIB = 1 << 20


def open_pair(net: MemoryNet, num_blocks: int = 4, block_bytes: int = 64) -> tuple[Node, Node]:
    sender = net.node("sender", num_blocks, block_bytes)
    receiver = net.node("receiver", num_blocks, block_bytes)
    fill_at_random(sender.memory)
    sender.transport.open("receiver@1/1", receiver.transport.endpoint())
    return sender, receiver


@pytest.mark.covers("H08")
def test_a_lease_revoked_while_a_write_runs_waits_for_it(memory_net: MemoryNet) -> None:
    sender, receiver = open_pair(memory_net)
    receiver.transport.admit(1, SECRET, [0])
    sender.transport.write("receiver@1/1", LeaseRef(1, SECRET), [(0, 0)])
    memory_net.hub.step()  # taken
    memory_net.hub.step()  # begun
    receiver.transport.revoke(1)
    assert receiver.said.of(RevokeDone) == []
    assert receiver.transport.snapshot()["leases_quarantined"] == 1
    memory_net.hub.step()  # finished: the late bytes land where they may still land
    assert receiver.memory[0].any()
    assert receiver.said.all() == [RevokeDone(1)]


@pytest.mark.covers("H09", "H11")
def test_a_flipped_byte_fails_its_own_lease_only(memory_net: MemoryNet) -> None:
    sender, receiver = open_pair(memory_net)
    key = memory_net.hub.links()[0]
    assert not memory_net.hub.flip(key), "nothing is on the wire yet"
    for lease_id in (1, 2):
        receiver.transport.admit(lease_id, SECRET, [lease_id])
        sender.transport.write("receiver@1/1", LeaseRef(lease_id, SECRET), [(0, lease_id)])
    memory_net.hub.step()
    assert memory_net.hub.flip(key, byte_index=63)
    memory_net.hub.run()
    assert [(refused.lease_id, refused.code) for refused in receiver.said.of(WriteRefused)] == [(1, pb.CHECKSUM)]
    assert receiver.said.landed(1) == []
    assert receiver.said.landed(2) == [0]


@pytest.mark.parametrize("num_delivered", [0, 1, 2])
def test_a_cut_link_delivers_as_much_of_the_wire_as_the_test_says(memory_net: MemoryNet, num_delivered: int) -> None:
    sender, receiver = open_pair(memory_net, 4, MIB)
    receiver.transport.admit(1, SECRET, [0, 1, 2])
    sender.transport.write("receiver@1/1", LeaseRef(1, SECRET), [(0, 0), (1, 1), (2, 2)])
    (key,) = memory_net.hub.links()
    memory_net.hub.step(0)
    memory_net.hub.step(0)
    assert sender.said.taken(1) == [0, 1]
    assert memory_net.hub.cut(key, num_delivered)
    assert not memory_net.hub.cut(key), "it is gone"
    memory_net.hub.run()
    assert receiver.said.landed(1) == list(range(num_delivered))
    assert sender.said.of(LinkClosed) == [LinkClosed("receiver@1/1", "connection lost")]
    assert sender.said.taken(1) == [0, 1]


def test_a_dropped_answer_leaves_the_link_as_it_is(memory_net: MemoryNet) -> None:
    sender, receiver = open_pair(memory_net)
    (key,) = memory_net.hub.links()
    assert not memory_net.hub.drop_answer(key)
    for lease_id in (1, 2):
        sender.transport.notify("receiver@1/1", commit(lease_id))
    memory_net.until(lambda: len(receiver.said.of(NotifyArrived)) == 2)
    for lease_id, arrived in enumerate(receiver.said.of(NotifyArrived), start=1):
        receiver.transport.answer(arrived.reply_to, answer(lease_id))
    assert memory_net.hub.drop_answer(key)
    memory_net.hub.run()
    assert sender.said.of(Answered) == [Answered("receiver@1/1", answer(2))]
    assert memory_net.hub.links() == (key,)


def test_a_restarted_node_is_not_reached_under_its_old_endpoint(memory_net: MemoryNet) -> None:
    sender, receiver = open_pair(memory_net)
    old = receiver.transport.endpoint()
    receiver.transport.stop()
    receiver = memory_net.node("receiver")
    sender.transport.open("receiver@1/2", old)
    sender.transport.open("receiver@2/1", receiver.transport.endpoint())
    memory_net.hub.run()
    assert [event.link_id for event in sender.said.of(LinkClosed)] == ["receiver@1/1", "receiver@1/2"]


@pytest.mark.covers("H02", "H04", "H05", "H08")
@settings(deadline=None, max_examples=examples(200, 3))
@given(st.data())
def test_whatever_the_order_of_steps_nothing_lands_outside_an_open_lease(data: st.DataObject) -> None:
    """Two senders, two leases each in turn over the same blocks; revokes, cuts and dropped links wherever they hurt."""
    with MemoryNet(is_one_sided=data.draw(st.booleans())) as net:
        receiver = net.node("receiver", 8, 64)
        senders = [net.node(f"sender-{i}", 8, 64) for i in range(2)]
        for i, sender in enumerate(senders):
            fill_at_random(sender.memory, seed=i)
            sender.transport.open("receiver@1/1", receiver.transport.endpoint())
        next_lease_id = 1
        owner: dict[int, int] = {}  # sender -> its lease
        revoked: set[int] = set()
        for _ in range(data.draw(st.integers(5, 40))):
            i = data.draw(st.integers(0, 1))
            blocks = range(4 * i, 4 * i + 4)
            action = data.draw(st.sampled_from(["lease", "step", "step", "step", "revoke", "cut"]))
            if action == "step" and (num := net.hub.pending()):
                net.hub.step(data.draw(st.integers(0, num - 1)))
            elif action == "lease" and i not in owner:
                owner[i] = next_lease_id
                next_lease_id += 1
                receiver.transport.admit(owner[i], SECRET, blocks)
                for pair in range(2):
                    lease = LeaseRef(owner[i], SECRET)
                    written = [(2 * pair, blocks[2 * pair]), (2 * pair + 1, blocks[2 * pair + 1])]
                    senders[i].transport.write("receiver@1/1", lease, written)
                senders[i].transport.notify("receiver@1/1", commit(owner[i]))
            elif action == "revoke" and i in owner:
                receiver.transport.revoke(owner[i])
                revoked.add(owner[i])
            elif action == "cut" and net.hub.links():
                net.hub.cut(data.draw(st.sampled_from(net.hub.links())), data.draw(st.integers(0, 2)))
            for other, lease_id in list(owner.items()):  # a quiet lease's blocks belong to somebody else from then on
                if RevokeDone(lease_id) in receiver.said.all():
                    receiver.memory[4 * other : 4 * other + 4] = 0xEE
                    del owner[other]
        untouched = [i for i in range(2) if i not in owner]
        net.hub.run()
        for i in untouched:
            rows = receiver.memory[4 * i : 4 * i + 4]
            assert (rows == 0xEE).all() or not rows.any()
        for event in receiver.said.of(BlocksLanded):
            assert event.num_bytes == 64 * len(event.block_indices)
        for lease_id in revoked:
            assert receiver.said.of(RevokeDone).count(RevokeDone(lease_id)) == 1
        for i, lease_id in owner.items():
            for index in receiver.said.landed(lease_id):
                assert np.array_equal(receiver.memory[4 * i + index], senders[i].memory[4 * i + index])
        for sender in senders:
            assert len(sender.said.of(LinkClosed)) <= 1
        assert len(receiver.said.of(RevokeDone)) == len(revoked)
