"""Bugs in what nodes tell of their caches, in the router's index of it, and in placement by it."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_INDEX: Final = ("tests/router/test_cache_index.py",)
_MAP: Final = ("tests/router/test_cache_map.py",)
_CORE: Final = ("tests/router/test_core_caches.py",)
_PLACEMENT: Final = ("tests/router/test_placement.py",)

MUTANTS: Final = (
    Mutant(
        "cache-log-takes-eviction-for-store",
        "A block that is evicted is told of as one that can be found.",
        "engine/block_pool.py",
        "self.key_log.add(key, False)",
        "self.key_log.add(key, True)",
        _MAP,
    ),
    Mutant(
        "cache-log-off-is-no-gap",
        "A log that was off for a while goes on as if nothing had happened meanwhile.",
        "engine/key_log.py",
        "self._num_forgotten = self.last + 1  #",
        "self._num_forgotten = self.last  #",
        _MAP,
    ),
    Mutant(
        "cache-log-overflow-goes-unsaid",
        "Who asks for changes that are no longer kept gets the oldest that are.",
        "engine/key_log.py",
        "first = number - self._num_forgotten",
        "first = max(number - self._num_forgotten, 0)",
        _MAP,
    ),
    Mutant(
        "cache-feed-snapshot-lacks-its-first-piece",
        "A snapshot begins with its second piece.",
        "node/cache_feed.py",
        "pb.CacheNews(taken=log.last), {}, 0)",
        "pb.CacheNews(taken=log.last), {}, self._piece)",
        _MAP,
    ),
    Mutant(
        "cache-feed-first-word-counts",
        "Of a key that came and went in one piece the first word is told.",
        "node/cache_feed.py",
        "last_words = dict(changes)",
        "last_words = dict(reversed(changes))",
        _MAP,
    ),
    Mutant(
        "cache-feed-answers-twice",
        "A question is answered again and again.",
        "node/cache_feed.py",
        "                self._asks[router] = None\n",
        "",
        ("tests/node/test_cache_feed.py",),
    ),
    Mutant(
        "cache-map-overlooks-a-gap",
        "News that does not follow what is known is taken.",
        "router/cache_map.py",
        "(is_new or news.after == known.taken)",
        "(is_new or news.HasField('after'))",
        _MAP,
    ),
    Mutant(
        "cache-map-waits-for-a-lost-question",
        "A question that went with its session is waited for.",
        "router/cache_map.py",
        "known.is_asked = False  # the question went with its session",
        "pass",
        (*_MAP, *_CORE),
    ),
    Mutant(
        "cache-map-keeps-the-dead",
        "What a process held stays in the index when it is gone.",
        "router/cache_map.py",
        "            self._index.close(self._known[ref].holder)\n            del",
        "            del",
        _MAP,
    ),
    Mutant(
        "cache-map-adds-a-new-snapshot-to-the-old",
        "A node that begins anew keeps what was known of it before.",
        "router/cache_map.py",
        "        self._index.close(known.holder)\n",
        "        return True\n",
        _MAP,
    ),
    Mutant(
        "cache-map-counts-the-last-token",
        "A prompt that is cached whole has nothing left to compute.",
        "router/cache_map.py",
        "token_ids[:-1], block_size)",
        "token_ids, block_size)",
        _MAP,
    ),
    Mutant(
        "cache-map-has-no-pace",
        "Nodes are asked for more at once, however much came.",
        "router/cache_map.py",
        "+ self._pace.key_s *",
        "+ 0.0 *",
        _MAP,
    ),
    Mutant(
        "cache-index-remembers-the-closed",
        "A holder that is closed goes on to hold what it held until it is swept.",
        "router/cache_index.py",
        "return self._bits(value) & ~self._closed",
        "return self._bits(value)",
        _INDEX,
    ),
    Mutant(
        "cache-index-skips-a-missing-block",
        "A run of blocks goes on behind one that the holder lacks.",
        "router/cache_index.py",
        "still = holders & self._live(value)",
        "still = self._live(value)",
        _INDEX,
    ),
    Mutant(
        "cache-index-evicts-for-all",
        "A block that one node evicts is gone for all of them.",
        "router/cache_index.py",
        "self._live(value) & ~(1 << holder))",
        "0)",
        _INDEX,
    ),
    Mutant(
        "cache-index-reuses-a-number-unswept",
        "A holder's number is given out again while its keys are in the table.",
        "router/cache_index.py",
        "        self._closed |= 1 << holder\n",
        "        self._free.append(holder)\n",
        _INDEX,
    ),
    Mutant(
        "key-table-splits-by-the-first-hash",
        "A key that lies where its second hash says moves by its first one.",
        "router/key_table.py",
        "np.where(of_first, buckets[:, 0], buckets[:, 1])",
        "buckets[:, 0]",
        _INDEX,
    ),
    Mutant(
        "key-table-drops-who-gives-way",
        "A key that gives its cell to another one is lost.",
        "router/key_table.py",
        "is_out = has_won & (before_values != 0)",
        "is_out = has_won & (before_values == -1)",
        _INDEX,
    ),
    Mutant(
        "placement-by-cache-forgets-the-queue",
        "A prompt goes where it is cached, however long the queue there is.",
        "router/placement.py",
        "return queued + prompt.num_tokens - prompt.cached",
        "return prompt.num_tokens - prompt.cached",
        _PLACEMENT,
    ),
    Mutant(
        "placement-by-cache-bears-any-imbalance",
        "A node is taken for what it holds, however much longer its queue is than the shortest.",
        "router/placement.py",
        "if each.load[0] <= longest]",
        "if each.load[0] >= 0]",
        _PLACEMENT,
    ),
    Mutant(
        "placement-counts-what-is-cached-as-work",
        "What a node holds of a prompt is counted as work that it has to do.",
        "router/core.py",
        "group[0].num_tokens - num_cached if",
        "group[0].num_tokens if",
        _CORE,
    ),
)
