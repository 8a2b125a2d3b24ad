"""Commands that are given a URL where somebody else answers: a node, a proxy, any web server; or with TLS, or without."""

from __future__ import annotations

import json
import re
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bench import serve
from deploy import certs, chat, container_health, doctor, status
from tests.security.foreign_authority import Signed, host, write

NODE = {"node_id": "decode-0", "bit_exact": True, "transport": {}, "versions": {}}
ROUTER: dict[str, object] = {"missing": [], "degraded": [], "nodes": [], "versions": {}}
BATON = str(Path(sys.executable).with_name("baton"))
PAGE = "<html>502 Bad Gateway</html>"
DEEP = "[" * 100_000  # deeper than Python reads JSON


@contextmanager
def answering(answers: Mapping[str, str], tls: Path | None = None, status_code: int = 200) -> Iterator[str]:
    """The URL of a web server that has these pages, by path; the first is what any other path gets."""

    class Answering(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status_code)
            self.end_headers()
            self.wfile.write(answers.get(self.path, next(iter(answers.values()))).encode())

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # who hangs up in a handshake is no error here
        if tls is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(tls / "tls.crt", tls / "tls.key")
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def troubles(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """What `baton doctor` finds wrong in a cluster."""
    assert doctor.main([*words, "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    return [each["sentence"] for each in findings if each["level"] == "wrong" and each["what"] != "port"]


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
@pytest.mark.parametrize("page", [PAGE, "[]", "{}", DEEP], ids=["html", "list", "object", "deep"])
def test_a_deep_look_that_a_proxy_answers_is_one_sentence(capsys: pytest.CaptureFixture[str], page: str) -> None:
    with answering({"/ready?deep=1": page, "/state": json.dumps(ROUTER)}) as url:
        assert troubles(capsys, url) == [f"{url}/ready?deep=1: is answered 200, not as a router does"]


@pytest.mark.parametrize(
    ("nodes", "requests", "lack"),
    [([], {}, "'data'"), ([], {"data": []}, "'ready'"), ([{"role": "decode"}], {"data": []}, "'name'")],
)
def test_pages_that_are_almost_a_routers_are_said_to_be_anothers(
    capsys: pytest.CaptureFixture[str], nodes: object, requests: object, lack: str
) -> None:
    state = ROUTER | {"nodes": nodes} | ({"ready": True, "live_requests": 0, "queued": 0} if nodes else {})
    pages: dict[str, object] = {"/state": state, "/ready?deep=1": {"pairs": []}, "/v1/requests?limit=10": requests}
    with answering({path: json.dumps(page) for path, page in pages.items()}) as url:
        sentence = f"{url}: its pages are no router's, or another release's (KeyError: {lack})"
        assert status.main([url, "--once"]) == 1
        assert capsys.readouterr().err == f"baton status: {sentence}\n"
        if nodes:
            assert troubles(capsys, url) == [sentence]


def test_a_nodes_address_where_somebody_else_answers_is_that_nodes_trouble(capsys: pytest.CaptureFixture[str]) -> None:
    with answering({"/state": "{}"}) as elsewhere:
        node = {"name": "decode-0", "session": "up", "circuit": "closed", "draining": False, "fingerprint": {}}
        router = ROUTER | {"nodes": [node | {"http": elsewhere}]}
        with answering({"/state": json.dumps(router), "/ready?deep=1": '{"pairs": []}'}) as url:
            (sentence,) = troubles(capsys, url)
            assert sentence == f"its HTTP port cannot be asked from here: {elsewhere}/state: is no node's"


@pytest.mark.covers("O06")
def test_pairs_that_were_too_many_to_be_tried_are_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    deep = {"/ready?deep=1": '{"pairs": [], "pairs_left_out": 7}'}
    with answering({"/state": json.dumps(ROUTER | {"nodes": []})} | deep) as url:
        doctor.main([url])
    assert re.search(r"warning\s+canary: 7 more pairs of nodes were not tried", capsys.readouterr().out)


def test_of_a_node_that_is_gone_nobody_is_told_to_start_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    node = {"name": "decode-0", "session": "up", "circuit": "closed", "draining": False, "fingerprint": {}}
    router = ROUTER | {"nodes": [node | {"http": "127.0.0.1:1"}]}
    with answering({"/state": json.dumps(router), "/ready?deep=1": '{"pairs": []}'}) as url:
        (sentence,) = troubles(capsys, url)
    gone = (
        "its HTTP port cannot be asked from here: http://127.0.0.1:1/state: nobody answers there (Connection refused)"
    )
    assert sentence == gone
    assert doctor.main(["http://127.0.0.1:1"]) == 1
    assert "`make up` starts a cluster" in capsys.readouterr().out


@pytest.mark.parametrize("command", [doctor.main, status.main], ids=["doctor", "status"])
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--url", "127.0.0.1:8000"], "--url 127.0.0.1:8000: must be http(s)://HOST[:PORT][/PREFIX]"),
        (["http://:8000"], "--url http://:8000: must be http(s)://HOST[:PORT][/PREFIX]"),
        (
            ["http://h", "--api-key", "key\n"],
            "--api-key: keys are printable ASCII; it has another character, a line's end perhaps",
        ),
        (["https://h", "--tls-dir", "/nowhere"], "--tls-dir /nowhere: there is no ca.crt in it"),
    ],
)
def test_what_no_router_can_be_asked_with_is_a_wrong_value_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], command: Callable[[Sequence[str]], int], words: Sequence[str], sentence: str
) -> None:
    with pytest.raises(SystemExit) as end:
        command(words)
    assert end.value.code == 2
    assert capsys.readouterr().err.endswith(f": {sentence}\n")


Ask = Callable[[str], int]
ASKING: Mapping[str, tuple[Ask, str]] = {
    "status": (lambda url: status.main([url, "--once"]), "--tls-dir DIR"),
    "chat": (lambda url: chat.main([url, "hi"]), "--ca FILE"),
    "bench": (lambda url: serve.main([url]), "--ca FILE"),
}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority that no browser knows, and the certificate of this host."""
    folder = tmp_path_factory.mktemp("certs")
    assert certs.main([str(folder)]) == 0
    return folder


def told(capsys: pytest.CaptureFixture[str], ask: Ask, url: str) -> str:
    """The one line of a command that gets no answer."""
    capsys.readouterr()
    try:
        code: object = ask(url)
    except SystemExit as end:
        code = end.code
    (line,) = capsys.readouterr().err.splitlines()
    assert code in (1, 2)
    return line


@pytest.mark.parametrize("command", ASKING)
def test_with_tls_where_there_is_none_and_without_where_there_is_the_sentence_says_which(
    capsys: pytest.CaptureFixture[str], authority: Path, command: str
) -> None:
    ask, flag = ASKING[command]
    with answering({"/": "{}"}) as url:
        assert told(capsys, ask, url.replace("http", "https")).endswith(": speaks no TLS there; is it http://?")
    with answering({"/": "{}"}, tls=authority / "localhost") as url:
        unknown = told(capsys, ask, url)
        assert ": its certificate is refused here: " in unknown
        assert unknown.endswith(f"; {flag} names the authority that signed it")


@pytest.mark.parametrize("command", ASKING)
def test_an_authority_that_this_host_trusts_needs_no_flag(
    capsys: pytest.CaptureFixture[str], authority: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its store, where companies put their own, or where SSL_CERT_FILE says: what curl finds these commands find."""
    ask, _ = ASKING[command]
    monkeypatch.setenv("SSL_CERT_FILE", str(authority / "ca.crt"))
    with answering({"/": "{}"}, tls=authority / "localhost") as url:
        assert "certificate" not in told(capsys, ask, url)


def test_an_authority_need_not_be_a_root(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """ca.crt has the authority that has signed, which another one may have signed: members take that, and so do commands."""
    between = Signed(name="between", signer=Signed())
    directory = write(tmp_path / "certs", [between], [host(between)])
    authority = str(directory / "ca.crt")
    with answering({"/": "{}"}, tls=directory) as url:
        assert container_health.answers(container_health.Page(url, directory / "ca.crt"))
        for ask in (
            lambda url: status.main([url, "--once", "--tls-dir", str(directory)]),
            lambda url: chat.main([url, "hi", "--ca", authority]),
            lambda url: serve.main([url, "--ca", authority]),
        ):
            assert "certificate" not in told(capsys, ask, url)


@pytest.mark.parametrize("command", ASKING)
def test_a_server_with_tls_that_is_asked_without_hangs_up_and_the_sentence_asks_for_https(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """As uvicorn does."""
    with saying(b"") as url:
        assert told(capsys, ASKING[command][0], url).endswith(": hangs up without an answer; is it https://?")


@pytest.mark.parametrize("status_code", [200, 500])
@pytest.mark.parametrize("command", ASKING)
def test_an_answer_that_is_nested_without_end_is_one_sentence(
    capsys: pytest.CaptureFixture[str], command: str, status_code: int
) -> None:
    with answering({"/": DEEP}, status_code=status_code) as url:
        assert told(capsys, ASKING[command][0], url).startswith(f"baton {command}: {url}")


@pytest.mark.parametrize("command", ASKING)
def test_a_port_where_something_else_than_http_is_spoken_is_said_to_be_one(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Of gRPC's first frame h11 said `illegal request line`: a user had asked a router's registry."""
    with saying(bytes.fromhex("000012040000000000")) as url:
        assert ": speaks no HTTP there; a router's --port does, " in told(capsys, ASKING[command][0], url)


@pytest.mark.parametrize("command", ASKING)
def test_who_has_shown_a_key_that_is_unknown_is_not_told_to_show_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    with answering({"/": "{}"}, status_code=401) as url:
        assert ": wants a key: --api-key, " in told(capsys, ASKING[command][0], url)
        monkeypatch.setenv("BATON_API_KEY", "sk-0123456789abcdef")
        assert ": does not know the key that it was shown: --api-key, " in told(capsys, ASKING[command][0], url)


@contextmanager
def saying(words: bytes) -> Iterator[str]:
    """The URL of somebody who says this to the first who asks, and hangs up."""

    def say() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(words)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=say)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize("ask", [chat.main, serve.main], ids=["chat", "bench"])
def test_an_authority_that_holds_no_certificate_is_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, ask: Callable[[Sequence[str]], int]
) -> None:
    (tmp_path / "ca.crt").write_text("nothing of the kind")
    line = told(capsys, lambda url: ask(["--url", url, "--ca", str(tmp_path / "ca.crt")]), "https://127.0.0.1:1")
    assert line.endswith(f"--ca {tmp_path / 'ca.crt'}: holds no certificate, as PEM")


@pytest.mark.covers("D08")
@pytest.mark.parametrize("words", [("drain", "decode-0"), ("role", "decode-0", "decode")], ids=["drain", "role"])
def test_a_registry_without_tls_that_is_asked_with_it_is_one_line_and_none_of_grpcs(
    authority: Path, words: Sequence[str]
) -> None:
    with answering({"/": "{}"}) as url:
        address = url.removeprefix("http://")
        flags = ("--router", address, "--tls-dir", str(authority / "localhost"))
        ended = subprocess.run([BATON, *words, *flags], capture_output=True, text=True, timeout=120, check=False)
    why = "speaks no TLS there; of processes without certificates ask without --tls-dir"
    assert (ended.returncode, ended.stderr) == (2, f"baton {words[0]}: --router {address}: {why}\n")
