"""The HTTP side of the router: OpenAI's endpoints, and those that operators look at.

A request is read (bounded), checked and tokenized once, into typed values (openai_types.py, intake.py); a bad one is answered
before any node hears of it. How its answer is written: streaming.py. Every answer to one, and every error of any path, echoes the
client's `X-Request-Id` (or `request_id`), which is logged and never a key; without one it carries the router's own id. The log has
every request's end, that of a bad one too.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from router.answer import Arrival, Asked, Delivery
from router.bodies import Bodies
from router.canary import AlreadyLooking, DeepLook
from router.chat_types import ChatBody
from router.dashboard import AllWorkers, Dashboard
from router.gate import OVER_LIMIT, account_of
from router.intake import Intake, IntakeLimits, off_loop
from router.json_reading import TURNS
from router.launcher_link import LauncherLink
from router.openai_answers import AnswerOptions, AnswerWriter, ChatForm, CompletionForm, unix_seconds
from router.openai_types import (
    REQUEST_ID_RULE,
    ApiError,
    CompletionBody,
    bad_request,
    parse_body,
    unknown_model,
)
from router.refusals import REQUEST_ID, id_header, is_request_id, refusal
from router.responses_answers import ResponsesWriter
from router.responses_types import ResponsesBody, renamed
from router.shell import RouterShell
from router.sight import USUALLY_LISTED, Sight
from router.streaming import GenerationResponse, Writer, error_answer, json_answer
from router.text import ModelText
from router.thinking import ReasoningParser
from router.tokenizing import DETOKENIZE, TOKENIZE, DetokenizeBody, TokenizeBody, Tokenizing
from router.tool_calls import AUTOMATIC
from router.worker_metrics import merged
from router.worker_pages import (
    METRICS,
    METRICS_OF_CLIENTS,
    REQUESTS,
    STATE,
    TIMELINE,
    found_timeline,
    no_timeline,
    whole_requests,
    whole_state,
)
from router.wrong_values import shown
from runtime.logs import printable
from runtime.tracing import TraceContext

_LOG: Final = logging.getLogger(__name__)
_CALL_COST: Final = 128  # bytes of a prompt take as long as a character of what may be a tool call

AnyBody = CompletionBody | ChatBody | ResponsesBody


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """What the HTTP side needs of the router's config."""

    model_name: str
    request_timeout_s: float
    max_body_bytes: int
    max_prompt_tokens: int | None = None
    max_n: int = 16
    all_workers: AllWorkers | None = None
    tool_parser: str = AUTOMATIC
    reasoning_parser: ReasoningParser = "auto"
    launcher: LauncherLink | None = None  # who can kill nodes, on `baton up`


Endpoint = Callable[[Request], Awaitable[Response]]


class _ShortWay:
    """The application; nearly all requests reach their endpoints without the framework's routing, which they do not need."""

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, Endpoint]) -> None:
        """`endpoints`: by path, of what is posted; `app` has them, too, and describes them."""
        self._app = app
        self._endpoints = endpoints
        self._posted = ServerErrorMiddleware(self._post, _answer_bug)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the application's whole life."""
        is_posted = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._endpoints
        await (self._posted if is_posted else self._app)(scope, receive, send)

    async def _post(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._endpoints[scope["path"]](Request(scope, receive))
        await response(scope, receive, send)


class Api:
    """The endpoints, over one shell and one model's text."""

    def __init__(self, shell: RouterShell, text: ModelText, settings: ApiSettings) -> None:
        self._shell = shell
        self._text = text
        self._settings = settings
        self._workers = settings.all_workers
        self._bodies = Bodies(settings.max_body_bytes)
        limits = IntakeLimits(
            settings.request_timeout_s,
            settings.max_prompt_tokens,
            settings.max_n,
            settings.tool_parser,
            settings.reasoning_parser,
        )
        self._intake = Intake(shell, text, settings.model_name, limits)
        self._sight = Sight(shell)
        self._deep = DeepLook(shell, text)
        self._tokenizing = Tokenizing(
            text, settings.model_name, self._bodies.read, settings.request_timeout_s, lambda: shell.max_total_tokens
        )
        self._dashboard = Dashboard(shell, settings.model_name, settings.all_workers, settings.launcher)
        self._started = unix_seconds()

    def app(self) -> ASGIApp:
        """The ASGI application."""
        app = FastAPI(title="Baton", version="1", docs_url=None, redoc_url=None, redirect_slashes=False)
        for path, endpoint, body_type in (
            ("/v1/completions", self.completions, CompletionBody),
            ("/v1/chat/completions", self.chat_completions, ChatBody),
            (TOKENIZE, self._tokenizing.tokenize, TokenizeBody),
            (DETOKENIZE, self._tokenizing.detokenize, DetokenizeBody),
            ("/v1/responses", self.responses, ResponsesBody),
        ):
            schema = {"$ref": f"#/components/schemas/{body_type.__name__}"}
            described = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
            app.add_api_route(path, endpoint, methods=["POST"], response_model=None, openapi_extra=described)
        for path, answer in (
            ("/v1/models", self.models),
            ("/v1/models/{name:path}", self.model),  # names may have slashes
            ("/health", self.health),
            ("/ready", self.ready),
            ("/metrics", self.metrics),
            ("/state", self.state),
            ("/v1/requests", self.requests),
            ("/v1/requests/{name}/timeline", self.timeline),
        ):
            app.add_api_route(path, answer, methods=["GET"])
            app.add_api_route(path, answer, methods=["HEAD"], include_in_schema=False)
        self._dashboard.add_to(app)
        app.add_exception_handler(HTTPException, _answer_http_exception)
        app.add_exception_handler(Exception, _answer_bug)
        app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]  # FastAPI's documented way to extend it
        endpoints = {"/v1/completions": self.completions, "/v1/chat/completions": self.chat_completions}
        return _ShortWay(app, endpoints | {"/v1/responses": self.responses})

    # ---------------------------------------------------------------- operators

    async def models(self) -> Response:
        """The one model that is served."""
        return json_answer({"object": "list", "data": [self._model()]})

    async def model(self, name: str, request: Request) -> Response:
        """The same one, by its name."""
        if name != self._settings.model_name:
            return refusal(unknown_model(name, self._settings.model_name), id_header(request))
        return json_answer(self._model())

    def _model(self) -> dict[str, Any]:
        told = {"id": self._settings.model_name, "object": "model", "created": self._started, "owned_by": "baton"}
        return told | {"max_model_len": self._shell.max_total_tokens}  # vLLM's and SGLang's; null: no node has said

    async def health(self) -> Response:
        """The process is alive."""
        return json_answer({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """A request can be served, and what it would be served without; otherwise 503 says what is missing.

        With `accepting=1`, which is for balancers, 200 also while requests wait for a node to come back (no_nodes_grace_s).
        With `deep=1` also whether KV crosses between every two nodes (canary.py): seconds, and one look at a time.
        """
        missing, degraded = self._shell.missing(), self._shell.degraded()
        content: dict[str, Any] = {"ready": not missing, "missing": missing, "degraded": degraded}
        if request.query_params.get("deep") == "1" and request.method == "GET":
            try:
                pairs, num_left_out = await self._deep.look()
            except AlreadyLooking:
                error = ApiError(429, "A deep look is under way.", code="ALREADY_LOOKING", retry_after_s=1.0)
                return refusal(error, id_header(request))
            is_ready = not missing and all(pair.problem is None for pair in pairs)
            content |= {"ready": is_ready, "pairs": [pair.to_json() for pair in pairs], "pairs_left_out": num_left_out}
        is_good = content["ready"]
        if request.query_params.get("accepting") == "1":
            is_good = content["accepting"] = not self._shell.missing(waits=True)
        return json_answer(content, 200 if is_good else 503)

    async def metrics(self, request: Request) -> Response:
        """Prometheus text; what names clients only for one of them."""
        names_clients = account_of(request) is not None
        text: bytes | str
        if self._workers is None:
            text = self._shell.metrics.render(names_clients=names_clients)
        else:
            text = merged(await self._workers.parts(METRICS_OF_CLIENTS if names_clients else METRICS))
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def state(self) -> Response:
        """The nodes, as they are."""
        if (workers := self._workers) is not None:
            return json_answer(whole_state(await workers.parts(STATE), workers.index))
        return json_answer(self._sight.state())

    async def requests(self, request: Request) -> Response:
        """The newest requests, `limit` of them."""
        limit = request.query_params.get("limit", str(USUALLY_LISTED))
        if not (limit.isascii() and limit.isdecimal() and len(limit) < 10):
            return refusal(bad_request("limit", f"must be a whole number, not {shown(limit)}"), id_header(request))
        if self._workers is not None:
            return json_answer(whole_requests(await self._workers.parts(REQUESTS + limit), int(limit)))
        return json_answer(self._sight.requests(int(limit)))

    async def timeline(self, name: str, request: Request) -> Response:
        """Where one request's time went, and what happened to it."""
        num_answered = num_workers = 1
        if self._workers is None:
            found = self._sight.timeline(name)
        else:
            texts = await self._workers.parts(TIMELINE + name)
            found, num_answered, num_workers = found_timeline(texts), len(texts), self._workers.number
        if found is None:
            return refusal(no_timeline(name, num_answered, num_workers), id_header(request))
        return json_answer(found)

    # ---------------------------------------------------------------- generation

    async def completions(self, request: Request) -> Response:
        """Continue a prompt."""
        return await self._answer(request, CompletionBody)

    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._answer(request, ChatBody)

    async def responses(self, request: Request) -> Response:
        """Answer a conversation in the shapes of the Responses API."""
        return await self._answer(request, ResponsesBody)

    async def _answer(self, request: Request, body_type: type[AnyBody]) -> Response:
        """Check the request; the response then runs it. Whatever is wrong with it is answered here."""
        arrived_at, seen_at = asyncio.get_running_loop().time(), self._shell.now()
        client_id = request.headers.get(REQUEST_ID)
        account = account_of(request)
        headers: dict[str, str] = {}
        parse: Callable[[bytes], AnyBody] = partial(parse_body, body_type)
        try:
            if client_id is not None:
                if not is_request_id(client_id):
                    raise bad_request(REQUEST_ID, REQUEST_ID_RULE)
                headers[REQUEST_ID] = client_id
            if self._shell.is_draining:
                headers["Connection"] = "close"  # the next request is to reach another router, or worker
                raise ApiError(503, "The router is shutting down.", code="SHUTTING_DOWN", retry_after_s=1.0)
            if account is not None:
                account.admit()
            async with asyncio.timeout_at(arrived_at + self._settings.request_timeout_s) as patience:
                with await self._bodies.read(request, patience) as content:
                    await self._shell.step_aside()
                    body = await off_loop(len(content), TURNS.call, len(content), parse, content)
                    if body.request_id is not None:
                        headers[REQUEST_ID] = client_id = body.request_id
                    asked = await self._asked(body, arrived_at, len(content))
            if account is not None:
                account.take_prompt(sum(each.request.num_given for each in asked))
        except ApiError as error:
            return self._refused(error, headers)
        except TimeoutError:
            return self._refused(ApiError(408, "The request did not arrive in time.", code="timeout"), headers)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        headers.setdefault(REQUEST_ID, asked[0].request.request_id)
        said = sum(
            len(text.text_before) for each in asked if each.tools or each.thinking for text in each.texts
        )  # by a resubmission
        writer = await off_loop(max(len(content), _CALL_COST * said), self._writer, body, asked)
        told = TraceContext(request.headers.get("traceparent", ""), ",".join(request.headers.getlist("tracestate")))
        client = None if account is None else account.client.name
        delivery = Delivery(asked, Arrival(seen_at, client_id, told, client))
        on_end = None if account is None else account.owe
        return GenerationResponse(self._shell, delivery, writer, is_stream=body.stream, headers=headers, on_end=on_end)

    def _refused(self, error: ApiError, headers: dict[str, str]) -> Response:
        """Counted here: the core, which counts all others, never hears of it. A key's limits are counted by its account."""
        if error.code != OVER_LIMIT:
            self._shell.metrics.turned_away(error.code)
        return refusal(error, headers)

    async def _asked(self, body: AnyBody, arrived_at: float, num_bytes: int) -> list[Asked]:
        if not isinstance(body, ResponsesBody):
            return await self._intake.asked(body, arrived_at, num_bytes)
        try:
            return await self._intake.asked(
                await off_loop(num_bytes, TURNS.call, num_bytes, body.as_chat), arrived_at, num_bytes
            )
        except ApiError as error:
            raise renamed(error) from error

    def _writer(self, body: AnyBody, asked: Sequence[Asked]) -> Writer:
        name = self._settings.model_name
        if isinstance(body, ResponsesBody):
            return ResponsesWriter(asked[0], body, name)
        form = ChatForm() if isinstance(body, ChatBody) else CompletionForm()
        options = AnswerOptions(
            name, body.includes_usage, body.return_token_ids, body.num_logprobs, body.counts_in_chunks
        )
        return AnswerWriter(asked, form, options, self._text.spelling)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """What the framework refuses (unknown path, wrong method) in the API's shape."""
    if not isinstance(error, HTTPException):
        raise error
    message = printable(f"{request.method} {request.url.path[:200]}: {error.detail}.")
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    return refusal(ApiError(error.status_code, message, code=code), {**(error.headers or {}), **id_header(request)})


async def _answer_bug(request: Request, error: Exception) -> Response:
    """The boundary of one request: a bug in it is logged and costs nobody else anything."""
    headers = id_header(request)
    request_id = headers.setdefault(REQUEST_ID, secrets.token_hex(12))
    _LOG.error("event=request_failed request=%s path=%s", request_id, request.url.path, exc_info=error)
    return error_answer(ApiError(500, "Internal error; the router's log says more.", code="INTERNAL"), headers)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's description of the routes, with the bodies that we parse ourselves."""
    description = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = description.setdefault("components", {}).setdefault("schemas", {})
    for body_type in (CompletionBody, ChatBody, ResponsesBody, TokenizeBody, DetokenizeBody):
        schema = body_type.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[body_type.__name__] = schema
    return description
