"""A node's transport as a sending and a receiving end, each with a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Final, Protocol

from connector.transport import LeaseRef, Receiver, Sender
from proto import baton_pb2 as pb

_LOG = logging.getLogger(__name__)

_STOP_S: Final = 1.0


class _End(Protocol):
    """What either end has beside its part of the contract."""

    ended: Future[None]

    def start(self) -> None: ...
    def stop(self, timeout_s: float) -> bool: ...
    def snapshot(self) -> Mapping[str, object]: ...


class SenderEnd(Sender, _End, Protocol):
    """The sending end."""


class ReceiverEnd(Receiver, _End, Protocol):
    """The receiving end."""


class TwoEnds(ABC):
    """Implements transport.Transport over two ends, which it starts."""

    def __init__(self, sender: SenderEnd, receiver: ReceiverEnd) -> None:
        self._sender = sender
        self._receiver = receiver
        self._is_stopped = False
        self._is_released = threading.Lock()  # taken once, by whoever releases
        receiver.start()
        sender.start()

    @property
    def ended(self) -> tuple[Future[None], ...]:
        """Resolved when a thread has ended, whether of `stop` or of a bug: a node that is not stopping should die of it then."""
        return self._sender.ended, self._receiver.ended

    @abstractmethod
    def reaches(self, endpoint: pb.Endpoint) -> bool:
        """Whether a link to this endpoint may succeed, as far as can be told without trying."""

    def open(self, link_id: str, endpoint: pb.Endpoint) -> None:
        """As Sender.open; what precedes "@" in the link id names the peer in the byte counts."""
        self._sender.open(link_id, endpoint)

    def write(self, link_id: str, lease: LeaseRef, blocks: Sequence[tuple[int, int]]) -> None:
        """As Sender.write."""
        self._sender.write(link_id, lease, blocks)

    def drop(self, link_id: str, lease: LeaseRef) -> None:
        """As Sender.drop."""
        self._sender.drop(link_id, lease)

    def notify(self, link_id: str, payload: bytes) -> None:
        """As Sender.notify."""
        self._sender.notify(link_id, payload)

    def close(self, link_id: str) -> None:
        """As Sender.close."""
        self._sender.close(link_id)

    def endpoint(self) -> pb.Endpoint:
        """As Receiver.endpoint."""
        return self._receiver.endpoint()

    def admit(self, lease_id: int, secret: bytes, block_ids: Sequence[int]) -> None:
        """As Receiver.admit."""
        self._receiver.admit(lease_id, secret, block_ids)

    def revoke(self, lease_id: int) -> None:
        """As Receiver.revoke."""
        self._receiver.revoke(lease_id)

    def answer(self, reply_to: object, payload: bytes) -> None:
        """As Receiver.answer."""
        self._receiver.answer(reply_to, payload)

    def snapshot(self) -> Mapping[str, object]:
        """JSON-able state of both ends."""
        return {**self._sender.snapshot(), **self._receiver.snapshot()}

    def stop(self) -> None:
        """As Transport.stop; links end without LinkClosed, since nobody is left to be told."""
        if self._is_stopped:
            return
        self._is_stopped = True
        instant = time.monotonic() + _STOP_S
        is_ended = self._sender.stop(_STOP_S)
        is_ended &= self._receiver.stop(max(0.0, instant - time.monotonic()))
        if not is_ended:  # a daemon thread that is stuck in `emit`: the process can end without it, this call must
            _LOG.error("event=transport_stuck")
        for end in self.ended:
            end.add_done_callback(self._release_behind_the_last)

    def _release_behind_the_last(self, _: Future[None]) -> None:
        """Called here or, of a thread that `stop` did not wait for, by that thread."""
        if all(end.done() for end in self.ended) and self._is_released.acquire(blocking=False):
            self._release()

    @abstractmethod
    def _release(self) -> None:
        """Both threads have ended: give back what they shared."""
