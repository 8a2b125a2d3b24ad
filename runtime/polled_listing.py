"""What a router makes of a shared registry that it reads again and again. Pure: `now` is an argument everywhere.

The list and its rules are listing.py's. Here: which of the entries read were repeated since (their stamp has changed), and how
time passes. It passes only while the registry can be read. While it cannot, nobody is missed; nor for REJOIN_S after that, in which
nodes find it again, its memory perhaps empty. So a registry that vanishes or forgets unlists nobody who lives.
One that fails again right after it failed may have a node missed until that writes again: its session outweighs that.

    read   read          (none)           read   read   read   read
    -----> -----> . . . . . . . . . . . . -----------------> ----->
    time passes      it stands still        REJOIN_S more      time passes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from proto import baton_pb2 as pb
from runtime.listing import Change, Listing
from runtime.session import Peer

# Between two readings: longer, and nodes may have been unable to write for too long. A period (0.25 s), a call that takes as long
# as it may (0.5 s), and room: time that stood still at each slow reading would never pass, and who is dead would never be missed.
GAP_S: Final = 0.9
REJOIN_S: Final = 1.5  # nodes are back within 1 s (registry_client.py), and read within a period more
FRESH_S: Final = (
    0.75  # an entry that is new to us and older than its period may be of a dead node: its repetition will tell
)


@dataclass(frozen=True, slots=True)
class Row:
    """An entry as it was read."""

    entry: pb.NodeEntry
    stamp: bytes  # when it was last repeated, by the registry's clock: is compared, and nothing else
    age_s: float  # how long ago that was, by the same clock


@dataclass(slots=True)
class Reading:
    """What one reading brings about."""

    changes: list[Change] = field(default_factory=list)
    refused: list[tuple[Peer, str]] = field(default_factory=list)  # processes that we do not take, with the sentence


class PolledListing:
    """All entries, as one router knows them."""

    def __init__(self, ttl_s: float) -> None:
        self._listing = Listing(ttl_s)
        self._stamps: dict[Peer, bytes] = {}  # of the last reading
        self._read_at: float | None = None
        self._resumes_at = 0.0  # until then time stands still
        self._passed_s = 0.0  # the time that has passed: the listing's clock

    def read(self, rows: Sequence[Row], gone: Sequence[Peer], now: float) -> Reading:
        """Take everything that was read at `now`, by the caller's clock. `gone`: who deregistered or was replaced of late."""
        self._pass_time(now)
        reading = Reading()
        for peer in gone:
            reading.changes += self._listing.deregister(peer)
        stamps: dict[Peer, bytes] = {}
        for row in rows:
            peer = Peer(row.entry.node.name, row.entry.node.incarnation)
            before = self._stamps.get(peer)
            stamps[peer] = row.stamp
            if row.age_s <= FRESH_S if before is None else row.stamp != before:
                outcome = self._listing.register(row.entry, self._passed_s)
                if isinstance(outcome, str):
                    reading.refused.append((peer, outcome))
                else:
                    reading.changes += outcome
        self._stamps = stamps
        while (deadline := self._listing.next_deadline()) is not None and deadline <= self._passed_s:
            reading.changes += self._listing.expire(deadline)
        return reading

    def entries(self) -> tuple[pb.NodeEntry, ...]:
        """What is listed now."""
        return self._listing.entries()

    def _pass_time(self, now: float) -> None:
        if self._read_at is not None:
            if now - self._read_at > GAP_S:
                self._resumes_at = now + REJOIN_S
            self._passed_s += max(now - max(self._read_at, self._resumes_at), 0.0)
        self._read_at = now
