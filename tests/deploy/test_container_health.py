"""The image's health check: it asks process 1 where that listens, over HTTPS with the cluster's authority where there is one."""

from __future__ import annotations

import http.server
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy import container_health
from deploy.container_health import Page, answers, health_page
from tests.security.strangers import make_certificates

IMAGE = {"BATON_PORT": "8000", "BATON_HTTP_PORT": "8002"}
ROUTER = ["/opt/baton/.venv/bin/python", "-P", "-m", "router", "--workers", "2"]
DECODE = ["/opt/baton/.venv/bin/python", "-P", "-m", "deploy.node_process", "decode"]
OWN = "172.18.0.5"


@pytest.mark.parametrize(
    ("words", "variables", "url"),
    [
        (ROUTER, {}, f"http://{OWN}:8000/health"),
        (["python3", "/opt/baton/.venv/bin/baton", "router"], {}, f"http://{OWN}:8000/health"),
        (DECODE, {}, f"http://{OWN}:8002/health"),
        ([*DECODE, "--model", "router", "--http-port", "9"], {}, f"http://{OWN}:9/health"),
        ([*DECODE, "--http-port=9"], {"BATON_HTTP_PORT": "7"}, f"http://{OWN}:9/health"),
        (DECODE, {"BATON_HOST": "10.0.0.5", "BATON_HTTP_PORT": "7"}, "http://10.0.0.5:7/health"),
        (ROUTER, {"BATON_HOST": "0.0.0.0"}, "http://127.0.0.1:8000/health"),
        (DECODE, {"BATON_HOST": "::"}, "http://[::1]:8002/health"),
        (DECODE, {"BATON_TLS_DIR": ""}, f"http://{OWN}:8002/health"),
        (DECODE, {"BATON_TLS_DIR": "/tls"}, f"https://{OWN}:8002/health"),
        ([*ROUTER, "--tls-dir", "/tls"], {}, f"https://{OWN}:8000/health"),
    ],
)
def test_it_asks_where_the_process_listens(words: list[str], variables: dict[str, str], url: str) -> None:
    authority = Path("/tls/ca.crt") if url.startswith("https") else None
    assert health_page(words, IMAGE | variables, OWN) == Page(url, authority)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Server and client are one process here, which may stand still for longer than a health check waits."""
    monkeypatch.setattr(container_health, "TIMEOUT_S", 60.0)


class Answering(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 503)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Not on stderr."""


@contextmanager
def serving(tls_dir: Path | None) -> Iterator[str]:
    """A server's host and port."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        if tls_dir is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls_dir / "tls.crt", tls_dir / "tls.key")
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_who_answers_200_is_healthy_and_nobody_else() -> None:
    with serving(None) as address:
        assert answers(Page(f"http://{address}/health", None))
        with pytest.raises(OSError, match="503"):
            answers(Page(f"http://{address}/ready", None))
    with pytest.raises(OSError, match="refused"):
        answers(Page(f"http://{address}/health", None))


@pytest.mark.covers("X03")
def test_only_a_certificate_of_the_clusters_authority_is_believed_whatever_name_it_has(tmp_path: Path) -> None:
    ours, others = (make_certificates(tmp_path / name / "certs", "decode-0") for name in ("ours", "others"))
    with serving(ours) as address:
        assert answers(Page(f"https://{address}/health", ours / "ca.crt"))
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            answers(Page(f"https://{address}/health", others / "ca.crt"))
        with pytest.raises(OSError, match=r"."):
            answers(Page(f"http://{address}/health", None))
