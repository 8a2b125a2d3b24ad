"""The demo model's tokenizer: byte-level BPE learned from its own text, each digit a token, so that numbers can be copied.

Not here: the text (talk.py). The layout is the one of every model that Baton makes (engine/byte_tokenizer.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from engine.byte_tokenizer import SPECIAL_TOKENS
from engine.demo.talk import Turn

VOCAB_SIZE: Final = 1536
BEGIN, END, MESSAGE_START, MESSAGE_END = range(4)  # the trainer gives special tokens the first ids
NOT_LEARNED: Final = -100  # torch's cross_entropy leaves such targets out


def learn_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Merges of what is frequent in `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    begin = SPECIAL_TOKENS[BEGIN]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, BEGIN)]
    )
    return tokenizer


def conversation_ids(tokenizer: Tokenizer, turns: Sequence[Turn]) -> tuple[list[int], list[int]]:
    """Tokens as the chat template lays them out, and the target of each: the next token where that is the assistant's."""
    parts = [([BEGIN], False)]
    for turn in turns:
        parts.append((_ids(tokenizer, f"<|im_start|>user\n{turn.asked}<|im_end|>\n<|im_start|>assistant\n"), False))
        parts.append((_ids(tokenizer, f"{turn.answer}<|im_end|>"), True))
        parts.append((_ids(tokenizer, "\n"), False))
    return _with_targets(parts)


def text_ids(tokenizer: Tokenizer, texts: Iterable[str]) -> tuple[list[int], list[int]]:
    """Plain texts, each from its beginning to its end, all of it learned."""
    parts: list[tuple[list[int], bool]] = []
    for text in texts:
        parts += [([BEGIN], False), ([*_ids(tokenizer, text), END], True)]
    return _with_targets(parts)


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _with_targets(parts: list[tuple[list[int], bool]]) -> tuple[list[int], list[int]]:
    ids = [token for tokens, _ in parts for token in tokens]
    said = [token if is_learned else NOT_LEARNED for tokens, is_learned in parts for token in tokens]
    return ids[:-1], said[1:]
