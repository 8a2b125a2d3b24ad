"""The seam between the handoff and the bytes: what a transport is, whichever wire it uses.

A *link* is one ordered connection from a sender node to a receiver node, opened with what `Reserve` answered. Writes and
notifications on a link arrive in the order in which they were given. A link that fails never comes back: what was in flight
has failed, and a reconnect is a new link.

The loop thread calls every method here; no method blocks. Events are handed to the `emit` callable that the transport was
made with, from whichever thread; the shell gives one that hops to the loop. Methods called for ids that are unknown or gone
do nothing: the events that say so are already under way.

    sender                                       receiver
    open(link, endpoint)                         admit(lease_id, secret, block_ids)
    write(link, lease, blocks) .. BlocksTaken    .. BlockLanded, WriteRefused
    drop(link, lease) .. BlocksTaken
    notify(link, payload)                        .. NotifyArrived
                              Answered ..        answer(reply_to, payload)
    close(link) .. LinkClosed                    revoke(lease_id) .. RevokeDone
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from proto import baton_pb2 as pb

MAX_PAYLOAD_BYTES = 1 << 20  # of one write; a larger block travels in pieces


@dataclass(frozen=True, slots=True)
class LeaseRef:
    """What a sender shows to be let into a lease."""

    lease_id: int
    secret: bytes


# ---- events to the sender


@dataclass(frozen=True, slots=True)
class BlocksTaken:
    """The transport has read these source blocks of a lease and reads them no more; not yet proof of arrival.

    `is_dropped`: they were never given to the wire, so this says nothing of what the link carries.
    """

    link_id: str
    lease_id: int
    block_indices: tuple[int, ...]
    is_dropped: bool = False


@dataclass(frozen=True, slots=True)
class Answered:
    """The receiver's answer to a notification: a serialized DataMessage with a CommitAnswer, unchecked.

    Behind BlocksTaken of all that was written on the link before the notification.
    """

    link_id: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class LinkClosed:
    """The link is gone and quiet: nobody reads a source block of any lease written on it in a way that could count.

    (Over shm a peer may still be in the middle of a copy; it finds out by itself. See shm_sender.py.)
    """

    link_id: str
    reason: str


# ---- events to the receiver


@dataclass(frozen=True, slots=True)
class BlocksLanded:
    """These blocks of a lease are complete in place, each piece's checksum verified, of the bytes that were put there."""

    lease_id: int
    block_indices: tuple[int, ...]
    num_bytes: int
    peer: str  # name of the sending node


@dataclass(frozen=True, slots=True)
class WriteRefused:
    """A write that touched nothing (unknown lease, wrong secret, bad span), or whose checksum did not match.

    `lease_id` is 0 when the frame named no lease that is admitted here with that secret.
    """

    lease_id: int
    code: pb.ErrorCode.ValueType
    reason: str


@dataclass(frozen=True, slots=True)
class NotifyArrived:
    """A notification, behind all earlier writes of its link; `reply_to` is opaque and serves `answer` once."""

    reply_to: object
    payload: bytes


@dataclass(frozen=True, slots=True)
class RevokeDone:
    """The lease's blocks are quiet: no write into them runs or will start."""

    lease_id: int


SenderEvent = BlocksTaken | Answered | LinkClosed
ReceiverEvent = BlocksLanded | WriteRefused | NotifyArrived | RevokeDone
Emit = Callable[[SenderEvent | ReceiverEvent], None]


class Sender(Protocol):
    """The sending end of a node's transport."""

    def open(self, link_id: str, endpoint: pb.Endpoint) -> None:
        """Open a link under an id that the caller never uses twice. Failure arrives as LinkClosed."""

    def write(self, link_id: str, lease: LeaseRef, blocks: Sequence[tuple[int, int]]) -> None:
        """Queue (block index in the lease, source block id) pairs; BlocksTaken follows for each, once."""

    def drop(self, link_id: str, lease: LeaseRef) -> None:
        """Send nothing more of what is queued for a lease. What is under way is not called back, and still awaited.

        BlocksTaken follows for each block as ever, of those that were dropped once nothing under way reads a piece of them.
        """

    def notify(self, link_id: str, payload: bytes) -> None:
        """Queue a notification behind every earlier write of this link."""

    def close(self, link_id: str) -> None:
        """Drop the link and all that is queued on it; LinkClosed follows when it is quiet."""


class Receiver(Protocol):
    """The receiving end of a node's transport."""

    def endpoint(self) -> pb.Endpoint:
        """Where senders reach this node, with the link secret that their handshake needs."""

    def admit(self, lease_id: int, secret: bytes, block_ids: Sequence[int]) -> None:
        """Writes that show this secret may land: block index i of the lease in block_ids[i]; -1 may not be written."""

    def revoke(self, lease_id: int) -> None:
        """Start no new write into the lease; RevokeDone follows when none runs. Exactly one for each admit."""

    def answer(self, reply_to: object, payload: bytes) -> None:
        """Send a payload back to whoever sent the notification."""


class Transport(Sender, Receiver, Protocol):
    """Both ends over one KV memory."""

    def stop(self) -> None:
        """Close every link and socket and end the transport's threads; blocks for at most a second."""
