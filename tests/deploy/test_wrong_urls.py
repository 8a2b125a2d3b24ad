"""`baton doctor` and `baton status` where somebody else answers: a node, a proxy, any web server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from deploy import doctor, status

NODE = {"node_id": "decode-0", "bit_exact": True, "transport": {}, "versions": {}}
ROUTER: dict[str, object] = {"missing": [], "degraded": [], "nodes": [], "versions": {}}
PAGE = "<html>502 Bad Gateway</html>"


@contextmanager
def answering(answers: Mapping[str, str]) -> Iterator[str]:
    """The URL of a web server that has these pages, by path; the first is what any other path gets."""

    class Answering(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answers.get(self.path, next(iter(answers.values()))).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def troubles(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """What `baton doctor` finds wrong in a cluster."""
    assert doctor.main([*words, "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    return [each["sentence"] for each in findings if each["level"] == "wrong" and each["what"] != "port"]


@pytest.mark.covers("O06")
@pytest.mark.parametrize(
    ("answer", "whose"),
    [(NODE, "that of node decode-0; a router's URL is wanted"), ({}, "somebody else's"), ([], "somebody else's")],
)
def test_a_state_that_is_no_routers_is_said_to_be_none_in_one_sentence(
    capsys: pytest.CaptureFixture[str], answer: object, whose: str
) -> None:
    with answering({"/state": json.dumps(answer)}) as url:
        sentence = f"{url}/state: is no router's, but {whose}"
        assert troubles(capsys, url) == [sentence]
        assert status.main([url, "--once"]) == 1
        assert capsys.readouterr().err == f"baton status: {sentence}\n"


@pytest.mark.covers("O06")
@pytest.mark.parametrize("page", [PAGE, "[]", "{}"])
def test_a_deep_look_that_a_proxy_answers_is_one_sentence(capsys: pytest.CaptureFixture[str], page: str) -> None:
    with answering({"/ready?deep=1": page, "/state": json.dumps(ROUTER)}) as url:
        assert troubles(capsys, url) == [f"{url}/ready?deep=1: is answered 200, not as a router does"]


@pytest.mark.covers("O06")
def test_a_nodes_address_where_somebody_else_answers_is_that_nodes_trouble(capsys: pytest.CaptureFixture[str]) -> None:
    with answering({"/state": "{}"}) as elsewhere:
        node = {"name": "decode-0", "session": "up", "circuit": "closed", "draining": False, "fingerprint": {}}
        router = ROUTER | {"nodes": [node | {"http": elsewhere}]}
        with answering({"/state": json.dumps(router), "/ready?deep=1": '{"pairs": []}'}) as url:
            (sentence,) = troubles(capsys, url)
            assert sentence == f"its HTTP port cannot be asked from here: {elsewhere}/state: is no node's"
