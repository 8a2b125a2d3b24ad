"""What a node tells the routers of its load."""

from __future__ import annotations

from engine.block_pool import BlockPool
from engine.scheduler import Scheduler
from proto import baton_pb2 as pb


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
