"""What a node says of its load, to routers and to whoever scrapes it: the counts of its real scheduler and pool."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from connector.transport import BlocksLanded, NotifyArrived, RevokeDone
from engine.plan import SamplingParams
from engine.sequence import SequenceSpec
from node.load import load_report
from node.measures import Measures
from node.metrics import Counters
from node.view import NodeView
from proto.attempt_key import AttemptKey
from tests.cores.nodes import Decode, commit
from tests.node.test_http import samples_of, seen

PROMPT = [1, 2, 3, 4, 5, 6, 7]  # a full block and a tail
NUM_RUNNING, NUM_LEASED, NUM_CACHED, NUM_QUARANTINED = 2, 4, 3, 1
NUM_USED = NUM_RUNNING * 2
NUM_FREE = 32 - NUM_LEASED - NUM_CACHED - NUM_QUARANTINED - NUM_USED


def loaded() -> Decode:
    """Something of everything, each as often as nothing else."""
    decode = Decode(num_blocks=32, num_slots=4)
    for number in range(NUM_RUNNING):
        key, prompt = AttemptKey("r", number, 0), [number, *PROMPT[1:]]
        lease = decode.reserve(key, prompt, 2).lease
        decode.core.receive(BlocksLanded(lease.lease_id, (0, 1), 128, "prefill-0"), 0.0)
        decode.core.receive(NotifyArrived("link", commit(key, lease, prompt, 9, 2)), 0.0)
        decode.core.receive(RevokeDone(lease.lease_id), 0.0)
    decode.pool.lease(NUM_LEASED)
    decode.pool.quarantine(decode.pool.lease(NUM_QUARANTINED))
    cached = decode.pool.allocate(NUM_CACHED)
    decode.pool.publish({block_id: bytes([block_id]) for block_id in cached})
    decode.pool.free(cached)
    waits = SequenceSpec("waits", tuple(PROMPT), 0, SamplingParams(0.0, 0), 2, frozenset(), ())
    decode.scheduler.submit(waits)
    return decode


@pytest.mark.covers("D03", "S15")
def test_routers_are_told_what_the_pool_and_the_scheduler_count() -> None:
    decode = loaded()
    report = load_report(decode.scheduler, decode.pool, num_reserves=5)
    assert (report.running, report.waiting) == (NUM_RUNNING, 1 + 5)
    blocks = (report.blocks_free, report.blocks_cached, report.blocks_used)
    assert blocks == (NUM_FREE, NUM_CACHED, NUM_USED)
    assert (report.blocks_leased, report.blocks_quarantined) == (NUM_LEASED, NUM_QUARANTINED)
    assert decode.core.load() == load_report(decode.scheduler, decode.pool)


@pytest.mark.covers("D03", "O01", "S15")
def test_a_page_of_metrics_says_the_same() -> None:
    decode = loaded()

    async def page() -> str:
        facts, sources = seen(Counters(), Measures())
        return NodeView(facts, replace(sources, core=decode.core)).metrics().decode()

    samples = samples_of(asyncio.run(page()))
    shown = {name[1]: value for name, value in samples.items() if name[0] == "baton_node_blocks"}
    assert shown == {
        "free": NUM_FREE,
        "cached": NUM_CACHED,
        "used": NUM_USED,
        "leased": NUM_LEASED,
        "quarantined": NUM_QUARANTINED,
    }
    assert samples["baton_node_sequences_running",] == samples["baton_node_sequences", "running_decode"] == NUM_RUNNING
    assert samples["baton_node_sequences_waiting",] == samples["baton_node_sequences", "waiting"] == 1
