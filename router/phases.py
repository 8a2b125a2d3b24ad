"""The phases of a branch, as types: where it is, and whose words are whose.

    Waiting ──dispatch──> Prefilling ──receiver's first batch──> Decoding ──finish──> (forgotten)
       ^                     │  │                                 ^ │ ^ │                 ^
       │                     │  └──commit unanswered──> CommitUnknown │ └──> AwaitingPrompt ─┘
       │                     │                                      │ │
       └──failed, refused────┴──────────────────────────── Moving <─┘ └── target's first batch, or it came to nothing
                                                           │    │
                         commit unanswered──> MoveUnknown <┘    └> MoveDoubted <──target lost

A handover has two ends in each of them. At first the sender is the prefill node and the receiver the decode node, under one
attempt number. In a move the sender is the decode node that holds the branch and the receiver the one that it goes to, under the
next number. Who of the two is believed is the owner rule (ownership.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from proto import baton_pb2 as pb
from router.events import NodeRef
from router.ownership import Owner
from router.placement import Pair


class Post(NamedTuple):
    """A node at work on an attempt."""

    node: NodeRef
    attempt: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """In the queue, on no node."""

    owner: ClassVar = Owner.NOBODY


@dataclass(frozen=True, slots=True)
class Prefilling:
    """Dispatched; the prefill node owns the attempt."""

    owner: ClassVar = Owner.SENDER
    pair: Pair


@dataclass(frozen=True, slots=True)
class CommitUnknown:
    """The sender sent Commit and heard nothing; the receiver may own the attempt, or nobody does."""

    owner: ClassVar = Owner.UNSURE
    pair: Pair
    until: float
    error: pb.PDError


@dataclass(frozen=True, slots=True)
class Decoding:
    """The receiver owns the attempt."""

    owner: ClassVar = Owner.RECEIVER
    pair: Pair


@dataclass(frozen=True, slots=True)
class Moving:
    """The decode node has been told where to move the branch, and goes on with it until it has."""

    owner: ClassVar = Owner.MOVING
    pair: Pair
    target: Post


@dataclass(frozen=True, slots=True)
class MoveUnknown:
    """The decode node sent Commit and heard nothing."""

    owner: ClassVar = Owner.UNSURE
    pair: Pair
    target: Post
    until: float
    error: pb.PDError


@dataclass(frozen=True, slots=True)
class MoveDoubted:
    """The target was lost. If it had the branch by then, the decode node has nothing to say any more; else it goes on or asks."""

    owner: ClassVar = Owner.DOUBTED
    pair: Pair
    lost: NodeRef
    until: float


@dataclass(frozen=True, slots=True)
class AwaitingPrompt:
    """Complete, but for the prompt's logprobs: the receiver's last batch has overtaken the sender's first."""

    owner: ClassVar = Owner.NOBODY
    pair: Pair
    until: float


Phase = Waiting | Prefilling | CommitUnknown | Decoding | Moving | MoveUnknown | MoveDoubted | AwaitingPrompt
Move = Moving | MoveUnknown | MoveDoubted


def posts_of(phase: Phase, attempt: int) -> tuple[Post | None, Post | None]:
    """Sender and receiver of what the branch is in the middle of, or was last, under its attempt `attempt`."""
    match phase:
        case Waiting():
            return None, None
        case Moving(pair, target) | MoveUnknown(pair, target):
            return Post(pair.decode, attempt), target
        case MoveDoubted(pair):
            return Post(pair.decode, attempt), None
        case _:
            return Post(phase.pair.prefill, attempt), Post(phase.pair.decode, attempt)


def ends_of(phase: Phase) -> tuple[NodeRef, ...]:
    """Who may have failed an attempt: its sender, then its receiver."""
    match phase:
        case Waiting():
            return ()
        case Moving(pair, target) | MoveUnknown(pair, target):
            return pair.decode, target.node
        case MoveDoubted(pair, lost):
            return pair.decode, lost
        case _:
            return phase.pair.prefill, phase.pair.decode


def nodes_of(phase: Phase) -> tuple[NodeRef, ...]:
    """Every node where something of the branch may be, each once."""
    match phase:
        case Waiting():
            return ()
        case Moving(pair, target) | MoveUnknown(pair, target):
            return tuple(dict.fromkeys((*pair.nodes, target.node)))
        case _:
            return phase.pair.nodes
