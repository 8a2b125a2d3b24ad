"""The list of mutants does not rot: each still has its one place in the code, a name of its own, and tests that exist."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest

from tests.architecture.source_tree import ROOMS, ROOT
from tests.mutants.listed import ALL
from tests.mutants.mutant import Mutant
from tests.mutants.planting import Verdict, plant

MIN_MUTANTS = 30


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place_of_the_product_and_names_tests_that_exist(mutant: Mutant) -> None:
    text = (ROOT / mutant.path).read_text(encoding="utf-8")
    assert mutant.planted_in(text) != text
    if mutant.path.endswith(".py"):
        ast.parse(mutant.planted_in(text), mutant.path)
    assert mutant.path.split("/")[0] in ROOMS
    assert mutant.bug.endswith(".") and "\n" not in mutant.bug
    assert mutant.killed_by and all((ROOT / killer.partition("::")[0]).is_file() for killer in mutant.killed_by)


def test_names_and_bugs_are_told_apart_and_there_are_enough() -> None:
    assert len(ALL) >= MIN_MUTANTS
    assert len({mutant.name for mutant in ALL}) == len({mutant.bug for mutant in ALL}) == len(ALL)
    assert len({(mutant.path, mutant.old, mutant.new) for mutant in ALL}) == len(ALL)


def test_a_change_that_has_no_place_or_several_is_refused() -> None:
    mutant = Mutant("name", "Bug.", "a.py", "old", "new", ())
    assert mutant.planted_in("an old text") == "an new text"
    for text in ("nothing", "old and old"):
        with pytest.raises(ValueError, match=f"{text.count('old')} places"):
            mutant.planted_in(text)


def test_a_planted_bug_is_noticed_by_its_tests_and_by_no_others_and_the_tree_stays_as_it_is() -> None:
    known = next(mutant for mutant in ALL if mutant.name == "log-takes-a-gap")
    text = (ROOT / known.path).read_text(encoding="utf-8")
    killed, survived, unclear = (
        plant(replace(known, killed_by=(killer,)))
        for killer in (*known.killed_by, "tests/router/test_keyed_heap.py", "tests/router/test_of_nothing.py")
    )
    assert (killed.verdict, survived.verdict, unclear.verdict) == (Verdict.KILLED, Verdict.SURVIVED, Verdict.UNCLEAR)
    assert killed.detail.startswith("tests/router/test_token_log.py::")
    assert (ROOT / known.path).read_text(encoding="utf-8") == text
