"""Nodes that listen on every address, and are known by names and by IPv6: what the others dial, and that KV gets there."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import pytest

from bench.free_port import free_port
from tests.e2e.role_by_role import started_role_by_role


def listens_for_both(port: int) -> bool:
    """Whether somebody listens there for IPv4 and for IPv6."""
    for host in ("127.0.0.1", "::1"):
        try:
            socket.create_connection((host, port), timeout=60).close()
        except OSError:
            return False
    return True


@pytest.mark.covers("X04", "D08")
def test_nodes_that_listen_everywhere_are_dialled_by_name_and_by_ipv6_and_hand_over(
    tiny_model: Path, tmp_path: Path
) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    kv_port = free_port()
    flags = {
        "router": (),
        "prefill-0": ("--host", "0.0.0.0", "--advertise", "localhost", "--transport", "zmq"),
        "decode-0": ("--host", "::", "--advertise", "::1", "--transport", "zmq", "--kv-port", str(kv_port)),
    }
    with started_role_by_role(tiny_model, tmp_path, flags) as cluster:
        nodes = {node["name"]: node for node in httpx.get(f"{cluster.url}/state", timeout=60).json()["nodes"]}
        assert nodes["prefill-0"]["http"].startswith("localhost:")
        assert nodes["decode-0"]["http"].startswith("[::1]:")
        decode = cluster.state("decode-0")
        asked = {"model": tiny_model.name, "prompt": "hello " * 20, "max_tokens": 4}
        assert httpx.post(f"{cluster.url}/v1/completions", json=asked, timeout=60).status_code == 200
        assert cluster.state("prefill-0")["transport"]["bytes_sent_over"]["zmq"] > 0
        assert listens_for_both(kv_port)
        assert listens_for_both(int(nodes["decode-0"]["http"].rpartition(":")[2])), decode
        assert "exposed listener=decode-0 host=::" in cluster.log_text("decode-0")
