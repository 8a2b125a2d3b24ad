"""The image's health check: it asks process 1 where that listens, over HTTPS with the cluster's authority where there is one."""

from __future__ import annotations

import http.server
import shutil
import ssl
import subprocess
import sys
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
    assert health_page(words, IMAGE | variables, lambda: OWN) == Page(url, authority)


def test_a_container_whose_name_nobody_knows_is_asked_where_it_was_told_to_listen() -> None:
    def find_own() -> str:
        raise OSError("Name or service not known")

    told = IMAGE | {"BATON_HOST": "0.0.0.0"}
    assert health_page(ROUTER, told, find_own).url == "http://127.0.0.1:8000/health"


@pytest.mark.parametrize("addresses", [("172.30.0.5",), ("172.30.0.5", "fd00:1::5"), ("fd00:1::5",)])
def test_it_asks_where_the_entry_has_the_process_listen_in_a_network_of_ipv6_too(
    tmp_path: Path, addresses: tuple[str, ...]
) -> None:
    """`docker network create --ipv6`: the name has two addresses, and the process listens at the first that `hostname -i` says."""
    space = ("unshare", "--mount", "--uts")
    if shutil.which("unshare") is None or subprocess.run([*space, "true"], capture_output=True, check=False).returncode:
        pytest.skip("unshare is not to be had: no other name for this machine")
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"{address} some-container\n" for address in addresses))
    ask = "hostname some-container && mount --bind $0 /etc/hosts && hostname -i && $1 -c $2"
    asked = "from deploy.container_health import own_address; print(own_address())"
    words = [*space, "sh", "-c", ask.replace("$2", '"$2"'), str(hosts), sys.executable, asked]
    found = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    assert found[0].split()[0] == found[1] and found[1] in addresses


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
