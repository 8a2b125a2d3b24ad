"""The owner rule: of an attempt on two nodes, whose word counts. One table, no I/O, no tokens.

    SENDER ──its Commit has no answer──> UNSURE ──grace over──> NOBODY
       │  └──────────receiver's batch──────┐ │                    ^
       │                                   v v                    │
       └──finish, error, lost──> NOBODY  RECEIVER ──finish, error, lost
                                         ^   ^  │
         target's batch, or it asks again│   │  └──asks, and is told of a target──> MOVING ──Commit has no answer──> UNSURE
                                         └───┼─────────────────────────────────────────┘ │
                                             └──asks again── DOUBTED <──target lost──────┘

Until the sender has sent Commit only the sender reports (connector/handoff.py), so its error is certain and the attempt may be
retried. An error that says that Commit went unanswered decides nothing: the receiver may run. Then the receiver's first batch
decides, and for want of one the end of a grace period (R21). Once the receiver was heard, nothing that the sender says matters:
the two sessions have no common order, so its words may simply be late.

A lost node, and a grace that is over, say nothing of the other node: it may run the attempt yet. A retry is safe nevertheless: the
old attempt is fenced where it can be reached, and whatever it says from then on is an older attempt's.

A move is a handover like the first: the node that holds the branch is the sender, the target the receiver. But a sender that had
all to lose goes on if it comes to nothing. So a target that is lost is no reason to retry, and leaves a doubt: had it the branch
already, the sender is done with it and will say nothing any more. What it says shows that it is not; its silence for a grace
period ends the attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final

from proto import baton_pb2 as pb


class Owner(Enum):
    """Who may end an attempt."""

    __hash__ = object.__hash__  # members are single objects; Enum's own is written in Python, and asked for every token

    SENDER = auto()
    UNSURE = auto()  # the sender, or the receiver: neither the sender nor we know
    RECEIVER = auto()
    MOVING = auto()  # the sender, until its target speaks
    DOUBTED = auto()  # the sender, if it has not handed over to a target that is lost
    NOBODY = auto()  # it has ended here


class Side(Enum):
    """Who speaks."""

    SENDER = auto()
    RECEIVER = auto()


class Word(Enum):
    """What is heard of an attempt."""

    __hash__ = object.__hash__

    SENDER_TOKENS = auto()
    SENDER_FINISH = auto()
    SENDER_ERROR = auto()  # certain: the receiver does not own the attempt
    SENDER_UNSURE = auto()  # Commit was sent and not answered
    SENDER_LOST = auto()
    HOLDER_ASKS = auto()  # WantsMove: who decodes would hand over, and no move is under way there
    RECEIVER_TOKENS = auto()
    RECEIVER_FINISH = auto()
    RECEIVER_ERROR = auto()
    RECEIVER_LOST = auto()
    GRACE_OVER = auto()


class Verdict(Enum):
    """What the router's core makes of it."""

    TAKE = auto()  # tokens, for the log
    FINISH = auto()  # tokens, and the branch's end
    AWAIT_RECEIVER = auto()  # for the grace period
    AWAIT_SENDER = auto()  # for the grace period, from its last word on
    PLACE = auto()  # look for a target; if there is one, MOVING is next
    RETRY = auto()  # another attempt, if the error and the budget allow
    IGNORE = auto()  # counted


_O, _W, _V = Owner, Word, Verdict
# While one of these owns it, the receiver's word counts.
_RECEIVERS: Final = (_O.SENDER, _O.UNSURE, _O.RECEIVER, _O.MOVING)

TABLE: Final[Mapping[tuple[Owner, Word], tuple[Owner, Verdict]]] = {
    (_O.SENDER, _W.SENDER_TOKENS): (_O.SENDER, _V.TAKE),
    (_O.SENDER, _W.SENDER_FINISH): (_O.NOBODY, _V.FINISH),
    (_O.SENDER, _W.SENDER_ERROR): (_O.NOBODY, _V.RETRY),
    (_O.SENDER, _W.SENDER_UNSURE): (_O.UNSURE, _V.AWAIT_RECEIVER),
    (_O.SENDER, _W.SENDER_LOST): (_O.NOBODY, _V.RETRY),
    (_O.UNSURE, _W.GRACE_OVER): (_O.NOBODY, _V.RETRY),
    (_O.RECEIVER, _W.SENDER_TOKENS): (_O.RECEIVER, _V.TAKE),  # late, and a repeat: the log drops it
    **{(owner, _W.RECEIVER_TOKENS): (_O.RECEIVER, _V.TAKE) for owner in _RECEIVERS},
    **{(owner, _W.RECEIVER_FINISH): (_O.NOBODY, _V.FINISH) for owner in _RECEIVERS},
    **{(owner, _W.RECEIVER_ERROR): (_O.NOBODY, _V.RETRY) for owner in _RECEIVERS},
    **{(owner, _W.RECEIVER_LOST): (_O.NOBODY, _V.RETRY) for owner in (_O.SENDER, _O.UNSURE, _O.RECEIVER)},
    **{(owner, _W.HOLDER_ASKS): (_O.RECEIVER, _V.PLACE) for owner in (_O.RECEIVER, _O.MOVING, _O.DOUBTED)},
    (_O.MOVING, _W.SENDER_TOKENS): (_O.MOVING, _V.TAKE),
    (_O.MOVING, _W.SENDER_FINISH): (_O.NOBODY, _V.FINISH),
    (_O.MOVING, _W.SENDER_ERROR): (_O.NOBODY, _V.RETRY),
    (_O.MOVING, _W.SENDER_UNSURE): (_O.UNSURE, _V.AWAIT_RECEIVER),
    (_O.MOVING, _W.SENDER_LOST): (_O.NOBODY, _V.RETRY),
    (_O.MOVING, _W.RECEIVER_LOST): (_O.DOUBTED, _V.AWAIT_SENDER),
    (_O.DOUBTED, _W.SENDER_TOKENS): (_O.DOUBTED, _V.TAKE),
    (_O.DOUBTED, _W.SENDER_FINISH): (_O.NOBODY, _V.FINISH),
    **{
        (_O.DOUBTED, word): (_O.NOBODY, _V.RETRY)
        for word in (_W.SENDER_ERROR, _W.SENDER_UNSURE, _W.SENDER_LOST, _W.GRACE_OVER)
    },
}

# The rest is late, or a broken peer's: no change.
IGNORED: Final[frozenset[tuple[Owner, Word]]] = frozenset(
    {(_O.NOBODY, word) for word in Word}
    | {(_O.RECEIVER, word) for word in (_W.SENDER_FINISH, _W.SENDER_ERROR, _W.SENDER_UNSURE, _W.SENDER_LOST)}
    | {(_O.UNSURE, word) for word in (_W.SENDER_TOKENS, _W.SENDER_FINISH, _W.SENDER_ERROR, _W.SENDER_UNSURE)}
    | {(_O.DOUBTED, w) for w in (_W.RECEIVER_TOKENS, _W.RECEIVER_FINISH, _W.RECEIVER_ERROR, _W.RECEIVER_LOST)}
    | {(owner, _W.HOLDER_ASKS) for owner in (_O.SENDER, _O.UNSURE)}
    | {(owner, _W.GRACE_OVER) for owner in (_O.SENDER, _O.RECEIVER, _O.MOVING)}
    | {(_O.UNSURE, _W.SENDER_LOST)}
)


def judge(owner: Owner, word: Word) -> tuple[Owner, Verdict]:
    """The next owner, and what to do. Total: a word that counts no more changes nothing."""
    return TABLE.get((owner, word), (owner, Verdict.IGNORE))


_WORDS: Final = {
    Side.SENDER: (_W.SENDER_TOKENS, _W.SENDER_FINISH, _W.SENDER_ERROR, _W.SENDER_LOST),
    Side.RECEIVER: (_W.RECEIVER_TOKENS, _W.RECEIVER_FINISH, _W.RECEIVER_ERROR, _W.RECEIVER_LOST),
}


def word_of_tokens(side: Side, finish: pb.FinishReason.ValueType) -> Word:
    """What a batch of tokens says."""
    return _WORDS[side][0 if finish == pb.FINISH_UNSPECIFIED else 1]


def word_of_error(side: Side, commit_unanswered: bool) -> Word:
    """What a PD Error says; that nobody has answered its Commit, only a sender can say."""
    return Word.SENDER_UNSURE if side is Side.SENDER and commit_unanswered else _WORDS[side][2]


def word_of_loss(side: Side) -> Word:
    """What it says that a node is lost."""
    return _WORDS[side][3]
