"""What a directory's other files say of added tokens: tokenizer.json is not all that transformers reads of them.

Tokens that are cut out of a text before anything else, and what blanks beside them go with them, change a prompt's ids. Where
`tokenizer_config.json` tells them by id, it is the last word; before transformers 4.34 `special_tokens_map.json` named the special
ones and `added_tokens.json` had the ids of those that were added. What is only named, as the token that a text begins with may be,
is added like any. Not here: what is special in a chat template (text.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

# In this order those that the vocabulary lacks get their ids.
_NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FURTHER: Final = ("extra_special_tokens", "additional_special_tokens")  # the second before transformers 5
_MOST_DIGITS: Final = 10
_FIELDS: Final = frozenset({"content", "single_word", "lstrip", "rstrip", "normalized", "special"})


class WrongTokens(ValueError):
    """The files contradict each other, or one of them holds something else; the message says what."""


def with_map(settings: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of tokenizer_config.json with those of special_tokens_map.json, which count but where the former have a list."""
    return {**settings, **told, **{key: settings[key] for key in _FURTHER if settings.get(key)}}


def add_told_tokens(tokenizer: Tokenizer, settings: Mapping[str, Any], ids: Mapping[str, Any], vocab_size: int) -> None:
    """Let the tokenizer cut texts as the settings of tokenizer_config.json, and added_tokens.json's `ids`, have it.

    Ids from `vocab_size` on, such as that of a padding token, are none of the model's: they stay text. A token that is only named
    has the id that the vocabulary gives it, else the next, which is transformers' way. Raises WrongTokens.
    """
    told, own_tokens = settings.get("added_tokens_decoder"), tokenizer.get_added_tokens_decoder()
    named = _named_tokens(settings)
    if told is None:
        own = {token.content for token in own_tokens.values()}
        new = {str(token_id): content for content, token_id in ids.items() if content not in own}
        told = {key: {"content": content, "normalized": content not in named} for key, content in new.items()}
    told_tokens, new_tokens, beyond = [], [], set()
    for token_id, token in sorted(_tokens(told), key=lambda each: each[0]):
        found = tokenizer.token_to_id(token.content)
        if found is None and token_id < vocab_size:  # gets the next id
            new_tokens.append((token_id, token))
        elif found == token_id and repr(own_tokens.get(token_id)) != repr(token):  # of two ids tokenizer.json's counts
            told_tokens.append(token)
        elif found is None:
            beyond.add(token.content)
    tokenizer.add_tokens([*told_tokens, *(token for _, token in new_tokens)])  # once: each time all are sorted anew
    for token_id, token in new_tokens:
        if (found := tokenizer.token_to_id(token.content)) != token_id:
            raise WrongTokens(
                f"token {token.content!r} is to be {token_id}, and would be {found} behind those of tokenizer.json"
            )
    _make_special(tokenizer, {content: token for content, token in named.items() if content not in beyond})


def _make_special(tokenizer: Tokenizer, named: Mapping[str, AddedToken]) -> None:
    """Cut these out of texts, and hide them; one that is added already keeps its blanks."""
    own = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    tokens = [own.get(content, token) for content, token in named.items()]
    if new := [token for token in tokens if token.content not in own or not token.special]:
        for token in new:
            token.special = True
        tokenizer.add_tokens(new)


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, AddedToken]:
    """Each token that is named as special, by its text.

    Any key that ends in `_token` may name one, as with transformers; others of these are flags.
    """
    named = {name: settings.get(name) for name in _NAMES}
    named |= {name: told for name, told in settings.items() if name.endswith("_token") and _is_token(told)}
    further = settings.get(_FURTHER[0]) or settings.get(_FURTHER[1]) or []
    if isinstance(further, list):
        further = {f"{_FURTHER[0]}.{index}": told for index, told in enumerate(further)}
    if not isinstance(further, dict):
        raise WrongTokens(f"{_FURTHER[0]} is neither a list nor an object of tokens")
    tokens: dict[str, AddedToken] = {}
    for name, told in (named | further).items():
        if told:  # null and false name none
            if not _is_token(told):
                raise WrongTokens(f"{name} is neither a token's text nor an object with its content and flags")
            each = told if isinstance(told, dict) else {"content": told}
            tokens.setdefault(each["content"], AddedToken(**_fields(each) | {"special": True}))
    return tokens


def _is_token(told: object) -> bool:
    if not isinstance(told, dict):
        return isinstance(told, str)
    fields = _fields(told)
    return isinstance(fields.pop("content", None), str) and all(isinstance(flag, bool) for flag in fields.values())


def _fields(told: Mapping[str, Any]) -> dict[str, Any]:
    return {name: told[name] for name in _FIELDS & told.keys()}


def _tokens(told: object) -> Iterator[tuple[int, AddedToken]]:
    if not isinstance(told, dict):
        raise WrongTokens("added_tokens_decoder is not an object of tokens by id")
    for key, each in told.items():
        is_id = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= _MOST_DIGITS
        if not is_id or not isinstance(each, dict) or not _is_token(each):
            raise WrongTokens(f"added token {key!r} is not an id with its content and flags")
        yield int(key), AddedToken(**_fields(each))
