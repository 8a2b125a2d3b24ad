"""The receiving half of a one-sided transport: the sender's hardware writes into our memory, and nobody here is asked first.

So an ended lease is not quiet because we say so. Only who may write at all is decided here, once per lease and link:

    sender (one_sided_sending.py)                   receiver
    attach(lease, secret)  ───────────────────────► is it admitted?
    write …                ◄─────────────────────── granted(block ids), or denied
    bytes land whenever they do; behind them, written(spans, checksums) ─► checked where they stand: BlocksLanded, WriteRefused
                           ◄─────────────────────── stop(lease): revoked here
    stopped(lease)         ───────────────────────► behind all that it had written: RevokeDone

A link that is gone has stopped as well: its end arrives behind what was on it. If neither comes, the receiver tears the connection
down itself, after which its hardware takes nothing more from there. Until then the lease's blocks are somebody's who is dead, and
stay in quarantine (H08).

One thread calls all of it, whichever moves the receiver's links; leases are admitted and revoked at the landing, by the loop
thread. Not here: links, their order, when anything happens (nixl_receiver.py, memory_transport.py).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from connector.landing import Landing
from connector.writes import IncomingWrite


class Attach(NamedTuple):
    """Sender: I am about to write into this lease."""

    lease_id: int
    secret: bytes


class Attached(NamedTuple):
    """Receiver: here lies what you asked for; None: nowhere, write nothing."""

    block_ids: tuple[int, ...] | None


class Stop(NamedTuple):
    """Receiver: the lease is over."""

    lease_id: int


class Stopped(NamedTuple):
    """Sender: I shall not write into it again, and what I had written came before this."""

    lease_id: int


class OneSidedWriters:
    """Which links' senders may write into which leases of a landing."""

    def __init__(self, landing: Landing) -> None:
        self._landing = landing
        self._writers: dict[int, dict[Hashable, None]] = {}  # lease id -> links, in the order in which they came
        self._over: set[int] = set()  # of those leases, the ones that are revoked

    def attach(self, link: Hashable, asked: Attach) -> Attached:
        """Let a link's sender know where a lease lies, if it is admitted here with that secret."""
        block_ids = self._landing.attach(*asked)
        if block_ids is not None:
            writers = self._writers.setdefault(asked.lease_id, {})
            if link in writers:  # it knew already
                self._landing.detach(asked.lease_id)
            writers[link] = None
        return Attached(block_ids)

    def written(self, write: IncomingWrite, peer: str, *, checksums: bool = True) -> None:
        """A write stands in memory, as its sender says."""
        self._landing.verify(write, peer, checksums=checksums)

    def end(self, lease_id: int) -> tuple[Hashable, ...]:
        """A lease was revoked: the links whose senders have to be told now. RevokeDone comes behind the last `stopped` of them."""
        if lease_id in self._over or lease_id not in self._writers:
            return ()
        self._over.add(lease_id)
        return tuple(self._writers[lease_id])

    def stopped(self, link: Hashable, lease_id: int) -> None:
        """The sender of this link writes no more into the lease."""
        writers = self._writers.get(lease_id, {})
        if link not in writers:
            return
        del writers[link]
        if not writers:
            del self._writers[lease_id]
            self._over.discard(lease_id)
        self._landing.detach(lease_id)

    def gone(self, link: Hashable) -> None:
        """Nothing comes on this link any more."""
        for lease_id in [each for each, writers in self._writers.items() if link in writers]:
            self.stopped(link, lease_id)

    def awaits_stop(self, link: Hashable) -> bool:
        """Whether a lease that is over is not quiet for want of this link's sender."""
        return any(link in self._writers[lease_id] for lease_id in self._over)
