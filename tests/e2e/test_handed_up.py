"""A decode node that gives work up again and again: what is handed up goes on exactly, and clients that leave leave nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.cluster import Cluster, started_cluster
from tests.e2e.slow_steps import SlowSteps
from tests.e2e.test_serving import wait_until_nothing_is_held
from tests.plain_http import NO_CERTIFICATES
from tests.router.upper_router import UpperRouter

NUM_REQUESTS = 14
PATHS = ("/v1/completions", "/v1/chat/completions")
# All at their ends are five times as many blocks.
SIZES = "--num-blocks 24 --max-num-seqs 16 --max-model-len 256 --block-size 16 --reserve-policy none"


@contextmanager
def small_cluster(model: Path, folder: Path, retry_count: int, *flags: str) -> Iterator[Cluster]:
    """One whose decode nodes have far too few blocks."""
    settings = folder / "baton.toml"
    settings.write_text(f"[router]\npreempt_retry_count = {retry_count}\n")
    flags = (*SIZES.split(), "--config", str(settings), *flags)
    with started_cluster(model, folder, *flags, environment=SlowSteps(folder).environment) as cluster:
        yield cluster


def drawn(rng: random.Random, path: str) -> dict[str, Any]:
    """A request of a hundred tokens, which a model that knows nothing makes of bytes: characters break anywhere."""
    common: dict[str, Any] = {
        "n": 1,
        "seed": rng.getrandbits(50),
        "max_tokens": rng.randint(80, 110),
        "temperature": rng.choice([0, 1]),
        "presence_penalty": rng.choice([0, 0.5]),
        "stop": rng.choice([None, ["ab", "e"]]),
        "min_tokens": rng.choice([0, 70]),
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if path == PATHS[0]:
        return common | {"prompt": [rng.randrange(256) for _ in range(20)], "logprobs": rng.choice([None, 2])}
    return common | {"messages": [{"role": "user", "content": f"{rng.random()}"}], "logprobs": rng.random() < 0.5}


@pytest.mark.covers("R08", "R09", "A05", "A07", "A08", "A09")
def test_handed_up_by_real_nodes_and_sent_again_every_answer_is_that_of_an_undisturbed_run(
    tiny_model: Path, tmp_path: Path, fresh_seed: int
) -> None:
    rng = random.Random(fresh_seed)
    steps = SlowSteps(tmp_path)
    paths = [PATHS[number % 2] for number in range(NUM_REQUESTS)]
    bodies = [drawn(rng, path) for path in paths]

    async def ask(cluster: Cluster) -> int:
        async with httpx.AsyncClient(
            base_url=cluster.url, timeout=60, trust_env=False, verify=NO_CERTIFICATES
        ) as client:
            upper = UpperRouter(client, "llama-tiny", rng)
            undisturbed = [await upper.answer(path, body) for path, body in zip(paths, bodies, strict=True)]
            assert upper.num_handed_up == upper.num_turned_away == 0
            with steps.wanted(0.005):  # or the first have ended before the last have come
                together = await asyncio.gather(*map(upper.answer, paths, bodies))
            for body, expected, answer in zip(bodies, undisturbed, together, strict=True):
                assert answer == expected, body
            return upper.num_handed_up

    with small_cluster(tiny_model, tmp_path, 0) as cluster:
        assert asyncio.run(ask(cluster)) > 0, "nothing was short"
        assert cluster.metrics()["choices_total{pd_reschedule}"] > 0
        wait_until_nothing_is_held(cluster)


@pytest.mark.covers("A10", "P08", "R15")
def test_clients_that_leave_while_their_requests_are_tried_again_leave_nothing(
    tiny_model: Path, tmp_path: Path, fresh_seed: int
) -> None:
    rng, steps = random.Random(fresh_seed), SlowSteps(tmp_path)

    async def leave(cluster: Cluster) -> None:
        async with httpx.AsyncClient(
            base_url=cluster.url, timeout=60, trust_env=False, verify=NO_CERTIFICATES
        ) as client:
            fields = [drawn(rng, PATHS[0]) | {"max_tokens": 230, "stop": None} for _ in range(2 * NUM_REQUESTS)]
            streams = [{"model": "llama-tiny", "stream": number % 2 == 0} for number in range(len(fields))]
            posts = [
                asyncio.create_task(client.post(PATHS[0], json=a | b)) for a, b in zip(fields, streams, strict=True)
            ]
            with steps.wanted(0.005):
                while not cluster.metrics().get("retries_total{PREEMPTED}"):
                    assert not any(post.done() for post in posts), "nothing was short"
                    await asyncio.sleep(0.01)
            with steps.wanted(0.2):  # of themselves they would not be over so soon
                for post in posts:
                    post.cancel()
                await asyncio.gather(*posts, return_exceptions=True)
                await asyncio.to_thread(wait_until_nothing_is_held, cluster)

    with small_cluster(tiny_model, tmp_path, 100, "--decode", "2") as cluster:
        asyncio.run(leave(cluster))
        now = cluster.metrics()
        assert now["live_requests"] == now["queued_requests"] == 0
        assert {value for name, value in now.items() if name.startswith(("node_prefilling", "node_branches"))} == {0}
        assert sum(cluster.state(node)["running"] + cluster.state(node)["waiting"] for node in cluster.nodes) == 0
