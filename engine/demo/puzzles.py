"""Copying, sorting, and arithmetic on small numbers: one question, one right answer."""

from __future__ import annotations

from random import Random
from typing import Final

from engine.demo.recall import COLOURS, THINGS
from engine.demo.split import Part, part_of

_WORDS: Final = (
    *COLOURS,
    *THINGS,
    *"apple river stone cloud paper winter summer music garden bread window horse ship candle forest letter".split(),
)
_MOST_WORDS, _MOST_NUMBERS = 12, 8
_LARGEST_TERM, _LARGEST_FACTOR = 20, 10


def copying(rng: Random, part: Part) -> tuple[str, str]:
    """Words, to be said again."""
    while True:
        words = " ".join(rng.choices(_WORDS, k=rng.randint(2, _MOST_WORDS)))
        if part_of("copy", words) is part:
            return rng.choice(("Repeat: {}", "Say this again: {}", "Copy these words: {}")).format(words), words


def sorting(rng: Random, part: Part) -> tuple[str, str]:
    """Numbers below a hundred, to be put in order."""
    while True:
        numbers = rng.sample(range(100), rng.randint(3, _MOST_NUMBERS))
        shown = ", ".join(map(str, numbers))
        if part_of("sort", shown) is part:
            ask = rng.choice(("Sort these numbers: {}", "Put these numbers in order: {}", "Sort: {}"))
            return ask.format(shown), ", ".join(map(str, sorted(numbers)))


def arithmetic(rng: Random, part: Part) -> tuple[str, str]:
    """A sum or a difference of numbers up to twenty, or a product of numbers up to ten."""
    while True:
        sign = rng.choice("+-*")
        most = _LARGEST_FACTOR if sign == "*" else _LARGEST_TERM
        left, right = rng.randint(0, most), rng.randint(0, most)
        if sign == "-" and left < right:
            left, right = right, left
        if part_of(left, sign, right) is part:
            result = {"+": left + right, "-": left - right, "*": left * right}[sign]
            ask = rng.choice(("What is {} {} {}?", "{} {} {} =", "Compute {} {} {}."))
            return ask.format(left, sign, right), f"{left} {sign} {right} = {result}"
