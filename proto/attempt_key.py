"""The fence of everything on the wire: which attempt of which branch a message belongs to."""

from __future__ import annotations

from typing import NamedTuple

from proto import baton_pb2 as pb


class BranchKey(NamedTuple):
    """One of the `n` choices of a request."""

    request_id: str
    choice: int


class AttemptKey(NamedTuple):
    """One try at running a branch; hashable form of the message `baton.AttemptKey`."""

    request_id: str
    choice: int
    attempt: int

    @property
    def branch(self) -> BranchKey:
        """The branch that this attempt runs."""
        return BranchKey(self.request_id, self.choice)

    def to_proto(self) -> pb.AttemptKey:
        """The message form."""
        return pb.AttemptKey(request_id=self.request_id, choice=self.choice, attempt=self.attempt)


def attempt_key(message: pb.AttemptKey) -> AttemptKey:
    """The hashable form of a received key."""
    return AttemptKey(message.request_id, message.choice, message.attempt)


def attempt_keys(request: pb.ReserveRequest | pb.ReleaseRequest) -> tuple[AttemptKey, ...]:
    """The attempt of each branch that is meant; the first is what the handoff goes by."""
    lead = attempt_key(request.key)
    return (lead, *(lead._replace(choice=choice) for choice in request.more_choices))
