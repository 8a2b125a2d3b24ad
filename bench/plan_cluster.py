"""A whole cluster on a virtual clock: the product's router over simulated nodes, request by request. Pure.

    arrival --route--> prefill node: queue, chunks --blocks behind each chunk--> decode node: lease, commit, steps --reply--> client
               |                       `-- first token --reply--> client
            the product's: waiting line, node table, placement, index of caches

What is the product's and what is not stands in docs/planning.md. Virtual time never goes back; every request ends once, served or
refused. Not here: which cluster is looked for (plan_search.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, cast

import numpy as np

from bench.plan_engine import KEY_SEED, Engine, ExactEngine, Told, Work
from bench.plan_fast import FastEngine
from bench.plan_load import Load, Request
from bench.plan_node import SimNode
from bench.plan_outcome import Counts, Outcome, Setup, Slo
from engine.block_pool import BlockCounts
from node.cache_feed import CacheFeed
from node.events import RouterId
from proto import baton_pb2 as pb
from proto.block_key import block_keys
from router.breaker import Breakers, BreakerTiming
from router.cache_index import CacheIndex
from router.cache_map import SHORT_KEY_BYTES, CacheMap
from router.entrance import RouterCoreConfig
from router.events import GenerationRequest, NodeListed, NodeRef, Sampling, SessionUp
from router.nodes import NodeTable
from router.placement import CACHE_AWARE, Pair, Placement
from router.requests import LiveBranch
from router.retry import Tries
from router.waiting import WaitingBranches

_ROUTER: Final = RouterId("router", 1)
_INDEX_BYTES: Final = 256 << 20
_ROLES: Final = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE, "mixed": pb.ROLE_MIXED}


@dataclass(slots=True, eq=False)
class _Live:
    """A request that has not ended."""

    request: Request
    branch: LiveBranch
    keys: Sequence[bytes]
    token_ids: tuple[int, ...]
    pair: Pair | None = None
    work: Work | None = None
    first_at: float = -1.0
    num_said: int = 0  # by attempts that are over
    num_computed: int = 0
    num_sent: int = 0
    is_granted: bool = False


class Cluster:
    """One run."""

    def __init__(self, setup: Setup, counts: Counts, load: Load, slo: Slo, most_missed: int | None = None) -> None:
        """`most_missed`: more requests than that without the objective end the run. ValueError: a request fits no node."""
        if load.longest > setup.sizes.max_model_len:
            raise ValueError(
                f"a request of {load.longest} tokens fits no node of {setup.sizes.num_blocks} blocks of "
                f"{setup.sizes.block_size}: more --num-blocks, or --max-model-len to cut it"
            )
        self._setup, self._counts, self._load, self._slo = setup, counts, load, slo
        self._most_missed = len(load) if most_missed is None else most_missed
        config = RouterCoreConfig(max_queue=setup.max_queue)
        self._config = config
        self._table = NodeTable(config.max_inflight_prefills)
        self._caches = CacheMap(CacheIndex(_INDEX_BYTES)) if setup.placement_prefill == CACHE_AWARE else None
        breakers = Breakers(BreakerTiming(config.breaker_failures, config.breaker_first_s, config.breaker_longest_s))
        placement = Placement(setup.placement_prefill, setup.placement_decode)
        self._waiting = WaitingBranches(self._table, breakers, placement, config, self._caches)
        self._nodes: dict[NodeRef, SimNode] = {}
        self._feeds: dict[NodeRef, CacheFeed] = {}
        self._asked: set[NodeRef] = set()  # nodes whose question stands
        self._fingerprint = pb.Fingerprint(architecture="planned", block_size=setup.sizes.block_size)
        for role, number in (("prefill", counts.prefill), ("decode", counts.decode), ("mixed", counts.mixed)):
            for index in range(number):
                self._add(role, f"{role}-{index:05}")
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._order = count()
        self._now = 0.0
        self._tick_at: float | None = None
        self._live: dict[int, _Live] = {}
        self._num_arrived = self._num_ended = self._num_kept = self._num_refused = self._num_preempted = 0
        self._ttft, self._tpot, self._alone, self._end = (np.full(len(load), np.nan) for _ in range(4))

    def _add(self, role: str, name: str) -> None:
        sizes, ref = self._setup.sizes, NodeRef(name, 1)
        entry = pb.NodeEntry(
            node=pb.PeerId(name=name, incarnation=1),
            role=_ROLES[role],
            grpc_address=name,
            fingerprint=self._fingerprint,
            num_blocks=sizes.num_blocks,
            max_num_seqs=sizes.max_num_seqs,
            max_model_len=sizes.max_model_len,
        )
        self._table.receive(NodeListed(entry))
        self._table.receive(SessionUp(ref))
        engine: Engine = ExactEngine(sizes, role) if self._setup.is_exact else FastEngine(sizes, role)
        self._nodes[ref] = SimNode(ref, role, engine, self._setup.rates)
        if self._caches is not None and role != "decode":
            self._feeds[ref] = CacheFeed(engine.pool)

    # ---------------------------------------------------------------- the clock

    def run(self, advance: Callable[[int], None] = lambda _: None) -> Outcome:
        """Everything, to the last end; `advance` hears how many requests have ended, now and then."""
        load, next_at = self._load, self._load[0].at_s
        if self._caches is not None:
            for node in self._table:
                self._caches.look(node.ref, node, 0.0)
        self._tick()
        told = 0
        while self._num_ended < len(load) and self._num_ended - self._num_kept <= self._most_missed:
            if self._num_arrived < len(load) and (not self._events or next_at <= self._events[0][0]):
                self._step_to(next_at)
                self._arrive(load[self._num_arrived])
                if self._num_arrived < len(load):
                    next_at = load[self._num_arrived].at_s
            else:
                at, _, act, what = heapq.heappop(self._events)
                self._step_to(at)
                act(what)
            if self._num_ended >= told + 1000:
                told = self._num_ended
                advance(told)
        return self._outcome()

    def _step_to(self, at: float) -> None:
        if at < self._now:
            raise ValueError(f"virtual time goes back from {self._now} to {at}")
        self._now = at

    def _at(self, at: float, act: Callable[[Any], None], what: object) -> None:
        heapq.heappush(self._events, (at, next(self._order), act, what))

    # ---------------------------------------------------------------- the router

    def _arrive(self, request: Request) -> None:
        self._num_arrived += 1
        if len(self._waiting) >= self._setup.max_queue:
            self._num_refused += 1
            self._num_ended += 1
            self._end[request.index] = self._now
            return
        block_size = self._setup.sizes.block_size
        token_ids: tuple[int, ...] = ()
        if self._setup.spells or self._setup.is_exact:
            token_ids = self._load.tokens(request)
            keys: Sequence[bytes] = block_keys(KEY_SEED, token_ids, block_size)
        else:
            keys = self._load.keys(request, block_size)
        live = _Live(request, self._branch(request, request.prompt_tokens, request.output_tokens), keys, token_ids)
        self._live[request.index] = live
        self._queue(live)

    def _branch(self, request: Request, num_given: int, num_new: int) -> LiveBranch:
        prompt = cast("tuple[int, ...]", range(num_given))  # of which nothing but the length is asked here
        asked = GenerationRequest(str(request.index), prompt, 0, Sampling(0.0, num_new, ()), float("inf"))
        return LiveBranch(asked, 0, request.index, Tries(self._config), self._now)

    def _queue(self, live: _Live) -> None:
        if self._caches is not None:
            most = (live.branch.num_tokens - 1) // self._setup.sizes.block_size
            short = b"".join([key[:SHORT_KEY_BYTES] for key in live.keys[:most]])
            live.branch.short_keys[self._fingerprint.SerializeToString(deterministic=True)] = short
        self._waiting.put(live.branch)
        self._dispatch()

    def _dispatch(self) -> None:
        while (placed := self._waiting.take(self._now)) is not None:
            (branch,) = placed.group
            live = self._live[int(branch.key.request_id)]
            num_tokens = max(branch.num_tokens - placed.num_cached - placed.num_pooled, 1)
            self._table.occupy(branch.key, placed.pair, num_tokens)
            live.pair = placed.pair
            live.num_computed = live.num_sent = 0
            live.is_granted = False
            request, said = live.request, live.num_said
            num_given, num_new = request.prompt_tokens + said, request.output_tokens - said
            live.work = Work(request.index, request.prompt_tokens, num_given, num_new, live.keys, live.token_ids)
            self._at(self._now + self._setup.rates.route_s, self._begin, live)

    def _tick(self, _: object = None) -> None:
        """The router asks nodes what they hold, when it is due."""
        self._tick_at = None
        if self._caches is None:
            return
        for ref, ask in self._caches.questions(self._now):
            node = self._nodes[ref]
            node.sync(self._now)  # what it has evicted until now is in the answer
            self._feeds[ref].ask(_ROUTER, ask)
            self._asked.add(ref)
            self._hear(ref)
            before = node.wake_at
            node.aim(self._now, ref in self._asked)
            self._wake_later(node, before)
        self._arm_tick()

    def _arm_tick(self) -> None:
        due = None if self._caches is None else self._caches.next_deadline()
        if due is not None and (self._tick_at is None or due < self._tick_at):
            self._tick_at = max(due, self._now)
            self._at(self._tick_at, self._tick, None)

    def _hear(self, ref: NodeRef) -> None:
        """What the node's cache has to say to a question that stands."""
        if self._caches is None or ref not in self._asked:
            return
        for told in self._feeds[ref].tell():
            self._asked.discard(ref)
            self._caches.take(ref, told.message.cache, self._now)
            self._arm_tick()

    # ---------------------------------------------------------------- nodes

    def _begin(self, live: _Live) -> None:
        """The prompt is at its node."""
        assert live.pair is not None and live.work is not None
        node = self._nodes[live.pair.prefill]
        node.sync(self._now)
        node.engine.submit(live.work)
        self._go(node)

    def _go(self, node: SimNode) -> None:
        if node.door is not None:
            for work, num_held in node.door.settle():
                live = self._live[work.request]
                live.is_granted, live.num_sent = True, num_held
                self._send(live)
        before = node.wake_at
        node.go(self._now, self._ask, node.ref in self._asked)
        self._wake_later(node, before)
        if node.ref in self._asked:
            self._hear(node.ref)

    def _wake_later(self, node: SimNode, before: float | None) -> None:
        if node.wake_at is not None and node.wake_at != before:
            self._at(node.wake_at, self._wake, node)

    def _wake(self, node: SimNode) -> None:
        if node.wake_at != self._now:
            return  # it was told anew since
        node.wake_at = None
        for told in node.wake(self._now):
            self._take(node, told)
        self._go(node)

    def _take(self, node: SimNode, told: Told) -> None:
        live = self._live[told.work.request]
        if told.is_first and live.first_at < 0:
            live.first_at = self._now
            self._ttft[live.request.index] = self._now + self._setup.rates.reply_s - live.request.at_s
            if node.role == "mixed" and live.pair is not None:
                self._table.vacate_prefill(live.branch.key, live.pair)
                self._dispatch()
        if node.role == "prefill":
            live.num_computed = told.num_computed
            if told.finish is None or told.work.num_new > 1:
                self._send(live)
            else:
                node.engine.release(told.work)
                self._finish(live)
        elif told.finish == "preempted":
            self._again(live, told)
        elif told.finish is not None:
            self._finish(live)

    def _ask(self, node: SimNode, work: Work, num_cached: int) -> None:
        """A prompt is begun: its decode node is asked for a lease."""
        live = self._live[work.request]
        if live.first_at < 0:
            self._alone[work.request] = self._setup.rates.first_s(
                work.num_given, num_cached, self._setup.sizes.max_num_batched_tokens
            )
        if node.role != "prefill" or work.num_new == 1 or live.pair is None:
            return
        target = self._nodes[live.pair.decode]
        target.sync(self._now)
        assert target.door is not None
        target.door.ask(work)
        self._go(target)

    def _send(self, live: _Live) -> None:
        """Write what is computed, if there is a lease to write into; behind the last of it comes the commit."""
        if not live.is_granted or not live.num_computed or live.pair is None or live.work is None:
            return
        node, rates = self._nodes[live.pair.prefill], self._setup.rates
        num_tokens = max(live.num_computed - live.num_sent, 0)
        live.num_sent = max(live.num_computed, live.num_sent)
        node.link_free_at = max(node.link_free_at, self._now) + rates.transfer_s(num_tokens)
        if live.num_computed == live.work.num_given:
            self._at(node.link_free_at + rates.link_latency_s, self._commit, live)

    def _commit(self, live: _Live) -> None:
        assert live.pair is not None and live.work is not None
        target, node = self._nodes[live.pair.decode], self._nodes[live.pair.prefill]
        target.sync(self._now)
        assert target.door is not None
        target.door.commit(live.work)
        self._go(target)
        node.sync(self._now)
        node.engine.release(live.work)
        self._go(node)
        self._table.vacate_prefill(live.branch.key, live.pair)
        self._dispatch()

    # ---------------------------------------------------------------- ends

    def _again(self, live: _Live, told: Told) -> None:
        """It gave way: the router queues it again, with what it has said."""
        assert live.pair is not None
        self._num_preempted += 1
        self._table.vacate(live.branch.key, live.pair)
        live.num_said = live.request.output_tokens - told.num_left
        given = live.request.prompt_tokens + live.num_said
        live.branch = self._branch(live.request, given, told.num_left)
        self._queue(live)

    def _finish(self, live: _Live) -> None:
        assert live.pair is not None
        index, request = live.request.index, live.request
        self._table.vacate(live.branch.key, live.pair)
        del self._live[index]
        self._num_ended += 1
        self._end[index] = self._now
        keeps = self._ttft[index] <= self._slo.ttft_s
        if request.output_tokens > 1:
            self._tpot[index] = tpot = (self._now - live.first_at) / (request.output_tokens - 1)
            keeps &= tpot <= self._slo.tpot_s
        self._num_kept += bool(keeps)
        self._dispatch()

    def block_counts(self) -> list[BlockCounts]:
        """Of every node, as they are now."""
        return [node.engine.pool.counts() for node in self._nodes.values()]

    def _outcome(self) -> Outcome:
        duration_s = max(self._now, 1e-9)
        by_role: dict[str, list[SimNode]] = {}
        for node in self._nodes.values():
            by_role.setdefault(node.role, []).append(node)
        use = {role: sum(n.busy_s for n in nodes) / len(nodes) / duration_s for role, nodes in by_role.items()}
        blocks = {
            role: sum(n.used_block_s for n in nodes) / len(nodes) / duration_s / self._setup.sizes.num_blocks
            for role, nodes in by_role.items()
        }
        return Outcome(
            counts=self._counts,
            num_requests=len(self._load),
            num_refused=self._num_refused,
            ttft_s=self._ttft,
            tpot_s=self._tpot,
            alone_s=self._alone,
            end_s=self._end,
            num_kept=self._num_kept,
            duration_s=duration_s,
            use=use,
            blocks=blocks,
            num_preempted=sum(node.engine.num_preempted for node in self._nodes.values()),
            num_steps=sum(node.num_steps for node in self._nodes.values()),
            num_computed=sum(node.num_tokens for node in self._nodes.values()),
            num_prompt=sum(node.num_tokens + node.num_cached for node in self._nodes.values()),
            is_whole=self._num_ended == len(self._load),
        )
