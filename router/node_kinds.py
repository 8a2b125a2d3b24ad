"""Which nodes are alike, and which of them have room: what placement chooses from, kept as it changes. Pure.

Nodes of one kind differ by load alone, so whether a request can be served, and by which of them, is a question to each kind and not
to each node; there are few kinds. A node is here while it is expected: it can take work, or its broken stream may be resumed. Who
owns a Node says when it has changed: `put` after its session, its entry or its speed have, `changed` after its work or its load.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Set
from typing import NamedTuple

from router.events import NodeRef
from router.node_state import Node
from router.ranking import Candidate, Ranking


class Kind(NamedTuple):
    """What nodes have in common."""

    fingerprint: bytes
    max_total_tokens: int
    prefills: bool
    decodes: bool
    prefills_locally: bool
    tokens_per_s: float | None  # at which it computes prompts, as placement takes it (rates.py)


class NodesOfKind:
    """All of a kind that are expected."""

    __slots__ = ("alone", "decode", "expected", "kind", "prefill", "working")

    def __init__(
        self, kind: Kind, as_prefill: Callable[[NodeRef], Candidate], as_decode: Callable[[NodeRef], Candidate]
    ) -> None:
        self.kind = kind
        self.expected: set[NodeRef] = set()
        self.working: set[NodeRef] = set()  # those of them that can take work, were there room
        self.prefill = Ranking(kind.fingerprint, as_prefill)  # with room for a prompt
        self.decode = Ranking(kind.fingerprint, as_decode)  # with a free sequence
        self.alone = Ranking(kind.fingerprint, as_decode)  # with both, where they decode but compute prompts themselves


class NodeKinds:
    """All kinds that there are nodes of."""

    def __init__(
        self, nodes: Mapping[NodeRef, Node], rate: Callable[[NodeRef], float | None], most_prompts: int
    ) -> None:
        """`nodes`: of whom `put` and `changed` tell; `rate`: one's, as placement takes it; `most_prompts`: at once, of one."""
        self._nodes = nodes
        self._rate = rate
        self._most_prompts = most_prompts
        self._kinds: dict[Kind, NodesOfKind] = {}
        self._kind_of: dict[NodeRef, NodesOfKind] = {}

    def __iter__(self) -> Iterator[NodesOfKind]:
        return iter(self._kinds.values())

    def put(self, node: Node) -> None:
        """A node is new, or anything about it may have changed."""
        ref, old = node.ref, self._kind_of.get(node.ref)
        kind = self._kind(node) if node.is_expected else None
        if old is not None and old.kind != kind:
            self._remove(ref, old)
        if kind is None:
            return
        nodes = self._kind_of.get(ref)
        if nodes is None:
            if (nodes := self._kinds.get(kind)) is None:
                nodes = self._kinds[kind] = NodesOfKind(kind, self._as_prefill, self._as_decode)
            self._kind_of[ref] = nodes
            nodes.expected.add(ref)
        if node.can_take_work:
            nodes.working.add(ref)
        else:
            nodes.working.discard(ref)
        self.changed(node)

    def changed(self, node: Node) -> None:
        """What is on the node, or what it says of its load, is not what it was."""
        if (nodes := self._kind_of.get(ref := node.ref)) is None:
            return
        kind, works = nodes.kind, ref in nodes.working
        takes_prompts = works and node.num_prefills < self._most_prompts
        if kind.prefills:
            nodes.prefill.put(ref, takes_prompts)
        if kind.decodes:
            has_slot = works and len(node.branches) < node.entry.max_num_seqs
            nodes.decode.put(ref, has_slot)
            if kind.prefills_locally:
                nodes.alone.put(ref, has_slot and takes_prompts)

    def look_at_rates(self) -> None:
        """How fast nodes compute prompts may have changed."""
        for ref, nodes in list(self._kind_of.items()):
            if nodes.kind.prefills and nodes.kind.tokens_per_s != self._rate(ref):
                self.put(self._nodes[ref])

    def remove(self, ref: NodeRef) -> None:
        """The node is no more, if it was here."""
        if (nodes := self._kind_of.get(ref)) is not None:
            self._remove(ref, nodes)

    def _remove(self, ref: NodeRef, nodes: NodesOfKind) -> None:
        del self._kind_of[ref]
        nodes.expected.discard(ref)
        nodes.working.discard(ref)
        for ranking in (nodes.prefill, nodes.decode, nodes.alone):
            ranking.put(ref, False)
        if not nodes.expected:
            del self._kinds[nodes.kind]

    def _kind(self, node: Node) -> Kind:
        rate = self._rate(node.ref) if node.prefills else None
        roles = (node.prefills, node.decodes, node.prefills_locally)
        return Kind(node.fingerprint, node.max_total_tokens, *roles, rate)

    def _as_prefill(self, ref: NodeRef) -> Candidate:
        return self._nodes[ref].prefill_candidate(self._rate(ref))

    def _as_decode(self, ref: NodeRef) -> Candidate:
        return self._nodes[ref].decode_candidate()

    # ---------------------------------------------------------------- what can be served

    def prefilled(self, without: Set[NodeRef] = frozenset()) -> set[bytes]:
        """Fingerprints of nodes that prefill, but for these."""
        return {each.kind.fingerprint for each in self if each.kind.prefills and has_others(each.expected, without)}

    def stranded(self, without: Set[NodeRef] = frozenset()) -> list[NodesOfKind]:
        """Decode nodes that compute prompts themselves because nobody else would, but for nodes that are left alone.

        A prefill node that is merely busy, or whose broken stream may be resumed, is waited for: its whole queue would come over
        decode nodes at once.
        """
        able = [each for each in self if each.kind.prefills_locally]
        prefilled = self.prefilled(without) if able else ()
        return [each for each in able if each.kind.fingerprint not in prefilled]


def has_others(nodes: Set[NodeRef], without: Collection[NodeRef]) -> bool:
    """Whether there is any but these."""
    return len(nodes) > len(without) or any(ref not in without for ref in nodes)
