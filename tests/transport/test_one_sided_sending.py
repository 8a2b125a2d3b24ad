"""Both halves of a one-sided link, with nothing between them but queues: every order in which things can happen."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest

from connector.copying import Bytes
from connector.landing import Landing
from connector.one_sided import Attach, Attached, OneSidedWriters, Stop, Stopped
from connector.one_sided_sending import Notice, OneSidedSending, Put, Written
from connector.transport import BlocksLanded, LeaseRef, ReceiverEvent, RevokeDone, SenderEvent
from connector.writes import IncomingWrite, decode_written, describe, pack, take_out

SECRET = b"0123456789abcdef"
BLOCK_BYTES = 16
NUM_BLOCKS = 24


class Wire:
    """A link of two machines. Steps: the sender's next, one put lands, what may be said is said, one word arrives there or here."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        content = np.frombuffer(self.rng.randbytes(NUM_BLOCKS * BLOCK_BYTES), np.uint8)
        self.source: Bytes = content.reshape(NUM_BLOCKS, BLOCK_BYTES)
        self.memory = np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8)
        self.events: list[SenderEvent | ReceiverEvent] = []
        self.landing = Landing(self.memory, self.events.append)
        self.writers = OneSidedWriters(self.landing)
        self.landing.tell_of_ends(self._tell)
        self.sending = OneSidedSending(max_moving=3)
        self.there: deque[Attach | Stopped | Notice | bytes] = deque()
        self.back: deque[Attached | Stop] = deque()
        self.puts: list[Put] = []
        self.taken: list[int] = []  # leases of blocks that are free
        self.heard: list[tuple[bytes, int]] = []  # notices, and how many writes had been told before
        self.num_written = 0
        self.quiet_blocks: set[int] = set()

    def _tell(self, lease_id: int) -> None:
        self.back.extend(Stop(lease_id) for _ in self.writers.end(lease_id))

    def write(self, lease: LeaseRef, blocks: list[tuple[int, int]]) -> None:
        self.sending.queue.extend(pack(lease, blocks, BLOCK_BYTES))

    def drop(self, lease: LeaseRef) -> None:
        if (rest := take_out(self.sending.queue, lease)) is not None:
            self.sending.drop(rest)

    def steps(self) -> list[str]:
        return [
            name for name, is_due in (("there", self.there), ("back", self.back), ("land", self.puts)) if is_due
        ] + ["next", "say"]

    def take(self, step: str) -> bool:
        """Whether anything happened."""
        match step:
            case "next":
                return self._next()
            case "say":
                return self._say()
            case "land":
                put = self.puts.pop(self.rng.randrange(len(self.puts)))
                for span, source_id, block_id in zip(put.write.spans, put.write.source_ids, put.block_ids, strict=True):
                    assert block_id not in self.quiet_blocks, "written behind RevokeDone"
                    self.memory[block_id, span.offset : span.offset + span.length] = self.source[source_id]
                self.sending.moved(put.number)
            case "there":
                self._arrive(self.there.popleft())
            case "back":
                match self.back.popleft():
                    case Attached(block_ids):
                        assert self.sending.attached(block_ids)
                    case Stop(lease_id):
                        self.sending.stop(lease_id)
        return True

    def _next(self) -> bool:
        match self.sending.next():
            case Attach() as asked:
                self.there.append(asked)
            case Put() as put:
                self.puts.append(put)
                assert self.sending.num_moving <= 3
            case None:
                return False
        return True

    def _say(self) -> bool:
        said = list(self.sending.said())
        for each in said:
            match each:
                case Written(write, is_told, _):
                    self.taken += [write.lease.lease_id] * len(write.finished)
                    if not write.spans:
                        assert write.lease not in [put.write.lease for put in self.puts], "read, and given back"
                    if is_told:
                        self.there.append(describe(self.source, write))
                case _:
                    self.there.append(each)
        return bool(said)

    def _arrive(self, what: Attach | Stopped | Notice | bytes) -> None:
        match what:
            case Attach():
                self.back.append(self.writers.attach("link", what))
            case Stopped(lease_id):
                self.writers.stopped("link", lease_id)
            case Notice(payload):
                self.heard.append((payload, self.num_written))
            case bytes():
                written = decode_written(what)
                assert isinstance(written, IncomingWrite)
                self.num_written += 1
                self.writers.written(written, "sender")

    def run(self) -> None:
        idle = 0
        while idle < 40:
            idle = 0 if self.take(self.rng.choice(self.steps())) else idle + 1


@pytest.mark.covers("H08")
def test_no_order_lets_a_write_land_in_a_quiet_lease_or_keeps_a_lease_from_becoming_quiet() -> None:
    num_cut_short = 0
    for seed in range(400):
        wire = Wire(seed)
        leases = {n: LeaseRef(n, SECRET) for n in range(1, 4)}
        blocks = {n: list(range(8 * (n - 1), 8 * n)) for n in leases}
        for n, lease in leases.items():
            wire.landing.admit(n, SECRET, blocks[n])
            for i in range(8):
                wire.write(lease, [(i, wire.rng.randrange(NUM_BLOCKS))])
        wire.sending.queue.append(b"behind all")
        revoked: set[int] = set()
        for _ in range(60):
            wire.take(wire.rng.choice(wire.steps()))
            if wire.rng.random() < 0.05 and len(revoked) < 3:
                lease_id = wire.rng.choice([n for n in leases if n not in revoked])
                revoked.add(lease_id)
                if wire.rng.random() < 0.5:  # the sender may give up first, too, or be told first
                    wire.drop(leases[lease_id])
                wire.landing.revoke(lease_id)
                if wire.rng.random() < 0.5:
                    wire.drop(leases[lease_id])
            for event in wire.events:
                if isinstance(event, RevokeDone):
                    wire.quiet_blocks.update(blocks[event.lease_id])
        wire.run()
        for lease_id in set(leases) - revoked:
            of_lease = [e for e in wire.events if isinstance(e, BlocksLanded) and e.lease_id == lease_id]
            assert sorted(i for e in of_lease for i in e.block_indices) == list(range(8))
            wire.landing.revoke(lease_id)
        wire.run()
        assert sorted(e.lease_id for e in wire.events if isinstance(e, RevokeDone)) == [1, 2, 3]
        assert sorted(wire.taken) == sorted(list(leases) * 8), "each source is free in the end"
        assert [payload for payload, _ in wire.heard] == [b"behind all"]
        assert wire.heard[0][1] == wire.num_written, "a write was told behind the notice that it came before"
        assert wire.sending.num_known == 0
        num_cut_short += wire.num_written < 24
    assert num_cut_short > 100, "leases ended while they were written"


def test_a_write_that_has_no_place_is_put_nowhere_and_told() -> None:
    wire = Wire(1)
    wire.landing.admit(1, SECRET, [0, -1])
    for blocks in ([(0, 0), (1, 1)], [(2, 0)], [(0, 2)]):
        wire.write(LeaseRef(1, SECRET), blocks)
    wire.run()
    assert wire.num_written == 3 and len(wire.taken) == 4
    assert np.array_equal(wire.memory[0], wire.source[2]) and not wire.memory[1:].any()


def test_who_shows_a_wrong_secret_learns_nothing_and_puts_nothing() -> None:
    wire = Wire(1)
    wire.landing.admit(1, SECRET, [0])
    wire.write(LeaseRef(1, b"x" * 16), [(0, 0)])
    wire.run()
    assert wire.taken == [1] and wire.num_written == 0 and not wire.memory.any()
    assert wire.sending.num_known == 0


def test_an_answer_to_no_question_is_told() -> None:
    assert not OneSidedSending(1).attached((1,))
