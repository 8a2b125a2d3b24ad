"""An attempt that a full decode node refused has not computed in vain: the next one finds it in the prefill node's cache."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from engine.plan import SamplingParams
from engine.sequence import SequenceSpec
from tests.e2e.engine_alone import engine_alone
from tests.e2e.fault_clients import Stream, ask, tokens_of
from tests.e2e.role_by_role import RoleByRole, started_role_by_role, wait_until

BLOCK: Final = 16
CHUNK: Final = 40  # not a whole number of blocks
SIZES: Final = ("--block-size", str(BLOCK), "--num-blocks", "64", "--max-model-len", "1024")


@pytest.mark.covers("P03", "P09", "R19")
def test_an_attempt_that_a_full_node_refused_goes_on_where_its_computing_ended(
    tiny_model: Path, tmp_path: Path, fresh_seed: int
) -> None:
    """Whether the refusal comes between two chunks or while the only one is computed."""
    rng = random.Random(fresh_seed)
    chunks = ("--max-num-seqs", "8", "--max-num-batched-tokens", str(CHUNK), "--reserve-wait-s", "0")
    flags = {"router": (), "prefill-0": (*SIZES, *chunks), "decode-0": (*SIZES, "--reserve-policy", "full")}
    with started_role_by_role(tiny_model, tmp_path, flags) as cluster:
        for length in (20 * BLOCK + 5, 2 * BLOCK + 5):
            prompt = [rng.randrange(256) for _ in range(length)]
            said, num_refused, num_computed = refused_again_and_again(cluster, prompt)
            spec = SequenceSpec(0, tuple(prompt), 0, SamplingParams(0.0, 0), len(said), frozenset(), ())
            assert said == engine_alone(tiny_model).generate([spec])[0]
            # What is no full block where an attempt ended is computed by the next one.
            assert 0 <= num_computed - length <= num_refused * BLOCK, (
                f"{num_computed} of {length}, {num_refused} refusals"
            )


def refused_again_and_again(cluster: RoleByRole, prompt: list[int]) -> tuple[list[int], int, int]:
    """Ask for a few tokens while the decode node is full: they, how often it refused, and positions computed for them."""
    fields: dict[str, Any] = {"model": "llama-tiny", "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    # Promised in full: all blocks of the decode node but one.
    holder = fields | {"prompt": [1], "max_tokens": 1000}
    refusals = cluster.metric("pd_errors_total", "NO_BLOCKS")
    dispatches = cluster.metric("dispatches_total")
    with ThreadPoolExecutor(2) as threads:
        with cluster.slow_steps():
            stream = Stream(cluster, threads, holder)
            stream.take_tokens(2)
            computed = computed_on(cluster)
            answer = threads.submit(ask, cluster, fields | {"prompt": prompt, "max_tokens": 8})
            wait_until("it was refused", lambda: cluster.metric("pd_errors_total", "NO_BLOCKS") >= refusals + 3)
        stream.take_all()
        said = tokens_of(answer.result())
    cluster.wait_until_nothing_is_held(*cluster.nodes)
    num_refused = int(cluster.metric("pd_errors_total", "NO_BLOCKS") - refusals)
    assert cluster.metric("dispatches_total") - dispatches == 2 + num_refused
    assert cluster.metric("retries_total") == 0, "a refusal uses no retry"
    return said, num_refused, computed_on(cluster) - computed


def computed_on(cluster: RoleByRole) -> int:
    """Positions of prompts that the prefill node has computed."""
    number: int = cluster.state("prefill-0")["counters"]["tokens_computed"]["prefill"]
    return number
