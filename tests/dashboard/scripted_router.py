"""A router that is made up: the page's real files, and answers that a test chooses while the page asks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from router.page_files import HEADERS, PREFIX
from tests.architecture.source_tree import ROOT

PAGE: Final = ROOT / "router" / "page"
CHAT: Final = "/v1/chat/completions"
KILL: Final = "/dashboard/kill"
STATE: Final = "/dashboard/state"
REQUESTS: Final = "/dashboard/requests/"
TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

Asked = tuple[int, object]  # status, and what becomes JSON; bytes stay what they are


def node(name: str = "decode-0", incarnation: str = "1", **more: Any) -> dict[str, Any]:
    """One of the state's."""
    blocks = {"free": 5, "cached": 0, "used": 1, "leased": 0, "quarantined": 0}
    usual = {"role": "decode", "session": "up", "circuit": "closed", "num_blocks": 6, "tp": 1}
    load = {"draining": False, "left_out": False, "running": 0, "waiting": 0, "prefilling": 0, "blocks": blocks}
    return {"name": name, "incarnation": incarnation} | usual | load | more


def request(name: str, outcome: str | None = "stop", **more: Any) -> dict[str, Any]:
    """A line of the list."""
    ended_well = None if outcome is None else outcome == "stop"
    times = {"seconds": 1.0, "age_s": 5.0, "first_token_s": 0.1, "prompt_tokens": 1, "completion_tokens": 2}
    usual = {"client_request_id": None, "num_choices": 1, "num_attempts": 1, "nodes": ["decode-0"]}
    return {"id": name, "outcome": outcome, "ended_well": ended_well} | times | usual | more


def state(at: float | None = None, tokens: int = 0, **more: Any) -> dict[str, Any]:
    """What is shown each second; `routers`: names of the workers that have answered, `num_workers` of how many."""
    workers = [{"worker": index, "pid": 1, "router": name} for index, name in enumerate(more.pop("routers", ["a"]))]
    nodes, live = more.pop("nodes", [node()]), more.pop("live", 0)
    known = {"ready": True, "missing": [], "degraded": [], "workers": workers, "queued": 0, "live_requests": live}
    usual = {"model": "m", "can_kill": True, "num_workers": len(workers), "requests": [request("aaaaaaaa1111")]}
    counts = {"at": time.monotonic() if at is None else at, "generated_tokens": tokens}
    return usual | {"state": known | {"nodes": nodes}, "first_token_s": None, "token_s": None} | counts | more


def timeline(name: str, outcome: str | None = "stop", **more: Any) -> dict[str, Any]:
    """One request's, and what to draw of it."""
    attempt = {"attempt": 0, "kind": "handoff", "sender": "prefill-0", "receiver": "decode-0", "at": 0.001}
    ended: dict[str, Any] = {"ended_at": None if outcome is None else 1.0, "end": outcome, "parts": {}}
    legs = {"time_to_first_token": None, "first_to_second_token": None}
    events = {"choice": 0, "choices": [{"index": 0, "attempts": [attempt | ended]} | legs], "events": [], "spans": []}
    panel = {"kind": "whole", "start": 0, "end": 1, "lanes": ["router"], "bars": [], "marks": []}
    return {
        "timeline": request(name, outcome) | events | more,
        "picture": {"choice": 0, "panels": [panel]},
    }


def token(text: str) -> bytes:
    """A chunk of a chat's answer."""
    return json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}).encode()


class ScriptedRouter:
    """What is asked, and what the test lets be answered; made by `scripted_router`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.state: Callable[[], Asked] = lambda: (200, state())
        self.timeline: Callable[[str], Asked] = lambda name: (200, timeline(name))
        self.kill: Callable[[str], Asked] = lambda name: (200, {"killed": name})
        self.chat: Callable[[], Iterator[bytes]] = lambda: iter(())
        self.killed: list[str] = []
        self.chats: list[dict[str, Any]] = []  # bodies
        self.keys: set[str | None] = set()
        self.asked: list[str] = []  # paths

    def answer(self, path: str, body: bytes) -> Asked:
        """To one question, but for the page's files and the chat."""
        self.asked.append(path)
        if path == STATE:
            return self.state()
        if path.startswith(REQUESTS):
            return self.timeline(path.removeprefix(REQUESTS))
        if path == KILL:
            self.killed.append(name := json.loads(body)["node"])
            return self.kill(name)
        return 404, {"error": {"message": "Not Found"}}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    script: ScriptedRouter

    def handle_error(self, request: object, client_address: object) -> None:
        """Whoever it was has hung up."""


class _Handler(BaseHTTPRequestHandler):
    @property
    def script(self) -> ScriptedRouter:
        assert isinstance(self.server, _Server)
        return self.server.script

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        name = "index.html" if self.path == "/" else self.path.removeprefix(PREFIX)
        if self.path == "/" or self.path.startswith(PREFIX):
            self._send(200, (PAGE / name).read_bytes(), TYPES[Path(name).suffix])
        else:
            self.script.keys.add(self.headers.get("Authorization"))
            self._tell(*self.script.answer(self.path, b""))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path != CHAT:
            self._tell(*self.script.answer(self.path, body))
            return
        self.script.chats.append(json.loads(body))
        self._send(200, b"", "text/event-stream", is_whole=False)
        for data in self.script.chat():
            self.wfile.write(b"data: " + data + b"\n\n")

    def _tell(self, status: int, content: object) -> None:
        is_json = not isinstance(content, bytes)
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self._send(status, data, "application/json" if is_json else "text/html")

    def _send(self, status: int, data: bytes, kind: str, *, is_whole: bool = True) -> None:
        self.send_response(status)
        length = {"Content-Length": str(len(data))} if is_whole else {}
        for name, value in {**HEADERS, "Content-Type": f"{kind}; charset=utf-8", **length}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def scripted_router() -> Iterator[ScriptedRouter]:
    """It listens until the block ends."""
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.script = script = ScriptedRouter(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield script
        finally:
            server.shutdown()
            thread.join()
