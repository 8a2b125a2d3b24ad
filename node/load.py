"""What a node tells the routers of its load."""

from __future__ import annotations

from engine.block_pool import BlockPool
from engine.scheduler import Scheduler
from proto import baton_pb2 as pb
from proto.prefill_speed import PrefillSpeed


def load_report(scheduler: Scheduler, pool: BlockPool, num_reserves: int = 0) -> pb.LoadReport:
    """Counts as they are now; `num_reserves` wait for a lease."""
    blocks = pool.counts()
    return pb.LoadReport(
        waiting=scheduler.num_waiting + num_reserves,
        running=scheduler.num_running,
        blocks_free=blocks.free,
        blocks_cached=blocks.cached,
        blocks_used=blocks.used,
        blocks_leased=blocks.leased,
        blocks_quarantined=blocks.quarantined,
    )


def tell_speed(report: pb.LoadReport, speed: PrefillSpeed | None, num_prompt_tokens: int) -> None:
    """Add what a node that prefills has measured of itself, if it has."""
    if speed is None:
        return
    report.prefill_tokens = num_prompt_tokens
    report.prefill_tokens_per_s = 1 / speed.token_s
    if (fetch := speed.fetch) is not None:
        report.fetch.CopyFrom(
            pb.FetchSpeed(latency_s=fetch.latency_s, block_s=fetch.block_s, share=fetch.share, look_s=fetch.look_s)
        )
