"""A mutant: one realistic bug, as an exact change of one place of the code, and the tests that must notice it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """`make mutants` plants it in a copy of the tree; at least one of `killed_by` must then fail."""

    name: str
    bug: str  # one sentence
    path: str  # of the changed file, from the root
    old: str  # occurs there exactly once
    new: str
    killed_by: tuple[str, ...]  # test files, or ids of single tests

    def planted_in(self, text: str) -> str:
        """The file's text with the bug. Raises ValueError where the place is not there, or not the only one."""
        if (num_places := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.path} has {num_places} places to change, not one")
        return text.replace(self.old, self.new)
