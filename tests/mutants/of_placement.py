"""Bugs in the orders and kinds of nodes that the router keeps so that placement need not look at every node."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_RANKING: Final = ("tests/router/test_ranking.py",)
_KINDS: Final = ("tests/router/test_node_kinds.py",)
_CACHES: Final = ("tests/router/test_core_caches.py",)
_MAP: Final = ("tests/router/test_cache_map.py",)

MUTANTS: Final = (
    Mutant(
        "ranking-overlooks-a-load",
        "A node whose load has changed keeps its place in the order.",
        "router/ranking.py",
        "                insort(self._names, ref)\n            self._stale[ref] = None\n",
        "                insort(self._names, ref)\n                self._stale[ref] = None\n",
        _RANKING,
    ),
    Mutant(
        "ranking-keeps-who-has-gone",
        "Every incarnation of a node that ever was is remembered where nobody asks for the order by load.",
        "router/ranking.py",
        "                self._stale.pop(ref, None)",
        "                self._stale[ref] = None",
        _RANKING,
    ),
    Mutant(
        "equals-in-no-turn",
        "Of nodes with the lowest load the first by name gets every request.",
        "router/ranking.py",
        "max(bisect_right(order, (load, last)), first)",
        "first",
        _RANKING,
    ),
    Mutant(
        "turn-takes-who-is-left-out",
        "Of nodes with the lowest load one is taken that may not be used.",
        "router/ranking.py",
        "                if self._may(order[index][1]):\n                    chosen",
        "                if order[index][1] > last:\n                    chosen",
        _RANKING,
    ),
    Mutant(
        "draw-takes-who-is-left-out",
        "A node that may not be used is drawn in place of the one behind it.",
        "router/ranking.py",
        "                    index += 1\n",
        "                    pass\n",
        _RANKING,
    ),
    Mutant(
        "what-has-ended-still-counts",
        "A decode node whose branches have ended stays where it was in the order by load, and full.",
        "router/nodes.py",
        "            node.branches.pop(branch, None)\n            self._kinds.changed(node)\n",
        "            node.branches.pop(branch, None)\n",
        _KINDS,
    ),
    Mutant(
        "new-rates-unheard",
        "A node that turns out to be slow stays among the fast ones.",
        "router/nodes.py",
        "            self._kinds.look_at_rates()\n",
        "            pass\n",
        _CACHES,
    ),
    Mutant(
        "lost-node-keeps-its-kind",
        "A node that is lost is still counted among those that could serve.",
        "router/nodes.py",
        "            if event.node in self._nodes:\n                self._kinds.put(node)\n",
        "",
        _KINDS,
    ),
    Mutant(
        "claims-hold-for-no-kind",
        "Who waits for room has a claim to nodes, and others are sent there.",
        "router/nodes.py",
        "return length is not None and length <= nodes.kind.max_total_tokens",
        "return length is not None and length < nodes.kind.max_total_tokens - 1000",
        _KINDS,
    ),
    Mutant(
        "soonest-is-the-least-loaded",
        "By cache the least loaded node is taken before others that hold more than it does.",
        "router/placement.py",
        "        if costs[-1][0] == bound:\n",
        "        if costs:\n",
        _RANKING,
    ),
    Mutant(
        "soonest-overlooks-what-others-hold",
        "A node further down the order, which holds something of the prompt, is not looked at.",
        "router/placement.py",
        "num_uncached = prompt.num_tokens - prompt.most_of_others",
        "num_uncached = prompt.num_tokens",
        _RANKING,
    ),
    Mutant(
        "holders-beyond-the-few-hold-nothing",
        "Of a beginning that many nodes share, only a few are believed to have it.",
        "router/cache_map.py",
        "for holder in _bits(found)], num_tokens",
        "for holder in _bits(found)], 0",
        _MAP,
    ),
)
