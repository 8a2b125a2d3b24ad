"""Held-out questions of every kind, and how many of them a network answers without one wrong token.

Greedy decoding gives the right answer exactly if the likeliest token is the right one at every position of that answer: one pass
over question and answer tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from types import MappingProxyType
from typing import Final

import torch
from tokenizers import Tokenizer

from engine.demo.network import Network
from engine.demo.split import Part
from engine.demo.talk import Kind, Turn, puzzle, question, recall
from engine.demo.vocabulary import conversation_ids

_TOKENS_A_CODE: Final = 16  # that a sentence with a code takes, and one that says nothing half of that


def recalls(rng: Random, num_tokens: int) -> Turn:
    """One question behind about so many tokens, a third of them without any code."""
    num_codes = max(1, 2 * num_tokens // (3 * _TOKENS_A_CODE))
    return recall(rng, num_codes, max(0, num_tokens // 3 // (_TOKENS_A_CODE // 2)))


def _puzzles(kind: Kind) -> Callable[[Random], Turn]:
    return lambda rng: puzzle(rng, kind, Part.HELD_OUT)


def _recalls_of(num_tokens: int) -> Callable[[Random], Turn]:
    return lambda rng: recalls(rng, num_tokens)


EXAMS: Final = MappingProxyType(
    {
        "recall, 128 tokens": _recalls_of(128),
        "recall, 512 tokens": _recalls_of(512),
        "recall, 1,000 tokens": _recalls_of(1000),
        "questions": lambda rng: question(rng, Part.HELD_OUT),
        "copying": _puzzles(Kind.COPY),
        "sorting": _puzzles(Kind.SORT),
        "arithmetic": _puzzles(Kind.ARITHMETIC),
    }
)


def draw_exam(name: str, count: int, seed: int) -> Iterator[Turn]:
    """The same questions for the same arguments."""
    rng = Random(f"{name} {seed}")
    for _ in range(count):
        yield EXAMS[name](rng)


@torch.no_grad()
def share_right(network: Network, tokenizer: Tokenizer, turns: Iterator[Turn]) -> float:
    """Of the turns, each a conversation of its own."""
    right = []
    for turn in turns:
        ids, targets = (torch.tensor([each]) for each in conversation_ids(tokenizer, [turn]))
        said = network.logits(ids, targets >= 0).argmax(-1)
        right.append(torch.equal(said, targets[targets >= 0]))
    return sum(right) / len(right)
