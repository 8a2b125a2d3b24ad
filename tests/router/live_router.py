"""A router's shell and HTTP side on real sockets, with two scripted nodes, inside the test's loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from starlette.types import ASGIApp

from proto import baton_pb2 as pb
from router.api import Api, ApiSettings
from router.core import RouterCore
from router.entrance import RouterCoreConfig
from router.placement import Placement
from router.shell import RouterShell
from router.text import ModelText
from runtime.http_server import HttpServer
from runtime.session import Peer, SessionTiming
from tests.plain_http import NO_CERTIFICATES
from tests.router.scripted_nodes import Script, ScriptedNode, ScriptedPair, replying

MODEL_NAME = "tiny"
MAX_MODEL_LEN = 256

# None of what takes seconds happens by itself: a machine that holds this process up for some breaks nothing.
USUAL_TIMING = SessionTiming(silence_s=60.0, grace_s=90.0, dial_timeout_s=60.0)


@dataclass(frozen=True, slots=True)
class LiveRouter:
    """What tests touch."""

    shell: RouterShell
    pair: ScriptedPair
    client: httpx.AsyncClient
    port: int

    async def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        """A request with a small body; `body` adds and replaces fields."""
        content = {"model": MODEL_NAME} | ({"prompt": "hi"} if path == "/v1/completions" else {}) | body
        return await self.client.post(path, json=content)

    def node(self, name: str) -> dict[str, Any]:
        """The core's view of a node."""
        nodes: Any = self.shell.snapshot()["nodes"]
        return next(node for key, node in nodes.items() if key.startswith(f"{name}@"))


@asynccontextmanager
async def live_router(
    model: Path,
    script: Script | None = None,
    core_config: RouterCoreConfig | None = None,
    timeout_s: float = 600.0,
    timing: SessionTiming = USUAL_TIMING,
    behind: Callable[[ASGIApp, RouterShell], ASGIApp] = lambda app, shell: app,
    settings: ApiSettings | None = None,
    max_model_len: int = MAX_MODEL_LEN,
) -> AsyncIterator[LiveRouter]:
    """Serve until the block ends; ready when it begins. `behind` puts something in front of the API."""
    shell = RouterShell(RouterCore(core_config or RouterCoreConfig(), Placement()), Peer("router", 77), timing)
    api = Api(shell, ModelText(model), settings or ApiSettings(MODEL_NAME, timeout_s, max_body_bytes=1 << 20))
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    http = HttpServer(behind(api.app(), shell), listener)
    serving = asyncio.create_task(http.run())
    async with (
        ScriptedNode("prefill", pb.ROLE_PREFILL, max_model_len, timing) as prefill,
        ScriptedNode("decode", pb.ROLE_DECODE, max_model_len, timing) as decode,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120, verify=NO_CERTIFICATES) as client,
    ):
        pair = ScriptedPair(prefill, decode, script or replying(b"hello"))
        pair.start()
        shell.on_listed(prefill.entry())
        shell.on_listed(decode.entry())
        await until(lambda: not shell.missing())
        yield LiveRouter(shell, pair, client, port)
        await pair.close()
        await shell.close()
        http.stop()
        await serving


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Let the loop run until the condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)
