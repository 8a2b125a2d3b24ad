"""The HTTP side of the router: OpenAI's endpoints, and those that operators look at.

A request is read (bounded), checked and tokenized here, once, into typed values; a bad one is answered before any node hears
of it. How its answer is written: streaming.py. Every answer echoes the client's `X-Request-Id` (or `request_id`), which is
logged and never a key; without one it carries the router's own id.

Defaults: `max_tokens` is 16 for completions and, for chat, whatever the model's length leaves. Decode nodes reserve that
length in full as long as nothing can be preempted, so clients that name a max_tokens share a node with more others.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from router.answer import Arrival
from router.events import GenerationRequest
from router.openai_answers import AnswerOptions, AnswerWriter, ChatForm, CompletionForm, unix_seconds
from router.openai_types import (
    MAX_REQUEST_ID_LENGTH,
    REQUEST_ID_PATTERN,
    ApiError,
    ChatBody,
    CompletionBody,
    bad_request,
    parse_body,
)
from router.shell import RouterShell
from router.streaming import GenerationResponse, error_answer, json_answer
from router.text import ModelText, TemplateRefusal

_LOG: Final = logging.getLogger(__name__)
_DEFAULT_COMPLETION_TOKENS: Final = 16  # OpenAI's
_DRAWN_SEED_BITS: Final = 53  # whole numbers that every JSON parser keeps
_LARGE_BODY_BYTES: Final = 64 << 10  # from here on parsing and tokenizing leave the loop
_REQUEST_ID: Final = "X-Request-Id"

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """What the HTTP side needs of the router's config."""

    model_name: str
    request_timeout_s: float
    max_body_bytes: int


class Api:
    """The endpoints, over one shell and one model's text."""

    def __init__(self, shell: RouterShell, text: ModelText, settings: ApiSettings) -> None:
        self._shell = shell
        self._text = text
        self._settings = settings
        self._started = unix_seconds()

    def app(self) -> FastAPI:
        """The ASGI application."""
        app = FastAPI(title="Baton", version="1", docs_url=None, redoc_url=None)
        for path, endpoint, body_type in (
            ("/v1/completions", self.completions, CompletionBody),
            ("/v1/chat/completions", self.chat_completions, ChatBody),
        ):
            schema = {"$ref": f"#/components/schemas/{body_type.__name__}"}
            described = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
            app.add_api_route(path, endpoint, methods=["POST"], response_model=None, openapi_extra=described)
        app.add_api_route("/v1/models", self.models, methods=["GET"])
        app.add_api_route("/health", self.health, methods=["GET"])
        app.add_api_route("/ready", self.ready, methods=["GET"])
        app.add_api_route("/metrics", self.metrics, methods=["GET"])
        app.add_exception_handler(HTTPException, _answer_http_exception)
        app.add_exception_handler(Exception, _answer_bug)
        app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]  # FastAPI's documented way to extend it
        return app

    # ---------------------------------------------------------------- operators

    async def models(self) -> Response:
        """The one model that is served."""
        model = {"id": self._settings.model_name, "object": "model", "created": self._started, "owned_by": "baton"}
        return json_answer({"object": "list", "data": [model]})

    async def health(self) -> Response:
        """The process is alive."""
        return json_answer({"status": "ok"})

    async def ready(self) -> Response:
        """One node of each role can take work; otherwise 503 says what is missing."""
        missing = self._shell.missing()
        return json_answer({"ready": not missing, "missing": missing}, 503 if missing else 200)

    async def metrics(self) -> Response:
        """Prometheus text."""
        return Response(self._shell.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    # ---------------------------------------------------------------- generation

    async def completions(self, request: Request) -> Response:
        """Continue a prompt."""
        return await self._answer(request, CompletionBody)

    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._answer(request, ChatBody)

    async def _answer(self, request: Request, body_type: type[CompletionBody] | type[ChatBody]) -> Response:
        """Check the request; the response then runs it. Whatever is wrong with it is answered here."""
        arrived_at = asyncio.get_running_loop().time()
        client_id = request.headers.get(_REQUEST_ID)
        headers: dict[str, str] = {}
        parse: Callable[[bytes], CompletionBody | ChatBody] = partial(parse_body, body_type)
        try:
            if client_id is not None:
                if len(client_id) > MAX_REQUEST_ID_LENGTH or not re.match(REQUEST_ID_PATTERN, client_id):
                    raise bad_request(_REQUEST_ID, f"must be 1 to {MAX_REQUEST_ID_LENGTH} visible ASCII characters")
                headers[_REQUEST_ID] = client_id
            async with asyncio.timeout_at(arrived_at + self._settings.request_timeout_s):
                content = await self._read(request)
                body = await _off_loop(len(content), parse, content)
                if body.request_id is not None:
                    headers[_REQUEST_ID] = client_id = body.request_id
                generation = await self._generation(body, arrived_at)
        except ApiError as error:
            return error_answer(error, headers)
        except TimeoutError:
            return error_answer(ApiError(408, "The request did not arrive in time.", code="timeout"), headers)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        headers.setdefault(_REQUEST_ID, generation.request_id)
        form = ChatForm() if isinstance(body, ChatBody) else CompletionForm()
        options = AnswerOptions(self._settings.model_name, body.stream, body.includes_usage, body.return_token_ids)
        writer = AnswerWriter(generation, form, options, self._text)
        arrival = Arrival(arrived_at, client_id)
        return GenerationResponse(self._shell, generation, arrival, writer, is_stream=body.stream, headers=headers)

    async def _read(self, request: Request) -> bytes:
        """The body, refused while it is read once it is too large."""
        limit = self._settings.max_body_bytes
        too_large = ApiError(413, f"The body is larger than {limit} bytes.", code="body_too_large")
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > limit:
            raise too_large
        content = bytearray()
        async for chunk in request.stream():
            content += chunk
            if len(content) > limit:
                raise too_large
        return bytes(content)

    async def _generation(self, body: CompletionBody | ChatBody, arrived_at: float) -> GenerationRequest:
        """The request in tokens; raises ApiError."""
        if body.model != self._settings.model_name:
            message = f"this router serves {self._settings.model_name}, not {body.model[:60]}"
            raise ApiError(404, f"model: {message}", code="model_not_found", param="model")
        asked_tokens = body.max_tokens
        if isinstance(body, ChatBody):
            field, prompt = "messages", await self._chat_prompt(body)
            if body.max_completion_tokens is not None:
                if asked_tokens not in (None, body.max_completion_tokens):
                    raise bad_request("max_completion_tokens", "contradicts max_tokens; give one of them")
                asked_tokens = body.max_completion_tokens
        else:
            field, prompt = "prompt", await self._completion_prompt(body)
        max_tokens = self._fitting_max_tokens(field, len(prompt), asked_tokens)
        if asked_tokens is None and isinstance(body, CompletionBody):
            max_tokens = min(max_tokens, _DEFAULT_COMPLETION_TOKENS)
        return GenerationRequest(
            request_id=secrets.token_hex(12),
            prompt_token_ids=tuple(prompt),
            seed=secrets.randbits(_DRAWN_SEED_BITS) if body.seed is None else body.seed,
            temperature=body.temperature,
            max_tokens=max_tokens,
            stop_token_ids=() if body.ignore_eos else self._text.stop_token_ids,
            deadline=arrived_at + self._settings.request_timeout_s,
        )

    async def _chat_prompt(self, body: ChatBody) -> Sequence[int]:
        messages = [message.for_template() for message in body.messages]
        size = sum(len(message["content"]) for message in messages)
        try:
            return await _off_loop(size, self._text.encode_chat, messages)
        except TemplateRefusal as refusal:
            raise bad_request("messages", str(refusal)) from refusal
        except UnicodeError as error:
            raise bad_request("messages", "holds half a surrogate pair, which is no character") from error

    async def _completion_prompt(self, body: CompletionBody) -> Sequence[int]:
        if isinstance(body.prompt, str):
            try:
                prompt = await _off_loop(len(body.prompt), self._text.encode_prompt, body.prompt) if body.prompt else []
            except UnicodeError as error:
                raise bad_request("prompt", "holds half a surrogate pair, which is no character") from error
        else:
            prompt, vocab_size = body.prompt, self._text.vocab_size
            if prompt and not (min(prompt) >= 0 and max(prompt) < vocab_size):
                wrong = next(each for each in prompt if not 0 <= each < vocab_size)
                raise bad_request("prompt", f"token id {str(wrong)[:20]} is not between 0 and {vocab_size - 1}")
        if not prompt:
            raise bad_request("prompt", "must not be empty")
        return prompt

    def _fitting_max_tokens(self, field: str, num_prompt_tokens: int, asked_tokens: int | None) -> int:
        """max_tokens, or what the prompt leaves; raises ApiError if the two do not fit together."""
        longest = self._shell.max_total_tokens
        if longest is None:
            message = f"No nodes to serve the request: {', '.join(self._shell.missing())}."
            raise ApiError(503, message, code="NO_NODES", retry_after_s=1.0)
        room = longest - num_prompt_tokens
        if room < 1:
            message = (
                f"{num_prompt_tokens} tokens leave no room for an answer; prompt and answer have {longest} together"
            )
            raise bad_request(field, message, "context_length_exceeded")
        if asked_tokens is not None and asked_tokens > room:
            message = (
                f"{asked_tokens} is more than the {room} that {num_prompt_tokens} prompt tokens leave of {longest}"
            )
            raise bad_request("max_tokens", message, "context_length_exceeded")
        return room if asked_tokens is None else asked_tokens


async def _off_loop(size: int, function: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> R:
    """Call the function, in a thread if its input is large: the loop has other clients."""
    if size < _LARGE_BODY_BYTES:
        return function(*arguments, **named)
    return await asyncio.to_thread(function, *arguments, **named)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """What the framework refuses (unknown path, wrong method) in the API's shape."""
    if not isinstance(error, HTTPException):
        raise error
    message = f"{request.method} {request.url.path[:200]}: {error.detail}."
    return error_answer(ApiError(error.status_code, message, code="not_found"), error.headers)


async def _answer_bug(request: Request, error: Exception) -> Response:
    """The boundary of one request: a bug in it is logged and costs nobody else anything."""
    _LOG.error("request_failed path=%s", request.url.path, exc_info=error)
    return error_answer(ApiError(500, "Internal error; the router's log says more.", code="INTERNAL"))


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's description of the routes, with the bodies that we parse ourselves."""
    description = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = description.setdefault("components", {}).setdefault("schemas", {})
    for body_type in (CompletionBody, ChatBody):
        schema = body_type.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[body_type.__name__] = schema
    return description
