"""The most characters that one token of a tokenizer stands for: so a text's length tells how many tokens it has at least.

A text that cannot fit is refused by it, before it is tokenized: that takes a hundred times its size of memory, and seconds (vLLM
has such a bound, too: max_chars_per_token). Where characters may vanish on their way into tokens, such as spaces that are stripped
or what the vocabulary lacks, there is none.
"""

from __future__ import annotations

import json
from math import prod
from typing import Any, Final

from tokenizers import Tokenizer, models, pre_tokenizers

_KEEPS_ALL: Final = frozenset({"Prepend", "NFD", "NFKD", "Lowercase", "ByteLevel"})  # normalizers that shorten nothing
_COMPOSES: Final = frozenset({"NFC", "NFKC"})
_MOST_COMPOSED: Final = 4  # characters that become one: a Greek letter with three marks
_CUTS: Final = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"})  # pre-tokenizers that drop nothing


def characters_of_longest_token(tokenizer: Tokenizer) -> int | None:
    """How many characters of a text a token stands for at most; None: there is no bound that this knows of."""
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None
    cutters = _parts(tokenizer.pre_tokenizer, "pretokenizers")
    if not _has_every_byte(tokenizer, cutters) or any(not _drops_nothing(each) for each in cutters):
        return None
    shrinking = [_shrinks(each) for each in _parts(tokenizer.normalizer, "normalizers")]
    longest = max(map(len, [*tokenizer.get_vocab(with_added_tokens=False), *(token.content for token in added)]))
    return None if 0 in shrinking else longest * prod(shrinking)


def _has_every_byte(tokenizer: Tokenizer, cutters: list[dict[str, Any]]) -> bool:
    """Whether no character is unknown, of which a run may become one token, or none."""
    model = tokenizer.model
    if not isinstance(model, models.BPE):
        return False
    if any(each["type"] == "ByteLevel" for each in cutters):
        return all(tokenizer.token_to_id(each) is not None for each in pre_tokenizers.ByteLevel.alphabet())
    return model.byte_fallback and all(tokenizer.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))


def _drops_nothing(cutter: dict[str, Any]) -> bool:
    return cutter["type"] in _CUTS or (cutter["type"] == "Split" and cutter["behavior"] != "Removed")


def _shrinks(normalizer: dict[str, Any]) -> int:
    """By how much at most; 0: nobody knows."""
    kind = normalizer["type"]
    if kind == "Replace":
        old, new = normalizer["pattern"].get("String"), normalizer["content"]
        return -(-len(old) // len(new)) if old and new else 0
    return 1 if kind in _KEEPS_ALL else _MOST_COMPOSED if kind in _COMPOSES else 0


def _parts(step: Any, key: str) -> list[dict[str, Any]]:
    """What a step of the tokenizer consists of, as its file spells it."""
    if step is None:
        return []
    found: dict[str, Any] = json.loads(step.__getstate__())
    return _flat(found, key)


def _flat(step: dict[str, Any], key: str) -> list[dict[str, Any]]:
    return [each for part in step[key] for each in _flat(part, key)] if step["type"] == "Sequence" else [step]
