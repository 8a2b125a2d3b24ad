"""Two ends of a handover from the lease on, and the router's session with each: what both explorations of the owner rule share.

Each session is ordered; there is no order between them, and none between a session and the link. The bytes are left out
(test_handoff_exhaustive.py), so a lease is filled from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from connector.handoff import (
    ReceiverAction,
    ReceiverEvent,
    ReceiverState,
    SenderEvent,
    SenderState,
    step_receiver,
)
from router.ownership import Owner, Word

MAX_WORDS = 2  # tokens that wait in one session


@dataclass(frozen=True)
class Ends:
    """A handover whose Commit has not been sent."""

    sender: SenderState = SenderState.WRITING
    receiver: ReceiverState = ReceiverState.FILLED
    is_commit_in_flight: bool = False
    is_release_in_flight: bool = False
    ack: bool | None = None  # on its way back: owns it, refuses it
    from_sender: tuple[Word, ...] = ()
    from_receiver: tuple[Word, ...] = ()
    is_running: bool = False  # the receiver's branch generates
    has_run: bool = False
    is_sender_lost: bool = False
    is_receiver_lost: bool = False  # its session
    is_receiver_dead: bool = False
    owner: Owner = Owner.SENDER
    is_grace_set: bool = False


W = TypeVar("W", bound=Ends)


def tell(w: W, word: Word) -> W:
    """The receiver's words; of a lost session nobody hears them."""
    return w if w.is_receiver_lost else replace(w, from_receiver=(*w.from_receiver, word))


def receiver_step(w: W, event: ReceiverEvent) -> W:
    """The real machine's step."""
    state, actions = step_receiver(w.receiver, event)
    w = replace(w, receiver=state)
    for action in actions:
        match action:
            case ReceiverAction.ACTIVATE:
                w = tell(replace(w, is_running=True, has_run=True), Word.RECEIVER_TOKENS)
            case ReceiverAction.ACK_COMMIT | ReceiverAction.REFUSE_COMMIT:
                w = replace(w, ack=action is ReceiverAction.ACK_COMMIT)
            case _:
                pass
    return w


def hearing_steps(w: W, hear: Callable[[W, Word], W]) -> Iterator[W]:
    """The router hears the next word of either session, or its patience is over."""
    if w.from_sender:
        yield hear(replace(w, from_sender=w.from_sender[1:]), w.from_sender[0])
    if w.from_receiver:
        yield hear(replace(w, from_receiver=w.from_receiver[1:]), w.from_receiver[0])
    if w.is_grace_set:
        yield hear(replace(w, is_grace_set=False), Word.GRACE_OVER)


def link_steps(w: W, sender_step: Callable[[W, SenderEvent], W]) -> Iterator[W]:
    """The link breaks, the Commit is answered, or is not."""
    if w.sender in (SenderState.WRITING, SenderState.COMMITTING):
        yield sender_step(replace(w, is_commit_in_flight=False), SenderEvent.LINK_LOST)  # with what was on it
        yield sender_step(w, SenderEvent.LINK_LOST)  # what was on it still arrives
    if w.sender is SenderState.COMMITTING:
        yield sender_step(w, SenderEvent.OVERDUE)
        if w.ack is not None:
            yield sender_step(replace(w, ack=None), SenderEvent.ACKED if w.ack else SenderEvent.COMMIT_REFUSED)


def receiver_steps(w: W) -> Iterator[W]:
    """What the receiver does by itself."""
    if w.is_receiver_dead:
        return
    if w.is_commit_in_flight:
        arrived = replace(w, is_commit_in_flight=False)
        yield arrived  # lost
        if w.receiver is not ReceiverState.RUNNING:
            yield receiver_step(arrived, ReceiverEvent.COMMIT)
    if w.is_release_in_flight:
        arrived = replace(w, is_release_in_flight=False)
        yield receiver_step(arrived, ReceiverEvent.RELEASE) if w.receiver is ReceiverState.FILLED else arrived
    if w.receiver is ReceiverState.FILLED:
        yield receiver_step(w, ReceiverEvent.EXPIRE)
    if w.receiver in (ReceiverState.COMMITTED, ReceiverState.QUARANTINED):
        yield receiver_step(w, ReceiverEvent.QUIET)
    if w.is_running and len(w.from_receiver) < MAX_WORDS:
        yield tell(w, Word.RECEIVER_TOKENS)
    if w.is_running:
        for word in (Word.RECEIVER_FINISH, Word.RECEIVER_ERROR):
            yield tell(replace(w, is_running=False), word)
        if w.is_receiver_lost:  # it finds its router gone
            yield replace(w, is_running=False)
