"""Conversations and texts that the demo model learns from, and the questions that it is asked when it is measured.

A conversation goes through exercises of all kinds until it is long enough; what one turn told may be asked for many turns later.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Final

from engine.demo import puzzles, stories
from engine.demo.facts import FACTS, WORDINGS, Fact
from engine.demo.recall import Codes, page
from engine.demo.split import Part, part_of


class Kind(StrEnum):
    """Of exercises."""

    RECALL = "recall"
    QUESTION = "questions"
    COPY = "copying"
    SORT = "sorting"
    ARITHMETIC = "arithmetic"
    STORY = "stories"


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user says, and the answer."""

    kind: Kind
    asked: str
    answer: str


_PUZZLES: Final = {Kind.COPY: puzzles.copying, Kind.SORT: puzzles.sorting, Kind.ARITHMETIC: puzzles.arithmetic}
_FRAMES: Final = (
    "{}",
    "Please: {}",
    "One question: {}",
    "Tell me: {}",
    "I want to know: {}",
    "{} Please answer.",
    "Quick question: {}",
    "{} In one sentence.",
)
_NOTED: Final = "Noted."
_CHARACTERS_A_CODE: Final = 150  # of a conversation, at least: what is told fills no more than half of it


def wordings(fact: Fact) -> list[str]:
    """All ways to ask for a fact."""
    about = [each.format(thing) for thing in fact.about for each in WORDINGS]
    return about + [frame.format(each) for each in fact.asked for frame in _FRAMES]


def question(rng: Random, part: Part) -> Turn:
    """One of the facts is asked for, in a wording that was learned with it, or in one that was not."""
    while True:
        fact = rng.choice(FACTS)
        asked = [each for each in wordings(fact) if part_of("question", each) is part]
        if asked:
            return Turn(Kind.QUESTION, rng.choice(asked), fact.answer)


def recall(rng: Random, num_codes: int, num_fillers: int) -> Turn:
    """A text with codes, then the question for one of them."""
    codes = Codes(rng)
    text = page(rng, codes, num_codes, num_fillers)
    asked, answer = codes.ask(rng.choice(codes.names))
    return Turn(Kind.RECALL, f"{text} {asked}", answer)


def puzzle(rng: Random, kind: Kind, part: Part) -> Turn:
    """One of the kinds that have exactly one right answer and need no knowledge."""
    return Turn(kind, *_PUZZLES[kind](rng, part))


def conversation(rng: Random, num_characters: int, codes_share: float = 1 / 2) -> list[Turn]:
    """At least so many characters of turns of all kinds, all of them learned; in a share of conversations half are recall."""
    codes, turns, length = Codes(rng), list[Turn](), 0
    has_many_codes = rng.random() < codes_share
    while length < num_characters:
        turn = _turn(rng, codes, has_many_codes, max(2, num_characters // _CHARACTERS_A_CODE))
        turns.append(turn)
        length += len(turn.asked) + len(turn.answer)
    return turns


def _turn(rng: Random, codes: Codes, has_many_codes: bool, most_codes: int) -> Turn:
    kinds = (Kind.RECALL, Kind.QUESTION, Kind.COPY, Kind.SORT, Kind.ARITHMETIC, Kind.STORY)
    kind = rng.choices(kinds, weights=(12 if has_many_codes else 2, 5, 2, 2, 3, 1))[0]
    if kind is Kind.QUESTION:
        return question(rng, Part.LEARNED)
    if kind is Kind.STORY:
        return Turn(kind, *stories.request(rng))
    if kind is not Kind.RECALL:
        return puzzle(rng, kind, Part.LEARNED)
    return _recall(rng, codes, most_codes)


def _recall(rng: Random, codes: Codes, most_codes: int) -> Turn:
    """Codes are told, to be asked for at once or later; or one told before is asked for."""
    num_codes = rng.randint(1, min(most_codes, rng.choice((4, 12, 48))))
    if codes.names and (num_codes > codes.num_left or rng.random() < 2 / 3):
        return Turn(Kind.RECALL, *codes.ask(rng.choice(codes.names)))
    text = page(rng, codes, num_codes, rng.randint(0, num_codes))
    if rng.random() < 1 / 4:
        return Turn(Kind.RECALL, f"{text} Remember that.", _NOTED)
    asked, answer = codes.ask(rng.choice(codes.names))
    return Turn(Kind.RECALL, f"{text} {asked}", answer)
