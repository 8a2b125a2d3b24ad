"""The pages of a node: /health, /ready, /metrics, /state. For people, probes and Prometheus; no client's request comes here.

Not here: what the pages say (node/view.py). The handlers are coroutines, so they run on the loop's thread, where the core may be
read; a plain function would be sent to a thread pool. Starlette alone: FastAPI on top of it, with the models of its own description
of an API, takes a node longer to load than all that is its own.
"""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from node.view import NodeView


def make_app(view: NodeView) -> Starlette:
    """The pages of one node."""

    async def health(_: Request) -> Response:
        """That the loop answers at all, also while it drains: who restarts what is not healthy must let it finish."""
        return JSONResponse({"status": "draining" if view.is_draining else "ok", "node_id": view.node_id})

    async def ready(_: Request) -> Response:
        """That the node takes work, and that a registry has heard of it."""
        return JSONResponse({"ready": view.is_ready}, 200 if view.is_ready else 503)

    async def state(_: Request) -> Response:
        return JSONResponse(view.state())

    async def metrics(_: Request) -> Response:
        return Response(view.metrics(), media_type=CONTENT_TYPE_LATEST)

    pages = {"/health": health, "/ready": ready, "/state": state, "/metrics": metrics}
    return Starlette(routes=[Route(path, page, methods=["GET"]) for path, page in pages.items()])
