"""What a router makes of a registry that it reads: who is listed while it can be read, cannot, and has forgotten."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proto import baton_pb2 as pb
from runtime.listing import Listed, Missed, Unlisted
from runtime.polled_listing import FRESH_S, GAP_S, REJOIN_S, PolledListing, Row
from runtime.redis_reader import PERIOD_S as POLL_S
from runtime.redis_store import CALL_TIMEOUT_S
from runtime.registry_client import BACKOFF_MIN_S, PERIOD_S
from runtime.session import Peer
from tests.registry.test_listing import entry

TTL_S = 1.5
NODE = Peer("decode-0", 1)


def row(of: pb.NodeEntry, repeated_at: float, now: float) -> Row:
    """As a registry with a clock of its own tells it."""
    return Row(of, str(1_000_000 + repeated_at).encode(), now - repeated_at)


def reading_until(listing: PolledListing, start: float, end: float, rows: Iterable[Row] = ()) -> list[float]:
    """Read the same again and again; when something changed."""
    changed = []
    for i in range(int((end - start) / POLL_S) + 1):
        if listing.read(tuple(rows), (), start + i * POLL_S).changes:
            changed.append(start + i * POLL_S)
    return changed


@pytest.mark.covers("R13")
def test_a_node_is_listed_while_its_stamp_changes_and_gone_within_2_s_of_its_last_repetition() -> None:
    listing = PolledListing(TTL_S)
    now, repeated_at = 0.0, 0.0
    assert listing.read([row(entry(), 0.0, 0.0)], (), 0.0).changes == [Listed(entry())]
    while now < 10.0:
        now += POLL_S
        if now - repeated_at >= PERIOD_S:
            repeated_at = now
        assert listing.read([row(entry(), repeated_at, now)], (), now).changes == []
    (gone_at,) = reading_until(listing, now + POLL_S, now + 5.0, [row(entry(), repeated_at, now)])
    assert TTL_S <= gone_at - repeated_at < 2.0
    assert listing.entries() == ()


@pytest.mark.covers("R13")
@pytest.mark.parametrize("call_s", [0.0, 0.3, 0.45, CALL_TIMEOUT_S])
def test_a_registry_that_is_slow_to_answer_hides_no_death(call_s: float) -> None:
    """Each reading comes a period behind the end of the last call."""
    listing = PolledListing(TTL_S)
    listing.read([row(entry(), 0.0, 0.0)], (), 0.0)
    now, gone_at = 0.0, None
    while gone_at is None and now < 60.0:
        now += POLL_S + call_s
        if listing.read([row(entry(), 0.0, now)], (), now).changes:
            gone_at = now
    assert gone_at is not None and gone_at < TTL_S + 2 * (POLL_S + call_s)


@pytest.mark.covers("R13", "C08")
def test_while_the_registry_cannot_be_read_nobody_is_missed_nor_while_they_find_it_again() -> None:
    listing = PolledListing(TTL_S)
    listing.read([row(entry(), 0.0, 0.0)], (), 0.0)
    listing.read([row(entry(), REJOIN_S, REJOIN_S)], (), GAP_S)
    assert reading_until(listing, 3600.0, 3600.0 + REJOIN_S) == [], "its memory is empty, but they may be on their way"
    (gone_at,) = reading_until(listing, 3600.0 + REJOIN_S + POLL_S, 3610.0)
    assert gone_at <= 3600.0 + REJOIN_S + TTL_S + POLL_S


@pytest.mark.covers("C08")
def test_a_node_that_writes_again_after_an_outage_was_never_unlisted() -> None:
    listing = PolledListing(TTL_S)
    listing.read([row(entry(), 0.0, 0.0)], (), 0.0)
    assert reading_until(listing, 60.0, 60.9) == []
    assert listing.read([row(entry(), 61.0, 61.0)], (), 61.0).changes == []
    (gone_at,) = reading_until(listing, 61.0 + POLL_S, 70.0)
    assert gone_at >= 61.0 + TTL_S


@pytest.mark.covers("R13")
def test_an_entry_that_was_old_when_first_read_is_taken_once_it_is_repeated() -> None:
    listing = PolledListing(TTL_S)
    old = row(entry(), 0.0, FRESH_S + 0.01)
    assert listing.read([old], (), 0.0).changes == []
    assert listing.read([old], (), POLL_S).changes == []
    assert listing.read([row(entry(), 2.0, 2.0)], (), 2 * POLL_S).changes == [Listed(entry())]


@pytest.mark.covers("R13")
def test_who_says_goodbye_is_gone_at_the_next_look() -> None:
    listing = PolledListing(TTL_S)
    listing.read([row(entry(), 0.0, 0.0)], (), 0.0)
    assert listing.read([], [NODE], POLL_S).changes == [Unlisted(NODE)]
    assert listing.read([], [NODE], 2 * POLL_S).changes == []


@pytest.mark.covers("R13", "C06")
def test_a_newer_process_takes_the_name_and_what_is_wrong_is_refused_with_a_sentence() -> None:
    listing = PolledListing(TTL_S)
    listing.read([row(entry(), 0.0, 0.0)], (), 0.0)
    newer = entry(incarnation=2)
    reading = listing.read([row(newer, 0.2, 0.2)], (), POLL_S)
    assert reading.changes == [Unlisted(NODE), Listed(newer)]
    broken = entry(name="decode-1", port=7000, num_blocks=0)
    reading = listing.read([row(newer, 0.2, 0.4), row(broken, 0.3, 0.4), row(entry(), 0.4, 0.4)], (), 2 * POLL_S)
    assert [(peer.name, sentence.split()[0]) for peer, sentence in reading.refused] == [
        ("decode-1", "num_blocks"),
        ("decode-0", "node.incarnation"),
    ]
    assert reading.changes == []


@pytest.mark.covers("C08", "R13")
@given(
    outages=st.lists(st.tuples(st.floats(0.1, 3.0), st.floats(0.0, 8.0), st.booleans()), max_size=4),
    phase=st.floats(0.0, PERIOD_S),
    timeout_s=st.floats(0.0, 0.5),
)
@example(outages=[(1.5625, 0.5, False), (0.5, 0.0, True)], phase=0.125, timeout_s=0.0)
@example(outages=[(1.21875, 0.0625, False), (0.25, 0.5625, True), (0.25, 0.0, True)], phase=0.0, timeout_s=0.0625)
def test_no_outage_unlists_a_node_that_lives(
    outages: list[tuple[float, float, bool]], phase: float, timeout_s: float
) -> None:
    """A node and a router with their true periods, timeouts and backoffs, over a registry that comes and goes, its memory
    kept or lost. None is unlisted, and none is missed but by one that fails again right after it failed, until it writes again."""
    registry = _Registry(outages)
    listing = PolledListing(TTL_S)
    node_at, node_backoff = phase, BACKOFF_MIN_S
    router_at, router_backoff = 0.0, BACKOFF_MIN_S
    is_listed = False
    while min(node_at, router_at) < registry.end + 5.0:
        if node_at <= router_at:
            up_at = registry.answers_at(node_at, timeout_s)
            if up_at is not None:
                registry.write(up_at)
                node_at, node_backoff = up_at + PERIOD_S, BACKOFF_MIN_S
            else:
                node_at, node_backoff = node_at + timeout_s + node_backoff, min(2 * node_backoff, 0.4)
        else:
            up_at = registry.answers_at(router_at, timeout_s)
            if up_at is not None:
                for change in listing.read(registry.rows(up_at), (), up_at).changes:
                    assert isinstance(change, Missed if is_listed else Listed), f"at {up_at}: {change}"
                    assert not is_listed or registry.num_outages(up_at - 2 * TTL_S, up_at) > 1, f"missed at {up_at}"
                    is_listed = not is_listed
                router_at, router_backoff = up_at + POLL_S, BACKOFF_MIN_S
            else:
                router_at, router_backoff = router_at + timeout_s + router_backoff, min(2 * router_backoff, 0.4)
    assert is_listed


class _Registry:
    """It is down for a while, again and again; a call that meets it down fails after a timeout, or is answered at once when it
    comes back within that."""

    def __init__(self, outages: list[tuple[float, float, bool]]) -> None:
        at = 5.0
        self._downs: list[tuple[float, float]] = []
        self._forgets: list[float] = []
        for up_s, down_s, is_memory_lost in outages:
            at += up_s
            self._downs.append((at, at + down_s))
            at += down_s
            if is_memory_lost:
                self._forgets.append(at)
        self.end = at
        self._written_at: float | None = None

    def answers_at(self, at: float, timeout_s: float) -> float | None:
        for start, end in self._downs:
            if start <= at < end:
                return end if end <= at + timeout_s else None
        return at

    def num_outages(self, start: float, end: float) -> int:
        return sum(start < back_at <= end for _, back_at in self._downs)

    def write(self, at: float) -> None:
        self._written_at = at

    def rows(self, now: float) -> list[Row]:
        at = self._written_at
        if at is None or now - at >= TTL_S or any(at < forget <= now for forget in self._forgets):
            return []
        return [row(entry(), at, now)]
