"""Prompts whose leading blocks may be in the KV pool: who waits for them, what is fetched, when it goes on without. Pure.

    hold() --LookInPool--> PoolLooked --lease, FetchBlocks--> BlocksFetched --commit, publish, free--> released: it matches them
      |                        |                                   '--- the next run of its blocks, if it has more
      '--- not worth it        '--- none, not worth it, no room            whenever its patience is over: released as it is

A request that waits here is not in the scheduler: nobody is behind it, and it holds nothing. It is patient for as long as computing
would take, those in front included (fetch_cost.py); what comes too late is in the prefix cache for whoever comes next.

Blocks, from FetchBlocks to BlocksFetched: leased what is to be filled, referenced what the run continues (of the request's own
prefix match, which the lease must not evict). Both are the fetch's own, whatever becomes of the requests; nothing is given back
earlier, for the reader may write. Then all are cached like any others: nothing is kept for a request in the scheduler's queue,
since what those before it need could be just that. A fetch takes room that nobody who runs or waits is counted on to need, and all
fetches take a quarter of the pool at most.

What was just preempted elsewhere may be on its way into the pool while its next attempt looks for it there: a request that has
completion tokens already looks again, as long as a quarter of its patience lasts.

A block is fetched once at a time: who needs one that is on its way waits for it. While an answer is overdue, nobody new waits.
Where fetching is not worth it, a few blocks are fetched now and then all the same, and nobody waits for them: else one slow moment
of the pool would be held against it for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile
from typing import Final

from engine.block_pool import BlockPool
from engine.prefix_cache import PrefixCache
from engine.scheduler import Scheduler
from node import events as ev
from node.timers import Timers, earliest
from prefill_node.fetch_cost import COLD_WAIT_S, FetchCost
from proto.attempt_key import AttemptKey

MAX_RUN_BLOCKS: Final = 64  # of one fetch: some ten to a hundred MB
MAX_FETCHES: Final = 4  # at a time; as many more as there are blocks for would only wait for the same readers
MAX_LOOKS: Final = 64  # at a time: most are of requests that have given up by then
POOL_SHARE: Final = 4  # a fourth of the blocks may be leased for fetches
PROBE_BLOCKS: Final = 8
LOOK_AGAIN_S: Final = 0.01  # a block is written in less
LOOKS_FOR: Final = 1 / 4  # of the patience of who goes on: so much is lost if nothing was saved
PROBE_PAUSE_S: Final = 10.0


@dataclass(slots=True)
class _Held:
    """A request that waits."""

    block_keys: tuple[bytes, ...]  # those that a match may use
    end: int  # leading ones of them that it hopes for: on their way for others, then by the pool's word
    began_at: float
    num_in_front: int  # prompt positions to compute, when it came
    give_up_at: float
    looks_until: float  # what the pool has not may come so long
    is_told: bool = False  # the pool was asked what it has of all of them, and has answered


@dataclass(frozen=True, slots=True)
class _Look:
    """An unanswered one."""

    keys: tuple[bytes, ...]
    waiter: AttemptKey | None  # None: a probe
    base: int  # index of the first key among the waiter's
    asked_at: float
    overdue_at: float


@dataclass(slots=True)
class _Fetch:
    """An unanswered one: `keys` go into `block_ids`."""

    keys: tuple[bytes, ...]
    block_ids: list[int]  # leased
    continued: list[int]  # one reference each: the prefix that the keys continue
    overdue_at: float
    waiters: list[AttemptKey] = field(default_factory=list)


class Fetching:
    """Owned by the prefill core. What it asks of the shell goes to `out`; who may be computed now is returned."""

    def __init__(self, scheduler: Scheduler, pool: BlockPool, out: list[ev.Action], *, is_on: bool) -> None:
        """Without `is_on` there is no KV pool, and nobody is held."""
        self._scheduler = scheduler
        self._pool = pool
        self._cache = PrefixCache(pool)
        self._out = out
        self._is_on = is_on
        self.is_held_up = False  # no fetch is to begin
        self.cost = FetchCost(pool.block_size)
        self._held: dict[AttemptKey, _Held] = {}
        self._patience: Timers[AttemptKey] = Timers()
        self._again: Timers[AttemptKey] = Timers()  # to look
        self._looks: dict[int, _Look] = {}
        self._fetches: dict[int, _Fetch] = {}
        self._by_key: dict[bytes, _Fetch] = {}  # what is on its way
        self._next_id = 0
        self._probe_at = 0.0

    @property
    def held(self) -> tuple[AttemptKey, ...]:
        """Who waits, in the order of their coming."""
        return tuple(self._held)

    def __contains__(self, key: AttemptKey) -> bool:
        """Whether it waits."""
        return key in self._held

    def hold(self, key: AttemptKey, block_keys: tuple[bytes, ...], now: float, *, goes_on: bool) -> bool:
        """Whether a request that came just now waits for blocks of these keys; False: it is to be computed at once.

        `goes_on`: it has run elsewhere, where more of it may be about to be saved.
        """
        if not self._is_on:
            return False
        num_local = len(self._cache.match(block_keys, len(block_keys)))
        num_missing = len(block_keys) - num_local
        if num_missing == 0:
            return False
        if self._is_stuck(now):
            self._out.append(ev.Count("kv_pool_too_late"))
            return False
        num_in_front = self._scheduler.backlog().num_tokens
        if not self.cost.is_worth_a_look(num_missing, num_in_front):
            self._out.append(ev.Count("kv_pool_not_worth"))
            self._probe(block_keys[num_local : num_local + PROBE_BLOCKS], now)
            return False
        patience_s = self.cost.patience_s(num_missing, num_in_front)
        give_up_at, looks_until = now + patience_s, now + (LOOKS_FOR * patience_s if goes_on else 0.0)
        end = num_local + len(list(takewhile(self._by_key.__contains__, block_keys[num_local:])))
        self._held[key] = _Held(block_keys, end, now, num_in_front, give_up_at, looks_until)
        self._patience.set(key, give_up_at)
        return not self._go_on((key,), now)

    def drop(self, key: AttemptKey) -> None:
        """Nobody wants this request any more; of a request that does not wait nothing is here."""
        self._patience.set(key, None)
        self._again.set(key, None)
        self._held.pop(key, None)

    def take(self, event: ev.PoolLooked | ev.BlocksFetched, now: float) -> list[AttemptKey]:
        """What the pool says; who needs not wait any longer."""
        match event:
            case ev.PoolLooked(look_id, num_blocks):
                return self._looked(self._looks.pop(look_id), num_blocks, now)
            case ev.BlocksFetched(fetch_id, num_blocks, seconds):
                return self._fetched(self._fetches.pop(fetch_id), num_blocks, seconds, now)

    def expire(self, now: float) -> list[AttemptKey]:
        """Who has waited long enough."""
        late = self._patience.pop_due(now)
        for key in late:
            self.drop(key)
            self._out.append(ev.Count("kv_pool_too_late"))
        return [*late, *self._look_again(self._again.pop_due(now), now)]

    def next_deadline(self) -> float | None:
        """When expire must be called."""
        return earliest(self._patience.next(), self._again.next())

    def snapshot(self) -> dict[str, object]:
        """What is under way; block counts as the pool's own counts go."""
        return {
            "waiting_for_kv": len(self._held),
            "kv_looks": len(self._looks),
            "kv_fetches": len(self._fetches),
            "blocks_of_fetches": self._num_leased,
            "references_of_fetches": sum(len(fetch.continued) for fetch in self._fetches.values()),
        }

    # ------------------------------------------------------------ what the pool says

    def _looked(self, look: _Look, num_blocks: int, now: float) -> list[AttemptKey]:
        self.cost.looked(now - look.asked_at)
        if look.waiter is None:
            if num_blocks and look.keys[0] not in self._by_key and self._pool.find(look.keys[0]) is None:
                self._fetch(look.keys[:num_blocks], (), now + COLD_WAIT_S)
            return []
        if (held := self._held.get(look.waiter)) is None:
            return []
        held.end, held.is_told = look.base + num_blocks, True
        if now >= held.looks_until:
            patient_s = self.cost.patience_s(num_blocks, held.num_in_front)
            held.give_up_at = min(held.give_up_at, held.began_at + patient_s)
            self._patience.set(look.waiter, held.give_up_at)
        return self._go_on((look.waiter,), now)

    def _look_again(self, keys: Sequence[AttemptKey], now: float) -> list[AttemptKey]:
        """For what may have come since; who needs not wait for that."""
        released = []
        for key in keys:
            self._held[key].is_told = False
            released += self._go_on((key,), now)
        return released

    def _fetched(self, fetch: _Fetch, num_blocks: int, seconds: float, now: float) -> list[AttemptKey]:
        filled = fetch.block_ids[:num_blocks]
        self._pool.commit_lease(filled)
        self._pool.release_lease(fetch.block_ids[num_blocks:])
        self._pool.publish(dict(zip(filled, fetch.keys, strict=False)))  # a twin computed meanwhile stays the one found
        self._pool.free([*fetch.continued, *filled])
        for block_key in fetch.keys:
            del self._by_key[block_key]
        self.cost.fetched(len(fetch.keys), num_blocks, seconds)
        self._probe_at = now + PROBE_PAUSE_S
        if num_blocks < len(fetch.keys):
            self._give_up_hope(fetch.waiters, fetch.keys[num_blocks])
        return self._go_on(fetch.waiters, now)

    def _give_up_hope(self, waiters: Iterable[AttemptKey], lacking: bytes) -> None:
        """The pool does not have this block, whatever it said: nobody who waits asks for it again."""
        for key in waiters:
            held = self._held.get(key)
            if held is not None and lacking in held.block_keys[: held.end]:
                held.end = held.block_keys.index(lacking)
                held.is_told, held.looks_until = True, held.began_at

    def _go_on(self, keys: Sequence[AttemptKey], now: float) -> list[AttemptKey]:
        """Of these, who has nothing more to wait for."""
        # Once each: who was dropped and came again is there twice.
        waiting = [key for key in dict.fromkeys(keys) if key in self._held]
        released = [key for key in waiting if not self._wait_on(key, now)]
        for key in released:
            self.drop(key)
        return released

    def _wait_on(self, key: AttemptKey, now: float) -> bool:
        """Whether the next run of its blocks is on its way, by now."""
        held = self._held[key]
        matched = self._cache.match(held.block_keys, held.end)
        lacking = held.block_keys[len(matched) : held.end]
        if not lacking:
            return self._hope(key, held, now)
        fetch = self._by_key.get(lacking[0])
        if fetch is None:
            num_worth = self.cost.num_worth(len(lacking), self._scheduler.backlog().num_tokens)
            if not num_worth:
                self._out.append(ev.Count("kv_pool_not_worth"))
                return False
            fetch = self._fetch(lacking[:num_worth], held.block_keys[: len(matched)], held.give_up_at)
        if fetch is None:
            return False
        fetch.waiters.append(key)
        return True

    def _hope(self, key: AttemptKey, held: _Held, now: float) -> bool:
        """Whether there may be more than it hoped for so far: the pool is asked, or is to be asked again."""
        num_local = len(self._cache.match(held.block_keys, len(held.block_keys)))
        if num_local == len(held.block_keys) or held.end == len(held.block_keys):
            return False
        if held.is_told:
            if now < held.looks_until:
                self._again.set(key, now + LOOK_AGAIN_S)
            return now < held.looks_until
        if len(self._looks) >= MAX_LOOKS:
            return False
        self._look(_Look(held.block_keys[num_local:], key, num_local, now, held.give_up_at))
        return True

    # ------------------------------------------------------------ what is asked of it

    @property
    def _num_leased(self) -> int:
        return sum(len(fetch.block_ids) for fetch in self._fetches.values())

    def _is_stuck(self, now: float) -> bool:
        """Whether an answer is overdue: whoever waits for another one would wait for that first."""
        looks = (look.overdue_at for look in self._looks.values())
        return any(now >= at for at in chain(looks, (fetch.overdue_at for fetch in self._fetches.values())))

    def _look(self, look: _Look) -> None:
        self._next_id += 1
        self._looks[self._next_id] = look
        self._out.append(ev.LookInPool(self._next_id, look.keys))

    def _probe(self, keys: tuple[bytes, ...], now: float) -> None:
        """See how the pool does, with few blocks, and nobody waiting."""
        if now >= self._probe_at and not self._looks and not self._fetches:
            self._probe_at = now + PROBE_PAUSE_S
            self._out.append(ev.Count("kv_pool_probes"))
            self._look(_Look(keys, None, 0, now, now + COLD_WAIT_S))

    def _fetch(self, keys: tuple[bytes, ...], behind: tuple[bytes, ...], overdue_at: float) -> _Fetch | None:
        """Fetch a run of these, which continue `behind`; None if there is no room for it.

        The first is neither here nor on its way; before another one that is, the run ends.
        """
        is_needed = lambda key: key not in self._by_key and self._pool.find(key) is None  # noqa: E731
        num_needed = len(list(takewhile(is_needed, keys[:MAX_RUN_BLOCKS])))
        num_blocks = min(num_needed, self._pool.num_blocks // POOL_SHARE - self._num_leased)
        matched = self._cache.match(behind, len(behind))
        num_taken = sum(map(self._pool.is_cached, matched)) + num_blocks + self._scheduler.backlog().num_blocks
        has_room = num_blocks > 0 and not self.is_held_up and self._scheduler.admits(num_taken, ())
        if not has_room or len(self._fetches) >= MAX_FETCHES:
            self._out.append(ev.Count("kv_pool_no_room"))
            return None
        continued = self._cache.acquire_match(behind, len(behind))  # before the lease: it would evict just these
        fetch = _Fetch(keys[:num_blocks], self._pool.lease(num_blocks), continued, overdue_at)
        self._next_id += 1
        self._fetches[self._next_id] = fetch
        self._by_key |= dict.fromkeys(fetch.keys, fetch)
        blocks = tuple(zip(fetch.keys, fetch.block_ids, strict=True))
        self._out.append(ev.FetchBlocks(self._next_id, blocks))
        return fetch
