"""The pages of a node: /health, /ready, /metrics, /state. For people, probes and Prometheus; no client's request comes here.

Not here: what the pages say (node/view.py). The handlers are coroutines, so they run on the loop's thread, where the core may be
read; a plain function would be sent to a thread pool.
"""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from node.view import NodeView


def make_app(view: NodeView) -> FastAPI:
    """The pages of one node."""
    app = FastAPI(title=f"Baton node {view.node_id}", docs_url=None, redoc_url=None)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """That the loop answers at all, also while it drains: who restarts what is not healthy must let it finish."""
        return {"status": "draining" if view.is_draining else "ok", "node_id": view.node_id}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """That the node takes work."""
        return JSONResponse({"ready": not view.is_draining}, 503 if view.is_draining else 200)

    @app.get("/state")
    async def state() -> JSONResponse:
        return JSONResponse(view.state())

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(view.metrics(), media_type=CONTENT_TYPE_LATEST)

    return app
