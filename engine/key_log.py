"""Which keys a block pool, or a KV pool, has come to hold and has lost, in order, while somebody wants to know. Pure.

Changes are numbered 1, 2, 3 …; whoever knows a number asks for what came behind it. The log is bounded: who asks too late is told
so, and has to look at the whole pool. Off, it keeps nothing and costs one comparison per change; what happened meanwhile makes
every number that was known before too old.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# A key, and whether it can be found from now on; None, of a KV pool: nobody will find it there, whoever knew of it.
Change = tuple[bytes, bool | None]


class KeyLog:
    """The newest changes of one pool."""

    def __init__(self, capacity: int = 1 << 16) -> None:
        """At least `capacity` changes are kept, twice as many at most."""
        self.is_on = False
        self._capacity = capacity
        self._changes: list[Change] = []
        self._num_forgotten = 0  # number of the last change that is not kept

    @property
    def last(self) -> int:
        """The number of the newest change."""
        return self._num_forgotten + len(self._changes)

    def switch(self, is_on: bool) -> None:
        """Keep changes from now on, or no more."""
        if self.is_on and not is_on:
            self._num_forgotten = self.last + 1  # one that nobody has seen stands for all that are to come
            self._changes.clear()
        self.is_on = is_on

    def add(self, key: bytes, is_held: bool | None) -> None:
        """A key has begun, or ceased, to be found; see Change."""
        self.add_each((key,), is_held)

    def add_each(self, keys: Iterable[bytes], is_held: bool | None) -> None:
        """All of these have, in this order."""
        if not self.is_on:
            return
        self._changes += [(key, is_held) for key in keys]
        while len(self._changes) >= 2 * self._capacity:
            self._num_forgotten += self._capacity
            del self._changes[: self._capacity]

    def since(self, number: int, most: int) -> Sequence[Change] | None:
        """The changes behind this number, oldest first, `most` of them at most; None if not all of them are kept."""
        first = number - self._num_forgotten
        return self._changes[first : first + most] if 0 <= first <= len(self._changes) else None
