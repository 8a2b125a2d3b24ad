"""`/tokenize` and `/detokenize`, in vLLM's shape: what a text is in token ids here, and the way back. No node hears of them.

Token ids are those that a completion (`prompt`) or a chat (`messages`) with the same text would be dispatched with.
Source: vLLM's vllm/entrypoints/serve/tokenize/protocol.py, of 0.16.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Final

from fastapi import Request
from pydantic import Field, StrictInt, StrictStr
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from router.bodies import HeldBody
from router.chat_template import TemplateRefusal
from router.chat_types import MAX_TOOLS, Message, Tool, check_continued, check_kwargs, check_messages, check_tools
from router.gate import account_of
from router.intake import TEXT_COST, off_loop, size_of_chat
from router.json_parts import Sliced, dump_ascii, json_parts
from router.json_reading import TURNS
from router.openai_types import ApiError, Body, CheckedBody, Flag, bad_request, parse_body, unknown_model
from router.refusals import id_header, refusal
from router.text import ModelText
from router.wrong_values import NO_CHARACTER

TOKENIZE: Final = "/tokenize"
DETOKENIZE: Final = "/detokenize"
_VALUES_PER_SLICE: Final = 4096  # written at one go: the encoder lets no other thread run, not even the loop's


class TokenizeBody(CheckedBody):
    """The body of /tokenize: a prompt or a conversation."""

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(default_factory=list)
    chat_template_kwargs: dict[StrictStr, Any] = Field(default_factory=dict)
    add_special_tokens: Flag | None = None  # left out: as generation does, for a prompt but not for a conversation
    add_generation_prompt: Flag | None = None  # left out: as a chat
    continue_final_message: Flag = False
    return_token_strs: Flag = False


class DetokenizeBody(CheckedBody):
    """The body of /detokenize."""

    model: StrictStr | None = None
    tokens: Annotated[list[StrictInt], Field(fail_fast=True)]


class Tokenizing:
    """The two endpoints, over one model's text."""

    def __init__(
        self,
        text: ModelText,
        model_name: str,
        read: Callable[[Request, asyncio.Timeout], Awaitable[HeldBody]],
        timeout_s: float,
        max_model_len: Callable[[], int | None],
    ) -> None:
        """`read`: a request's bounded body. `max_model_len`: tokens of prompt and completion together; None: no node says."""
        self._text = text
        self._model_name = model_name
        self._read = read
        self._timeout_s = timeout_s
        self._max_model_len = max_model_len

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a conversation."""
        return await self._answer(request, TokenizeBody, self._tokenized)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special tokens included."""
        return await self._answer(request, DetokenizeBody, self._detokenized)

    async def _answer(
        self, request: Request, body_type: type[Body], answer: Callable[[Body, int], Awaitable[bytes]]
    ) -> Response:
        headers = id_header(request)
        account = account_of(request)
        try:
            if account is not None:
                account.admit()
            async with asyncio.timeout(self._timeout_s) as patience:
                with await self._read(request, patience) as content:
                    body: Body = await off_loop(
                        len(content), TURNS.call, len(content), partial(parse_body, body_type), content
                    )
                    asked: str | None = getattr(body, "model", None)
                    if asked not in (None, self._model_name):
                        raise unknown_model(str(asked), self._model_name)
                    return Response(await answer(body, len(content)), 200, headers, "application/json")
        except ApiError as error:
            return refusal(error, headers)
        except TimeoutError:
            return refusal(ApiError(408, "The request did not arrive in time.", code="timeout"), headers)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it

    async def _tokenized(self, body: TokenizeBody, num_bytes: int) -> bytes:
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("prompt", "give either prompt or messages")
        check_messages(body.messages or [])
        check_continued(body.messages or [], body.continue_final_message, body.add_generation_prompt)
        if body.tools:
            check_tools([tool.function for tool in body.tools], "tools.{}.function")
            if body.messages is None or self._text.tool_template is None:
                raise bad_request("tools", "needs messages, and a chat template that has tools")
        check_kwargs(body.chat_template_kwargs)
        if body.chat_template_kwargs and body.messages is None:
            raise bad_request("chat_template_kwargs", "needs messages")
        field = "prompt" if body.messages is None else "messages"
        try:
            size, takes = size_of_chat(num_bytes, body.messages or []), TEXT_COST * num_bytes
            return await off_loop(size, self._told_tokens, body, self._max_model_len(), takes=takes)
        except TemplateRefusal as refused:
            raise bad_request(field, str(refused)) from refused
        except UnicodeError as error:
            raise bad_request(field, NO_CHARACTER) from error

    def _told_tokens(self, body: TokenizeBody, max_model_len: int | None) -> bytes:
        token_ids = self._token_ids(body)
        strings = list(map(self._text.token_string, token_ids)) if body.return_token_strs else None
        told = {"count": len(token_ids), "max_model_len": max_model_len, "tokens": _sliced(token_ids)}
        return _written(told | {"token_strs": None if strings is None else _sliced(strings)})

    def _token_ids(self, body: TokenizeBody) -> list[int]:
        if body.messages is None:
            return self._text.encode_prompt(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
        return self._text.encode_chat(
            [message.for_template() for message in body.messages],
            [tool.for_template() for tool in body.tools],
            body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt is not False,
            continues=body.continue_final_message,
            add_special_tokens=body.add_special_tokens is True,
        )

    async def _detokenized(self, body: DetokenizeBody, num_bytes: int) -> bytes:
        return await off_loop(max(num_bytes, 16 * len(body.tokens)), self._told_text, body.tokens)

    def _told_text(self, tokens: Sequence[int]) -> bytes:
        vocab_size = self._text.vocab_size
        if wrong := next((each for each in tokens if not 0 <= each < vocab_size), None):
            raise bad_request("tokens", f"token id {str(wrong)[:20]} is not between 0 and {vocab_size - 1}")
        return _written({"prompt": self._text.decode(tokens, skip_special_tokens=False)})


def _sliced(values: Sequence[object]) -> Sliced:
    return Sliced(values[start : start + _VALUES_PER_SLICE] for start in range(0, len(values), _VALUES_PER_SLICE))


def _written(told: Mapping[str, object]) -> bytes:
    return "".join(json_parts(told, dump_ascii)).encode("ascii")
