"""`baton up` where variables are set that are for one process, or that its flags take back."""

from __future__ import annotations

from pathlib import Path

import httpx
import psutil
import pytest

from bench.free_port import free_port
from tests.e2e.cluster import HANDOFFS_ONLY, started_cluster
from tests.plain_http import NO_CERTIFICATES


def test_flags_win_over_variables_and_two_nodes_have_ports_of_their_own(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"KV_PORT": str(free_port()), "ADVERTISE": "192.0.2.1", "WORKERS": "2", "API_KEYS": str(tmp_path / "k")}
    for name, value in variables.items():
        monkeypatch.setitem(HANDOFFS_ONLY, f"BATON_{name}", value)
    flags = ("--workers", "1", "--api-keys", "none")
    with started_cluster(tiny_model, tmp_path, *flags) as cluster:
        assert len(cluster.nodes) == 2 and all(node["grpc"].startswith("127.0.0.1:") for node in cluster.nodes)
        assert not psutil.Process(cluster.router_pid).children()
        body = {"model": tiny_model.name, "prompt": "Once", "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60, verify=NO_CERTIFICATES)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
