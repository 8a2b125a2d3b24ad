"""The tokenizer of a random model: every byte is a token, so every text has one, and the rest of the vocabulary is made-up words.

Prompts are encoded byte by byte; the words are only ever generated. Not here: sizes and weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

NUM_BYTES: Final = 256
BEGIN_OF_TEXT, END_OF_TEXT, MESSAGE_START, MESSAGE_END = range(NUM_BYTES, NUM_BYTES + 4)
SPECIAL_TOKENS: Final = ("<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>")
LEAST_VOCAB_SIZE: Final = NUM_BYTES + len(SPECIAL_TOKENS)
READABLE_IDS: Final = range(32, 127)  # bytes of printable ASCII
CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_SYLLABLES: Final = tuple(consonant + vowel for consonant in "bdfghjklmnprstvz" for vowel in "aeiou")


def write_tokenizer(vocab_size: int, max_length: int, out: Path) -> None:
    """Write tokenizer.json and its companions: a byte-level BPE without merges, token id = byte value, then words."""
    vocab = {_printable(byte): byte for byte in range(NUM_BYTES)}
    vocab |= {token: NUM_BYTES + index for index, token in enumerate(SPECIAL_TOKENS)}
    vocab |= {_printable(ord(" ")) + _word(index): LEAST_VOCAB_SIZE + index for index in range(vocab_size - len(vocab))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    begin = SPECIAL_TOKENS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, BEGIN_OF_TEXT)]
    )
    write_tokenizer_files(tokenizer, max_length, out)


def write_tokenizer_files(tokenizer: Tokenizer, max_length: int, out: Path) -> None:
    """Write tokenizer.json and what says how it is used: SPECIAL_TOKENS, CHAT_TEMPLATE, the most tokens of a sequence."""
    tokenizer.save(str(out / "tokenizer.json"))
    named = {"bos_token": SPECIAL_TOKENS[0], "eos_token": SPECIAL_TOKENS[1]}
    write_json(out / "special_tokens_map.json", named)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(out / "tokenizer_config.json", named | settings)


def write_json(path: Path, value: object) -> None:
    """Write as Hugging Face does: indented, with a newline at the end."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def _word(index: int) -> str:
    """The index-th of all words, the shorter first."""
    num_syllables, base = 1, len(_SYLLABLES)
    while index >= base**num_syllables:
        index -= base**num_syllables
        num_syllables += 1
    return "".join(_SYLLABLES[index // base**place % base] for place in reversed(range(num_syllables)))


def _printable(byte: int) -> str:
    """The character that byte-level tokenizers (GPT-2's table) write for a byte: itself, or the next free from U+0100 on."""
    if _is_plain(byte):
        return chr(byte)
    return chr(0x100 + sum(not _is_plain(other) for other in range(byte)))


def _is_plain(byte: int) -> bool:
    return 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF
