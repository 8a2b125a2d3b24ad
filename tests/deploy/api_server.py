"""A stand-in for Kubernetes' API server, as far as Helm asks one: it names the kinds, has what it was given, takes all.

It judges nothing (kubernetes_types.py does), runs nothing, and listens on loopback.
"""

from __future__ import annotations

import base64
import json
import re
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
RELEASE: Final = re.compile(rb"H4sI[A-Za-z0-9+/]+=*")  # gzip in base64, in a protobuf message
_NAME: Final = re.compile(rb"sh\.helm\.release\.v1\.[a-z0-9.-]+\.v[0-9]+")
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


def patched(old: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """What a patch makes of an object, but that lists are replaced; null takes away."""
    found = old | {key: value for key, value in patch.items() if value is not None}
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        elif isinstance(value, dict) and isinstance(old.get(key), dict):
            found[key] = patched(old[key], value)
    return found


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer in one piece: the second of two would wait 40 ms for the first one's acknowledgement
    server: StandIn

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        found = self.server.live.get(path) or self.server.remembered(path) or answer_to(path)
        self._say(404 if found is None else 200, json.dumps(found or _NOT_FOUND).encode(), "application/json")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        kind = self.headers.get_content_type()
        if kind.endswith("protobuf"):
            self.server.memories.append(body)
        else:
            made = json.loads(body)
            self.server.given.append(made)
            self.server.live[f"{self.path.partition('?')[0]}/{made['metadata']['name']}"] = made
        self._say(201, body, kind)

    do_PUT = do_POST

    def do_PATCH(self) -> None:
        path = self.path.partition("?")[0]
        patch = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        self.server.live[path] = patched(self.server.live[path], patch)
        self._say(200, json.dumps(self.server.live[path]).encode(), "application/json")

    def do_DELETE(self) -> None:
        del self.server.live[self.path.partition("?")[0]]
        self._say(200, b"{}", "application/json")

    def _say(self, code: int, body: bytes, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: what was asked is of no interest."""


class StandIn(ThreadingHTTPServer):
    """The server, with what it was given, in order: objects, and in protobuf Helm's own memory of what it has done.

    `live`: objects as they are now, by their paths.
    """

    daemon_threads = True

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []
        self.live: dict[str, dict[str, Any]] = {}
        self.memories: list[bytes] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.server_port}"

    def remembered(self, path: str) -> dict[str, Any] | None:
        """Of a list of Secrets, those in which Helm has written what it did; None: another page."""
        if not path.endswith("/secrets") or not self.memories:
            return None
        kept = {}
        for memory in self.memories:  # a later one of a name is what became of it
            name, release = _NAME.search(memory), RELEASE.search(memory)
            assert name and release
            content = {"release": base64.b64encode(release[0]).decode()}
            kept[name[0]] = {"metadata": {"name": name[0].decode()}, "data": content}
        return {"kind": "SecretList", "apiVersion": "v1", "metadata": {}, "items": [*kept.values()]}


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
