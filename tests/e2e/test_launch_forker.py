"""Nodes of `baton up` that were forked from one process. What the launcher asks of it: tests/deploy/test_forker.py."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import psutil
import pytest

from tests.e2e.cluster import START_BOUND_S, Cluster, Watch, started_cluster
from tests.e2e.fault_clients import Stream, ask, body, tokens_of
from tests.e2e.slow_steps import SlowSteps

NUM_TOKENS: Final = 400


@pytest.mark.covers("A04")
def test_a_killed_forker_takes_its_nodes_along_is_reported_and_a_stream_goes_on_at_the_next_node(
    tiny_model: Path, tmp_path: Path
) -> None:
    """One process more that can die: its end is that of all nodes, and not that of the router or of what it serves."""
    flags = ("--prefill", "0", "--decode", "2", "--block-size", "8", "--num-blocks", "600")
    fields, steps = body(random.Random(0), 40, NUM_TOKENS), SlowSteps(tmp_path)
    with (
        started_cluster(tiny_model, tmp_path, *flags, environment=steps.environment, is_executed=True) as cluster,
        ThreadPoolExecutor(1) as threads,
        ExitStack() as slow,
    ):
        nodes = [psutil.Process(node["pid"]) for node in cluster.nodes]
        (forker,) = {node.parent() for node in nodes}
        assert forker is not None and forker.ppid() == cluster.launcher.pid
        for node in nodes:  # whole, though it is longer than the forker's own was
            assert node.cmdline()[:2] == ["baton", "decode"]
            assert node.cmdline()[-2:] == ["--parent-pid", str(forker.pid)]

        watch = Watch(cluster.pids)
        slow.enter_context(steps.wanted(0.05))  # or it were at its end before the forker is
        stream = Stream(cluster, threads, fields)
        stream.take_tokens(5)
        forker.kill()
        slow.close()
        watch.wait_for_end([node.pid for node in nodes])
        assert watch.alive() == {cluster.router_pid}
        assert stream.is_running
        watch.close()
        assert cluster.launcher.stdout is not None
        said = [cluster.launcher.stdout.readline() for _ in range(3)]
        assert sum(f"(pid {forker.pid}) has ended, and they with it" in line for line in said) == 1, said
        for entry in cluster.nodes:
            assert sum(f"{entry['node_id']} (pid {entry['pid']}) ended with SIGKILL" in line for line in said) == 1, (
                said
            )

        with cluster.client() as client:
            pressed = client.post("/dashboard/kill", json={"node": "decode-1"}, headers={"Origin": cluster.url})
        assert pressed.status_code == 200, pressed.text
        stream.take_all()
        assert stream.last == "[DONE]" and len(stream.token_ids) == NUM_TOKENS
        assert stream.token_ids == tokens_of(ask(cluster, fields))
        ends_at = time.monotonic() + START_BOUND_S
        while now(cluster) == cluster.nodes:
            assert time.monotonic() < ends_at, (cluster.run_dir / "decode-1.log").read_text()
            time.sleep(0.05)


def now(cluster: Cluster) -> list[dict[str, object]]:
    """The nodes of cluster.json."""
    nodes: list[dict[str, object]] = json.loads((cluster.run_dir / "cluster.json").read_text())["nodes"]
    return nodes
