"""Handoff: one attempt's KV goes from the node that computed it to the node that reserved blocks for it.

Job      the legal conversation, for both ends. Nothing else.
Not here I/O, clocks, block ids, tensors, retries: the roles' cores own those (prefill_node/core.py, decode_node/core.py).
Shape    step_sender and step_receiver: (state, event) -> (state, actions), from one table each. A pair that is in neither the
         table nor the ignored races raises: only a bug makes one, because cores check what a peer says before it gets here.

The sender pushes, so a late write could hurt the receiver's blocks; the receiver therefore frees nothing that a write may
still touch, and the sender keeps its source blocks until nobody reads them:

    sender    IDLE --START--> RESERVING --GRANTED--> WRITING --ALL_WRITTEN--> COMMITTING --ACKED--> DONE
                                  |                     | cancel, withdrawal,      | overdue, cancel
                                  | refused, cancel     v lease gone               v
                                  |                  DRAINING <--------------------+
                                  v                     | QUIET, LINK_LOST
                                FAILED <----------------+            (LINK_LOST leads here from anywhere)

    receiver  RESERVED --LAST_BLOCK--> FILLED --COMMIT--> COMMITTED --QUIET--> RUNNING
                  |                      | release, cancel,  | cancel,
                  |                      | expiry, bad write | bad write
                  +----------------------+-------------------+--> QUARANTINED --QUIET--> RELEASED

Owner rule. Until SEND_COMMIT the sender alone reports to the router (REPORT). After it the attempt may belong to the receiver,
so the sender does not release the lease, and what it reports (REPORT_UNANSWERED) counts only as long as the router has seen
nothing from the receiver. It renews it: the Commit may be behind more than the link carries in a lease life. COMMITTED waits
for QUIET too: when the sequence begins to run, no write into its blocks runs or can start, not even a repeated one.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final


class IllegalTransition(Exception):
    """This event cannot happen in this state: a bug here."""


# ---------------------------------------------------------------- sender


class SenderState(Enum):
    """One attempt at the node that computes its KV."""

    IDLE = auto()  # not about to be computed yet: nothing asked, nothing lent
    RESERVING = auto()  # Reserve has no answer yet; the KV is being computed meanwhile
    WRITING = auto()  # a lease is held; the link may read our blocks
    COMMITTING = auto()  # Commit is queued behind the last write
    DRAINING = auto()  # given up, but the link may still read our blocks: those that it has begun with
    DONE = auto()  # the receiver owns the attempt; our blocks are dropped
    FAILED = auto()  # no handoff (failed, cancelled or not needed); our blocks are dropped


class SenderEvent(Enum):
    """What can happen to the sender's end."""

    START = auto()  # the prompt is about to be computed
    GRANTED = auto()  # Reserve answered with a lease
    REFUSED = auto()  # Reserve answered with a PD Error: the receiver holds nothing
    UNANSWERED = auto()  # Reserve got no answer: the receiver may hold a lease
    ALL_WRITTEN = auto()  # first token known, every block queued on the link
    WITHDRAW = auto()  # the branch ended with its first token
    LEASE_GONE = auto()  # the receiver says so, or a lease life passed without renewal
    ACKED = auto()  # the receiver owns the attempt
    COMMIT_REFUSED = auto()
    OVERDUE = auto()  # behind Commit, or since we gave up, a lease life passed in which the link carried nothing
    CANCEL = auto()  # router's Cancel, router lost, or the deadline
    LINK_LOST = auto()  # the link is gone and quiet
    QUIET = auto()  # every queued block of this attempt has been read


class SenderAction(Enum):
    """What the sender's core does about it."""

    SEND_RESERVE = auto()
    START_WRITING = auto()
    SEND_COMMIT = auto()
    SEND_RELEASE = auto()
    CLOSE_LINK = auto()
    STOP_COMPUTING = auto()
    DROP_BLOCKS = auto()
    REPORT = auto()  # PD Error to the router: the attempt failed for certain
    REPORT_UNANSWERED = auto()  # PD Error to the router, unless the receiver's batch says otherwise


_S, _E, _A = SenderState, SenderEvent, SenderAction
SenderRow = tuple[SenderState, tuple[SenderAction, ...]]

SENDER_TABLE: Final[Mapping[tuple[SenderState, SenderEvent], SenderRow]] = {
    (_S.IDLE, _E.START): (_S.RESERVING, (_A.SEND_RESERVE,)),
    (_S.IDLE, _E.WITHDRAW): (_S.FAILED, (_A.DROP_BLOCKS,)),
    (_S.IDLE, _E.CANCEL): (_S.FAILED, (_A.STOP_COMPUTING, _A.DROP_BLOCKS)),
    (_S.RESERVING, _E.GRANTED): (_S.WRITING, (_A.START_WRITING,)),
    (_S.RESERVING, _E.REFUSED): (_S.FAILED, (_A.STOP_COMPUTING, _A.REPORT, _A.DROP_BLOCKS)),
    (_S.RESERVING, _E.UNANSWERED): (_S.FAILED, (_A.SEND_RELEASE, _A.STOP_COMPUTING, _A.REPORT, _A.DROP_BLOCKS)),
    (_S.RESERVING, _E.WITHDRAW): (_S.FAILED, (_A.SEND_RELEASE, _A.DROP_BLOCKS)),
    (_S.RESERVING, _E.CANCEL): (_S.FAILED, (_A.SEND_RELEASE, _A.STOP_COMPUTING, _A.DROP_BLOCKS)),
    (_S.WRITING, _E.ALL_WRITTEN): (_S.COMMITTING, (_A.SEND_COMMIT,)),
    (_S.WRITING, _E.WITHDRAW): (_S.DRAINING, (_A.SEND_RELEASE,)),
    (_S.WRITING, _E.LEASE_GONE): (_S.DRAINING, (_A.SEND_RELEASE, _A.STOP_COMPUTING, _A.REPORT)),
    (_S.WRITING, _E.CANCEL): (_S.DRAINING, (_A.SEND_RELEASE, _A.STOP_COMPUTING)),
    (_S.WRITING, _E.LINK_LOST): (_S.FAILED, (_A.SEND_RELEASE, _A.STOP_COMPUTING, _A.REPORT, _A.DROP_BLOCKS)),
    (_S.COMMITTING, _E.ACKED): (_S.DONE, (_A.DROP_BLOCKS,)),
    (_S.COMMITTING, _E.COMMIT_REFUSED): (_S.FAILED, (_A.REPORT, _A.DROP_BLOCKS)),
    (_S.COMMITTING, _E.OVERDUE): (_S.DRAINING, (_A.REPORT_UNANSWERED,)),
    (_S.COMMITTING, _E.CANCEL): (_S.DRAINING, ()),
    (_S.COMMITTING, _E.LINK_LOST): (_S.FAILED, (_A.REPORT_UNANSWERED, _A.DROP_BLOCKS)),
    (_S.DRAINING, _E.OVERDUE): (_S.DRAINING, (_A.CLOSE_LINK,)),  # a stuck send becomes quiet by losing its link
    (_S.DRAINING, _E.LINK_LOST): (_S.FAILED, (_A.DROP_BLOCKS,)),
    (_S.DRAINING, _E.QUIET): (_S.FAILED, (_A.DROP_BLOCKS,)),
    (_S.FAILED, _E.GRANTED): (_S.FAILED, (_A.SEND_RELEASE,)),  # the answer came after we gave up
}

SENDER_IGNORED: Final[frozenset[tuple[SenderState, SenderEvent]]] = frozenset(
    # The link reports quiet whenever nothing is queued; only a draining sender waits for it.
    {(s, _E.QUIET) for s in (_S.WRITING, _S.COMMITTING)}
    # Word about the lease that crosses our giving up, and a second reason to give up.
    | {(_S.DRAINING, e) for e in (_E.LEASE_GONE, _E.CANCEL)}
    # A renewal that crossed Commit, or came behind it: the lease has become a sequence, or the Commit will be refused.
    | {(_S.COMMITTING, _E.LEASE_GONE)}
    | {(_S.FAILED, e) for e in (_E.REFUSED, _E.UNANSWERED)}
)

# ---------------------------------------------------------------- receiver


class ReceiverState(Enum):
    """One lease at the node that reserved blocks."""

    RESERVED = auto()  # blocks promised; writes may land
    FILLED = auto()  # every block that will be sent has landed, checksums right
    COMMITTED = auto()  # the attempt is ours; waiting for the last write to be quiet
    RUNNING = auto()  # the lease has become a sequence
    QUARANTINED = auto()  # over, but a write may still touch the blocks
    RELEASED = auto()  # over, blocks free


class ReceiverEvent(Enum):
    """What can happen to the receiver's end."""

    LAST_BLOCK = auto()
    BAD_WRITE = auto()  # checksum, or a span or Commit that a right sender never sends
    COMMIT = auto()
    RELEASE = auto()  # the sender gives it back
    CANCEL = auto()  # router's Cancel, router lost, a newer attempt, or the deadline
    EXPIRE = auto()  # a lease life passed without a write or renewal
    QUIET = auto()  # answers REVOKE, once: no write runs or will start


class ReceiverAction(Enum):
    """What the receiver's core does about it."""

    REVOKE = auto()  # let no new write in; QUIET follows
    QUARANTINE = auto()
    FREE_BLOCKS = auto()
    ACTIVATE = auto()  # the blocks become a sequence's
    ACK_COMMIT = auto()
    REFUSE_COMMIT = auto()


_R, _V, _B = ReceiverState, ReceiverEvent, ReceiverAction
ReceiverRow = tuple[ReceiverState, tuple[ReceiverAction, ...]]
_GIVE_UP: Final = (_B.REVOKE, _B.QUARANTINE)

RECEIVER_TABLE: Final[Mapping[tuple[ReceiverState, ReceiverEvent], ReceiverRow]] = {
    (_R.RESERVED, _V.LAST_BLOCK): (_R.FILLED, ()),
    (_R.RESERVED, _V.COMMIT): (_R.QUARANTINED, (*_GIVE_UP, _B.REFUSE_COMMIT)),  # a write is missing
    (_R.RESERVED, _V.BAD_WRITE): (_R.QUARANTINED, _GIVE_UP),
    (_R.RESERVED, _V.RELEASE): (_R.QUARANTINED, _GIVE_UP),
    (_R.RESERVED, _V.CANCEL): (_R.QUARANTINED, _GIVE_UP),
    (_R.RESERVED, _V.EXPIRE): (_R.QUARANTINED, _GIVE_UP),
    (_R.FILLED, _V.COMMIT): (_R.COMMITTED, (_B.REVOKE,)),
    (_R.FILLED, _V.BAD_WRITE): (_R.QUARANTINED, _GIVE_UP),
    (_R.FILLED, _V.RELEASE): (_R.QUARANTINED, _GIVE_UP),
    (_R.FILLED, _V.CANCEL): (_R.QUARANTINED, _GIVE_UP),
    (_R.FILLED, _V.EXPIRE): (_R.QUARANTINED, _GIVE_UP),
    (_R.COMMITTED, _V.QUIET): (_R.RUNNING, (_B.ACTIVATE, _B.ACK_COMMIT)),
    (_R.COMMITTED, _V.CANCEL): (_R.QUARANTINED, (_B.QUARANTINE, _B.REFUSE_COMMIT)),
    (_R.COMMITTED, _V.BAD_WRITE): (_R.QUARANTINED, (_B.QUARANTINE, _B.REFUSE_COMMIT)),
    (_R.QUARANTINED, _V.QUIET): (_R.RELEASED, (_B.FREE_BLOCKS,)),
    (_R.QUARANTINED, _V.COMMIT): (_R.QUARANTINED, (_B.REFUSE_COMMIT,)),
    (_R.RELEASED, _V.COMMIT): (_R.RELEASED, (_B.REFUSE_COMMIT,)),
}

RECEIVER_IGNORED: Final[frozenset[tuple[ReceiverState, ReceiverEvent]]] = frozenset(
    # A lease that was committed in time cannot expire any more (D05), and one Commit is enough.
    {(_R.COMMITTED, e) for e in (_V.EXPIRE, _V.COMMIT)}
    # Whatever else would end a lease that is over.
    | {(s, e) for s in (_R.QUARANTINED, _R.RELEASED) for e in (_V.BAD_WRITE, _V.RELEASE, _V.CANCEL, _V.EXPIRE)}
)


def step_sender(state: SenderState, event: SenderEvent) -> SenderRow:
    """The sender's next state and what to do, in order.

    Raises:
        IllegalTransition: the event cannot happen in this state.
    """
    if (state, event) in SENDER_IGNORED:
        return state, ()
    try:
        return SENDER_TABLE[state, event]
    except KeyError:
        raise IllegalTransition(f"sender: {event.name} in {state.name}") from None


def step_receiver(state: ReceiverState, event: ReceiverEvent) -> ReceiverRow:
    """The receiver's next state and what to do, in order.

    Raises:
        IllegalTransition: the event cannot happen in this state.
    """
    if (state, event) in RECEIVER_IGNORED:
        return state, ()
    try:
        return RECEIVER_TABLE[state, event]
    except KeyError:
        raise IllegalTransition(f"receiver: {event.name} in {state.name}") from None
