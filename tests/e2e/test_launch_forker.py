"""Nodes of `baton up` that were forked from one process. What the launcher asks of it: tests/deploy/test_forker.py."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.cluster import START_BOUND_S, Cluster, Watch, started_cluster


def completed(cluster: Cluster) -> int:
    """Tokens of a small completion."""
    with cluster.client() as client:
        model_id = client.get("/v1/models").json()["data"][0]["id"]
        answer = client.post("/v1/completions", json={"model": model_id, "prompt": "Once upon", "max_tokens": 4})
    assert answer.status_code == 200, answer.text
    number: int = answer.json()["usage"]["completion_tokens"]
    return number


@pytest.mark.covers("A04")
def test_a_killed_forker_takes_its_nodes_along_is_reported_and_is_there_again_with_the_next_node(
    tiny_model: Path, tmp_path: Path
) -> None:
    """One process more that can die: its end is that of all nodes, and not that of the router or of the cluster."""
    flags = ("--prefill", "0", "--decode", "2", "--block-size", "8", "--num-blocks", "600")
    with started_cluster(tiny_model, tmp_path, *flags) as cluster:
        assert completed(cluster) == 4
        nodes = [psutil.Process(node["pid"]) for node in cluster.nodes]
        (forker,) = {node.parent() for node in nodes}
        assert forker is not None and forker.ppid() == cluster.launcher.pid
        assert [" ".join(node.cmdline()[:2]) for node in nodes] == ["baton decode"] * 2
        watch = Watch(cluster.pids)
        forker.kill()
        watch.wait_for_end([node.pid for node in nodes])
        assert watch.alive() == {cluster.router_pid}
        watch.close()
        assert cluster.launcher.stdout is not None
        said = [cluster.launcher.stdout.readline() for _ in range(3)]
        assert sum(f"(pid {forker.pid}) has ended, and they with it" in line for line in said) == 1, said
        for node in cluster.nodes:
            assert sum(f"{node['node_id']} (pid {node['pid']}) ended with SIGKILL" in line for line in said) == 1, said

        with cluster.client() as client:
            pressed = client.post(
                "/dashboard/kill", json={"node": "decode-1"}, headers={"Origin": cluster.url}, timeout=START_BOUND_S
            )
            assert pressed.status_code == 200, pressed.text
            ends_at = time.monotonic() + START_BOUND_S
            while client.get("/ready").status_code != httpx.codes.OK or now(cluster) == cluster.nodes:
                assert time.monotonic() < ends_at, (cluster.run_dir / "decode-1.log").read_text()
                time.sleep(0.05)
        assert completed(cluster) == 4


def now(cluster: Cluster) -> list[dict[str, object]]:
    """The nodes of cluster.json."""
    nodes: list[dict[str, object]] = json.loads((cluster.run_dir / "cluster.json").read_text())["nodes"]
    return nodes
