"""Bugs in the change of a node's role."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_CHANGE: Final = ("tests/node/test_role_change.py",)

MUTANTS: Final[tuple[Mutant, ...]] = (
    Mutant(
        "role-wins-over-an-end",
        "A node that is told to end while it changes its role goes on in the new one.",
        "node/drain.py",
        "        self.next_role = None\n        if timeout_s <= 0",
        "        if timeout_s <= 0",
        _CHANGE,
    ),
    Mutant(
        "end-waits-for-the-switch",
        "A node that is told to end between two roles takes the next one up.",
        "node/drain.py",
        "if timeout_s <= 0 or self.stage is Stage.SWITCHING:",
        "if timeout_s <= 0:",
        _CHANGE,
    ),
    Mutant(
        "role-beside-a-drain",
        "A node that is to end begins to change its role instead.",
        "node/drain.py",
        "        if self.stage is not Stage.SERVING:\n            return Answer.ENDS if",
        "        if self.next_role is not None:\n            return Answer.ENDS if",
        _CHANGE,
    ),
    Mutant(
        "role-goes-on-with-what-is-left",
        "A node whose core never drains takes the next role with blocks that somebody may write into.",
        "node/drain.py",
        "if self.next_role is not None and not has_drained:",
        "if False:",
        _CHANGE,
    ),
    Mutant(
        "role-keeps-the-old-deadline",
        "The drain behind a change of role ends at the deadline of the change.",
        "node/drain.py",
        'self.stage, self.deadline = Stage.SERVING, float("inf")',
        "self.stage = Stage.SERVING",
        _CHANGE,
    ),
    Mutant(
        "role-looks-at-the-core-alone",
        "A role begins while a fetch out of the KV pool still writes into its blocks.",
        "node/ending.py",
        "if has_drained and self._drain.next_role is not None:",
        "if False:",
        _CHANGE,
    ),
    Mutant(
        "role-watched-for-ever",
        "Who asked for a change of role hears nothing once the node serves in it.",
        "node/ending.py",
        "return self._watch(last_word, self._over, changed)",
        "return self._watch(last_word, self._over)",
        _CHANGE,
    ),
)
