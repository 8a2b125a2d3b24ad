"""What every node's prefix cache holds, as far as this router has heard, and when it asks on. Pure.

A node is asked once its session is up, and answers as soon as there is news (node/cache_feed.py); after a pause it is
asked again. So there is one question on its way, or one node that has nothing to say, and the pace is this router's:
`rest_s` between a node's answer and the next question, and over all nodes so much time per key that taking up what
comes is a small share of it, snapshots of a large cluster included.

What is known of a node outlives its session, since the node's log may still have what came meanwhile; if it has not, it
says so, and all of it is heard anew. It does not outlive the process: another incarnation is another node. News that
does not follow what is known is a fault of the node, or of ours: counted, and the node is asked for everything again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from proto import baton_pb2 as pb
from proto.block_key import block_keys, fingerprint_bytes, seed_key
from router.cache_index import CacheIndex
from router.events import NodeRef
from router.key_table import Keys
from router.keyed_heap import KeyedHeap
from router.node_state import Node, Session
from router.requests import LiveBranch

SHORT_KEY_BYTES: Final = 8  # of each key, as nodes tell them
_SWEEP_BUCKETS: Final = 2048  # at once: a millisecond or so
_SWEEP_EVERY_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Pace:
    """When nodes are asked."""

    rest_s: float = 0.02  # from a node's answer to the next question to it
    gap_s: float = 0.002  # between any two questions: some five times what hearing an answer costs
    key_s: float = 0.000_002_5  # more of it for each key of the last answer: as many times what taking one up costs


@dataclass(slots=True)
class _Known:
    """One node."""

    holder: int
    fingerprint: bytes
    taken: int | None = None  # number of the last change that is known; None: nothing is
    next_block: int | None = None  # where the snapshot's next piece begins; None: it is whole
    is_asked: bool = False


class CacheMap:
    """The nodes that prefill, and the index of their blocks."""

    def __init__(self, index: CacheIndex, pace: Pace | None = None) -> None:
        self._index = index
        self._pace = pace or Pace()
        self._known: dict[NodeRef, _Known] = {}
        self._refs: dict[int, NodeRef] = {}  # by holder
        self._due = KeyedHeap[NodeRef]()
        self._free_at = 0.0  # no question before that
        self._sweep_at = 0.0
        self._models: dict[bytes, tuple[bytes, int]] = {}  # by fingerprint: key seed, block size

    # ---------------------------------------------------------------- nodes

    def look(self, nodes: Iterable[Node], now: float) -> None:
        """Nodes have come or gone, or their sessions have."""
        present = {node.ref: node for node in nodes if node.prefills}
        for ref in [ref for ref in self._known if ref not in present]:
            self._index.close(self._known[ref].holder)
            del self._refs[self._known.pop(ref).holder]
            self._due.discard(ref)
        present_models = {known.fingerprint for known in self._known.values()}
        self._models = {name: model for name, model in self._models.items() if name in present_models}
        for ref, node in present.items():
            known = self._known.get(ref)
            if node.session not in (Session.UP, Session.BROKEN):
                if known is not None:
                    known.is_asked = False  # the question went with its session
                    self._due.discard(ref)
            elif known is None:
                self._meet(node, now)
            elif not known.is_asked and ref not in self._due:
                self._due.put(ref, now)

    def _meet(self, node: Node, now: float) -> None:
        if (holder := self._index.open()) is None:
            return  # it is placed by its load
        self._known[node.ref] = _Known(holder, node.fingerprint)
        self._refs[holder] = node.ref
        self._due.put(node.ref, now)
        if node.fingerprint not in self._models:
            fields = pb.Fingerprint.DESCRIPTOR.fields
            of_node = {each.name: getattr(node.entry.fingerprint, each.name) for each in fields}
            self._models[node.fingerprint] = seed_key(fingerprint_bytes(of_node)), node.entry.fingerprint.block_size

    # ---------------------------------------------------------------- questions

    def questions(self, now: float) -> list[tuple[NodeRef, pb.CacheAsk]]:
        """What is due to be asked; sweeps the index a little where that is due."""
        asked: list[tuple[NodeRef, pb.CacheAsk]] = []
        while self._free_at <= now and (first := self._due.first()) is not None and first[1] <= now:
            ref = first[0]
            known = self._known[ref]
            self._due.discard(ref)
            known.is_asked = True
            asked.append((ref, pb.CacheAsk(taken=known.taken, next_block=known.next_block)))
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
        known = self._known.get(ref)
        if known is None or not known.is_asked:
            return False
        known.is_asked = False
        self._due.put(ref, now + self._pace.rest_s)
        is_new = not news.HasField("after")
        is_sound = (is_new or news.after == known.taken) and not (
            len(news.stored) | len(news.evicted)
        ) % SHORT_KEY_BYTES
        if (is_new or not is_sound) and known.taken is not None and not self._forget_blocks(ref, known):
            return is_sound
        if not is_sound:
            return False
        stored, evicted = _keys(news.stored), _keys(news.evicted)
        self._index.evict(known.holder, evicted)
        num_taken_up = self._index.store(known.holder, stored)
        self._free_at = max(self._free_at, now) + self._pace.key_s * (num_taken_up + len(evicted))
        known.taken = news.taken
        known.next_block = news.next_block if news.HasField("next_block") else None
        return True

    def _forget_blocks(self, ref: NodeRef, known: _Known) -> bool:
        """What is known goes with the holder's number, and another one is taken; False: there is none, the node is forgotten."""
        self._index.close(known.holder)
        del self._refs[known.holder]
        known.taken = known.next_block = None
        if (holder := self._index.open()) is None:
            del self._known[ref]
            self._due.discard(ref)
            return False
        known.holder = holder
        self._refs[holder] = ref
        return True

    # ---------------------------------------------------------------- prompts

    def cached(self, branch: LiveBranch) -> dict[NodeRef, int]:
        """Of a branch's prompt the tokens that nodes need not compute, by node; one that must compute all of it is not in it."""
        tokens: dict[NodeRef, int] = {}
        request = branch.request
        if branch.awaits_prompt_logprobs:
            return tokens
        for fingerprint, (seed, block_size) in self._models.items():
            keys = branch.short_keys.get(fingerprint)
            if keys is None:
                token_ids = (*request.prompt_token_ids, *request.generated_token_ids)
                known = block_keys(seed, token_ids[:-1], block_size)  # the last token is always computed
                keys = branch.short_keys[fingerprint] = b"".join([key[:SHORT_KEY_BYTES] for key in known])
            for num_blocks, holders in reversed(self._index.leading(_keys(keys))):
                for holder in _bits(holders):
                    tokens.setdefault(self._refs[holder], num_blocks * block_size)
        return tokens

    # ---------------------------------------------------------------- what there is

    def is_whole(self, ref: NodeRef) -> bool:
        """Whether all that the node held when it spoke last is known."""
        known = self._known.get(ref)
        return known is not None and known.taken is not None and known.next_block is None

    def keys_of(self, ref: NodeRef) -> set[int]:
        """What is known of a node, key by key: for tests."""
        return self._index.keys_of(self._known[ref].holder)

    def snapshot(self) -> Mapping[str, float]:
        """JSON-able numbers."""
        return {
            "nodes": len(self._known),
            "nodes_whole": sum(map(self.is_whole, self._known)),
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
