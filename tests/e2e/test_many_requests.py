"""Far more requests at once than there are slots: all are answered, and nothing is left behind."""

from __future__ import annotations

import asyncio
from pathlib import Path
from statistics import median

import pytest

from bench.completions import Record
from bench.report import report_of
from bench.serve import ServeConfig, find_asking, measure
from tests.e2e.cluster import started_cluster
from tests.e2e.test_serving import wait_until_nothing_is_held

NUM_REQUESTS = 500


@pytest.mark.covers("A12", "P07", "P08")
def test_500_requests_at_once_on_32_slots_are_all_answered_and_leave_no_block(
    tiny_model: Path, tmp_path: Path, fresh_seed: int
) -> None:
    with started_cluster(tiny_model, tmp_path, "--max-num-seqs", "32", "--max-model-len", "1024") as cluster:
        config = ServeConfig(
            url=cluster.url, num_requests=NUM_REQUESTS, prompt_tokens="64", output_tokens="32", seed=fresh_seed >> 1
        )

        async def run() -> list[Record]:
            return await measure(config, await find_asking(config))

        records = asyncio.run(run())
        assert report_of(records).errors == {}, [each for each in records if not each.is_ok][:3]
        answers = [(each.status, each.prompt_tokens, each.output_tokens) for each in records]
        assert answers == [("200", 64, 32)] * NUM_REQUESTS
        begun = [each.arrival_s + each.lag_s for each in records]
        ended = [start + each.end_s for start, each in zip(begun, records, strict=True)]
        assert max(begun) < median(ended), "all of them were there before half of them were answered"
        wait_until_nothing_is_held(cluster)
        for node in cluster.nodes:
            state = cluster.state(node)
            assert {state["blocks"][kind] for kind in ("used", "leased", "quarantined")} == {0}
            assert (state["running"], state["waiting"], state["leases"]) == (0, 0, 0)
            assert sum(state["blocks"].values()) == state["num_blocks"]
        (prefill,), (decode,) = cluster.nodes_of("prefill"), cluster.nodes_of("decode")
        outcomes = [cluster.state(node)["counters"]["attempts_ended"] for node in (prefill, decode)]
        assert outcomes[0]["committed"] > NUM_REQUESTS and outcomes[1]["finished"] > NUM_REQUESTS  # beside the warm-up
        assert sum(cluster.state(prefill)["kv_bytes_sent"].values()) > 0, "every KV crossed the wire"
