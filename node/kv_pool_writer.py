"""The way into the KV pool: one thread copies blocks into a staging buffer, another one writes them from there.

    loop ──save──► stager: KV memory ──memcpy──► staging buffer ──► writer: store.write     as slow as it likes
           ◄── BlocksStaged ──┘ the blocks may be freed
    loop ──take_out──► stager: what waits is dropped ──► writer: store.remove

One goes the same way as the other, so that no block that was given to be saved is stored behind its removal.

The stager waits for nobody: what finds no free slot is not stored, and counted. Copies are np.copyto, which releases the GIL. The
buffer is allocated once. Not here: which slot holds what (kv_staging.py), what is stored when (the cores).
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Condition
from typing import Final

import numpy as np
import numpy.typing as npt

from connector.kv_store import KvStore, KvStoreError
from node.events import BlocksStaged, Event, SaveBlocks, TakeOutBlocks
from node.kv_pool_circuit import PoolCircuit
from node.kv_recent import RecentKeys
from node.kv_staging import Staging
from node.measures import Measures
from node.pool_word import PoolWord
from runtime.threads import started_thread

_BATCH_BYTES: Final = 8 << 20  # that the writer gives to the store at once
# Times that blocks are to go and the store has not let go of an earlier call; the oldest are given up.
_MAX_TO_TAKE_OUT: Final = 64


class PoolWriter:
    """Made and told on the loop's thread."""

    def __init__(
        self,
        store: KvStore,
        kv_bytes: npt.NDArray[np.uint8],
        staging_bytes: int,
        recent: RecentKeys,
        circuit: PoolCircuit,
        says: tuple[Callable[[Event], None], PoolWord],
        measures: Measures,
    ) -> None:
        """kv_bytes: [num_blocks, block_bytes] u8. `recent` is the writer's own from now on. `says`: answers; what is learnt."""
        self._store = store
        self._kv_bytes = kv_bytes
        self._circuit = circuit
        self._post, self._word = says
        self._measures = measures
        block_bytes = kv_bytes.shape[1]
        self.num_slots = staging_bytes // block_bytes
        self._per_batch = max(1, _BATCH_BYTES // block_bytes)
        self._buffer = np.empty((self.num_slots, block_bytes), np.uint8)
        self._staging = Staging(self.num_slots)  # under _changed's lock, as the two flags
        self._recent = recent  # under the same lock
        self._changed = Condition()
        self._to_take_out: deque[tuple[bytes, ...]] = deque(maxlen=_MAX_TO_TAKE_OUT)  # under the same lock
        self._is_ending = False  # nothing is staged any more
        self._is_hurried = False  # nor written
        # The core bounds what it has under way.
        self._asked: SimpleQueue[tuple[SaveBlocks, float] | TakeOutBlocks | None] = SimpleQueue()
        self.ended: tuple[Future[None], ...] = (
            started_thread("kv-pool-stager", self._stage_all),
            started_thread("kv-pool-writer", self._write_all),
        )

    @property
    def num_used(self) -> int:
        """Slots that are not free."""
        return self._staging.num_used

    def save(self, action: SaveBlocks) -> None:
        """Copy the blocks, and write them later; BlocksStaged answers."""
        if self._circuit.would_let_through():
            self._asked.put((action, time.monotonic()))
        else:
            self._measures.add("kv_pool_saves", "refused", len(action.blocks))
            self._post(BlocksStaged(action.save_id, 0))

    def take_out(self, action: TakeOutBlocks) -> None:
        """Remove the blocks from the pool, once, whatever its circuit says: a full pool lets go of them as well.

        What a store that is down keeps, or another node brings again, goes when it breaks the next one.
        """
        self._asked.put(action)

    def forget(self, keys: tuple[bytes, ...]) -> None:
        """The pool lacks them, or is about to: they can be stored anew. Any thread."""
        with self._changed:
            self._recent.drop(keys)

    def end(self) -> None:
        """End both threads once all that was given is written."""
        self._asked.put(None)

    def hurry(self) -> None:
        """End them as soon as the call under way returns."""
        with self._changed:
            self._is_hurried = True
            self._changed.notify()

    # ------------------------------------------------------------ the stager

    def _stage_all(self) -> None:
        while (asked := self._asked.get()) is not None:
            if isinstance(asked, TakeOutBlocks):
                self._ask_to_remove(asked.keys)
                continue
            action, asked_at = asked
            num_staged = self._stage(action)
            if num_staged < len(action.blocks):
                self._measures.add("kv_pool_saves", "full", len(action.blocks) - num_staged)
            self._measures.observe("kv_pool_stage_seconds", time.monotonic() - asked_at)
            self._post(BlocksStaged(action.save_id, num_staged))
        with self._changed:
            self._is_ending = True
            self._changed.notify()

    def _ask_to_remove(self, keys: tuple[bytes, ...]) -> None:
        with self._changed:
            self._staging.drop(keys)
            self._to_take_out.append(keys)
            self._changed.notify()

    def _stage(self, action: SaveBlocks) -> int:
        """Copy leading blocks as far as there is room, those that the pool has left out; how many."""
        now = time.monotonic()
        for index, (key, block_id) in enumerate(action.blocks):
            with self._changed:
                if self._staging.holds(key):  # of another sequence with this prefix
                    continue
                is_present = self._recent.has(key, now)
                slot = None if is_present else self._staging.begin(key)
            if is_present:
                self._measures.add("kv_pool_saves", "present")
                continue
            if slot is None:
                return index
            np.copyto(self._buffer[slot], self._kv_bytes[block_id])
            with self._changed:
                self._staging.filled(slot)
                self._changed.notify()
        return len(action.blocks)

    # ------------------------------------------------------------ the writer

    def _write_all(self) -> None:
        while any(work := self._next_work()):
            batch, broken = work
            if broken:  # before the batch: what is in it of them was computed anew since
                self._remove(broken)
            if batch:
                self._write_batch(batch)

    def _next_work(self) -> tuple[list[tuple[bytes, int]], tuple[bytes, ...]]:
        """Blocks to write, and keys of blocks to remove; neither: there will be no more."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._staging.num_waiting or self._to_take_out or self._is_ending or self._is_hurried
            )
            if self._is_hurried:
                return [], ()
            return self._staging.take(self._per_batch), self._to_take_out.popleft() if self._to_take_out else ()

    def _write_batch(self, batch: list[tuple[bytes, int]]) -> None:
        outcome, num_written = self._write(batch)
        with self._changed:
            if outcome == "present":
                self._recent.note((key for key, _ in batch), time.monotonic())
            for _, slot in batch:
                self._staging.left(slot)
        self._measures.add("kv_pool_saves", outcome, len(batch) - num_written)
        self._measures.add("kv_pool_saves", "written", num_written)
        if outcome == "present":
            self._word.say(stored=tuple(key for key, _ in batch))

    def _remove(self, keys: tuple[bytes, ...]) -> None:
        self.forget(keys)
        with contextlib.suppress(KvStoreError):  # what it is like to write to, writing says
            self._store.remove(keys)
            self._word.say(lacking=keys)

    def _write(self, batch: list[tuple[bytes, int]]) -> tuple[str, int]:
        """What became of those blocks that were not written, and how many were."""
        if not self._circuit.ask():
            return "refused", 0
        began_at = time.monotonic()
        try:
            num_written = self._store.write([(key, self._buffer[slot].data) for key, slot in batch])
        except KvStoreError as error:
            self._circuit.failed(str(error))
            return "failed", 0
        finally:
            self._measures.observe("kv_pool_write_seconds", time.monotonic() - began_at)
        self._circuit.succeeded()
        return "present", min(num_written, len(batch))
