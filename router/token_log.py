"""The token log: the completion tokens that the router has accepted for one branch, by index.

It is the truth about a branch. Two nodes report the same tokens (the sender samples the first one, the receiver repeats it),
attempts start again from the log, and none of the sessions is ordered against another; so tokens are placed by index and
never by arrival: what is known already is dropped, what would leave a hole is refused, and what contradicts the log is a bug
of a node that must not reach the client. Not here: text, finish reasons, retries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Appended(NamedTuple):
    """What was new: `token_ids` begin at `first_index`. Empty for a pure repeat."""

    first_index: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Gap:
    """Refused: tokens between the log's end and the batch's start never arrived."""

    expected_index: int
    first_index: int

    def __str__(self) -> str:
        return f"tokens from index {self.first_index} arrived where index {self.expected_index} was due"


@dataclass(frozen=True, slots=True)
class Differs:
    """Refused: the log holds another token at this index."""

    index: int
    known_token_id: int
    token_id: int

    def __str__(self) -> str:
        return f"token {self.index} was reported as {self.known_token_id} and as {self.token_id}"


@dataclass(frozen=True, slots=True)
class TooLong:
    """Refused: more tokens than the branch may have."""

    max_tokens: int

    def __str__(self) -> str:
        return f"more than max_tokens = {self.max_tokens} tokens arrived"


class TokenLog:
    """Append-only list of at most `max_tokens` completion token ids; a refused append changes nothing."""

    __slots__ = ("_max_tokens", "_token_ids")

    def __init__(self, max_tokens: int, token_ids: Sequence[int] = ()) -> None:
        """`token_ids` are there from the start."""
        self._max_tokens = max_tokens
        self._token_ids = list(token_ids)

    def __len__(self) -> int:
        return len(self._token_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens so far; a copy."""
        return tuple(self._token_ids)

    @property
    def last_token_id(self) -> int | None:
        """The newest token, or None before the first."""
        return self._token_ids[-1] if self._token_ids else None

    def append(self, first_index: int, token_ids: Sequence[int]) -> Appended | Gap | Differs | TooLong:
        """Place `token_ids` at `first_index`; cost grows with the batch, not with the log."""
        length = len(self._token_ids)
        if first_index == length and length + len(token_ids) <= self._max_tokens:  # nearly always
            fresh = tuple(token_ids)
            self._token_ids += fresh
            return Appended(length, fresh)
        if first_index > length:
            return Gap(length, first_index)
        num_known = min(length - first_index, len(token_ids))
        for offset in range(num_known):
            known = self._token_ids[first_index + offset]
            if token_ids[offset] != known:
                return Differs(first_index + offset, known, token_ids[offset])
        if first_index + len(token_ids) > self._max_tokens:
            return TooLong(self._max_tokens)
        fresh = tuple(token_ids[num_known:])
        self._token_ids.extend(fresh)
        return Appended(length, fresh)
