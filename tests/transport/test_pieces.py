"""The small parts: cutting, checksums, mailbox, tally."""

from __future__ import annotations

import os
import select
import socket
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.checksum import piece_checksum
from connector.mailbox import Mailbox
from connector.shm_sender import message_bytes
from connector.socket_thread import SocketThread
from connector.tally import MOST_NAMES, OTHER, Tally
from connector.transport import MAX_PAYLOAD_BYTES, LeaseRef
from connector.writes import MAX_PIECES, MAX_WRITE_HEADER_BYTES, OutgoingWrite, frame_bytes, gather, pack
from tests.thorough import examples

LEASE = LeaseRef(2**64 - 1, b"0123456789abcdef")


@pytest.mark.covers("H02")
@settings(deadline=None, max_examples=examples(60, 3))
@given(
    block_bytes=st.sampled_from([1, 512, 600_000, MAX_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES + 1, 3 * MAX_PAYLOAD_BYTES]),
    num_blocks=st.integers(0, 40),
)
def test_packing_moves_each_byte_once_in_order_and_within_the_limits(block_bytes: int, num_blocks: int) -> None:
    blocks = [(i, 2 * i) for i in range(num_blocks)]
    writes = list(pack(LEASE, blocks, block_bytes))
    moved = [
        (source_id, span.offset, span.length, span.block_index)
        for write in writes
        for span, source_id in zip(write.spans, write.source_ids, strict=True)
    ]
    expected = [
        (2 * i, offset, min(MAX_PAYLOAD_BYTES, block_bytes - offset), i)
        for i in range(num_blocks)
        for offset in range(0, block_bytes, MAX_PAYLOAD_BYTES)
    ]
    assert moved == expected
    assert all(0 < sum(span.length for span in write.spans) <= MAX_PAYLOAD_BYTES for write in writes)
    assert [index for write in writes for index in write.finished] == list(range(num_blocks))
    for write in writes:
        for index in write.finished:  # finished with the message that holds its last byte
            assert any(span.block_index == index and span.offset + span.length == block_bytes for span in write.spans)


def test_small_blocks_share_messages() -> None:
    writes = list(pack(LEASE, [(i, i) for i in range(3000)], 512))
    assert [len(write.spans) for write in writes] == [1024, 1024, 952]


@pytest.mark.covers("H13")
def test_the_largest_honest_header_is_within_what_a_receiver_reads() -> None:
    (write,) = pack(LEASE, [(2**32 - 1, 0)] * MAX_PIECES, 512)
    header, payload = gather(np.zeros((1, 512), np.uint8), OutgoingWrite(LEASE, write.spans, write.source_ids, ()))
    assert len(header) <= MAX_WRITE_HEADER_BYTES
    assert len(payload) == MAX_PIECES * 512


def test_messages_are_short_where_the_write_is_short_and_never_longer_than_one_may_be() -> None:
    mib = 1 << 20
    assert [frame_bytes(size * mib) // mib for size in (1, 8, 15, 16, 24, 32, 1000)] == [1, 1, 1, 2, 3, 4, 4]
    blocks = [(i, i) for i in range(16)]
    sizes = [len(write.spans) for write in pack(LEASE, blocks, mib, frame_bytes(16 * mib))]
    assert sizes == [2] * 8
    assert [message_bytes(size * mib) // mib for size in (1, 16, 24, 64, 1000)] == [8, 8, 12, 32, 32]


@pytest.mark.covers("H09")
def test_a_checksum_tells_bytes_lease_block_and_offset_apart() -> None:
    data = np.arange(100_000, dtype=np.uint32).view(np.uint8)
    changed = data.copy()
    changed[77_777] ^= 1
    sums = {
        piece_checksum(data, 1, 2, 3),
        piece_checksum(changed, 1, 2, 3),
        piece_checksum(data[:-1], 1, 2, 3),
        piece_checksum(data, 2, 2, 3),
        piece_checksum(data, 1, 3, 3),
        piece_checksum(data, 1, 2, 4),
        piece_checksum(data, 1, 3, 2),
    }
    assert len(sums) == 7
    assert all(0 <= checksum < 2**64 for checksum in sums)
    assert piece_checksum(data.copy(), 1, 2, 3) in sums


def test_a_checksum_is_the_same_in_every_version_and_on_every_machine() -> None:
    assert piece_checksum(np.arange(256, dtype=np.uint8), 1, 2, 3) == 13053838783795129111


def test_a_mailbox_wakes_its_poller_keeps_order_and_sleeps_when_empty() -> None:
    mailbox: Mailbox[int] = Mailbox()
    received: list[int] = []

    def read() -> None:
        while len(received) < 50_000:
            select.select([mailbox], [], [])
            received.extend(mailbox.drain())

    thread = threading.Thread(target=read)
    thread.start()
    for i in range(50_000):
        mailbox.put(i)
    thread.join()
    assert received == list(range(50_000))
    mailbox.drain()
    assert select.select([mailbox], [], [], 0)[0] == []
    mailbox.close()
    mailbox.put(1)
    assert mailbox.fileno() == -1


def test_of_what_is_put_between_two_drains_only_the_first_wakes_the_poller() -> None:
    mailbox: Mailbox[int] = Mailbox()
    with socket.socket(fileno=os.dup(mailbox.fileno())) as peeking:
        for first in (0, 10):  # the second time around as the first
            for item in (first, first + 1, first + 2):
                mailbox.put(item)
            assert peeking.recv(16, socket.MSG_PEEK) == b"\0"
            assert mailbox.drain() == [first, first + 1, first + 2]
            assert select.select([mailbox], [], [], 0)[0] == []
    mailbox.close()


def test_what_is_put_without_waking_waits_for_what_wakes() -> None:
    mailbox: Mailbox[int] = Mailbox()
    mailbox.put(0, wakes=False)
    mailbox.put(1, wakes=False)
    assert select.select([mailbox], [], [], 0)[0] == []
    mailbox.put(2)
    mailbox.put(3, wakes=False)
    assert select.select([mailbox], [], [], 0)[0] == [mailbox]
    assert mailbox.drain() == [0, 1, 2, 3]
    mailbox.close()


def test_a_mailbox_that_nobody_reads_never_blocks_the_one_who_puts() -> None:
    mailbox: Mailbox[int] = Mailbox()
    for i in range(20_000):
        mailbox.put(i)
    assert mailbox.drain() == list(range(20_000))
    mailbox.close()


def test_a_tally_adds_up_over_threads() -> None:
    tally = Tally()

    def add() -> None:
        for _ in range(10_000):
            tally.add("b", 2)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    tally.add("a")
    for thread in threads:
        thread.join()
    assert list(tally.snapshot().items()) == [("a", 1), ("b", 80_000)]


@settings(deadline=None, max_examples=examples(60, 3))
@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from([OTHER, *"abcdefg"]), st.integers(0, 9)), max_size=60))
def test_a_tally_keeps_the_names_used_last_and_its_sum_and_none_goes_backwards(
    most_names: int, adds: list[tuple[str, int]]
) -> None:
    tally = Tally(most_names)
    used: list[str] = []  # the latest first
    before: dict[str, int] = {}
    total = 0
    for name, amount in adds:
        tally.add(name, amount)
        total += amount
        used = [name, *(each for each in used if each != name)]
        shown = tally.snapshot()
        assert set(used[:most_names]) <= shown.keys() <= {*used[:most_names], OTHER}
        assert sum(shown.values()) == total
        assert all(shown[each] >= count for each, count in before.items() if each in shown)
        assert shown[name] >= amount + before.get(name, 0), "none is counted under somebody else's name"
        before = shown


def test_a_tally_of_random_names_does_not_grow_for_ever() -> None:
    tally = Tally()
    for number in range(10 * MOST_NAMES):
        tally.add("mine")
        tally.add(f"decode-{number}", 2)
    shown = tally.snapshot()
    assert len(shown) == MOST_NAMES + 1
    assert shown["mine"] == 10 * MOST_NAMES
    assert shown[OTHER] == 2 * (9 * MOST_NAMES + 1)


class Hanging(SocketThread[int]):
    """A thread that hangs until it is let go, as one does whose `emit` does not return."""

    def __init__(self) -> None:
        super().__init__("hanging")
        self.may_end = threading.Event()
        self.wakes = self._mailbox

    def _serve(self) -> None:
        self.may_end.wait(20)

    def _perform(self, command: int) -> None:
        raise AssertionError(command)

    def _close_all(self) -> None:
        assert self.wakes.fileno() != -1, "closed under a thread that is still there"


def test_a_thread_that_outlives_its_stop_closes_its_mailbox_itself() -> None:
    thread = Hanging()
    thread.start()
    assert not thread.stop(0.01), "it hangs"
    assert thread.wakes.fileno() != -1
    thread.wakes.put(1)
    thread.may_end.set()
    thread.ended.result(timeout=20)
    assert thread.wakes.fileno() == -1
    thread.wakes.put(2)
    assert thread.stop(20)
