"""What every node's prefix cache and every KV pool holds, as far as this router has heard, and when it asks on. Pure.

A node is asked once its session is up, and answers as soon as there is news (node/cache_feed.py); after a pause it is
asked again. So there is one question on its way, or one node that has nothing to say, and the pace is this router's:
`rest_s` between a node's answer and the next question, and over all nodes so much time per key that taking up what
comes is a small share of it, snapshots of a large cluster included.

What is known of a node outlives its session, since the node's log may still have what came meanwhile; if it has not, it
says so, and all of it is heard anew. It does not outlive the process: another incarnation is another node. News that
does not follow what is known is a fault of the node, or of ours: counted, and the node is asked for everything again.

Of a KV pool each node that uses it knows a part (node/pool_book.py), and is asked for that apart from its cache. Which nodes
use the same one follows from the identity that they tell. Each node's word has a holder of its own, so that it goes with the
node; what any of them says is there all of them can fetch, and what one has looked for in vain is there for none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from proto import baton_pb2 as pb
from proto.block_key import block_keys, fingerprint_bytes, seed_key
from router.cache_index import CacheIndex, Run
from router.events import NodeRef
from router.key_table import Keys
from router.keyed_heap import KeyedHeap
from router.node_state import Node, Session
from router.placement import Prompt
from router.requests import LiveBranch

SHORT_KEY_BYTES: Final = 8  # of each key, as nodes tell them
_SWEEP_BUCKETS: Final = 2048  # at once: a millisecond or so
_SWEEP_EVERY_S: Final = 0.02
_MOST_HOLDERS: Final = 16  # of a prompt that are named one by one; a beginning that all share all have


@dataclass(frozen=True, slots=True)
class Pace:
    """When nodes are asked."""

    rest_s: float = 0.02  # from a node's answer to the next question to it
    gap_s: float = 0.002  # between any two questions: some five times what hearing an answer costs
    key_s: float = 0.000_001  # more of it for each key of the last answer: as many times what taking one up costs


class Source(NamedTuple):
    """Who is asked for what."""

    node: NodeRef
    pool: bytes = b""  # identity of the KV pool that it is to tell of; empty: its prefix cache


@dataclass(slots=True)
class _Known:
    """Of one source."""

    holder: int
    node: Node
    taken: int | None = None  # number of the last change that is known; None: nothing is
    next_block: int | None = None  # where the snapshot's next piece begins; None: it is whole
    is_asked: bool = False


class _Cached(Mapping[NodeRef, int]):
    """Tokens of a prompt by the node that has them cached; looked up when it is asked, since all nodes may have some."""

    def __init__(
        self, runs: Sequence[Run], holder_of: Callable[[NodeRef], int | None], sources: Mapping[int, Source]
    ) -> None:
        """`runs`: in tokens; the first that a holder is in is its."""
        self._runs = runs
        self._holder_of = holder_of
        self._sources = sources

    def __getitem__(self, ref: NodeRef) -> int:
        holder = self._holder_of(ref)
        if holder is not None:
            for num_tokens, holders in self._runs:
                if holders >> holder & 1:
                    return num_tokens
        raise KeyError(ref)

    def __iter__(self) -> Iterator[NodeRef]:
        everybody = 0
        for _, holders in self._runs:
            everybody |= holders
        return (self._sources[holder].node for holder in _bits(everybody))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class CacheMap:
    """The nodes that prefill, and the index of their blocks."""

    def __init__(self, index: CacheIndex, pace: Pace | None = None) -> None:
        self._index = index
        self._pace = pace or Pace()
        self._known: dict[Source, _Known] = {}
        self._unmet: dict[Source, Node] = {}  # for whom there was no holder
        self._sources: dict[int, Source] = {}  # by holder
        self._pools: dict[bytes, int] = {}  # by identity: the holders, as bits, that stand for nodes' words on it
        self._pool_of: dict[NodeRef, bytes] = {}
        self._due = KeyedHeap[Source]()
        self._free_at = 0.0  # no question before that
        self._sweep_at = 0.0
        self._models: dict[bytes, tuple[bytes, int]] = {}  # by fingerprint: key seed, block size

    # ---------------------------------------------------------------- nodes

    def look(self, ref: NodeRef, node: Node | None, now: float) -> None:
        """A node has come or gone (None), or its session has, or it uses another KV pool, or has another role; O(1) of nodes."""
        present = [Source(ref)] if node is not None and node.prefills else []
        present += [Source(ref, node.pool)] if node is not None and node.pool else []
        for source in {Source(ref): None, Source(ref, self._pool_of.pop(ref, b"")): None}:
            if source not in present:
                self._drop(source)
        if node is not None:
            if node.pool:
                self._pool_of[ref] = node.pool
            for source in present:
                self._follow(source, node, now)
        if self._unmet:  # there may be a holder for one of them now
            self._follow(*self._unmet.popitem(), now)

    def _follow(self, source: Source, node: Node, now: float) -> None:
        known = self._known.get(source)
        if node.session not in (Session.UP, Session.BROKEN):
            self._unmet.pop(source, None)
            if known is not None:
                known.is_asked = False  # the question went with its session
                self._due.discard(source)
        elif known is None:
            self._meet(source, node, now)
        elif not known.is_asked and source not in self._due:
            self._due.put(source, now)

    def _meet(self, source: Source, node: Node, now: float) -> None:
        if (holder := self._open(source)) is None:
            self._unmet[source] = node  # it is placed by its load
            return
        self._known[source] = _Known(holder, node)
        self._due.put(source, now)
        if node.fingerprint not in self._models:
            fields = pb.Fingerprint.DESCRIPTOR.fields
            of_node = {each.name: getattr(node.entry.fingerprint, each.name) for each in fields}
            self._models[node.fingerprint] = seed_key(fingerprint_bytes(of_node)), node.entry.fingerprint.block_size

    def _drop(self, source: Source) -> None:
        self._unmet.pop(source, None)
        if source in self._known:
            self._close(source)
            self._forget(source)

    def _forget(self, source: Source) -> Node:
        """Its holder is closed; whose it was."""
        node = self._known.pop(source).node
        self._due.discard(source)
        if all(known.node.fingerprint != node.fingerprint for known in self._known.values()):
            self._models.pop(node.fingerprint, None)
        return node

    def _open(self, source: Source) -> int | None:
        if (holder := self._index.open()) is not None:
            self._sources[holder] = source
            if source.pool:
                self._pools[source.pool] = self._pools.get(source.pool, 0) | 1 << holder
        return holder

    def _close(self, source: Source) -> None:
        holder = self._known[source].holder
        self._index.close(holder)
        del self._sources[holder]
        if source.pool:
            self._pools[source.pool] &= ~(1 << holder)
            if not self._pools[source.pool]:
                del self._pools[source.pool]

    # ---------------------------------------------------------------- questions

    def questions(self, now: float) -> list[tuple[NodeRef, pb.CacheAsk]]:
        """What is due to be asked; sweeps the index a little where that is due."""
        asked: list[tuple[NodeRef, pb.CacheAsk]] = []
        while self._free_at <= now and (first := self._due.first()) is not None and first[1] <= now:
            source = first[0]
            known = self._known[source]
            self._due.discard(source)
            known.is_asked = True
            ask = pb.CacheAsk(taken=known.taken, next_block=known.next_block, of_pool=bool(source.pool))
            asked.append((source.node, ask))
            self._free_at = now + self._pace.gap_s
        if self._index.is_sweeping and self._sweep_at <= now:
            self._index.sweep(_SWEEP_BUCKETS)
            self._sweep_at = now + _SWEEP_EVERY_S
        return asked

    def next_deadline(self) -> float | None:
        """When `questions` is to be called at the latest, or None."""
        first = self._due.first()
        asks = [] if first is None else [max(first[1], self._free_at)]
        return min([*asks, *([self._sweep_at] if self._index.is_sweeping else [])], default=None)

    def take(self, ref: NodeRef, news: pb.CacheNews, now: float) -> bool:
        """A node's answer; False: nobody had asked for it, or it does not follow what is known."""
        source = Source(ref, self._pool_of.get(ref, b"") if news.of_pool else b"")
        known = self._known.get(source)
        if known is None or not known.is_asked or news.of_pool != bool(source.pool):
            return False
        known.is_asked = False
        self._due.put(source, now + self._pace.rest_s)
        is_new = not news.HasField("after")
        is_sound = (is_new or news.after == known.taken) and not any(
            len(keys) % SHORT_KEY_BYTES for keys in (news.stored, news.evicted, news.lacking)
        )
        if (is_new or not is_sound) and known.taken is not None and not self._forget_blocks(source, known):
            return is_sound
        if not is_sound:
            return False
        stored, evicted, lacking = _keys(news.stored), _keys(news.evicted), _keys(news.lacking)
        self._index.evict(1 << known.holder, evicted)
        if source.pool:
            self._index.evict(self._pools[source.pool], lacking)
        num_taken_up = self._index.store(known.holder, stored)
        self._free_at = max(self._free_at, now) + self._pace.key_s * (num_taken_up + len(evicted) + len(lacking))
        known.taken = news.taken
        known.next_block = news.next_block if news.HasField("next_block") else None
        return True

    def _forget_blocks(self, source: Source, known: _Known) -> bool:
        """What is known goes with the holder's number, and another one is taken; False: there is none for the time being."""
        self._close(source)
        known.taken = known.next_block = None
        if (holder := self._open(source)) is None:
            self._unmet[source] = self._forget(source)
            return False
        known.holder = holder
        return True

    # ---------------------------------------------------------------- prompts

    def prompt(self, branch: LiveBranch) -> Prompt:
        """A branch's prompt, with the tokens that need not be computed, by node and by KV pool; who has none is not in it."""
        pooled: dict[tuple[bytes, bytes], int] = {}
        runs: list[Run] = []  # in tokens
        request = branch.request
        if branch.awaits_prompt_logprobs:
            return Prompt(branch.num_tokens, {})
        for fingerprint, (seed, block_size) in self._models.items():
            keys = branch.short_keys.get(fingerprint)
            if keys is None:
                token_ids = (*request.prompt_token_ids, *request.generated_token_ids)
                known = block_keys(seed, token_ids[:-1], block_size)  # the last token is always computed
                keys = branch.short_keys[fingerprint] = b"".join([key[:SHORT_KEY_BYTES] for key in known])
            for num_blocks, holders in reversed(self._index.leading(_keys(keys), self._pools.values())):
                rest = holders
                for pool, words in self._pools.items():
                    if holders & words:
                        pooled.setdefault((pool, fingerprint), num_blocks * block_size)
                        rest &= ~words
                if rest:
                    runs.append(Run(num_blocks * block_size, rest))
        cached: Mapping[NodeRef, int] = _Cached(runs, self._holder_of, self._sources) if runs else {}
        return Prompt(branch.num_tokens, cached, pooled, *self._few_holders(runs))

    def _few_holders(self, runs: Sequence[Run]) -> tuple[list[NodeRef], int]:
        """Those that hold the longest of these runs, some at most, and how long the longest is that any other holds."""
        found = 0
        for num_tokens, holders in sorted(runs, reverse=True):
            if (found | holders).bit_count() > _MOST_HOLDERS:
                return [self._sources[holder].node for holder in _bits(found)], num_tokens
            found |= holders
        return [self._sources[holder].node for holder in _bits(found)], 0

    def _holder_of(self, ref: NodeRef) -> int | None:
        """That stands for a node's prefix cache."""
        known = self._known.get(Source(ref))
        return None if known is None else known.holder

    # ---------------------------------------------------------------- what there is

    def is_whole(self, ref: NodeRef, pool: bytes = b"") -> bool:
        """Whether all that the node held, or knew of a pool, when it spoke last is known."""
        known = self._known.get(Source(ref, pool))
        return known is not None and known.taken is not None and known.next_block is None

    def keys_of(self, ref: NodeRef, pool: bytes = b"") -> set[int]:
        """What is known of a node's cache, or of a pool by its word, key by key: for tests."""
        return self._index.keys_of(self._known[Source(ref, pool)].holder)

    def snapshot(self) -> Mapping[str, float]:
        """JSON-able numbers."""
        nodes = [source.node for source in self._known if not source.pool]
        return {
            "nodes": len(nodes),
            "nodes_whole": sum(map(self.is_whole, nodes)),
            "pools": len(self._pools),
            "keys": self._index.num_keys,
            "bytes": self._index.num_bytes,
            "share": self._index.share,
            "dropped": self._index.num_dropped,
        }


def _keys(short_keys: bytes) -> Keys:
    return np.frombuffer(short_keys, dtype=np.uint64)


def _bits(holders: int) -> Iterator[int]:
    while holders:
        lowest = holders & -holders
        yield lowest.bit_length() - 1
        holders ^= lowest
