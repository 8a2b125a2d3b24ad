"""Who is let in: a layer in front of the API that asks for a key, and the account on which a request then goes.

Without keys everybody is let in, without limits. With them only OPEN_PATHS are open: probes and scrapers carry no keys, and what
these pages say (alive, ready, counts) holds nothing that anybody wrote, and the dashboard's own files, which hold nothing of the
cluster. Whoever shows a known key is known there, too: `/metrics` names clients to those alone, and `--metrics-need-key on` closes
it to everybody else. A deep look (`/ready?…`) costs work and needs a key. Whatever is added later needs a key unless it is listed
here.

Not here: keys (api_keys.py), limits (rate_limit.py), requests (api.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from starlette.requests import HTTPConnection, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from router.api_keys import ApiKeys, Client
from router.metrics import RouterMetrics
from router.openai_types import ApiError
from router.page_files import INDEX, PREFIX
from router.rate_limit import Over, RateLimits, Taken, What
from router.refusals import id_header, refusal

OPEN_PATHS: Final = frozenset({"/health", "/ready", "/metrics"})
OVER_LIMIT: Final = "rate_limit_exceeded"  # what who has used up a limit of its key is told
_OF_PROBES: Final = (b"", b"accepting=1")  # queries of /ready that cost nothing
_ACCOUNT: Final = "account"  # in a request's state

Tell = Callable[[Taken], None]


@dataclass(frozen=True, slots=True)
class Account:
    """What a request goes on: somebody's limits and counts."""

    client: Client
    limits: RateLimits
    metrics: RouterMetrics
    tell: Tell | None = None  # the other processes of this router, if there are any

    def admit(self) -> None:
        """Take one request; raises ApiError, 429, over the limit."""
        self._check(self.limits.admit(self.client, _now()))
        self._tell("requests", self.client.requests_per_minute, 1)
        self.metrics.client_asked(self.client.name)

    def take_prompt(self, num_tokens: int) -> None:
        """Take the tokens of a request's prompts; raises ApiError, 429, over the limit."""
        self._check(self.limits.take(self.client, num_tokens, _now()))
        self._tell("tokens", self.client.tokens_per_minute, num_tokens)
        self.metrics.client_used(self.client.name, "prompt", num_tokens)

    def owe(self, num_tokens: int) -> None:
        """Take what was generated."""
        self.limits.owe(self.client, num_tokens, _now())
        self._tell("tokens", self.client.tokens_per_minute, num_tokens)
        self.metrics.client_used(self.client.name, "completion", num_tokens)

    def _tell(self, what: What, limit: int | None, amount: int) -> None:
        if self.tell is not None and limit is not None and amount:
            self.tell(Taken(self.client.name, what, amount, limit))

    def _check(self, over: Over | None) -> None:
        if over is None:
            return
        self.metrics.turned_away(f"{over.what}_limit")
        wait_s = max(1, -int(-over.retry_after_s // 1))
        message = f"The limit of {self.client.name} is {over.limit} {over.what} a minute; there is room in {wait_s} s."
        raise ApiError(429, message, code=OVER_LIMIT, retry_after_s=over.retry_after_s)


def account_of(request: Request) -> Account | None:
    """On whose account it goes; None: nobody asks."""
    account: Account | None = request.scope.get("state", {}).get(_ACCOUNT)
    return account


class Gate:
    """The ASGI application behind it, for those who have a key."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Callable[[], ApiKeys],
        metrics: RouterMetrics,
        *,
        metrics_need_key: bool = False,
        tell: Tell | None = None,
    ) -> None:
        """`keys`: those that count now. `tell`: the router's other processes, which `hear` it."""
        self._app = app
        self._keys = keys
        self._metrics = metrics
        self._limits = RateLimits()
        self._tell = tell
        self._open_paths = OPEN_PATHS - ({"/metrics"} if metrics_need_key else frozenset())

    def keys_changed(self) -> None:
        """Forget in time the limits and counts of whoever has gone; the others keep what they have used."""
        names = self._keys().names
        self._limits.keep(names, _now())
        self._metrics.clients_are(names)

    def hear(self, taken: Taken) -> None:
        """Another process of this router has let somebody have that."""
        if taken.name in self._keys().names:
            self._limits.hear(taken, _now())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "http":
            shown = [value for name, value in scope["headers"] if name == b"authorization"]
            client = self._keys().find(shown[0]) if len(shown) == 1 else None
            if client is not None:
                scope.setdefault("state", {})[_ACCOUNT] = Account(client, self._limits, self._metrics, self._tell)
            elif not self._is_open(scope):
                await self._refuse("unknown_key" if shown else "no_key", HTTPConnection(scope))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        path = scope["path"]
        if path == INDEX or path.startswith(PREFIX):
            return True
        return path in self._open_paths and (path != "/ready" or scope.get("query_string", b"") in _OF_PROBES)

    def _refuse(self, reason: str, request: HTTPConnection) -> ASGIApp:
        self._metrics.turned_away(reason)
        told = "No API key was given" if reason == "no_key" else "The API key given is not known here"
        error = ApiError(401, f"{told}: send one as Authorization: Bearer KEY.", code="invalid_api_key")
        return refusal(error, {"WWW-Authenticate": "Bearer", **id_header(request)})


def _now() -> float:
    return asyncio.get_running_loop().time()
