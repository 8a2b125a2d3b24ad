"""The seam between a node and the cluster's KV pool: what a store of blocks is, whichever keeps them.

A store maps a block's key (proto/block_key.py: seeded with the model's fingerprint, naming the whole prefix) to its bytes. It
may forget anything at any time, be slow, fail, or lie: every record carries a checksum over key and bytes (kv_record.py), so
the worst that it can cost is a recompute.

Methods block, and are called by several threads at once (node/kv_pool.py has them). A store is of one block size; keys of
other models, or of a cluster with another secret, are never found in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

Count = Callable[[str, int], None]  # raises one of STORE_COUNTERS by an amount; from any thread

# What a store tells of itself, and what each unit is.
STORE_COUNTERS: Final[Mapping[str, str]] = {
    "evicted": "a block that this process dropped because the store was full, or for its age",
    "leftover": "a file of a writer that died, removed",
    "broken": "a block that was right by its checksum, and behind a row without numbers",
}


def count_nowhere(name: str, amount: int) -> None:
    """A Count for who wants none."""


class KvStoreError(Exception):
    """The store could not do it, in one sentence without secrets. What was asked is not done, or partly."""


class KvStoreUnready(KvStoreError):
    """It cannot be opened now, and perhaps in a while: a disk is full, or gone."""


class RunRead(NamedTuple):
    """What reading a run of blocks gave."""

    num_blocks: int  # leading ones that were there, each verified in place
    is_corrupt: bool  # it ended at a record that failed its check, and which the store has dropped


@dataclass(frozen=True, slots=True)
class KvStoreLimits:
    """What bounds a store; each says which of these it keeps, and how exactly."""

    max_bytes: int = 8 << 30  # of records; over it the least recently used ones go
    ttl_s: float = 86_400.0  # that a record is kept unused
    timeout_s: float = 2.0  # of one call to something that may hang


class KvStore(Protocol):
    """Blocks by key. Every method may raise KvStoreError."""

    def identity(self) -> bytes:
        """16 bytes that are the same for all who read and write the same blocks here, and for nobody else. Remembered once known.

        Who opens a store of another directory, server or secret gets another; of other block lengths, the same.
        """

    def missing(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key, whether the store has no such block."""

    def num_leading(self, keys: Sequence[bytes]) -> int:
        """How many leading keys have their block here, unverified: one round trip for all, or few. May overlook a hole."""

    def write(self, blocks: Sequence[tuple[bytes, memoryview]]) -> int:
        """Store those (key, bytes) that are missing; how many were. The others are in use again. A second writer is harmless.

        The bytes are [block_bytes] u8 and must not change meanwhile. Raises ValueError for another length.
        """

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> RunRead:
        """Read a whole run at once into `into`, each [block_bytes] u8, up to the first that is not there or not right.

        What lies in `into` behind those blocks is undefined. Raises ValueError for another length.
        """

    def remove(self, keys: Sequence[bytes]) -> None:
        """Drop those that are there: they are not what they should be, whatever their checksums say. Others may write them anew."""

    def close(self) -> None:
        """Give back what is held; what is stored stays. No other call is under way, and none follows."""
