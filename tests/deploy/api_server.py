"""A stand-in for Kubernetes' API server, as far as `helm install` asks one: it names the kinds, has nothing, takes all.

What it is given it keeps, in order. It judges nothing (kubernetes_types.py does), runs nothing, and listens on loopback.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, Final

VERSION: Final = "v1.33.0"
# (group, version) -> kind -> its name in a path
KINDS: Final[dict[tuple[str, str], dict[str, str]]] = {
    ("", "v1"): {"Secret": "secrets", "Service": "services", "ServiceAccount": "serviceaccounts"},
    ("apps", "v1"): {"Deployment": "deployments", "StatefulSet": "statefulsets"},
    ("autoscaling", "v2"): {"HorizontalPodAutoscaler": "horizontalpodautoscalers"},
    ("networking.k8s.io", "v1"): {"Ingress": "ingresses", "NetworkPolicy": "networkpolicies"},
    ("policy", "v1"): {"PodDisruptionBudget": "poddisruptionbudgets"},
    ("cert-manager.io", "v1"): {"Certificate": "certificates"},
    ("monitoring.coreos.com", "v1"): {"PodMonitor": "podmonitors"},
}
_NOT_FOUND: Final = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}


def answer_to(path: str) -> dict[str, Any] | None:
    """What GET of a path says; None: 404. A list of anything is empty."""
    pages: dict[str, dict[str, Any]] = {
        "/version": {"major": "1", "minor": "33", "gitVersion": VERSION},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(*key) for key in KINDS if key[0]]},
    }
    for (group, version), kinds in KINDS.items():
        root = f"/apis/{group}/{version}" if group else "/api/v1"
        pages[root] = {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": f"{group}/{version}".lstrip("/"),
            "resources": [
                {
                    "name": name,
                    "singularName": "",
                    "namespaced": True,
                    "kind": kind,
                    "verbs": ["get", "create", "patch"],
                }
                for kind, name in kinds.items()
            ],
        }
    if path in pages:
        return pages[path]
    if path.split("/")[-1] in {name for kinds in KINDS.values() for name in kinds.values()}:
        return {"kind": "List", "apiVersion": "v1", "metadata": {}, "items": []}
    return None


def _group(group: str, version: str) -> dict[str, Any]:
    spelled = {"groupVersion": f"{group}/{version}", "version": version}
    return {"name": group, "versions": [spelled], "preferredVersion": spelled}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer in one piece: the second of two would wait 40 ms for the first one's acknowledgement
    server: StandIn

    def do_GET(self) -> None:
        found = answer_to(self.path.partition("?")[0])
        self._say(404 if found is None else 200, json.dumps(found or _NOT_FOUND).encode(), "application/json")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        kind = self.headers.get_content_type()
        if kind.endswith("protobuf"):
            self.server.memories.append(body)
        else:
            self.server.given.append(json.loads(body))
        self._say(201, body, kind)

    do_PATCH = do_PUT = do_POST

    def _say(self, code: int, body: bytes, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: what was asked is of no interest."""


class StandIn(ThreadingHTTPServer):
    """The server, with what it was given: objects, and in protobuf Helm's own memory of what it has done."""

    daemon_threads = True

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []
        self.memories: list[bytes] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def api_server() -> Iterator[StandIn]:
    """One that serves."""
    with StandIn() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
