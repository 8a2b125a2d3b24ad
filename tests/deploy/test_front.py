"""deploy/haproxy.cfg as HAProxy reads it, before two stand-ins for routers; skipped where there is no haproxy."""

from __future__ import annotations

import http.client
import http.server
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from tests.deploy.installs import ROOT

pytestmark = pytest.mark.skipif(
    shutil.which("haproxy") is None, reason="there is no haproxy (Debian: apt-get install haproxy)"
)


class StandIn(http.server.ThreadingHTTPServer):
    """Streams two pieces, the second once it may; or drains, which no check has seen yet."""

    def __init__(self) -> None:
        self.is_draining = False
        self.num_refused = 0
        self.asked: list[str] = []  # paths
        self.may_end = threading.Event()
        super().__init__(("127.0.0.1", 0), Answering)

    def handle_error(self, *_: object) -> None:
        """HAProxy has hung up, as it does."""


class Answering(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(503 if self.server.is_draining else 200)
        if self.server.is_draining:
            self.server.num_refused += 1
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"5\r\nfirst\r\n")
        assert self.server.may_end.wait(60)
        self.wfile.write(b"4\r\nlast\r\n0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        """Not on stderr."""


@contextmanager
def front(folder: Path) -> Iterator[tuple[int, list[StandIn]]]:
    """Its port, and what is behind it."""
    with ExitStack() as started:
        routers = [started.enter_context(StandIn()) for _ in range(2)]
        for router in routers:
            threading.Thread(target=router.serve_forever).start()
            started.callback(router.shutdown)
        listener = started.enter_context(socket.create_server(("127.0.0.1", 0)))
        text = (ROOT / "deploy" / "haproxy.cfg").read_text()
        text = re.sub(r" router-([01]):8000", lambda found: f" 127.0.0.1:{routers[int(found[1])].server_port}", text)
        # Both routers are this process: one that stands still must not pass for two that are down.
        text = text.replace("    timeout connect 2s\n", "    timeout connect 60s\n    timeout check 60s\n")
        assert "timeout check" in text
        (folder / "haproxy.cfg").write_text(text.replace("bind :8000", f"bind fd@{listener.fileno()}"))
        command = ["haproxy", "-db", "-f", str(folder / "haproxy.cfg")]
        with subprocess.Popen(command, pass_fds=[listener.fileno()]) as process:
            try:
                yield listener.getsockname()[1], routers
            finally:
                for router in routers:
                    router.may_end.set()
                process.kill()


@contextmanager
def answer_of(port: int, num_bytes: int) -> Iterator[http.client.HTTPResponse]:
    """To a request whose body comes behind its headers, as clients send it."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as client:
        client.request("POST", "/v1/completions", bytes(num_bytes))
        with client.getresponse() as answer:
            yield answer


def test_an_answer_streams_whichever_router_is_there(tmp_path: Path) -> None:
    with front(tmp_path) as (port, routers):
        for gone in (None, 0):
            if gone is not None:
                routers[gone].shutdown()
                routers[gone].server_close()
            for _ in range(4):
                with answer_of(port, 100) as answer:
                    assert answer.status == 200
                    assert answer.read(5) == b"first", "before the last is there"
                    for router in routers:
                        router.may_end.set()
                    assert answer.read() == b"last"
                for router in routers:
                    router.may_end.clear()


@pytest.mark.covers("R19")
def test_what_a_router_has_refused_is_said_to_no_other(tmp_path: Path) -> None:
    """It may have killed nodes there, which the other router would not know."""
    with front(tmp_path) as (port, routers):
        for router in routers:
            router.is_draining = True
        with answer_of(port, 2) as answer:
            assert answer.status == 503
        assert sum(router.num_refused for router in routers) == 1


def looked(port: int, path: str) -> int:
    """Its status."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as client:
        client.request("GET", path)
        return client.getresponse().status


def test_a_browser_sees_the_dashboard_of_one_router_and_of_the_other_where_that_one_is_gone(tmp_path: Path) -> None:
    with front(tmp_path) as (port, routers):
        paths = [path for index in range(4) for path in ("/dashboard/state", f"/dashboard/requests/{index}")]
        assert {looked(port, path) for path in paths} == {200}
        seen = [[path for path in router.asked if path.startswith("/dashboard")] for router in routers]
        assert sorted(seen) == [[], paths]
        mine = seen.index(paths)
        routers[mine].shutdown()
        routers[mine].server_close()
        assert looked(port, "/dashboard/state") == 200
        assert "/dashboard/state" in routers[1 - mine].asked
