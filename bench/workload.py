"""What requests ask for, drawn from a seed: lengths, and prompts that share exactly what they shall share.

    a length's distribution, or a trace's entry --> Request: pieces of prompt, tokens of output --Prompts--> text

A piece is named, by a space and a number, and name and seed decide its tokens: pieces of one name are equal, those of two names of
one space differ within the first `width` tokens, where the name stands in digits, the last digit first (drawn tokens alone might
agree: an alphabet may have 256 letters). So the same seed gives the same prompts, and another one others. Pure.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Final, Literal

from bench.arrivals import Lengths
from bench.trace import Entry

PromptForm = Literal["token_ids", "words"]

FIRST_TOKEN: Final = 3  # below it are special tokens of most models
_CACHED_PIECES: Final = 16_384  # of 512 tokens: 30 MB
_WORDS: Final = (
    "a river stone under the old bridge and seven birds that never learned to sing before winter came home with "
    "green letters from harbour towns where nobody reads what is written on walls of empty stations at night"
).split()


class Space(IntEnum):
    """Whose numbers a piece's number is one of."""

    BLOCK = 0  # a trace's hash ids
    GROUP = 1  # prefixes that many requests share
    OWN = 2  # what no other request has
    WARMUP = 3


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of prompt; a shorter piece of the same name is the longer one's beginning."""

    space: Space
    number: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Request:
    """One request, before its text is made."""

    index: int
    at_s: float  # from the run's start
    pieces: tuple[Piece, ...]
    output_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """Of all its pieces."""
        return sum(piece.num_tokens for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class RandomLoad:
    """Lengths, and how much of each prompt it shares with others."""

    prompt: Lengths
    output: Lengths
    prefix_share: float = 0.0  # of each prompt's tokens
    prefix_groups: int = 1  # each request is of one of so many, and shares with those of its own

    def requests(self, rng: random.Random, offsets: Iterable[float]) -> Iterator[Request]:
        """One at each offset."""
        for index, at_s in enumerate(offsets):
            prompt, output = self.prompt.draw(rng), self.output.draw(rng)
            shared = min(round(prompt * self.prefix_share), prompt - 1)
            pieces = [Piece(Space.OWN, index, prompt - shared)]
            if shared:
                pieces.insert(0, Piece(Space.GROUP, rng.randrange(self.prefix_groups), shared))
            yield Request(index, at_s, tuple(pieces), output)


def replay(entries: Sequence[Entry], block_tokens: int) -> Iterator[Request]:
    """A trace's entries, scaled before, as requests; the first one's instant is the start.

    What a prompt is longer than its ids' blocks is its own; so are all but the ids that fit.
    """
    for index, entry in enumerate(entries):
        pieces: list[Piece] = []
        left = entry.prompt_tokens
        for hash_id in entry.hash_ids:
            if not left:
                break
            pieces.append(Piece(Space.BLOCK, hash_id, min(left, block_tokens)))
            left -= pieces[-1].num_tokens
        if left:
            pieces.append(Piece(Space.OWN, index, left))
        yield Request(index, entry.at_s - entries[0].at_s, tuple(pieces), entry.output_tokens)


def alphabet(form: PromptForm, vocab_size: int) -> tuple[str, ...]:
    """What prompts are drawn from: token ids below a bound, or words of about a token each."""
    return tuple(dict.fromkeys(_WORDS)) if form == "words" else tuple(map(str, range(FIRST_TOKEN, vocab_size)))


def num_digits(number: int, base: int) -> int:
    """Digits that numbers up to this one need; 1 at least."""
    digits = 1
    while number >= base:
        number //= base
        digits += 1
    return digits


def width_of(entries: Sequence[Entry], base: int) -> int:
    """Digits that tell apart every hash id of a trace, and every request of it."""
    return num_digits(max((len(entries), *(max(entry.hash_ids, default=0) for entry in entries))), base)


class Prompts:
    """Makes the text of pieces; of a form, an alphabet and a seed."""

    def __init__(self, seed: str, form: PromptForm, letters: Sequence[str], width: int) -> None:
        """`width`: digits that every piece's name gets, in its first tokens."""
        self._seed = seed
        self._form = form
        self._width = width
        self._separator = "," if form == "token_ids" else " "
        self._letters = {space: _shuffled(letters, f"{seed}/{space}") for space in Space}
        self._text = lru_cache(_CACHED_PIECES)(self._drawn)

    def json(self, pieces: Iterable[Piece]) -> str:
        """The prompt as JSON: a list of token ids, or a text."""
        text = self._separator.join(map(self._text, pieces))
        return f"[{text}]" if self._form == "token_ids" else f'"{text}"'

    def _drawn(self, piece: Piece) -> str:
        letters, number = self._letters[piece.space], piece.number
        name = []
        for _ in range(self._width):
            number, digit = divmod(number, len(letters))
            name.append(letters[digit])
        rng = random.Random(f"{self._seed}/{piece.space}/{piece.number}")
        drawn = name + rng.choices(letters, k=max(piece.num_tokens - self._width, 0))
        return self._separator.join(drawn[: piece.num_tokens])


def _shuffled(letters: Sequence[str], seed: str) -> tuple[str, ...]:
    return tuple(random.Random(seed).sample(letters, len(letters)))
