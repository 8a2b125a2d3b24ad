"""What the receiving ends that have a thread share: admissions at their landing, and answers on their way back.

Not here: connections and frames (zmq_receiver.py, shm_receiver.py).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from connector.landing import Landing
from connector.socket_thread import SocketThread
from connector.transport import Emit
from proto import baton_pb2 as pb


@dataclass(frozen=True, slots=True)
class ReplyTo:
    """Which connection a notification came from; no later one gets its id."""

    connection: bytes | int


@dataclass(frozen=True, slots=True)
class Reply:
    """A payload on its way back."""

    to: ReplyTo
    payload: bytes


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """A lease was revoked while somebody could still write into it."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class Unsaid:
    """Another thread has said something on a connection, which did not take all of it; the rest goes in the link's next turn."""

    connection: int
    flaw: str | None  # why it never will take it


class ReceiverThread(SocketThread[Reply | LeaseEnded | Unsaid]):
    """Implements transport.Receiver but for the connections. The landing may be shared with other receivers."""

    def __init__(self, name: str, landing: Landing, emit: Emit) -> None:
        super().__init__(name)
        self._landing = landing
        self._emit = emit

    @abstractmethod
    def endpoint(self) -> pb.Endpoint:
        """As Receiver.endpoint."""

    @property
    @abstractmethod
    def num_refused(self) -> int:
        """Handshakes refused."""

    def admit(self, lease_id: int, secret: bytes, block_ids: Sequence[int]) -> None:
        """As Receiver.admit."""
        self._landing.admit(lease_id, secret, block_ids)

    def revoke(self, lease_id: int) -> None:
        """As Receiver.revoke; RevokeDone may be emitted before this returns."""
        self._landing.revoke(lease_id)

    def answer(self, reply_to: object, payload: bytes) -> None:
        """As Receiver.answer; nothing happens if the link is gone."""
        if not isinstance(reply_to, ReplyTo):
            raise TypeError(f"{reply_to!r} is no reply_to of this transport")
        self._send_back(Reply(reply_to, payload))

    def _send_back(self, reply: Reply) -> None:
        """On whichever thread answers."""
        self._mailbox.put(reply)

    def snapshot(self) -> Mapping[str, object]:
        """As Landing.snapshot, and handshakes refused."""
        return {"links_refused": self.num_refused, **self._landing.snapshot()}
