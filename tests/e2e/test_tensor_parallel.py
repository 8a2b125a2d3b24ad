"""A cluster whose nodes have several ranks, as a user starts it: a rank's death is its node's, and no stream's."""

from __future__ import annotations

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.e2e.cluster import Watch, started_cluster
from tests.e2e.fault_clients import Stream, ask, body, tokens_of
from tests.e2e.role_by_role import wait_until
from tests.e2e.slow_steps import SlowSteps


@pytest.mark.covers("H14", "R10", "D07", "A14")
def test_streams_of_a_node_that_lost_a_rank_go_on_elsewhere_and_no_token_differs(
    tiny_model: Path, tmp_path: Path, fresh_seed: int
) -> None:
    """Two nodes of two ranks each, of the role that does everything; half of one is killed in the middle of all streams."""
    rng = random.Random(fresh_seed)
    steps = SlowSteps(tmp_path)
    flags = ("--prefill", "0", "--decode", "0", "--mixed", "2", "--tp", "2")
    with (
        started_cluster(tiny_model, tmp_path, *flags, environment=steps.environment) as cluster,
        ThreadPoolExecutor(4) as threads,
        ExitStack() as slow,
    ):
        with cluster.client() as client:
            of_router = {node["name"]: node["tp"] for node in client.get("/state").json()["nodes"]}
        assert of_router == {"mixed-0": 2, "mixed-1": 2}
        ranks = {node["node_id"]: cluster.state(node)["rank_pids"] for node in cluster.nodes}
        assert [len(pids) for pids in ranks.values()] == [1, 1]
        fields = [body(rng, 40, 80) for _ in range(4)]
        for each, letters in zip(fields, ("a-m", "n-z"), strict=False):  # only the first rank draws
            each |= {"ignore_eos": False, "structured_outputs": {"regex": f"[{letters}]{{70}}"}}
        slow.enter_context(steps.wanted(0.04))
        streams = [Stream(cluster, threads, each) for each in fields]
        for stream in streams:
            stream.take_tokens(5)
        (lost,) = (node for node in cluster.nodes if node["node_id"] == "mixed-0")
        assert cluster.state(lost)["running"] > 0, "nothing runs there that could be lost"
        with closing(Watch([*cluster.pids, *(pid for pids in ranks.values() for pid in pids)])) as watch:
            os.kill(ranks["mixed-0"][0], signal.SIGKILL)
            slow.close()
            watch.wait_for_end([lost["pid"]])
            for stream in streams:
                stream.take_all()
                assert stream.last == "[DONE]"
            ended = f"rank_ended rank=1 pid={ranks['mixed-0'][0]} how=SIGKILL"
            assert ended in (cluster.run_dir / "mixed-0.log").read_text()
            assert cluster.metrics()["retries_total{NODE_LOST}"] > 0
            undisturbed = list(threads.map(lambda each: tokens_of(ask(cluster, each)), fields))
            assert [stream.token_ids for stream in streams] == undisturbed
            left = [node for node in cluster.nodes if node is not lost]
            held = ("used", "leased", "quarantined")
            wait_until(
                "nothing is held", lambda: not sum(cluster.state(n)["blocks"][each] for n in left for each in held)
            )
            assert cluster.end(signal.SIGTERM) == 0
            watch.wait_for_end([*cluster.pids, *ranks["mixed-1"]])
