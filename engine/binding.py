"""What the runner asks of a grammar, wherever it is followed: in this process (grammars.py), or in one of its own. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.plan import BARRED_ROW, BROKEN_ROW, STALLED_ROW, Grammar


class Binding(Protocol):
    """What one completion may go on with."""

    @property
    def is_stalled(self) -> bool:
        """Whether nothing may follow because finding out took too long: the grammar's doing, so that it would everywhere."""

    def allowed(self) -> NDArray[np.bool_] | None:
        """What may come next, [vocab_size]; None: anything. May wait, for a bounded time. Where nothing may, see end_of_row."""

    def add(self, token_id: int) -> None:
        """The completion's next token. Does not wait."""

    def close(self) -> None:
        """Nobody asks any more."""


class Binder(Protocol):
    """Follows grammars."""

    def constraint(self, grammar: Grammar, generated_token_ids: Iterable[int] = ()) -> Binding:
        """What a completion that begins with these tokens may go on with."""


class Nothing:
    """A row of a grammar that is refused, or cannot be had now."""

    def __init__(self, is_stalled: bool, vocab_size: int) -> None:
        self.is_stalled = is_stalled
        self._vocab_size = vocab_size

    def allowed(self) -> NDArray[np.bool_] | None:
        """See Binding."""
        return np.zeros(self._vocab_size, np.bool_)

    def add(self, token_id: int) -> None:
        """See Binding."""

    def close(self) -> None:
        """See Binding."""


def end_of_row(binding: Binding, allowed: NDArray[np.bool_] | None) -> int:
    """What a row of a grammar that let no token be drawn answers: whose doing it was. Only broken KV is forgotten."""
    if binding.is_stalled:
        return STALLED_ROW
    return BROKEN_ROW if allowed is None or allowed.any() else BARRED_ROW
