"""Bugs of who may go on with what was begun, and of what no node that is left can hold."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_QUEUE: Final = ("tests/router/test_core_queue.py",)
_HEIRS: Final = ("tests/router/test_core_heirs.py",)

MUTANTS: Final = (
    Mutant(
        "another-author",
        "While nodes get a new model, a stream whose node dies is gone on with by that.",
        "router/waiting.py",
        "        if branch.author is not None:\n",
        "        if False:\n",
        _HEIRS,
    ),
    Mutant(
        "another-back-end",
        "A stream goes on at nodes of another back end though some of its own are there.",
        "router/waiting.py",
        "                able = same\n",
        "                pass\n",
        _HEIRS,
    ),
    Mutant(
        "author-of-the-last-try",
        "A retry that nobody has begun yet makes its nodes the author of what others said.",
        "router/core.py",
        "            if branch.author is None:\n",
        "            if True:\n",
        _HEIRS,
    ),
    Mutant(
        "no-heirs-no-end",
        "A stream whose model is served no more waits for its deadline.",
        "router/waiting.py",
        "            self.orphans.append(branch)\n",
        "            pass\n",
        _HEIRS,
    ),
    Mutant(
        "heirs-came-too-late",
        "The grace of a stream goes on though nodes of its model have come back.",
        "router/waiting.py",
        "        if is_large_enough or waits_on:\n            branch.gives_up_at = None\n",
        "        if is_large_enough or waits_on:\n            pass\n",
        _HEIRS,
    ),
    Mutant(
        "heirs-given-up-where-nobody-is",
        "A grace that another model's nodes began goes on though they have gone as well.",
        "router/waiting.py",
        "            branch.gives_up_at = None\n            return able\n",
        "            return able\n",
        _HEIRS,
    ),
    Mutant(
        "too-long-as-soon-as-the-longest-has-gone",
        "What only a node could hold that has gone a moment ago is answered as longer than nodes are.",
        "router/entrance.py",
        "        elif now - self.less_since > LONGEST_KEPT_S:\n",
        "        else:\n",
        _QUEUE,
    ),
    Mutant(
        "too-long-waits-for-its-deadline",
        "What no node that is left can hold waits for as long as its client does.",
        "router/waiting.py",
        "waits_on = branch.author is not None and longest is not None",
        "waits_on = longest is not None",
        _QUEUE,
    ),
)
