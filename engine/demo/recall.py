"""Recall: codes of things, told among other sentences, asked for later. The answer is in the context and nowhere else.

What a KV cache is for: one byte of it in the wrong place, and another number comes out.
"""

from __future__ import annotations

from random import Random
from typing import Final

COLOURS: Final = (
    "red blue green yellow black white brown grey pink purple orange silver golden old new small large round narrow wooden"
).split()
THINGS: Final = "door box safe locker gate room drawer chest cabinet garage vault trunk".split()
_FILLERS: Final = (
    "It rained all morning.",
    "The cat slept on the stairs.",
    "Nobody had been there since spring.",
    "A clock was ticking in the hall.",
    "The train was late again.",
    "Somebody had left the light on.",
    "The garden was full of leaves.",
    "There was tea on the table.",
    "The street was quiet.",
    "Two birds sat on the roof.",
    "The window was open.",
    "A letter lay under the mat.",
)


class Codes:
    """The things of one conversation: no two of one name, so that each question has one answer."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._unused = [f"{colour} {thing}" for colour in COLOURS for thing in THINGS]
        rng.shuffle(self._unused)
        self._codes: dict[str, str] = {}

    @property
    def num_left(self) -> int:
        """Names that nobody has yet."""
        return len(self._unused)

    @property
    def names(self) -> list[str]:
        """Those that were told, in their order."""
        return list(self._codes)

    def tell(self, count: int) -> list[str]:
        """Sentences that give so many new things their codes."""
        sentences = []
        for _ in range(count):
            name = self._unused.pop()
            self._codes[name] = "".join(self._rng.choices("0123456789", k=4))
            sentences.append(f"The code of the {name} is {self._codes[name]}.")
        return sentences

    def ask(self, name: str) -> tuple[str, str]:
        """A question, and its answer."""
        return f"What is the code of the {name}?", f"The code of the {name} is {self._codes[name]}."


def page(rng: Random, codes: Codes, num_codes: int, num_fillers: int) -> str:
    """A text in which so many codes are told, and so many sentences say nothing."""
    sentences = codes.tell(num_codes) + rng.choices(_FILLERS, k=num_fillers)
    rng.shuffle(sentences)
    return " ".join(sentences)
