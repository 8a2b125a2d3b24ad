"""The two real ends for the exploration (world.py): what one of them does with an input is worked out once and remembered.

Each has a clock of its own, so that nothing depends on how fast the other runs. Time is in units: silence breaks a stream after
1, the grace is 2. Acknowledgements are sent at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from runtime.session import Peer, SessionTiming, State
from runtime.session_book import SessionBook
from runtime.session_end import SessionEnd
from runtime.session_events import Input, Output
from tests.copied import Copier

TIMING: Final = SessionTiming(
    ack_s=0.0,
    keepalive_s=math.inf,
    silence_s=1.0,
    grace_s=2.0,
    dial_timeout_s=1.0,
    backoff_min_s=0.0,
    backoff_max_s=0.0,
    max_unacked_messages=2,
)
ROUTER: Final = Peer("router", 7)
NODE_NAME: Final = "node"


@dataclass
class Router:
    """The dialer's shell, without I/O."""

    now: float
    incarnation: int  # of the node that it means to reach
    session_id: int
    end: SessionEnd | None

    def key(self) -> Hashable:
        return ("router", self.incarnation, self.session_id, _end_key(self.end, self.now))


@dataclass
class Node:
    """The listener's shell, without I/O."""

    now: float
    incarnation: int
    book: SessionBook
    lost: list[int]  # ids, oldest first

    def key(self) -> Hashable:
        ends = tuple(_end_key(end, self.now) for end in self.book.sessions())
        return ("node", self.incarnation, ends, tuple(self.lost))


def _end_key(end: SessionEnd | None, now: float) -> Hashable:
    """All that decides what the end does next. Counts do not, nor do instants but for their distance from now."""
    if end is None:
        return None
    values = dict(end.snapshot())
    for name in ("frames_resent", "resumes", "attached_at", "unacknowledged_bytes"):
        del values[name]
    for name, value in values.items():
        if name.endswith("_at") and isinstance(value, float):
            values[name] = max(value - now, -TIMING.grace_s)
    return (end.session_id, *values.values())


Effect = tuple[int, tuple[tuple[int, Output], ...], tuple[tuple[int, int, bytes], ...]]


class Ends:
    """Works out, and remembers, what an end does with an input: (its next key, outputs and frames, by session id)."""

    def __init__(self) -> None:
        self._copier = Copier()
        self._sides: list[Router | Node] = []
        self._numbers: dict[Hashable, int] = {}  # by key: the place in _sides
        self._effects: dict[tuple[int, Hashable], Effect] = {}
        self.outputs_seen: set[type] = set()
        self.num_resent = 0

    def add(self, side: Router | Node) -> int:
        number = self._numbers.setdefault(side.key(), len(self._sides))
        if number == len(self._sides):
            self._sides.append(side)
        return number

    def router(self, number: int) -> Router:
        """To be looked at, not fed."""
        side = self._sides[number]
        assert isinstance(side, Router)
        return side

    def node(self, number: int) -> Node:
        """To be looked at, not fed."""
        side = self._sides[number]
        assert isinstance(side, Node)
        return side

    def apply(self, number: int, what: Hashable, act: Callable[[Router | Node], list[tuple[int, Output]]]) -> Effect:
        """`what` names the input; `act` performs it on a copy."""
        if (number, what) not in self._effects:
            side = self._copier.copied(self._sides[number])
            outputs = act(side)
            ends = [side.end] if isinstance(side, Router) else list(side.book.sessions())
            frames: list[tuple[int, int, bytes]] = []
            for end in ends:
                if end is None:
                    continue
                before = end.frames_resent
                outputs += [(end.session_id, o) for o in fire_due(end, side.now)]
                while end.stream is not None and (frame := end.next_frame(end.stream, side.now)) is not None:
                    frames.append((end.session_id, end.stream, frame.SerializeToString(deterministic=True)))
                self.num_resent += end.frames_resent - before
                assert end.snapshot()["unacknowledged"] in range(TIMING.max_unacked_messages + 1)
            self.outputs_seen |= {type(output) for _, output in outputs}
            self._effects[number, what] = (self.add(side), tuple(outputs), tuple(frames))
        return self._effects[number, what]


def fire_due(end: SessionEnd, now: float) -> list[Output]:
    out: list[Output] = []
    while (deadline := end.next_deadline()) is not None and deadline <= now:
        out += end.tick(now)
    return out


def feed(end: SessionEnd, what: Input, now: float) -> list[tuple[int, Output]]:
    return [(end.session_id, output) for output in (*end.tick(now), *end.receive(what, now))]


def strike_lost(node: Node, ends: Sequence[SessionEnd]) -> None:
    for end in ends:
        if end.state is State.LOST and end.session_id not in node.lost:
            node.book.strike(end)
            node.lost.append(end.session_id)


def new_node(incarnation: int) -> Node:
    return Node(0.0, incarnation, SessionBook(Peer(NODE_NAME, incarnation), TIMING), [])
