"""Reserve calls that may wait for room: bounded, first come, first served within a requester, requesters in turn. Pure.

Nobody overtakes: while the one whose turn it is does not fit, the others wait, or a large one would never find room. A
requester is a sender (a prefill node), so that one that asks for much does not hold up the rest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey, BranchKey


@dataclass(slots=True)
class WaitingReserve:
    """One attempt that has no lease yet, and the calls that want to hear of it: a repeated Reserve joins the first."""

    request: pb.ReserveRequest
    keys: tuple[AttemptKey, ...]
    open: dict[AttemptKey, None]  # branches still wanted here
    deadline: float  # of the request
    until: float  # when it is answered at the latest
    call_ids: list[int]


class WaitingReserves:
    """The line. At most `limit` attempts stand in it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lines: OrderedDict[str, OrderedDict[int, WaitingReserve]] = (
            OrderedDict()
        )  # by sender, next in turn first; each by its id(), since a sender may repeat a key that was closed
        self._of_branch: dict[BranchKey, WaitingReserve] = {}
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[WaitingReserve]:
        return (waiting for line in list(self._lines.values()) for waiting in list(line.values()))

    @property
    def is_full(self) -> bool:
        """Whether one more would be too many."""
        return self._num >= self._limit

    def put(self, waiting: WaitingReserve) -> None:
        """Stand behind the others of the same sender."""
        self._lines.setdefault(waiting.request.sender.name, OrderedDict())[id(waiting)] = waiting
        self._of_branch.update((key.branch, waiting) for key in waiting.open)
        self._num += 1

    def find(self, key: AttemptKey) -> WaitingReserve | None:
        """Who waits for this branch of this attempt."""
        waiting = self._of_branch.get(key.branch)
        return waiting if waiting is not None and key in waiting.open else None

    def of_any(self, keys: Iterable[AttemptKey]) -> WaitingReserve | None:
        """Who waits for any of these, the first of which may not be wanted any more."""
        return next((waiting for waiting in map(self.find, keys) if waiting is not None), None)

    def older(self, floors: Mapping[BranchKey, int]) -> list[tuple[WaitingReserve, AttemptKey]]:
        """Attempts below their branch's floor."""
        found = [(self._of_branch[branch], branch) for branch in floors if branch in self._of_branch]
        keys = [(waiting, key) for waiting, branch in found for key in waiting.open if key.branch == branch]
        return [(waiting, key) for waiting, key in keys if key.attempt < floors[key.branch]]

    def next(self) -> WaitingReserve | None:
        """Whose turn it is."""
        return next((next(iter(line.values())) for line in self._lines.values()), None)

    def close(self, waiting: WaitingReserve, key: AttemptKey) -> None:
        """This branch is not wanted here any more; without any the attempt leaves the line."""
        del waiting.open[key]
        if self._of_branch.get(key.branch) is waiting:
            del self._of_branch[key.branch]
        if not waiting.open:
            self.take(waiting)

    def take(self, waiting: WaitingReserve) -> None:
        """Leave the line; if it was its turn, the sender goes behind the other senders."""
        sender = waiting.request.sender.name
        line = self._lines[sender]
        was_next = self.next() is waiting
        del line[id(waiting)]
        for key in waiting.open:
            del self._of_branch[key.branch]
        self._num -= 1
        if not line:
            del self._lines[sender]
        elif was_next:
            self._lines.move_to_end(sender)
