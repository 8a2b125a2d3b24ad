"""The image's health check: it asks process 1 where that listens, over HTTPS with the cluster's authority where there is one."""

from __future__ import annotations

import http.server
import os
import re
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
from runtime.config import ConfigError
from tests.security.strangers import make_certificates

DEPLOY = Path(container_health.__file__).parent
IMAGE = dict(re.findall(r"(BATON_\w+)=(\S+)", (DEPLOY / "Dockerfile").read_text()))  # its ENV
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


FILE = """
model = "/models/m"
tls_dir = "none"
[router]
port = 9000
host = "127.0.0.9"
[decode]
http_port = 9002
tls_dir = "/tls"
"""
# A process that says what it was told.
BATON = """\
import sys
from router.config import RouterConfig
from node.config import NodeConfig
from runtime.config import load
config = load(RouterConfig if sys.argv[1] == "router" else NodeConfig, f"baton {sys.argv[1]}", "", sys.argv[2:])
port = config.port if sys.argv[1] == "router" else config.http_port
print(config.model, config.host, port, config.tls_dir)
"""


@pytest.mark.parametrize(
    ("words", "variables", "told", "url"),
    [
        (["router"], {}, f"/model {OWN} 8000 None", f"http://{OWN}:8000/health"),
        (["router"], {"BATON_CONFIG": "FILE"}, "/models/m 127.0.0.9 9000 None", "http://127.0.0.9:9000/health"),
        (["router", "--config", "FILE"], {}, "/models/m 127.0.0.9 9000 None", "http://127.0.0.9:9000/health"),
        (
            ["router", "--host", "127.0.0.7"],
            {"BATON_CONFIG": "FILE", "BATON_PORT": "7", "BATON_MODEL": "/m"},
            "/m 127.0.0.7 7 None",
            "http://127.0.0.7:7/health",
        ),
        (["decode"], {"BATON_CONFIG": "FILE"}, f"/models/m {OWN} 9002 /tls", f"https://{OWN}:9002/health"),
        (["prefill"], {"BATON_CONFIG": "FILE"}, f"/models/m {OWN} 8002 None", f"http://{OWN}:8002/health"),
    ],
)
def test_a_file_wins_over_what_the_image_says_and_the_check_asks_where_that_leads(
    tmp_path: Path, words: list[str], variables: dict[str, str], told: str, url: str
) -> None:
    """The image's ENV and its entry point, at whose end stands a process that says what it makes of them."""
    (tmp_path / "baton.toml").write_text(FILE)
    (tmp_path / "baton.py").write_text(BATON)
    for name, script in {
        "hostname": f"echo {OWN} fd00::5",
        "baton": f'exec "{sys.executable}" "{tmp_path}/baton.py" "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    words = [word.replace("FILE", str(tmp_path / "baton.toml")) for word in words]
    said = IMAGE | {name: value.replace("FILE", str(tmp_path / "baton.toml")) for name, value in variables.items()}
    if words[0] != "router":
        said |= {"BATON_ROUTER": "127.0.0.1:1"}
    environment = said | {"PATH": f"{tmp_path}:{os.defpath}", "PYTHONPATH": str(DEPLOY.parent)}
    command = [str(DEPLOY / "container_entry"), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"{told}\n", "")
    assert health_page(["python3", "/opt/baton/.venv/bin/baton", *words], said, lambda: OWN).url == url


def test_a_file_that_cannot_be_read_any_more_is_one_line_of_the_check(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        health_page([*ROUTER, "--config", str(tmp_path / "gone.toml")], IMAGE, lambda: OWN)


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
