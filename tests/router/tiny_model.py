"""A model directory's text side, small enough to read: bytes as tokens, a few merges, special tokens, a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

BOS_ID: Final = 256
EOS_ID: Final = 257
TURN_ID: Final = 258  # the second stop token: ends a turn
VOCAB_SIZE: Final = 320  # larger than the tokenizer's: ids that no token has
SPECIAL_TOKENS: Final = ("<s>", "</s>", "<turn>")

CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ message['role'] }}: {{ message['content'] }}<turn>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if tone %}({{ tone }}) {% endif %}{% endif %}"
)


def byte_level_tokenizer() -> Tokenizer:
    """Token id = byte value for 0 to 255; a few ids above are merges of ASCII and of two thirds of an emoji."""
    alphabet = _byte_alphabet()
    vocabulary = {character: byte for byte, character in enumerate(alphabet)}
    for position, token in enumerate(SPECIAL_TOKENS):
        vocabulary[token] = 256 + position
    merges = [(alphabet[ord("t")], alphabet[ord("h")]), (alphabet[0xF0], alphabet[0x9F])]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS_ID)])
    return tokenizer


def write_model_text(directory: Path) -> Path:
    """Write what the router reads of a model directory."""
    directory.mkdir(parents=True, exist_ok=True)
    byte_level_tokenizer().save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE, "eos_token_id": EOS_ID}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS_ID, TURN_ID]}))
    return directory


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte, by byte value."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_ins = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(256)]
