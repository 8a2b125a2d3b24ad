"""The KV pool as a node's loop sees it: threads that copy, write and read blocks, and answer by events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from connector.kv_store import KvStore
from node.events import Event, FetchBlocks, LookInPool, SaveBlocks


@dataclass(frozen=True, slots=True)
class KvPoolBounds:
    """What the threads keep within."""

    staging_bytes: int = 64 << 20  # of blocks that wait to be written
    look_timeout_s: float = 1.0  # from asking to the answer, whatever the store does
    fetch_timeout_s: float = 5.0
    num_readers: int = 2  # threads
    max_waiting_reads: int = 256  # looks and fetches; more are answered with 0 at once


class KvPoolThreads:
    """Implements loop.KvPool over one store; made, called and stopped on the loop's thread."""

    def __init__(
        self, store: KvStore, kv_bytes: npt.NDArray[np.uint8], bounds: KvPoolBounds, post: Callable[[Event], None]
    ) -> None:
        """kv_bytes: [num_blocks, block_bytes] u8, contiguous. `post` is called from any thread, and from inside the calls."""
        raise NotImplementedError

    def save(self, action: SaveBlocks) -> None:
        """See loop.KvPool."""
        raise NotImplementedError

    def look(self, action: LookInPool) -> None:
        """See loop.KvPool."""
        raise NotImplementedError

    def fetch(self, action: FetchBlocks) -> None:
        """See loop.KvPool."""
        raise NotImplementedError

    async def stop(self, timeout_s: float = 2.0) -> bool:
        """Write what is staged while there is time, end the threads, close the store; False if one did not end in time."""
        raise NotImplementedError

    def snapshot(self) -> Mapping[str, object]:
        """Counters by the names of POOL_COUNTERS, and gauges; JSON-able."""
        raise NotImplementedError
