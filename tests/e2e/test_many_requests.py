"""Far more requests at once than there are slots: all are answered, and nothing is left behind."""

from __future__ import annotations

import asyncio
from pathlib import Path
from statistics import median

import pytest

from bench.completions import Record
from bench.report import report_of
from bench.serve import find_asking, measure
from bench.serve_config import BenchConfig
from tests.e2e.cluster import Cluster, started_cluster
from tests.e2e.engine_alone import block_bytes
from tests.e2e.test_serving import wait_until_nothing_is_held
from tests.thorough import IS_THOROUGH

NUM_REQUESTS = 500 if IS_THOROUGH else 200
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 32
BLOCK_SIZE = 16


@pytest.mark.covers("A12", "O01", "P07", "P08")
def test_many_requests_at_once_on_32_slots_are_all_answered_and_leave_no_block(
    tiny_model: Path, tmp_path: Path, fresh_seed: int
) -> None:
    flags = ("--max-num-seqs", "32", "--max-model-len", "1024", "--block-size", str(BLOCK_SIZE))
    with started_cluster(tiny_model, tmp_path, *flags) as cluster:
        config = BenchConfig(
            url=cluster.url,
            max_requests=NUM_REQUESTS,
            prompt_tokens=str(PROMPT_TOKENS),
            output_tokens=str(OUTPUT_TOKENS),
            seed=fresh_seed >> 1,
        )

        async def run() -> list[Record]:
            return await measure(config, await find_asking(config))

        records = asyncio.run(run())
        assert report_of(records).errors == {}, [each for each in records if not each.is_ok][:3]
        answers = [(each.status, each.prompt_tokens, each.output_tokens) for each in records]
        assert answers == [("200", PROMPT_TOKENS, OUTPUT_TOKENS)] * NUM_REQUESTS
        begun = [each.arrival_s + each.lag_s for each in records]
        ended = [start + each.end_s for start, each in zip(begun, records, strict=True)]
        assert max(begun) < median(ended), "all of them were there before half of them were answered"
        wait_until_nothing_is_held(cluster)
        for node in cluster.nodes:
            state = cluster.state(node)
            assert {state["blocks"][kind] for kind in ("used", "leased", "quarantined")} == {0}
            assert (state["running"], state["waiting"], state["leases"]) == (0, 0, 0)
            assert sum(state["blocks"].values()) == state["num_blocks"]
        assert_they_were_measured(cluster, tiny_model)


def assert_they_were_measured(cluster: Cluster, model: Path) -> None:
    """By router and nodes alike, each by its own counts; beside the many there are the warm-up, and one question of a token."""
    (prefill,), (decode,) = cluster.nodes_of("prefill"), cluster.nodes_of("decode")
    num_whole, num_all = NUM_REQUESTS + 1, NUM_REQUESTS + 2
    router, sender, receiver = cluster.metrics(), cluster.metrics(prefill), cluster.metrics(decode)
    assert router["requests_total{length}"] == router["choices_total{length}"] == num_all
    assert router["tokens_total{prompt}"] == num_whole * PROMPT_TOKENS + 4
    assert router["tokens_total{completion}"] == num_whole * OUTPUT_TOKENS + 1
    for name in ("time_to_first_token_seconds", "request_seconds"):
        assert router[f"{name}_count"] == num_all
    assert router["time_per_output_token_seconds_count"] == num_whole
    assert 0 < router["time_to_first_token_seconds_sum"] < router["request_seconds_sum"]
    assert router["queue_seconds_count"] == router["dispatches_total{handoff}"] >= num_all
    assert router["queued_requests"] == router["live_requests"] == 0
    assert sender["attempts_ended_total{committed}"] == receiver["attempts_ended_total{finished}"] == num_whole
    assert sender["transfer_seconds_count"] == num_whole <= sender["reserve_seconds_count"]
    assert sender["tokens_computed_total{prefill}"] >= num_whole * PROMPT_TOKENS
    assert receiver["tokens_computed_total{decode}"] == num_whole * (OUTPUT_TOKENS - 1), "the first comes of the prompt"
    num_bytes = num_whole * PROMPT_TOKENS // BLOCK_SIZE * block_bytes(model, block_size=BLOCK_SIZE)
    assert sender["transfer_bytes_total{sent}{decode-0}"] == num_bytes, "every KV crossed the wire"
    assert receiver["transfer_bytes_total{received}{prefill-0}"] == num_bytes
    assert {value for name, value in sender.items() if name.startswith("transfer_failures_total")} == {0}
    for each in (sender, receiver):
        assert [each[f"blocks{{{state}}}"] for state in ("used", "leased", "quarantined")] == [0, 0, 0]
