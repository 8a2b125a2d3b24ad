"""The sending half of a one-sided link: what may be moved now, and what may be said of it, in which order.

    queue      write, write, notice, write …             as the node gave them
      │ next        Ask: where does its lease lie? once per lease, and nothing overtakes the question
      │             Put: move these bytes there; `moved` when they stand in the receiver's memory
      ▼
    outbox     written?, written?, notice, stopped …     said from the front, and only what is in place:
      │ said        so a notice, and a "stopped", is behind every write before it
      ▼

A lease that its receiver has ended (`stop`) is written into no more: what waits for it is taken from the queue in its turn and put
nowhere. What runs for it is awaited by "stopped", which stands behind it in the outbox. Leases are forgotten when nothing in the
queue is for them, so a link that lives for weeks knows only those that live. What the sender itself has dropped (`drop`) is told
behind what runs, too.

One thread drives it. Not here: how bytes move, sockets, checksums (nixl_sender.py); the other half is one_sided.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from connector.one_sided import Attach, Stopped
from connector.transport import LeaseRef
from connector.writes import OutgoingWrite


class Put(NamedTuple):
    """Move a write's bytes: span i of it goes into block block_ids[i] of the receiver."""

    number: int  # for `moved`
    write: OutgoingWrite
    block_ids: tuple[int, ...]


class Written(NamedTuple):
    """Its source is read no more. Tell the receiver that it stands in memory, or, where it was put nowhere, nothing."""

    write: OutgoingWrite
    is_told: bool
    number: int = 0  # its put's; 0: there was none


class Notice(NamedTuple):
    """A payload for the receiver."""

    payload: bytes


Said = Written | Notice | Stopped


@dataclass(slots=True)
class _Waiting:
    what: Said
    is_ready: bool


class OneSidedSending:
    """The sender's end of one link."""

    def __init__(self, max_moving: int) -> None:
        self.queue: deque[OutgoingWrite | bytes] = deque()
        self._max_moving = max_moving
        self._known: dict[LeaseRef, tuple[int, ...] | None] = {}  # where leases lie; None: nowhere (any more)
        self._asked: LeaseRef | None = None  # a lease of which this is not known yet
        self._moving: dict[int, _Waiting] = {}
        self._num_put = 0
        self._outbox: deque[_Waiting] = deque()

    @property
    def num_moving(self) -> int:
        """Writes that are under way."""
        return len(self._moving)

    @property
    def num_known(self) -> int:
        """Leases that are remembered."""
        return len(self._known)

    def next(self) -> Attach | Put | None:
        """What to do now for the head of the queue; None: nothing until something else has happened."""
        while self.queue and self._asked is None:
            head = self.queue[0]
            if isinstance(head, bytes):
                self._wait(Notice(head), is_ready=True)
            elif head.lease not in self._known:
                self._asked = head.lease
                return Attach(head.lease.lease_id, head.lease.secret)
            elif (block_ids := self._known[head.lease]) is None:
                self._wait(Written(head, is_told=False), is_ready=True)
            elif (
                places := _find_places(head, block_ids)
            ) is None:  # the receiver will refuse it: say it, touch nothing
                self._wait(Written(head, is_told=True), is_ready=True)
            elif len(self._moving) == self._max_moving:
                return None
            else:
                self.queue.popleft()
                self._num_put += 1
                self._moving[self._num_put] = self._wait(Written(head, True, self._num_put), is_ready=False)
                return Put(self._num_put, head, places)
            self.queue.popleft()
            if not isinstance(head, bytes):
                self._forget_if_over(head.lease)
        return None

    def attached(self, block_ids: Sequence[int] | None) -> bool:
        """The answer to the question; False: there was none."""
        lease, self._asked = self._asked, None
        if lease is None:
            return False
        self._known[lease] = None if block_ids is None else tuple(block_ids)
        self._forget_if_over(lease)  # what was for it may have been dropped
        return True

    def moved(self, number: int) -> None:
        """A put stands in the receiver's memory, all of it."""
        self._moving.pop(number).is_ready = True

    def stop(self, lease_id: int) -> None:
        """The receiver has ended a lease: write no more into it, and say so behind what was written."""
        for lease in [each for each in self._known if each.lease_id == lease_id]:
            self._known[lease] = None
            self._forget_if_over(lease)
        self._wait(Stopped(lease_id), is_ready=True)

    def drop(self, rest: OutgoingWrite) -> None:
        """A lease's writes were taken out of the queue, and this is left to say of them."""
        self._wait(Written(rest, is_told=False), is_ready=True)
        self._forget_if_over(rest.lease)

    def said(self) -> Iterator[Said]:
        """What may be said now, in this order; each once."""
        while self._outbox and self._outbox[0].is_ready:
            yield self._outbox.popleft().what

    def _wait(self, what: Said, *, is_ready: bool) -> _Waiting:
        waiting = _Waiting(what, is_ready)
        self._outbox.append(waiting)
        return waiting

    def _forget_if_over(self, lease: LeaseRef) -> None:
        if self._known.get(lease, ()) is None and not any(
            not isinstance(each, bytes) and each.lease == lease for each in self.queue
        ):
            del self._known[lease]


def _find_places(write: OutgoingWrite, block_ids: tuple[int, ...]) -> tuple[int, ...] | None:
    """The block of each span; None: one of them has no place in the lease."""
    indices = [span.block_index for span in write.spans]
    if not all(index < len(block_ids) and block_ids[index] >= 0 for index in indices):
        return None
    return tuple(block_ids[index] for index in indices)
