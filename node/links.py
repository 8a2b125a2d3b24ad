"""Which link leads to which receiver, and which attempts use it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from proto.attempt_key import AttemptKey


@dataclass(slots=True)
class _Link:
    receiver: tuple[str, int]
    leases: dict[int, AttemptKey] = field(default_factory=dict)
    carried_at: float = -inf  # when it is known to have carried something
    num_landed: int = 0  # as the receiver told it last


class Links:
    """One link per receiver incarnation, shared by its attempts; a lost one is replaced under a new id."""

    def __init__(self, tag: str = "") -> None:
        """`tag` is in every link's id: several senders in one process must not make the same."""
        self._tag = tag
        self._links: dict[str, _Link] = {}
        self._current: dict[tuple[str, int], str] = {}
        self._num_made = 0

    def find(self, receiver: tuple[str, int]) -> str | None:
        """The open link to this (name, incarnation)."""
        return self._current.get(receiver)

    def make(self, receiver: tuple[str, int]) -> str:
        """A new link's id: unique, and readable in logs as who and which."""
        self._num_made += 1
        link_id = f"{receiver[0]}@{receiver[1]:x}/{self._tag}{self._num_made}"
        self._links[link_id] = _Link(receiver)
        self._current[receiver] = link_id
        return link_id

    def is_new_lease(self, receiver: tuple[str, int], lease_id: int) -> bool:
        """Whether no attempt writes under this lease id on the receiver's link."""
        link_id = self._current.get(receiver)
        return link_id is None or lease_id not in self._links[link_id].leases

    def attach(self, link_id: str, lease_id: int, key: AttemptKey) -> None:
        """This attempt's blocks travel there from now on."""
        self._links[link_id].leases[lease_id] = key

    def detach(self, link_id: str, lease_id: int) -> None:
        """The attempt needs the link no more."""
        if link_id in self._links:
            self._links[link_id].leases.pop(lease_id, None)

    def attempt(self, link_id: str, lease_id: int) -> AttemptKey | None:
        """Whose lease it is on this link."""
        link = self._links.get(link_id)
        return link.leases.get(lease_id) if link else None

    def note_read(self, link_id: str, now: float) -> None:
        """It has read some of what it was given."""
        if link_id in self._links:
            self._links[link_id].carried_at = now

    def note_landed(self, link_id: str, num_landed: int, now: float) -> None:
        """So many blocks of this node the receiver has now."""
        link = self._links.get(link_id)
        if link and link.num_landed != num_landed:
            link.num_landed, link.carried_at = num_landed, now

    def carried_at(self, link_id: str) -> float:
        """When it is known to have carried something last; -inf: never, or it is gone."""
        return self._links[link_id].carried_at if link_id in self._links else -inf

    def retire(self, link_id: str) -> None:
        """Give it to no new attempt: it is being closed."""
        link = self._links.get(link_id)
        if link and self._current.get(link.receiver) == link_id:
            del self._current[link.receiver]

    def lost(self, link_id: str) -> list[AttemptKey]:
        """Forget a closed link; the attempts that were using it."""
        self.retire(link_id)
        link = self._links.pop(link_id, None)
        return list(link.leases.values()) if link else []

    def __contains__(self, link_id: object) -> bool:
        return link_id in self._links

    def __len__(self) -> int:
        return len(self._links)
