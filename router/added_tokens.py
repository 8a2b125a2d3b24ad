"""What a directory's other files say of added tokens: tokenizer.json is not all that transformers reads of them.

Tokens that are cut out of a text before anything else, and what blanks beside them go with them, change a prompt's ids. Where
`tokenizer_config.json` tells them by id, it is the last word; before transformers 4.34 `special_tokens_map.json` named the special
ones and `added_tokens.json` had the ids of those that were added. Not here: what is special in a chat template (text.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

_MOST_DIGITS: Final = 10
_FLAGS: Final = frozenset({"single_word", "lstrip", "rstrip", "normalized", "special"})


class WrongTokens(ValueError):
    """The files contradict each other, or one of them holds something else; the message says what."""


def add_told_tokens(tokenizer: Tokenizer, settings: Mapping[str, Any], ids: Mapping[str, Any], vocab_size: int) -> None:
    """Let the tokenizer cut texts as the settings of tokenizer_config.json, and added_tokens.json's `ids`, have it.

    Ids from `vocab_size` on, such as that of a padding token, are none of the model's: they stay text. Raises WrongTokens.
    """
    told, own_tokens = settings.get("added_tokens_decoder"), tokenizer.get_added_tokens_decoder()
    if told is None:
        own = {token.content for token in own_tokens.values()}
        told = {str(token_id): {"content": content} for content, token_id in ids.items() if content not in own}
    told_tokens, new_tokens = [], []
    for token_id, token in sorted(_tokens(told), key=lambda each: each[0]):
        found = tokenizer.token_to_id(token.content)
        if found is None and token_id < vocab_size:  # gets the next id
            new_tokens.append((token_id, token))
        elif found == token_id and repr(own_tokens.get(token_id)) != repr(token):  # of two ids tokenizer.json's counts
            told_tokens.append(token)
    tokenizer.add_tokens([*told_tokens, *(token for _, token in new_tokens)])  # once: each time all are sorted anew
    for token_id, token in new_tokens:
        if (found := tokenizer.token_to_id(token.content)) != token_id:
            raise WrongTokens(
                f"token {token.content!r} is to be {token_id}, and would be {found} behind those of tokenizer.json"
            )


def _tokens(told: object) -> Iterator[tuple[int, AddedToken]]:
    if not isinstance(told, dict):
        raise WrongTokens("added_tokens_decoder is not an object of tokens by id")
    for key, each in told.items():
        flags = {name: each[name] for name in _FLAGS & each.keys()} if isinstance(each, dict) else {}
        content = each.get("content") if isinstance(each, dict) else None
        is_id = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= _MOST_DIGITS
        if not is_id or not isinstance(content, str) or not all(isinstance(flag, bool) for flag in flags.values()):
            raise WrongTokens(f"added token {key!r} is not an id with its content and flags")
        yield int(key), AddedToken(content, **flags)
