"""Prompts that share beginnings: chats that grow turn by turn, and a real service's requests with their lengths scaled down. Pure.

What an assistant said is drawn, and not what the model says: prompts are then the same whatever serves them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.trace import TRACE_BLOCK, Scaling, read_trace, scaled
from bench.workload import FIRST_TOKEN, Prompts, alphabet, replay, width_of


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    at_s: float  # from the start
    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Chats:
    """Conversations that take turns; each turn's prompt is all that was said before, and something new."""

    talks: int
    turns: int
    system_tokens: int  # the same in all of them
    turn_tokens: int  # on average, the assistant's included
    output_tokens: int
    rate: float  # turns per second, over all of them


def chat_asks(chats: Chats, vocab_size: int, seed: int) -> list[Ask]:
    """Every turn, in the order of arrival: of each conversation in order, a turn at random among those that have any left."""
    rng = random.Random(seed)
    system = _drawn(rng, chats.system_tokens, vocab_size)
    said = [system for _ in range(chats.talks)]
    left = [chats.turns] * chats.talks
    asks: list[Ask] = []
    at_s = 0.0
    while open_talks := [index for index, number in enumerate(left) if number]:
        talk = rng.choice(open_talks)
        left[talk] -= 1
        said[talk] += _drawn(rng, rng.randint(chats.turn_tokens // 2, 3 * chats.turn_tokens // 2), vocab_size)
        at_s += rng.expovariate(chats.rate)
        asks.append(Ask(at_s, said[talk], chats.output_tokens))
    return asks


def trace_asks(lines: Iterable[str], scale: int, speed: float, max_prompt: int, vocab_size: int) -> list[Ask]:
    """Requests of a trace in Mooncake's format (FAST'25): timestamp in ms, input_length, output_length, hash_ids.

    Lengths are divided by `scale`, times by `speed`, longer prompts cut to `max_prompt`. Equal hash ids become equal
    tokens. ValueError: a line is not of that format.
    """
    block = TRACE_BLOCK // scale
    entries = scaled(read_trace(lines), Scaling(block, 1 / scale, speed, max_prompt))
    letters = alphabet("token_ids", vocab_size)
    prompts = Prompts("trace", "token_ids", letters, width_of(entries, len(letters)))
    return [
        Ask(each.at_s, tuple(json.loads(prompts.json(each.pieces))), each.output_tokens)
        for each in replay(entries, block)
    ]


def fresh_tokens(asks: Sequence[Ask], block_size: int) -> int:
    """Tokens that somebody must compute: what a cache of all that was ever computed would leave."""
    seen: set[int] = set()
    number = 0
    for ask in asks:
        key, is_known, num_known = 0, True, 0
        for start in range(0, len(ask.prompt) - block_size + 1, block_size):
            key = hash((key, ask.prompt[start : start + block_size]))
            is_known &= key in seen
            num_known += block_size * is_known
            seen.add(key)
        number += len(ask.prompt) - min(num_known, (len(ask.prompt) - 1) // block_size * block_size)
    return number


def _drawn(rng: random.Random, number: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.randrange(FIRST_TOKEN, vocab_size) for _ in range(number))
