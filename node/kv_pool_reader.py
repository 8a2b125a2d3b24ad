"""The way out of the KV pool: one thread asks what it has, others read runs of blocks. Every call is answered in time.

    loop ──look──► looker: store.num_leading ──► PoolLooked
         ──fetch─► readers: store.read ──► a buffer of the thread's own ──verified, memcpy──► KV memory ──► BlocksFetched
         ──timer─► too late: answered with what there is by then

A store may hang for ever, and a thread inside it cannot be ended. So a thread reads into a buffer of its own, and what it brings
is copied to KV memory only if its call is not answered yet: from the answer on nobody writes into those blocks. A thread that
hung takes the next call when the store lets it go; until then calls run out of time, and are kept no longer, the circuit opens,
and they are answered at once. A call that waited behind others for too long tells nothing of the store, if that came back
meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import Condition, Lock
from typing import Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from connector.kv_store import KvStore, KvStoreError, RunRead
from node.events import BlocksFetched, Event, FetchBlocks, LookInPool, PoolLooked
from node.kv_pool_circuit import PoolCircuit
from node.measures import Measures
from node.pool_word import PoolWord
from runtime.threads import started_thread

_READ_BYTES: Final = 4 << 20  # that a reader asks of the store at once, and what its buffer holds

_A = TypeVar("_A", LookInPool, FetchBlocks)


class _Call(Generic[_A]):
    """One look or fetch, until it is answered."""

    def __init__(self, action: _A) -> None:
        self.action: _A = action
        self.asked_at = time.monotonic()
        self.lock = Lock()
        self.is_begun = False  # a thread has it
        self.is_answered = False
        self.num_read = 0  # leading blocks that are in KV memory

    def claim(self) -> bool:
        """Whether the caller is the one to answer it."""
        with self.lock:
            was_answered, self.is_answered = self.is_answered, True
        return not was_answered


class _Line(Generic[_A]):
    """Calls that no thread has taken: those that hang take none, for days perhaps, and what was answered meanwhile goes."""

    def __init__(self) -> None:
        self._calls: dict[_Call[_A], None] = {}  # the oldest first
        self._is_ending = False
        self._changed = Condition()

    def __len__(self) -> int:
        return len(self._calls)

    def put(self, call: _Call[_A]) -> None:
        """Have a thread take it, or have it dropped."""
        with self._changed:
            self._calls[call] = None
            self._changed.notify()

    def take(self) -> _Call[_A] | None:
        """The oldest, as soon as there is one; None: there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self._is_ending)
            call = next(iter(self._calls), None)
            if call is not None:
                del self._calls[call]
            return call

    def drop(self, call: _Call[_A]) -> None:
        """It was answered; without effect where a thread has it."""
        with self._changed:
            self._calls.pop(call, None)

    def end(self) -> None:
        """There will be no more."""
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()


class PoolReader:
    """Made and told on the loop's thread."""

    def __init__(
        self,
        store: KvStore,
        kv_bytes: npt.NDArray[np.uint8],
        num_readers: int,
        timeouts_s: tuple[float, float],
        circuit: PoolCircuit,
        says: tuple[Callable[[Event], None], PoolWord],
        measures: Measures,
    ) -> None:
        """kv_bytes: [num_blocks, block_bytes] u8. `timeouts_s`: of a look, of a fetch, from the call to its answer.

        `says`: answers, and what is learnt of the pool.
        """
        self._store = store
        self._kv_bytes = kv_bytes
        self._look_timeout_s, self._fetch_timeout_s = timeouts_s
        self._circuit = circuit
        self._post, self._word = says
        self._measures = measures
        self._loop = asyncio.get_running_loop()
        self._looks = _Line[LookInPool]()
        self._fetches = _Line[FetchBlocks]()
        self._heard_at = {LookInPool: 0.0, FetchBlocks: 0.0}  # when the store last came back from one
        names = [f"kv-pool-reader-{number}" for number in range(num_readers)]
        self.ended: tuple[Future[None], ...] = (
            started_thread("kv-pool-looker", self._look_all),
            *(started_thread(name, self._read_all) for name in names),
        )

    @property
    def num_waiting(self) -> int:
        """Calls that no thread has taken."""
        return len(self._looks) + len(self._fetches)

    def look(self, action: LookInPool) -> None:
        """PoolLooked answers."""
        call = _Call(action)
        if self._circuit.ask():
            self._looks.put(call)
            self._loop.call_later(self._look_timeout_s, self._answer_look, call, "late", 0)
        else:
            self._answer_look(call, "refused", 0)

    def fetch(self, action: FetchBlocks) -> None:
        """BlocksFetched answers."""
        call = _Call(action)
        if self._circuit.ask():
            self._fetches.put(call)
            self._loop.call_later(self._fetch_timeout_s, self._answer_fetch, call, "late", call.asked_at)
        else:
            self._answer_fetch(call, "refused", call.asked_at)

    def end(self) -> None:
        """End the threads behind the calls already made."""
        self._looks.end()
        self._fetches.end()

    # ------------------------------------------------------------ looks

    def _look_all(self) -> None:
        self._word.say()  # whose it is, before anybody asks for anything
        while (call := self._looks.take()) is not None:
            if call.is_answered:
                continue
            call.is_begun = True
            try:
                # Within what was asked: a store may say anything.
                num_blocks = max(0, min(self._store.num_leading(call.action.keys), len(call.action.keys)))
                self._heard_at[LookInPool] = time.monotonic()
            except KvStoreError as error:
                self._answer_look(call, "failed", 0, str(error))
            else:
                self._answer_look(call, "found" if num_blocks else "nothing", num_blocks)
                keys = call.action.keys
                self._word.say(found=keys[:num_blocks], lacking=keys[num_blocks : num_blocks + 1])

    def _answer_look(
        self, call: _Call[LookInPool], outcome: str, num_blocks: int, why: str = "no answer in time"
    ) -> None:
        if not call.claim():
            return
        self._looks.drop(call)
        match outcome:
            case "late" if self._is_only_busy(call):
                self._circuit.said_nothing()
            case "failed" | "late":
                self._circuit.failed(why)
            case "nothing":
                self._circuit.succeeded()
            case "found":  # whether it is there is known when it is read
                self._circuit.said_nothing()
        self._measures.add("kv_pool_looks", outcome)
        self._measures.observe("kv_pool_look_seconds", time.monotonic() - call.asked_at)
        self._post(PoolLooked(call.action.look_id, num_blocks))

    # ------------------------------------------------------------ fetches

    def _read_all(self) -> None:
        block_bytes = self._kv_bytes.shape[1]
        buffer = np.empty((max(1, _READ_BYTES // block_bytes), block_bytes), np.uint8)
        while (call := self._fetches.take()) is not None:
            if call.is_answered:
                continue
            call.is_begun, began_at = True, time.monotonic()
            try:
                outcome = self._read(call, buffer)
            except KvStoreError as error:
                self._answer_fetch(call, "failed", began_at, str(error))
            else:
                self._answer_fetch(call, outcome, began_at)

    def _read(self, call: _Call[FetchBlocks], buffer: npt.NDArray[np.uint8]) -> str:
        """Read runs as long as the buffer, until one is not whole; what became of the blocks that are not there then."""
        blocks = call.action.blocks
        while call.num_read < len(blocks) and not call.is_answered:
            batch = blocks[call.num_read : call.num_read + len(buffer)]
            run = self._store.read([key for key, _ in batch], [buffer[slot].data for slot in range(len(batch))])
            self._heard_at[FetchBlocks] = time.monotonic()
            keys = tuple(key for key, _ in batch)
            self._word.say(found=keys[: run.num_blocks], lacking=keys[run.num_blocks : run.num_blocks + 1])
            if not self._copy(call, batch, buffer, run):
                break
            if run.num_blocks < len(batch):
                return "corrupt" if run.is_corrupt else "absent"
        return "absent"

    def _copy(
        self,
        call: _Call[FetchBlocks],
        batch: tuple[tuple[bytes, int], ...],
        buffer: npt.NDArray[np.uint8],
        run: RunRead,
    ) -> bool:
        """Put a run where it belongs, unless the call is answered already: then its blocks are somebody else's."""
        with call.lock:
            if call.is_answered:
                return False
            for slot, (_, block_id) in enumerate(batch[: run.num_blocks]):
                np.copyto(self._kv_bytes[block_id], buffer[slot])
            call.num_read += run.num_blocks
            return True

    def _answer_fetch(self, call: _Call[FetchBlocks], outcome: str, began_at: float, why: str = "") -> None:
        if not call.claim():
            return
        self._fetches.drop(call)
        num_read, num_asked = call.num_read, len(call.action.blocks)
        match outcome:
            case "refused":
                pass
            case "late" if self._is_only_busy(call):
                self._circuit.said_nothing()
            case "absent" | "corrupt" if num_read > 0:
                self._circuit.succeeded()
            case _:
                self._circuit.failed(why or f"nothing of what was looked up could be read: {outcome}")
        self._measures.add("kv_pool_reads", "read", num_read)
        if num_read < num_asked:
            num_corrupt = outcome == "corrupt"
            self._measures.add("kv_pool_reads", "corrupt", num_corrupt)
            self._measures.add(
                "kv_pool_reads", "absent" if num_corrupt else outcome, num_asked - num_read - num_corrupt
            )
        seconds = time.monotonic() - began_at
        self._measures.observe("kv_pool_fetch_seconds", seconds)
        self._post(BlocksFetched(call.action.fetch_id, num_read, seconds))

    # ------------------------------------------------------------ both

    def _is_only_busy(self, call: _Call[_A]) -> bool:
        """Whether it came too late because others were before it, and not because the store hangs."""
        return not call.is_begun and self._heard_at[type(call.action)] > call.asked_at
