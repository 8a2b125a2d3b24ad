"""A node whose step never ends, while its loop answers everybody: its process ends, and what it served goes on elsewhere."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.fault_clients import Stream, ask, body, tokens_of
from tests.e2e.role_by_role import started_role_by_role, wait_until

STEP_TIMEOUT_S: Final = 4
FOR_EVER_S: Final = 1e6
NODES: Final = ("prefill-0", "prefill-1", "decode-0", "decode-1")


@pytest.mark.covers("R10", "C10")
def test_a_node_whose_step_hangs_ends_says_where_it_stood_and_costs_no_token_and_no_block(
    tiny_model: Path, tmp_path: Path, fresh_seed: int
) -> None:
    flags = {"router": ()} | dict.fromkeys(NODES, ("--step-timeout-s", str(STEP_TIMEOUT_S)))
    rng = random.Random(fresh_seed)
    with started_role_by_role(tiny_model, tmp_path, flags) as cluster, ThreadPoolExecutor(4) as threads:
        fields = body(rng, 40, 600)
        with cluster.slow_steps(0.02):
            stream = Stream(cluster, threads, fields)
            stream.take_tokens(20)
            wait_until("it runs", lambda: cluster.metric("node_branches") == 1)
            holder = max(NODES[2:], key=lambda name: cluster.metric("node_branches", name))
        with cluster.slow_steps(FOR_EVER_S, holder):
            assert cluster.wait_for_end(holder) == 1
        stream.take_all()
        assert stream.last == "[DONE]" and cluster.metric("retries_total", "NODE_LOST") == 1
        log = cluster.log_text(holder)
        assert log.endswith(f"\nbaton decode: a step has not ended for {STEP_TIMEOUT_S} s (--step-timeout-s)\n")
        assert "Traceback" not in log, "nobody's mistake"
        assert "next_plan_later" in log, "the stack of the thread that hangs"
        assert stream.token_ids == tokens_of(ask(cluster, fields))

        with cluster.slow_steps(FOR_EVER_S, NODES[0]):
            answers = [threads.submit(ask, cluster, body(rng, 40, 4)) for _ in range(4)]
            assert cluster.wait_for_end(NODES[0]) == 1
            assert all(len(tokens_of(each.result())) == 4 for each in answers)
        left = [name for name in NODES if cluster.exit_code(name) is None]
        assert len(left) == 2
        cluster.wait_until_nothing_is_held(*left)
