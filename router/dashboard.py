"""The dashboard's endpoints: its files at `/`, what it shows each second, one request's picture, and the button of `baton up`.

Everything but the files is behind the same keys as the API. Not here: what is shown (dashboard_state.py, timeline_picture.py),
what is drawn (page/).
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from fastapi import FastAPI, HTTPException, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from router.dashboard_state import whole
from router.json_parts import dump_ascii
from router.kill_rules import MAX_BODY, find_objection
from router.launcher_link import LauncherGone, LauncherLink
from router.openai_types import ApiError, bad_request
from router.page_files import INDEX, PREFIX, PageFiles
from router.refusals import id_header, refusal
from router.shell import RouterShell
from router.streaming import json_answer
from router.timeline_picture import picture
from router.worker_pages import (
    DASHBOARD,
    TIMELINE,
    found_timeline,
    joined_requests,
    joined_state,
    no_timeline,
    own_page,
    own_part,
)
from router.wrong_values import shown
from runtime.logs import log_event, printable

_LOG: Final = logging.getLogger(__name__)

SHARED_S: Final = 0.8  # a look is shared for so long: a tab asks each second, and is to have a new one each time

PartsOfPage = Callable[[str], Awaitable[Mapping[int, str]]]  # by worker


@dataclass(frozen=True, slots=True)
class AllWorkers:
    """Which of several this is, of how many, and what those say that answer in time."""

    index: int
    number: int
    parts: PartsOfPage


class Dashboard:
    """The endpoints over one shell; of several workers, what all of them say."""

    def __init__(
        self,
        shell: RouterShell,
        model_name: str,
        all_workers: AllWorkers | None,
        launcher: LauncherLink | None,
    ) -> None:
        """`launcher`: who can kill nodes, if this router was started by one."""
        self._shell = shell
        self._model_name = model_name
        self._all_workers = all_workers
        self._workers = AllWorkers(0, 1, self._own) if all_workers is None else all_workers
        self._look: asyncio.Task[str] | None = None  # the newest, which whoever asks shares for a while
        self._looked_at = -math.inf
        self._launcher = launcher
        self._files = PageFiles()

    def add_to(self, app: FastAPI) -> None:
        """Serve them; they are no part of the API's description."""
        add = partial(app.add_api_route, include_in_schema=False)
        for path, endpoint in (
            (INDEX, self.index),
            (PREFIX + "{name}", self.file),
            ("/dashboard/state", self.state),
            ("/dashboard/requests/{name}", self.request),
        ):
            add(path, endpoint, methods=["GET", "HEAD"])
        if self._launcher is not None:
            add("/dashboard/kill", self.kill, methods=["POST"])

    async def index(self, request: Request) -> Response:
        """The page."""
        return self._file(request, "index.html")

    async def file(self, name: str, request: Request) -> Response:
        """What the page is made of."""
        return self._file(request, name)

    def _file(self, request: Request, name: str) -> Response:
        answer = self._files.answer(request, name)
        if answer is None:
            raise HTTPException(404, "Not Found")
        return answer

    async def state(self) -> Response:
        """What is shown each second; many tabs cost no more looks than a few."""
        now = self._shell.now()
        if self._look is None or (self._look.done() and now - self._looked_at >= SHARED_S):
            self._look, self._looked_at = asyncio.create_task(self._look_anew(), name="look"), now
        return Response(await asyncio.shield(self._look), media_type="application/json")

    async def _look_anew(self) -> str:
        """As JSON; whoever else has something to do on the loop does it between two parts of the work."""
        parts = [part async for part in self._parts()]
        state = joined_state({worker: each["state"] for worker, each in parts}, self._workers.index)
        requests = joined_requests([each["requests"] for _, each in parts])
        own = {"model": self._model_name, "can_kill": self._launcher is not None, "num_workers": self._workers.number}
        content = own | whole([each for _, each in parts], state, requests)
        await asyncio.sleep(0)
        return dump_ascii(content)

    async def _parts(self) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """By worker; of the only one as it is, and not as the JSON that others would have sent."""
        if self._all_workers is None:
            yield 0, own_part(self._shell)
            await asyncio.sleep(0)
            return
        for worker, text in (await self._all_workers.parts(DASHBOARD)).items():
            yield worker, json.loads(text)
            await asyncio.sleep(0)

    async def request(self, name: str, request: Request) -> Response:
        """One request's timeline, and what to draw of it; `choice` where it has several."""
        choice = request.query_params.get("choice")
        if choice is not None and not (choice.isascii() and choice.isdecimal() and len(choice) < 6):
            return refusal(bad_request("choice", f"must be a whole number, not {shown(choice)}"), id_header(request))
        texts = await self._workers.parts(TIMELINE + name)
        found = found_timeline(texts)
        if found is None:
            return refusal(no_timeline(name, len(texts), self._workers.number), id_header(request))
        return json_answer({"timeline": found, "picture": picture(found, None if choice is None else int(choice))})

    async def kill(self, request: Request) -> Response:
        """Kill a node with SIGKILL and start a new one; only the page itself may ask, and only on `baton up`."""
        assert self._launcher is not None
        try:
            node = await _node_to_kill(request)
            log_event(_LOG, logging.WARNING, "node_to_be_killed", node=printable(node))
            problem = await self._launcher.kill(node)
            if problem is not None:
                raise ApiError(409, problem, code="not_killed")
        except LauncherGone as error:
            return refusal(ApiError(502, str(error), code="launcher_gone"), id_header(request))
        except ApiError as error:
            return refusal(error, id_header(request))
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        return json_answer({"killed": node})

    async def _own(self, page: str) -> Mapping[int, str]:
        return {0: own_page(self._shell, page)}


async def _node_to_kill(request: Request) -> str:
    """The name in the body. Raises ApiError."""
    if (objection := find_objection(request.headers)) is not None:
        raise ApiError(403, objection, code="not_allowed")
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > MAX_BODY:
            raise ApiError(413, f"The body is larger than {MAX_BODY} bytes.", code="body_too_large")
    try:
        body: Any = json.loads(content)
    except (ValueError, RecursionError):
        raise bad_request(None, "The body is no JSON.") from None
    node = body.get("node") if isinstance(body, dict) else None
    if not isinstance(node, str):
        raise bad_request("node", "must be the name of a node")
    return node
