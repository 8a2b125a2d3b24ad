"""What `baton status` shows, on terminals of any width."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rich.console import Console

from deploy.router_pages import Pages
from deploy.status import fit, rendered

BLOCKS = {"free": 200, "cached": 30, "used": 20, "leased": 4, "quarantined": 2}
NODE = {
    "name": "decode-0",
    "role": "decode",
    "session": "up",
    "circuit": "closed",
    "draining": False,
    "left_out": False,
    "num_blocks": 256,
}
LOAD = {"tp": 1, "running": 1, "waiting": 0, "prefilling": 0, "blocks": BLOCKS}
STATE = {"ready": True, "missing": [], "degraded": [], "live_requests": 1, "queued": 0, "nodes": [NODE | LOAD]}
TOLD = {"id": "49eb72447120f54d752cd5ac", "outcome": "stop", "nodes": ["decode-0", "prefill-0"], "seconds": 0.08}
COUNTS = {"first_token_s": 0.0099, "prompt_tokens": 21, "completion_tokens": 20, "num_attempts": 1}


@pytest.mark.parametrize(("width", "has_all"), [(40, False), (79, False), (110, True)])
def test_every_node_and_request_is_one_line_and_a_narrow_terminal_is_shown_less_of_it(
    width: int, has_all: bool
) -> None:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(rendered("http://127.0.0.1:8000", STATE, [TOLD | COUNTS], width))
    lines = captured.get().splitlines()[-4:]
    assert [line.split()[0][:4] for line in lines] == ["node", "deco", "requ", "49eb"]
    assert (" tp " in lines[0], "attempts" in lines[2]) == (has_all, has_all)
    assert all(("used" in lines[0], "20" in lines[1], "stop" in lines[3], max(map(len, lines)) <= width))


@pytest.mark.parametrize("width", [60, 80, 90, 100, 109])
def test_nothing_is_cut_short_where_fewer_columns_would_fit_and_no_more_are_left_out(width: int) -> None:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(rendered("http://127.0.0.1:8000", STATE, [TOLD | COUNTS], width))
    assert "…" not in captured.get()
    widest = max(len(line.rstrip()) for line in captured.get().splitlines()[-4:])
    assert width - len("quarantined") - 2 <= widest <= width


def shown(state: dict[str, object], num_requests: int, height: int | None) -> list[str]:
    """Its lines."""
    console = Console(width=110, file=io.StringIO())
    with console.capture() as captured:
        console.print(rendered("http://127.0.0.1:8000", state, [TOLD | COUNTS] * num_requests, 110, height))
    return captured.get().splitlines()


def test_what_does_not_fit_a_terminal_is_neither_who_is_not_well_nor_all_requests() -> None:
    ill: dict[int, dict[str, object]] = {29: {"session": "lost"}, 30: {"draining": True}, 31: {"circuit": "open"}}
    nodes = [NODE | LOAD | {"name": f"decode-{index}"} | ill.get(index, {}) for index in range(40)]
    state = STATE | {"nodes": nodes, "degraded": ["word " * 40]}  # more than one line
    assert len(shown(state, 10, None)) == 3 + 41 + 11
    lines = shown(state, 10, 24)
    assert len(lines) == 24
    assert [line.split()[0] for line in lines[4:7]] == ["decode-29", "decode-30", "decode-31"]
    assert sum(line.startswith(TOLD["id"]) for line in lines) == 6  # type: ignore[arg-type]
    assert lines[4:].count(lines[16]) == 1 and lines[16] == "… and 28 more nodes"
    assert len([line for line in lines if line.startswith("decode-")]) == 12


@pytest.mark.parametrize("num_nodes", [0, 1, 5, 20])
@pytest.mark.parametrize("num_requests", [0, 1, 5, 20])
def test_the_lines_of_a_terminal_are_all_used_and_no_more(num_nodes: int, num_requests: int) -> None:
    for num_lines in range(5, 50):
        nodes, requests = fit(num_lines, num_nodes, num_requests)
        used = 1 + nodes + (nodes < num_nodes) + (num_requests > 0) + requests
        everything = 1 + num_nodes + (num_requests > 0) + num_requests
        assert used == min(num_lines, everything)
        assert (requests > 0) == (num_requests > 0) and nodes <= num_nodes and requests <= num_requests


def test_a_node_that_is_never_dialed_does_not_seem_to_be() -> None:
    state = STATE | {"nodes": [NODE | LOAD | {"session": "dialing", "left_out": True}]}
    (line,) = [line for line in shown(state, 0, None) if line.startswith("decode-0")]
    assert "left out (tokenizer)" in line and "dialing" not in line


@pytest.mark.parametrize("name", ["gpu[a100]-0", "decode[/0]", ":smile:"])
def test_names_are_shown_as_they_are(name: str) -> None:
    console = Console(width=200, file=io.StringIO())
    state = STATE | {"nodes": [NODE | LOAD | {"name": name, "role": name}]}
    with console.capture() as captured:
        console.print(
            rendered("http://127.0.0.1:8000", state, [TOLD | COUNTS | {"outcome": name, "nodes": [name]}], 200)
        )
    assert captured.get().count(name) == 4


def test_a_key_is_the_routers_alone_to_see() -> None:
    """Nodes need none, and whoever registers one would be sent it."""
    keys: list[tuple[str, str | None]] = []

    class Told(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append((self.path, self.headers["Authorization"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"node_id": "decode-0", "bit_exact": true, "transport": {}, "versions": {}}')

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Told) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = f"127.0.0.1:{server.server_port}"
        with Pages(f"http://{address}", "a-key", None) as pages:
            pages.json("/state")
            pages.node_state(address)
        server.shutdown()
        thread.join()
    assert keys == [("/state", "Bearer a-key"), ("/state", None)]


class Told(BaseHTTPRequestHandler):
    """A router with a node."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(STATE if self.path == "/state" else {"data": []}).encode())

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def on_a_terminal(term: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The command before such a router, and the other end of its terminal."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Told) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        terminal, its = pty.openpty()
        command = [sys.executable, "-m", "deploy.status", f"http://127.0.0.1:{server.server_port}"]
        environment = os.environ | {"TERM": term}
        with subprocess.Popen(
            [*command, "--interval-s", "0.1"], stdin=its, stdout=its, stderr=its, env=environment
        ) as shown:
            os.close(its)
            yield shown, terminal
        os.close(terminal)
        server.shutdown()
        thread.join(60)


def test_a_terminal_that_cannot_be_drawn_anew_is_shown_it_once() -> None:
    with on_a_terminal("dumb") as (shown, terminal):
        text = b""
        with suppress(OSError):  # EIO: nobody has it open any more
            while more := os.read(terminal, 65536):
                text += more
        assert shown.wait(60) == 0
    assert text.count(b"decode-0") == 1 and b"\x1b" not in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_terminal_is_left_as_it_was_whichever_signal_ends_it(number: signal.Signals) -> None:
    with on_a_terminal("xterm") as (shown, terminal):
        text = b""
        while text.count(b"decode-0") < 2:  # the first look is drawn before a signal is expected
            text += os.read(terminal, 65536)
        shown.send_signal(number)
        with suppress(OSError):  # EIO: nobody has it open any more
            while more := os.read(terminal, 65536):
                text += more
        assert shown.wait(60) == 0
    for shows, hides in ((b"\x1b[?1049l", b"\x1b[?1049h"), (b"\x1b[?25h", b"\x1b[?25l")):
        assert text.rfind(shows) > text.rfind(hides) >= 0
