"""The table of admitted leases against a naive model, over random histories."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

from connector.admissions import Admissions, Ended, Grant, Span
from connector.transport import WriteRefused
from tests.thorough import examples

NUM_BLOCKS = 6
BLOCK_BYTES = 10
PIECE_BYTES = 4  # pieces 0..4, 4..8, 8..10
SECRETS = (b"right", b"wrong")


@dataclass
class NaiveLease:
    """Every byte by itself."""

    block_ids: tuple[int, ...]
    is_revoked: bool = False
    begun: set[tuple[int, int]] = field(default_factory=set)  # (block index, byte)
    right: set[tuple[int, int]] = field(default_factory=set)
    reported: set[int] = field(default_factory=set)
    running: list[Grant] = field(default_factory=list)


def bytes_of(span: Span) -> set[tuple[int, int]]:
    return {(span.block_index, byte) for byte in range(span.offset, span.offset + span.length)}


piece_spans = st.builds(Span, st.integers(0, 3), st.sampled_from([0, 4, 8]), st.sampled_from([2, 4]))
any_spans = st.builds(Span, st.integers(0, 4), st.integers(0, 12), st.integers(0, 11))


class AdmissionsAgainstModel(RuleBasedStateMachine):
    """Leases are keyed 0..3; a key may be admitted again once it is quiet."""

    grants: Bundle[Grant] = Bundle("grants")

    def __init__(self) -> None:
        super().__init__()
        self.table = Admissions(NUM_BLOCKS, BLOCK_BYTES, PIECE_BYTES)
        self.model: dict[int, NaiveLease] = {}
        self.num_admitted = 0
        self.num_revoked = 0
        self.num_quiet = 0

    @rule(lease_id=st.integers(0, 3), block_ids=st.lists(st.integers(-1, NUM_BLOCKS - 1), max_size=4).map(tuple))
    def admit(self, lease_id: int, block_ids: tuple[int, ...]) -> None:
        if lease_id in self.model:
            with pytest.raises(ValueError, match="already"):
                self.table.admit(lease_id, SECRETS[0], block_ids)
        else:
            self.table.admit(lease_id, SECRETS[0], block_ids)
            self.model[lease_id] = NaiveLease(block_ids)
            self.num_admitted += 1

    @rule(
        target=grants,
        lease_id=st.integers(0, 3),
        secret=st.sampled_from([SECRETS[0]] * 5 + [SECRETS[1]]),
        spans=st.lists(piece_spans | any_spans, min_size=1, max_size=3),
    )
    def begin(self, lease_id: int, secret: bytes, spans: list[Span]) -> Grant:
        grant = self.table.begin(lease_id, secret, spans)
        lease = self.model.get(lease_id)
        if lease is None or lease.is_revoked or secret != SECRETS[0]:
            assert isinstance(grant, WriteRefused)
            assert grant.lease_id == 0
            return Grant(-1, (), ())
        wanted = [byte for span in spans for byte in bytes_of(span)]
        is_right = all(
            span.block_index < len(lease.block_ids)
            and lease.block_ids[span.block_index] >= 0
            and (span.offset, span.length) in {(0, 4), (4, 4), (8, 2)}
            for span in spans
        )
        if not is_right or len(wanted) != len(set(wanted)) or not lease.begun.isdisjoint(wanted):
            assert isinstance(grant, WriteRefused)
            assert grant.lease_id == lease_id
            return Grant(-1, (), ())
        assert isinstance(grant, Grant)
        assert grant.block_ids == tuple(lease.block_ids[span.block_index] for span in spans)
        lease.begun.update(wanted)
        lease.running.append(grant)
        return grant

    @rule(grant=consumes(grants), is_intact=st.sampled_from([True, True, True, False]))
    def end(self, grant: Grant, is_intact: bool) -> None:
        if grant.lease_id == -1:  # a refusal: nothing to end
            return
        lease = self.model[grant.lease_id]
        lease.running.remove(grant)
        ended = self.table.end(grant, is_intact)
        assert ended.is_quiet == (lease.is_revoked and not lease.running)
        if lease.is_revoked:
            assert ended.landed == ()
        else:
            if is_intact:
                lease.right.update(byte for span in grant.spans for byte in bytes_of(span))
            complete = {
                index
                for index in range(len(lease.block_ids))
                if all((index, byte) in lease.right for byte in range(BLOCK_BYTES))
            }
            assert set(ended.landed) == complete - lease.reported
            assert len(set(ended.landed)) == len(ended.landed)
            lease.reported |= complete
        if ended.is_quiet:
            self.num_quiet += 1
            del self.model[grant.lease_id]

    @rule(lease_id=st.integers(0, 3))
    def revoke(self, lease_id: int) -> None:
        lease = self.model.get(lease_id)
        is_quiet = self.table.revoke(lease_id)
        assert is_quiet == (lease is not None and not lease.running)
        if lease is None:
            return
        self.num_revoked += not lease.is_revoked
        lease.is_revoked = True
        if is_quiet:
            self.num_quiet += 1
            del self.model[lease_id]

    @invariant()
    def quiet_is_said_once_per_revoked_lease(self) -> None:
        waiting = sum(lease.is_revoked for lease in self.model.values())
        assert self.num_quiet == self.num_revoked - waiting
        assert self.table.snapshot() == {
            "leases_admitted": self.num_admitted - self.num_revoked,
            "leases_quarantined": waiting,
        }


@pytest.mark.covers("H05", "H08")
def test_the_table_agrees_with_a_naive_model_over_random_histories() -> None:
    limits = settings(deadline=None, max_examples=examples(150, 3), stateful_step_count=40)
    run_state_machine_as_test(AdmissionsAgainstModel, settings=limits)


@pytest.mark.covers("H05", "H08")
def test_after_a_revoke_no_write_begins_also_while_one_still_runs() -> None:
    table = Admissions(1, BLOCK_BYTES, PIECE_BYTES)
    table.admit(1, b"s", [0])
    running = table.begin(1, b"s", [Span(0, 0, 4)])
    assert isinstance(running, Grant)
    assert not table.revoke(1)
    refused = table.begin(1, b"s", [Span(0, 4, 4)])
    assert isinstance(refused, WriteRefused)
    assert refused.lease_id == 0
    assert table.end(running, is_intact=True) == Ended((), is_quiet=True)


@pytest.mark.covers("H04", "H09")
def test_a_block_with_one_corrupt_piece_never_lands() -> None:
    table = Admissions(1, BLOCK_BYTES, PIECE_BYTES)
    table.admit(1, b"s", [0])
    for offset, length, is_intact in ((0, 4, True), (4, 4, False), (8, 2, True)):
        grant = table.begin(1, b"s", [Span(0, offset, length)])
        assert isinstance(grant, Grant)
        assert table.end(grant, is_intact) == Ended((), is_quiet=False)
    assert isinstance(table.begin(1, b"s", [Span(0, 4, 4)]), WriteRefused), "and cannot be mended"


@pytest.mark.covers("H08")
def test_of_revoke_and_the_last_end_on_two_threads_exactly_one_says_quiet() -> None:
    table = Admissions(1, BLOCK_BYTES, PIECE_BYTES)
    barrier = threading.Barrier(2)
    said: list[bool] = []

    def end() -> None:
        for lease_id in range(500):
            barrier.wait()
            grant = table.begin(lease_id, b"s", [Span(0, 0, 4)])
            barrier.wait()
            if isinstance(grant, Grant):
                said.append(table.end(grant, True).is_quiet)

    thread = threading.Thread(target=end)
    thread.start()
    for lease_id in range(500):
        table.admit(lease_id, b"s", [0])
        barrier.wait()
        barrier.wait()
        said.append(table.revoke(lease_id))
    thread.join()
    assert sum(said) == 500
    assert table.snapshot() == {"leases_admitted": 0, "leases_quarantined": 0}
