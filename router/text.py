"""Text in and out of token ids, as the model directory says: tokenizer, template, stop tokens; and its sampling defaults.

Reads `tokenizer.json`, `tokenizer_config.json`, what older directories have of it in `special_tokens_map.json` and
`added_tokens.json`, `config.json`, `generation_config.json` and templates' own files once, at start. Not here: added tokens
(added_tokens.py); the template (chat_template.py); the incremental way back (detokenizer.py); weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer, decoders

from router.added_tokens import WrongTokens, add_told_tokens, with_map
from router.chat_template import NO_KWARGS, SPECIAL_TOKENS, ModelDirectoryError, TemplateRefusal, read_template
from router.choice_text import ChoiceText, TextRules
from router.detokenizer import REPLACEMENT, IncrementalDetokenizer
from router.openai_types import ApiError, parse_defaults
from router.spelling import Spelling
from router.token_bounds import characters_of_longest_token
from runtime.tokenizer_digest import tokenizer_digest

_MANY_TOKENS: Final = 4096  # whose text takes so long that others must run meanwhile


class TextTooLong(Exception):
    """A text has more tokens than it may, whichever they are; the argument says how many characters it has."""


class _WholeTexts(dict[int, str]):
    """Of each token that is whole characters its text, of any other ""."""

    def __init__(self, decode: Callable[[Sequence[int]], str], vocab_size: int) -> None:
        super().__init__()
        self._decode = decode
        self._vocab_size = vocab_size

    def __missing__(self, token_id: int) -> str:
        text = self._decode([token_id])
        text = "" if REPLACEMENT in text else text
        if token_id < self._vocab_size:  # else whoever says nonsense would fill it
            self[token_id] = text
        return text


class ModelText:
    """What the router knows of a model: everything about it that is text."""

    def __init__(self, directory: Path) -> None:
        """Read the directory; raises ModelDirectoryError."""
        try:
            is_directory = directory.is_dir()
        except OSError as error:  # nobody may look, or the name is too long for one
            raise ModelDirectoryError(f"--model {directory}: {error.strerror}") from error
        if not is_directory:
            raise ModelDirectoryError(f"--model {directory}: is not a directory")
        config = _read_json(directory / "config.json")
        generation = _read_json(directory / "generation_config.json", is_required=False)
        settings = _read_json(directory / "tokenizer_config.json", is_required=False)
        if "added_tokens_decoder" not in settings:  # transformers before 4.34 had it say less, and reads this one still
            settings = with_map(settings, _read_json(directory / "special_tokens_map.json", is_required=False))

        self.vocab_size = _vocab_size(config, directory / "config.json")  # token ids that the model can embed
        self.tokenizer_digest = tokenizer_digest(directory)  # which token each id is, to compare with nodes'
        self._tokenizer = _read_tokenizer(directory / "tokenizer.json")
        try:
            ids = _read_json(directory / "added_tokens.json", is_required=False)
            add_told_tokens(self._tokenizer, settings, ids, self.vocab_size)
        except WrongTokens as error:
            raise ModelDirectoryError(f"{directory}: {error}") from error
        self._tokenizer.encode_special_tokens = settings.get("split_special_tokens") is True
        self._special_tokens = {name: _spelling(settings[name]) for name in SPECIAL_TOKENS if settings.get(name)}
        self._special_ids = frozenset(
            token_id for token_id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._alone: dict[int, str] = {}  # texts of tokens that nothing precedes
        # A decoder of bytes puts them one behind the other, and looks at nothing else.
        is_of_bytes = isinstance(self._tokenizer.decoder, decoders.ByteLevel)
        self._whole = _WholeTexts(self._decode_few, self.vocab_size) if is_of_bytes else None
        self._template = read_template(directory, settings)
        self.spelling = Spelling(self._tokenizer)
        self._longest_token = characters_of_longest_token(self._tokenizer)
        self.stop_token_ids = self._find_stop_token_ids(directory, config, generation)
        try:
            self.sampling_defaults = parse_defaults(generation)
        except ApiError as error:
            raise ModelDirectoryError(f"{directory / 'generation_config.json'}: {error.message}") from error

    @property
    def thinks(self) -> bool:
        """Whether its chat template knows of thoughts."""
        return self._template is not None and self._template.thinks

    @property
    def tool_template(self) -> str | None:
        """The source of the chat template that takes tools; None: this model has none."""
        return None if self._template is None else self._template.tool_source

    def encode_prompt(self, text: str, *, add_special_tokens: bool = True, most_tokens: int | None = None) -> list[int]:
        """Token ids of a completion's prompt, with the special tokens that the tokenizer adds by itself (usually BOS).

        Raises UnicodeEncodeError for half a surrogate pair, which JSON can spell and no tokenizer takes, and TextTooLong where its
        length alone says that it has more than `most_tokens`.
        """
        return self._encode(text, add_special_tokens, most_tokens)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] = NO_KWARGS,
        *,
        add_generation_prompt: bool = True,
        continues: bool = False,
        add_special_tokens: bool = False,
        most_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation up to where the assistant speaks; the template writes all special tokens.

        `kwargs`: what the client tells the template besides. `continues`: the assistant speaks behind its last message's text.
        Raises TemplateRefusal if there is no template or it refuses the messages, and as encode_prompt.
        """
        if self._template is None:
            raise TemplateRefusal("this model has no chat template")
        if continues:
            text = self._template.render_open(messages, tools, kwargs, **self._special_tokens)
        else:
            told = {"add_generation_prompt": add_generation_prompt, **self._special_tokens}
            text = self._template.render(messages, tools, kwargs, **told)
        return self._encode(text, add_special_tokens, most_tokens)

    def _encode(self, text: str, add_special_tokens: bool, most_tokens: int | None) -> list[int]:
        if most_tokens is not None and self._longest_token and len(text) > most_tokens * self._longest_token:
            raise TextTooLong(len(text))
        text.encode()  # the tokenizer's own error for what is no Unicode does not say so
        # The batch form lets other threads run meanwhile; `encode` holds the interpreter for as long as a large text takes. The
        # fast one does not ask where in the text each token begins.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole completion; ids without a token have no text."""
        if len(token_ids) < _MANY_TOKENS:
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        (text,) = self._tokenizer.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)  # see _encode
        return text

    def token_string(self, token_id: int) -> str:
        """How the vocabulary writes a token; "" for an id that no token has."""
        return self._tokenizer.id_to_token(token_id) or ""

    def _decode_few(self, token_ids: Sequence[int]) -> str:
        """As `decode`; a token alone is asked for again and again, so each is decoded once."""
        if len(token_ids) != 1 or token_ids[0] >= self.vocab_size:
            return self.decode(token_ids)
        if (text := self._alone.get(token_ids[0])) is None:
            text = self._alone[token_ids[0]] = self.decode(token_ids)
        return text

    def spelled(self, tokens: Collection[str]) -> dict[int, str]:
        """Those of the tokens that are special here, and so without text, by id."""
        added = self._tokenizer.get_added_tokens_decoder().items()
        return {token_id: token.content for token_id, token in added if token.special and token.content in tokens}

    def detokenizer(self, prompt_ids: Sequence[int] = ()) -> IncrementalDetokenizer:
        """A detokenizer for one completion of a prompt; behind none, its text begins like a prompt's."""
        return IncrementalDetokenizer(self._decode_few, self._special_ids, prompt_ids, self._whole)

    def choice_text(
        self, rules: TextRules, given_ids: Sequence[int] = (), prompt_ids: Sequence[int] = ()
    ) -> ChoiceText:
        """The way to text of one completion of a prompt, whose first tokens are `given_ids`."""
        return ChoiceText(self.detokenizer(prompt_ids), rules, given_ids)

    def offsets(self, token_ids: Sequence[int]) -> list[int]:
        """For each token of a prompt, how many characters of its text are complete before it."""
        return ChoiceText(self.detokenizer(), TextRules(())).push(token_ids).offsets

    def offsets_in(self, text: str) -> list[int]:
        """For each token of a prompt given as this text, which may spell special tokens, where in it the token begins."""
        (encoding,) = self._tokenizer.encode_batch([text])
        offsets, end_so_far = list[int](), 0
        for (begin, end), is_added in zip(encoding.offsets, encoding.special_tokens_mask, strict=True):
            offsets.append(end_so_far if is_added else begin)
            end_so_far = end_so_far if is_added else end
        return offsets

    def _find_stop_token_ids(
        self, directory: Path, config: Mapping[str, Any], generation: Mapping[str, Any]
    ) -> tuple[int, ...]:
        """End-of-sequence ids: those of the generation config, or else of the model config, and the tokenizer's own.

        A chat model that was made of a base one may have the end of a turn in its tokenizer alone, and the base's end of a text in
        its config.
        """
        found = generation.get("eos_token_id")
        if found is None:
            found = config.get("eos_token_id")
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if not all(type(each) is int and 0 <= each < self.vocab_size for each in ids):
            raise ModelDirectoryError(f"{directory}: eos_token_id {found}: must be token ids below {self.vocab_size}")
        own = self._tokenizer.token_to_id(self._special_tokens.get("eos_token", ""))
        return tuple(dict.fromkeys([*ids, *([own] if own is not None and own < self.vocab_size else [])]))


# ---------------------------------------------------------------- files


def _read_json(path: Path, is_required: bool = True) -> dict[str, Any]:
    if not is_required and not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelDirectoryError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelDirectoryError(f"{path}: is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelDirectoryError(f"{path}: must hold a JSON object")
    return content


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(path.read_bytes())
    except OSError as error:
        raise ModelDirectoryError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelDirectoryError(f"{path}: is not a tokenizer: {error}") from error
    tokenizer.no_truncation()  # a prompt that is too long is refused, not cut
    tokenizer.no_padding()
    return tokenizer


def _vocab_size(config: Mapping[str, Any], path: Path) -> int:
    size = config.get("vocab_size")
    if type(size) is not int or size <= 0:
        raise ModelDirectoryError(f"{path}: vocab_size {size}: must be a whole number above 0")
    return size


def _spelling(token: object) -> str:
    """A special token's text; configs hold it plain or as an object."""
    return str(token["content"]) if isinstance(token, dict) and "content" in token else str(token)
