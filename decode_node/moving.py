"""A running attempt goes to another node, KV and all, decoding on meanwhile: what happens when, as one table.

Job      the holder's side of a Move (design, section 5): who owns the sequence, when it stops, when it goes on here. Nothing else.
Not here the handoff that carries it (connector/handoff.py): its end comes in as WRITTEN, FAILED, ACKED or UNKNOWN. I/O, clocks,
         blocks: decode_node/mover.py.

    RESTING --WANT--> ASKED --TARGET--> SENDING --FULL--> PAUSING --STOPPED--> PAUSED --WRITTEN--> COMMITTED --ACKED--> OVER
       ^                |                  |                 | failed             | failed             | refused    unknown: OVER
       |  nowhere       |        failed    |                 v                    |                    |
       +----------------+------------------+<-------------STAYING (resumed once it has stopped)--------+

    gave way to pressure (never resumed here):
    HELD --TARGET--> YIELDED --WRITTEN--> SURRENDERED --ACKED--> OVER; whatever else happens, it is given up, with all its tokens

Owner rule. Up to COMMIT the sequence is this node's alone, and a handoff that failed for certain, be it by a refused Commit, lets
it decode on where it was. Between COMMIT and the answer it may be the target's: it does not run here, and if no answer comes it
never will again (REPORT_UNANSWERED; the target's batch decides). Its length is final before COMMIT, which says every token.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final

from connector.handoff import IllegalTransition


class MoveState(Enum):
    """One running attempt, at the node that holds it."""

    RESTING = auto()  # no move is under way
    ASKED = auto()  # the router was asked for a target
    SENDING = auto()  # Reserve is asked, or a lease held: final blocks are written while the sequence decodes on
    PAUSING = auto()  # the same, and its slot is marked: no row follows
    STAYING = auto()  # it came to nothing behind the mark: it goes on when the mark is answered
    PAUSED = auto()  # its length is final; what is left is being written
    COMMITTED = auto()  # Commit is sent: whose it is, the answer says
    HELD = auto()  # gave way to pressure, its blocks are kept for a moment; a target was asked for
    YIELDED = auto()  # the same, Reserve asked or lease held
    SURRENDERED = auto()  # the same, Commit sent
    OVER = auto()  # moved, ended, or given up


class MoveEvent(Enum):
    """What can happen to it."""

    WANT = auto()  # the node drains
    TARGET = auto()  # the router names one
    NOWHERE = auto()  # it has none
    FULL = auto()  # few blocks are left to be written, or the reservation is nearly used up
    STOPPED = auto()  # the mark was answered: every token that it said was told
    GAVE_WAY = auto()  # the same, for older sequences' sake
    REQUEUED = auto()  # the same, at a node that resumes who gave way: it is first in line there already
    WRITTEN = auto()  # stopped, and every block queued on the link
    FAILED = auto()  # the target does not, and will not, own it
    ACKED = auto()  # the target owns it
    UNKNOWN = auto()  # Commit was not answered
    ENDED = auto()  # a last token came before the mark was answered
    STOP = auto()  # cancel, router lost, deadline, newer attempt
    TOO_LATE = auto()  # others need the blocks now


class MoveAction(Enum):
    """What the holder does about it."""

    ASK = auto()  # WantsMove
    RESERVE = auto()  # start the handoff
    PAUSE = auto()
    COMMIT = auto()
    RESUME = auto()  # decode on where it was
    WITHDRAW = auto()  # end the handoff, whose blocks stay until its link is quiet
    DROP = auto()  # the sequence ends here
    GIVE_UP = auto()  # the same, and the router hears PREEMPTED; a node that resumes who gave way queues it instead
    REPORT_MOVED = auto()  # it is somebody else's
    REPORT_UNANSWERED = auto()


_S, _E, _A = MoveState, MoveEvent, MoveAction
MoveRow = tuple[MoveState, tuple[MoveAction, ...]]
_MOVED: Final = (_S.OVER, (_A.DROP, _A.REPORT_MOVED))
_UNANSWERED: Final = (_S.OVER, (_A.DROP, _A.REPORT_UNANSWERED))
_PREEMPTED: Final = (_S.OVER, (_A.GIVE_UP,))
_STOPPED: Final = (_S.OVER, (_A.DROP, _A.WITHDRAW))

MOVE_TABLE: Final[Mapping[tuple[MoveState, MoveEvent], MoveRow]] = {
    (_S.RESTING, _E.WANT): (_S.ASKED, (_A.ASK,)),
    (_S.RESTING, _E.GAVE_WAY): (_S.HELD, (_A.ASK,)),
    (_S.ASKED, _E.TARGET): (_S.SENDING, (_A.RESERVE,)),
    (_S.ASKED, _E.NOWHERE): (_S.RESTING, ()),
    (_S.ASKED, _E.GAVE_WAY): (_S.HELD, ()),
    (_S.ASKED, _E.ENDED): (_S.OVER, ()),
    (_S.ASKED, _E.STOP): (_S.OVER, (_A.DROP,)),
    (_S.SENDING, _E.FULL): (_S.PAUSING, (_A.PAUSE,)),
    (_S.SENDING, _E.GAVE_WAY): (_S.YIELDED, ()),
    (_S.SENDING, _E.FAILED): (_S.RESTING, ()),
    (_S.SENDING, _E.ENDED): (_S.OVER, (_A.WITHDRAW,)),
    (_S.SENDING, _E.STOP): _STOPPED,
    (_S.PAUSING, _E.STOPPED): (_S.PAUSED, ()),
    (_S.PAUSING, _E.GAVE_WAY): (_S.YIELDED, ()),  # the mark was that of giving way
    (_S.PAUSING, _E.FAILED): (_S.STAYING, ()),
    (_S.PAUSING, _E.ENDED): (_S.OVER, (_A.WITHDRAW,)),
    (_S.PAUSING, _E.STOP): _STOPPED,
    (_S.STAYING, _E.STOPPED): (_S.RESTING, (_A.RESUME,)),
    (_S.STAYING, _E.GAVE_WAY): (_S.HELD, (_A.ASK,)),
    (_S.STAYING, _E.REQUEUED): (_S.RESTING, ()),  # no link reads it, so that nobody asked whether it stays
    (_S.STAYING, _E.ENDED): (_S.OVER, ()),
    (_S.STAYING, _E.STOP): (_S.OVER, (_A.DROP,)),
    (_S.PAUSED, _E.WRITTEN): (_S.COMMITTED, (_A.COMMIT,)),
    (_S.PAUSED, _E.FAILED): (_S.RESTING, (_A.RESUME,)),
    (_S.PAUSED, _E.STOP): _STOPPED,
    (_S.COMMITTED, _E.ACKED): _MOVED,
    (_S.COMMITTED, _E.FAILED): (_S.RESTING, (_A.RESUME,)),  # the Commit was refused
    (_S.COMMITTED, _E.UNKNOWN): _UNANSWERED,
    (_S.COMMITTED, _E.STOP): _STOPPED,
    (_S.HELD, _E.TARGET): (_S.YIELDED, (_A.RESERVE,)),
    (_S.HELD, _E.NOWHERE): _PREEMPTED,
    (_S.HELD, _E.TOO_LATE): _PREEMPTED,
    (_S.HELD, _E.STOP): (_S.OVER, (_A.DROP,)),
    (_S.YIELDED, _E.WRITTEN): (_S.SURRENDERED, (_A.COMMIT,)),
    (_S.YIELDED, _E.FAILED): _PREEMPTED,
    (_S.YIELDED, _E.TOO_LATE): (_S.OVER, (_A.WITHDRAW, _A.GIVE_UP)),
    (_S.YIELDED, _E.STOP): _STOPPED,
    (_S.SURRENDERED, _E.ACKED): _MOVED,
    (_S.SURRENDERED, _E.FAILED): _PREEMPTED,
    (_S.SURRENDERED, _E.UNKNOWN): _UNANSWERED,
    (_S.SURRENDERED, _E.STOP): _STOPPED,
}

MOVE_IGNORED: Final[frozenset[tuple[MoveState, MoveEvent]]] = frozenset(
    # A router that answers twice, or that was not asked.
    {(s, e) for s in set(_S) - {_S.ASKED, _S.HELD, _S.OVER} for e in (_E.TARGET, _E.NOWHERE)}
    # The blocks are free as soon as the link has read them, whatever the answer to Commit.
    | {(_S.SURRENDERED, _E.TOO_LATE)}
)


def step_move(state: MoveState, event: MoveEvent) -> MoveRow:
    """The next state and what to do, in order.

    Raises:
        IllegalTransition: the event cannot happen in this state.
    """
    if (state, event) in MOVE_IGNORED:
        return state, ()
    try:
        return MOVE_TABLE[state, event]
    except KeyError:
        raise IllegalTransition(f"move: {event.name} in {state.name}") from None
