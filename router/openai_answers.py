"""What clients get: the JSON of whole answers and of stream chunks, in OpenAI's shapes.

Beyond those shapes every choice names its effective `seed` (whole answers; a stream's first and last chunk), so that it can be
drawn again; and with `return_token_ids`, `prompt_token_ids` (whole answers; first chunk) and `completion_token_ids` (whole
answers: all; chunks: the chunk's own; the stop token included although it has no text, `generated_token_ids` of the client
not). Choices are numbered prompt by prompt. Usage counts each prompt, and what of it was cached, once, whatever `n` is, and of the
completions what was generated here, up to and including the token that completes a stop string.

A choice that ends `pd_reschedule` has `completion_token_ids` whether asked for or not, and they are its whole completion, the
`generated_token_ids` of the client included: what somebody else goes on with. In a stream they come in a last chunk without text.

A chunk's logprobs are those of its tokens, whose text may come later: the chunks' entries one behind the other are those of
the whole answer.

A chat of several choices opens them all, in order, before one of them says anything, as OpenAI and vLLM do: OpenAI's client numbers
choices as they first appear, and takes the logprobs of a later one's first chunk twice.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from router.answer import Asked, Piece
from router.choice_reader import ChoiceReader, reader_of
from router.chunk_template import MARK_IDS, MARK_TEXT, ChunkTemplate
from router.json_parts import ENTRIES_PER_SLICE, Sliced, dump_ascii, dump_unicode, in_slices, json_parts
from router.logprobs import ScoredToken, chat_logprobs, completion_logprobs
from router.openai_types import ApiError
from router.seeds import branch_seed
from router.spelling import Spelling
from router.tool_answers import delta_of, message_of, told_of
from router.tool_text import Told

STREAM_END: Final = b"data: [DONE]\n\n"


def unix_seconds() -> int:
    """The API's field `created`: the one reading of a wall clock, by which nothing is decided."""
    return int(time.time())


def event(content: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {dump_unicode(content)}\n\n".encode()


def _event_parts(content: dict[str, Any]) -> Iterator[bytes]:
    """The same, in parts."""
    yield b"data: "
    for part in json_parts(content, dump_unicode):
        yield part.encode()
    yield b"\n\n"


class AnswerForm(Protocol):
    """Where an endpoint puts the text and the logprobs of a choice."""

    id_prefix: str
    object_name: str
    chunk_object_name: str
    opens_choices: bool  # a stream of several begins with a chunk for each, which says nothing

    def whole(self, text: str) -> dict[str, Any]:
        """Fields of a finished choice."""

    def part(self, text: str, is_first: bool) -> dict[str, Any]:
        """Fields of a chunk's choice."""

    def logprobs(self, tokens: Sequence[ScoredToken], num_top: int, spelling: Spelling) -> dict[str, Any]:
        """The field `logprobs` of either, its arrays as json_parts.py takes them."""


class CompletionForm:
    """/v1/completions."""

    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_object_name = "text_completion"
    opens_choices = False

    def whole(self, text: str) -> dict[str, Any]:
        """A text."""
        return {"text": text}

    def part(self, text: str, is_first: bool) -> dict[str, Any]:
        """The text's next part."""
        return {"text": text}

    def logprobs(self, tokens: Sequence[ScoredToken], num_top: int, spelling: Spelling) -> dict[str, Any]:
        """A list for each thing known of a token."""
        return completion_logprobs(tokens, num_top, spelling)


class ChatForm:
    """/v1/chat/completions."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    opens_choices = True

    def whole(self, text: str) -> dict[str, Any]:
        """A message of the assistant."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def part(self, text: str, is_first: bool) -> dict[str, Any]:
        """The message's next part; the first one says who speaks."""
        return {"delta": ({"role": "assistant"} if is_first else {}) | {"content": text}}

    def logprobs(self, tokens: Sequence[ScoredToken], num_top: int, spelling: Spelling) -> dict[str, Any]:
        """An object for each token."""
        return chat_logprobs(tokens, num_top, spelling)


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How the client wants its answer."""

    model_name: str
    includes_usage: bool  # of a stream; a whole answer always does
    returns_token_ids: bool
    num_logprobs: int | None  # None: no logprobs
    counts_in_chunks: bool = False  # of a stream: the usage so far, of all choices, in each


@dataclass(slots=True)
class _Choice:
    """What has been told of a choice."""

    asked: Asked
    seed: int
    is_first: bool = True  # nothing has
    num_tokens: int = 0
    num_cached: int = 0  # of the prompt's tokens; the same for all choices of a prompt, once it was told
    whole: Piece = field(default_factory=Piece)  # all pieces, for an answer that is no stream
    texts: list[str] = field(default_factory=list)
    reader: ChoiceReader | None = None  # of thoughts and calls, where there may be any
    # What it makes of the texts: read as those come, since it takes its time.
    told: list[Told] = field(default_factory=list)
    usual: ChunkTemplate | None = None  # of its chunks, once one has been written

    def text_of(self, piece: Piece) -> str:
        """The piece's text, behind the prompt's if it is the first piece of an echo."""
        echo = self.asked.echo
        return echo.text + piece.text if echo is not None and self.is_first else piece.text

    def finish_reason(self, piece: Piece) -> str | None:
        """The piece's, as the client hears it."""
        return piece.finish_reason if self.reader is None else self.reader.finish_reason(piece.finish_reason)

    def scored(self, piece: Piece) -> list[ScoredToken]:
        """The piece's tokens with their logprobs, behind the prompt's if it is the first piece of an echo."""
        start, echo, tokens = 0, self.asked.echo, list[ScoredToken]()
        if echo is not None:
            start = len(echo.text)
            if self.is_first:
                scores = [None, *piece.prompt_logprobs]
                ids = self.asked.request.prompt_token_ids
                tokens += map(ScoredToken, ids, echo.offsets, scores)
        offsets = [start + offset for offset in piece.offsets]
        return [*tokens, *map(ScoredToken, piece.token_ids, offsets, piece.logprobs)]


def _begun(asked: Asked, choice: int) -> _Choice:
    return _Choice(asked, branch_seed(asked.request.seed, choice), reader=reader_of(asked, choice))


class AnswerWriter:
    """Turns an answer's pieces into what the client reads; gets the same ones for a stream and for a whole answer."""

    def __init__(self, asked: Sequence[Asked], form: AnswerForm, options: AnswerOptions, spelling: Spelling) -> None:
        self._form = form
        self._options = options
        self._spelling = spelling
        self._num_prompt_tokens = sum(len(each.request.prompt_token_ids) for each in asked)
        self._choices = [_begun(each, choice) for each in asked for choice in range(each.request.num_choices)]
        self._is_opened = not form.opens_choices or len(self._choices) == 1
        self._frame = {
            "id": form.id_prefix + asked[0].request.request_id,
            "created": unix_seconds(),
            "model": options.model_name,
        }

    def chunk(self, index: int, piece: Piece) -> Iterable[bytes]:
        """The events for a choice's next piece, in parts if long; none if the client could be shown nothing of it yet."""
        if not self._is_opened:
            self._is_opened = True
            return self._opened(index, piece)
        if self.is_usual(index, piece):
            return (self.usual_event(index, piece),)
        if piece.handed_up_ids is None or not (piece.token_ids or self._choices[index].is_first):
            return self._event(index, piece)
        before = replace(piece, finish_reason=None, handed_up_ids=None)
        last = Piece(finish_reason=piece.finish_reason, handed_up_ids=piece.handed_up_ids)
        return itertools.chain(self._event(index, before), self._event(index, last))

    def _opened(self, index: int, piece: Piece) -> Iterator[bytes]:
        """An event that opens each choice, then the piece's: one by one, as each may have all of a prompt's ids."""
        for each in range(len(self._choices)):
            yield from self._event(each, Piece())
        yield from self.chunk(index, piece)

    def is_usual(self, index: int, piece: Piece) -> bool:
        """Whether the piece is text behind which more follows: one short event, and nearly all there is of a stream."""
        choice = self._choices[index]
        options = self._options
        is_said = choice.reader is None or choice.reader.is_plain
        has_begun = not choice.is_first and is_said and options.num_logprobs is None
        return has_begun and not options.counts_in_chunks and piece.finish_reason is None and bool(piece.text)

    def usual_event(self, index: int, piece: Piece) -> bytes:
        """The event of such a piece."""
        choice = self._choices[index]
        choice.num_tokens += len(piece.token_ids)
        if choice.usual is None:
            choice.usual = self._usual(index)
        return choice.usual.event(piece.text, piece.token_ids)

    def _event(self, index: int, piece: Piece) -> Iterable[bytes]:
        choice = self._choices[index]
        choice.num_tokens += len(piece.token_ids)
        choice.num_cached = max(choice.num_cached, piece.num_cached)
        told, says_something = self._told(choice, piece)
        is_shown = choice.is_first or piece.finish_reason is not None or says_something
        has_tokens = self._options.returns_token_ids or self._options.num_logprobs is not None
        if not is_shown and not (has_tokens and piece.token_ids):
            return ()
        content = {
            "index": index,
            **told,
            "logprobs": self._logprobs(choice, piece),
            "finish_reason": choice.finish_reason(piece),
        }
        if choice.is_first or piece.finish_reason is not None:
            content["seed"] = choice.seed
        if self._options.returns_token_ids:
            if choice.is_first:
                content["prompt_token_ids"] = in_slices(choice.asked.request.prompt_token_ids)
            content["completion_token_ids"] = piece.token_ids
        if piece.handed_up_ids is not None:
            content["completion_token_ids"] = piece.handed_up_ids
        choice.is_first = False
        num_scored = len(piece.token_ids) + len(piece.prompt_logprobs)
        num_entries = num_scored * (1 + (self._options.num_logprobs or 0))
        is_long = num_entries > ENTRIES_PER_SLICE or isinstance(content.get("prompt_token_ids"), Sliced)
        return _event_parts(self._chunk_frame(iter([content]))) if is_long else (event(self._chunk_frame([content])),)

    def _told(self, choice: _Choice, piece: Piece) -> tuple[dict[str, Any], bool]:
        """What the chunk of a piece says, and whether that is anything."""
        if choice.reader is None:
            return self._form.part(choice.text_of(piece), choice.is_first), bool(piece.text)
        delta = delta_of(choice.reader, told_of(choice.reader, piece))
        first = {"role": "assistant", "content": ""} if choice.is_first else {}
        return {"delta": first | delta}, bool(delta)

    def _usual(self, index: int) -> ChunkTemplate:
        """For chunks of a choice that has begun and goes on."""
        content = {"index": index, **self._form.part(MARK_TEXT, False), "logprobs": None, "finish_reason": None}
        content |= {"completion_token_ids": MARK_IDS} if self._options.returns_token_ids else {}
        return ChunkTemplate(dump_unicode(self._chunk_frame([content])))

    def _chunk_frame(self, choices: Iterable[dict[str, Any]]) -> dict[str, Any]:
        frame = {**self._frame, "object": self._form.chunk_object_name, "choices": choices}
        if not self._options.includes_usage:
            return frame
        return frame | {"usage": self._usage() if self._options.counts_in_chunks else None}

    def failed(self, error: ApiError) -> bytes:
        """The event that ends a stream that failed."""
        return event(error.body())

    def named(self, error: ApiError) -> ApiError:
        """As it is."""
        return error

    def stream_end(self) -> bytes:
        """The events that end a stream that went well."""
        if not self._options.includes_usage:
            return STREAM_END
        frame = {**self._frame, "object": self._form.chunk_object_name}
        return event({**frame, "choices": [], "usage": self._usage()}) + STREAM_END

    def collect(self, index: int, piece: Piece) -> None:
        """Keep a choice's next piece for `whole`."""
        choice, whole = self._choices[index], self._choices[index].whole
        choice.num_tokens += len(piece.token_ids)
        choice.num_cached = max(choice.num_cached, piece.num_cached)
        if choice.reader is None:
            choice.texts.append(piece.text)
        else:
            choice.told += told_of(choice.reader, piece)
        whole.token_ids += piece.token_ids
        whole.offsets += piece.offsets
        whole.logprobs += piece.logprobs
        whole.prompt_logprobs = whole.prompt_logprobs or piece.prompt_logprobs
        whole.finish_reason, whole.handed_up_ids = piece.finish_reason, piece.handed_up_ids

    def whole(self) -> Iterator[bytes]:
        """The whole answer, in parts; ASCII."""
        choices = (self._whole_choice(index, choice) for index, choice in enumerate(self._choices))
        content = {**self._frame, "object": self._form.object_name, "choices": choices, "usage": self._usage()}
        for part in json_parts(content, dump_ascii):
            yield part.encode()

    def _whole_choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        choice.whole.text = "".join(choice.texts)
        content = {
            "index": index,
            **self._whole(choice),
            "logprobs": self._logprobs(choice, choice.whole),
            "finish_reason": choice.finish_reason(choice.whole),
            "seed": choice.seed,
        }
        if self._options.returns_token_ids:
            content["prompt_token_ids"] = in_slices(choice.asked.request.prompt_token_ids)
            content["completion_token_ids"] = choice.whole.token_ids
        if choice.whole.handed_up_ids is not None:
            content["completion_token_ids"] = choice.whole.handed_up_ids
        return content

    def _whole(self, choice: _Choice) -> dict[str, Any]:
        if choice.reader is None:
            return self._form.whole(choice.text_of(choice.whole))
        return {"message": message_of(choice.reader, choice.told)}

    def _logprobs(self, choice: _Choice, piece: Piece) -> dict[str, Any] | None:
        num_top = self._options.num_logprobs
        return None if num_top is None else self._form.logprobs(choice.scored(piece), num_top, self._spelling)

    def _usage(self) -> dict[str, Any]:
        num_completion = sum(choice.num_tokens for choice in self._choices)
        cached: dict[str, int] = {}  # by prompt
        for choice in self._choices:
            name = choice.asked.request.request_id
            cached[name] = max(cached.get(name, 0), choice.num_cached)
        usage: dict[str, Any] = {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": num_completion,
            "total_tokens": self._num_prompt_tokens + num_completion,
            "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
        }
        readers = [choice.reader for choice in self._choices if choice.reader is not None and choice.asked.thinking]
        if readers:
            num_thought = sum(reader.num_thought_tokens for reader in readers)
            usage["completion_tokens_details"] = {"reasoning_tokens": num_thought}
        return usage
