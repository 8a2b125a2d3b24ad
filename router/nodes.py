"""What the router knows of all node processes, and what of ours is on each (node_state.py).

The registry says whom to dial; only the session says who is alive. A node gets new work while its session is up, be it that the
registry misses it; not once it has gone by its own word, and not while it drains: then it keeps what it has. A process under
another's name or address has taken its place: the old one is lost at once. Work is held per branch (`prefilling`, `branches`) and
counted by looking, so a counter cannot drift. Questions about all nodes are put to their kinds (node_kinds.py), which hear of all
that changes here. Not here: which node is chosen (placement.py), what happens to a lost node's requests (core.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from proto import baton_pb2 as pb
from proto.attempt_key import BranchKey
from router.events import (
    Degraded,
    Dial,
    HangUp,
    LeftOut,
    LoadReported,
    NodeDrains,
    NodeListed,
    NodeMissed,
    NodeRef,
    NodeUnlisted,
    SessionBroken,
    SessionLost,
    SessionUp,
)
from router.node_kinds import Kind, NodeKinds, NodesOfKind, has_others
from router.node_state import Node, Session, left_out
from router.placement import Pair
from router.ranking import Among
from router.rates import Rates

_HALVES: Final = ("prefill", "decode")
NO_PREFILL_NODE: Final = "no prefill node can take work: decode nodes compute prompts themselves"

# Who waits for room has a claim to every node that is large enough: by fingerprint, the shortest sequence that waits for its nodes.
Claims = Mapping[bytes, int]
NO_CLAIMS: Final[Claims] = MappingProxyType({})

NodeEvent = NodeListed | NodeMissed | NodeUnlisted | NodeDrains | SessionUp | SessionBroken | SessionLost | LoadReported


@dataclass(slots=True)
class NodeChange:
    """What an event about nodes brings about."""

    actions: list[Dial | LeftOut | HangUp | Degraded] = field(default_factory=list)
    orphans: list[tuple[BranchKey, NodeRef]] = field(default_factory=list)  # with the lost node that each was on
    lost: list[NodeRef] = field(default_factory=list)  # nodes that were at work a moment ago, and were not about to end
    drained: list[NodeRef] = field(default_factory=list)  # nodes that are gone as they said they would
    died: list[NodeRef] = field(default_factory=list)  # the others whose process is known to have ended
    # Nodes that have come or gone, or are others but for load.
    touched: dict[NodeRef, None] = field(default_factory=dict)
    is_news: bool = True  # who waits may find something else than before it: neither a load, nor what was said before


class NodeTable:
    """All node processes that are listed or have a session; one per name and one per gRPC address."""

    def __init__(self, max_inflight_prefills: int, tokenizer: str = "") -> None:
        """`max_inflight_prefills`: of a node; `tokenizer`: digest of the router's, which a node's must equal; empty: unknown."""
        self._tokenizer = tokenizer
        self._max_inflight_prefills = max_inflight_prefills
        self._nodes: dict[NodeRef, Node] = {}
        self._ref_of: dict[str, NodeRef] = {}  # by name
        self._ref_at: dict[str, NodeRef] = {}  # by gRPC address
        self._rates = Rates()
        self._rates_version = 0  # that kinds were made by
        self._kinds = NodeKinds(self._nodes, self._rates.of, max_inflight_prefills)
        self._fingerprints: Set[bytes] = frozenset()
        self._max_total_tokens: int | None = None
        self._is_degraded = False
        # Sequences that all nodes that decode could run at once, whatever state they are in.
        self.num_slots = 0
        self.num_prefill_places = 0  # and prompts that all who compute any would be given at once

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def find(self, ref: NodeRef) -> Node | None:
        """The node process, if it is known."""
        return self._nodes.get(ref)

    def fingerprint_of(self, ref: NodeRef) -> bytes:
        """Of a node process that is known."""
        return self._nodes[ref].fingerprint

    def named(self, names: Collection[str]) -> set[NodeRef]:
        """The processes of these names that are known."""
        return {self._ref_of[name] for name in names if name in self._ref_of}

    def snapshot(self) -> Mapping[str, object]:
        """JSON-able state by node process."""
        return {f"{node.ref.name}@{node.ref.incarnation}": node.snapshot() for node in self}

    # ---------------------------------------------------------------- coming and going

    def receive(self, event: NodeEvent) -> NodeChange:
        """Take an event about a node; one about a process that is not known (any more) changes nothing."""
        change = NodeChange()
        if isinstance(event, NodeListed):
            self._list(event.entry, change)
        elif (node := self._nodes.get(event.node)) is not None:
            match event:
                case NodeMissed() | NodeUnlisted():
                    node.is_listed = False
                    node.is_gone |= isinstance(event, NodeUnlisted)
                    if node.session in (Session.DIALING, Session.LOST):
                        self._remove(node, change)
                case NodeDrains():  # each attempt that it gives back says so
                    change.is_news = not node.drains
                    node.has_said_draining = True
                case SessionUp():
                    node.session = Session.UP
                case SessionBroken():
                    node.session = Session.BROKEN
                case SessionLost(has_died=has_died):
                    self._lose(node, change, has_died)
                case LoadReported(load=load):
                    change.is_news = False
                    if load.kv_pool != node.pool:
                        change.touched[node.ref] = None
                    node.hear(load)
                    self._kinds.changed(node)
                    self._rates.hear(node.ref, load.prefill_tokens_per_s, load.prefill_tokens)
                    return change
            change.touched[node.ref] = None
            if event.node in self._nodes:
                self._kinds.put(node)
        self._fingerprints = {nodes.kind.fingerprint for nodes in self._kinds}
        self._max_total_tokens = self.longest_of(self._fingerprints)
        sentences = self.degraded()
        if self._is_degraded != bool(sentences) and not self.missing():  # else nothing is served: that is no recovery
            self._is_degraded = not self._is_degraded
            change.actions.append(Degraded(tuple(sentences)))
        return change

    def _list(self, entry: pb.NodeEntry, change: NodeChange) -> None:
        ref, address = NodeRef(entry.node.name, entry.node.incarnation), entry.grpc_address
        for other in dict.fromkeys((self._ref_of.get(ref.name, ref), self._ref_at.get(address, ref))):
            if other != ref:
                self._nodes[other].is_listed = False
                self._lose(self._nodes[other], change, has_died=True)
        change.touched[ref] = None
        fingerprint = entry.fingerprint.SerializeToString(deterministic=True)
        node = self._nodes.get(ref)
        if node is None:
            self._nodes[ref] = Node(ref, entry, fingerprint)
            self._count(self._nodes[ref], 1)
            self._ref_of[ref.name] = self._ref_at[address] = ref
            self._dial(self._nodes[ref], change)
            return
        self._count(node, -1)
        node.is_listed, node.is_gone, node.has_said_draining = True, False, False
        if node.entry.grpc_address != address:
            self._lose(node, change, has_died=False)
            node.session = Session.DIALING
            change.actions.append(HangUp(ref))
            del self._ref_at[node.entry.grpc_address]
            self._ref_at[address] = ref
            node.entry = entry
            self._dial(node, change)
        node.entry, node.fingerprint = entry, fingerprint
        self._count(node, 1)
        self._kinds.put(node)

    def _count(self, node: Node, sign: int) -> None:
        self.num_slots += sign * node.num_slots
        self.num_prefill_places += sign * self._max_inflight_prefills * (node.prefills or node.prefills_locally)

    def _dial(self, node: Node, change: NodeChange) -> None:
        node.is_left_out = "" != node.entry.tokenizer != self._tokenizer != ""
        change.actions.append(LeftOut(node.entry) if node.is_left_out else Dial(node.entry))

    def _lose(self, node: Node, change: NodeChange, has_died: bool) -> None:
        if node.drains:
            change.drained.append(node.ref)
        elif node.session in (Session.UP, Session.BROKEN):
            change.lost.append(node.ref)
            if has_died:
                change.died.append(node.ref)
        node.session = Session.LOST
        self._kinds.put(node)
        change.orphans += [(key, node.ref) for key in dict.fromkeys([*node.prefilling, *node.branches])]
        if not node.is_listed:
            self._remove(node, change)

    def _remove(self, node: Node, change: NodeChange) -> None:
        del self._nodes[node.ref], self._ref_of[node.ref.name], self._ref_at[node.entry.grpc_address]
        self._count(node, -1)
        change.touched[node.ref] = None
        self._kinds.remove(node.ref)
        self._rates.forget(node.ref)
        change.actions.append(HangUp(node.ref))

    # ---------------------------------------------------------------- what can be served

    @property
    def max_total_tokens(self) -> int | None:
        """The longest sequence that some compatible pair of expected nodes can hold, or a decode node that no prefill node could
        serve and that computes prompts itself; None without either."""
        return self._max_total_tokens

    @property
    def fingerprints(self) -> Set[bytes]:
        """Of all nodes that are expected."""
        return self._fingerprints

    def longest_of(self, fingerprints: Set[bytes]) -> int | None:
        """`max_total_tokens` of the nodes with one of these."""
        prefills = _longest_by_fingerprint(nodes.kind for nodes in self._kinds if nodes.kind.prefills)
        decodes = _longest_by_fingerprint(nodes.kind for nodes in self._kinds if nodes.kind.decodes)
        pairs = [min(prefills[each], decodes[each]) for each in prefills.keys() & decodes.keys() & fingerprints]
        stranded = [nodes.kind for nodes in self._kinds.stranded()]
        alone = [kind.max_total_tokens for kind in stranded if kind.fingerprint in fingerprints]
        return max((*pairs, *alone), default=None)

    def missing(self) -> list[str]:
        """What is lacking before a request can be served now, as sentences; empty when ready."""
        if any(nodes.working for nodes in self._kinds.stranded()):
            return []
        ready = [nodes.kind for nodes in self._kinds if nodes.working]
        groups = [
            {kind.fingerprint for kind in ready if kind.prefills},
            {kind.fingerprint for kind in ready if kind.decodes},
        ]
        if groups[0] and groups[1]:
            return [] if groups[0] & groups[1] else ["no prefill node has the fingerprint of a decode node"]
        lacking = [f"no {name} node can take work" for name, group in zip(_HALVES, groups, strict=True) if not group]
        return lacking + left_out(self)

    def degraded(self) -> list[str]:
        """What requests are served without, as sentences; empty when every role is there, and when nothing is served."""
        ready = [nodes.kind for nodes in self._kinds if nodes.working]
        prefilled = {kind.fingerprint for kind in ready if kind.prefills}
        has_pair = any(kind.decodes and kind.fingerprint in prefilled for kind in ready)
        return [NO_PREFILL_NODE] if not has_pair and any(nodes.working for nodes in self._kinds.stranded()) else []

    def can_serve(self, total_tokens: int, without: Set[NodeRef], fingerprints: Set[bytes]) -> bool:
        """Whether some pair with one of these fingerprints could take so long a sequence, had it room, that has none of these nodes
        in it; or a node alone."""

        def is_able(nodes: NodesOfKind) -> bool:
            is_large_enough = total_tokens <= nodes.kind.max_total_tokens
            return is_large_enough and nodes.kind.fingerprint in fingerprints and has_others(nodes.working, without)

        able = [nodes.kind for nodes in self._kinds if is_able(nodes)]
        prefills = {kind.fingerprint for kind in able if kind.prefills}
        has_pair = any(kind.decodes and kind.fingerprint in prefills for kind in able)
        return has_pair or any(map(is_able, self._kinds.stranded(without)))

    def has_unclaimed(self, claimed: Claims) -> bool:
        """Whether nobody has a claim to some node that decodes, and can take work."""
        return any(nodes.working and nodes.kind.decodes and not _is_claimed(nodes, claimed) for nodes in self._kinds)

    # ---------------------------------------------------------------- who has room

    def prefill_candidates(
        self, total_tokens: int, without: Set[NodeRef] = frozenset(), claimed: Claims = NO_CLAIMS
    ) -> Among:
        """Nodes that prefill, with room for a sequence of at most `total_tokens`, but for these, and for those that somebody has a
        claim to: every node that decodes and is large enough."""
        if self._rates_version != self._rates.version:
            self._rates_version = self._rates.version
            self._kinds.look_at_rates()
        able = self._large_enough(total_tokens, claimed)
        return Among([nodes.prefill for nodes in able if nodes.kind.prefills], without)

    def decode_candidates(
        self, total_tokens: int, without: Set[NodeRef] = frozenset(), claimed: Claims = NO_CLAIMS
    ) -> Among:
        """Nodes that decode, with a free sequence slot, as far as this router knows, that can hold `total_tokens`; but for some, as
        with prefill_candidates."""
        able = self._large_enough(total_tokens, claimed)
        return Among([nodes.decode for nodes in able if nodes.kind.decodes], without)

    def stranded_candidates(
        self, total_tokens: int, without: Set[NodeRef], claimed: Claims, broken: Set[NodeRef]
    ) -> Among:
        """Decode nodes with room that compute prompts themselves, and whom no prefill node but the broken could hand anything; but
        for some, as with prefill_candidates."""
        able = self._large_enough(total_tokens, claimed)
        return Among([nodes.alone for nodes in self._kinds.stranded(broken) if nodes in able], without)

    def spare_candidates(
        self, total_tokens: int, without: Set[NodeRef], claimed: Claims, num_tokens: int, max_tokens: int
    ) -> Among:
        """Decode nodes with room that would compute `num_tokens` more of prompts, and then at most `max_tokens` of them at once;
        but for some, as with prefill_candidates.

        Not where somebody waits for room: those with a short prompt would overtake who asks for a lease.
        """

        def fits(ref: NodeRef) -> bool:
            node = self._nodes[ref]
            return node.prefill_tokens + num_tokens <= max_tokens and not node.load.waiting

        able = self._large_enough(total_tokens, claimed) if num_tokens <= max_tokens else []
        return Among([nodes.alone for nodes in able if nodes.kind.prefills_locally], without).where(fits)

    def move_targets(self, holder: NodeRef, num_tokens: int, total_tokens: int, without: Set[NodeRef]) -> Among:
        """Other nodes that decode, have the holder's fingerprint and, as they said last, blocks for `num_tokens`, but for these."""
        known = self._nodes.get(holder)
        others = self.decode_candidates(total_tokens, without | {holder})
        able = others.of(() if known is None else (known.fingerprint,))
        return able.where(lambda ref: self._nodes[ref].has_blocks_for(num_tokens))

    def has_target(self, holder: NodeRef, total_tokens: int, without: Set[NodeRef]) -> bool:
        """Whether some other node could take a branch over from its holder, had it room, that is none of these."""
        known = self._nodes.get(holder)
        return known is not None and any(
            nodes.kind.decodes
            and nodes.kind.fingerprint == known.fingerprint
            and total_tokens <= nodes.kind.max_total_tokens
            and has_others(nodes.working, without | {holder})
            for nodes in self._kinds
        )

    def _large_enough(self, total_tokens: int, claimed: Claims) -> list[NodesOfKind]:
        return [
            nodes
            for nodes in self._kinds
            if total_tokens <= nodes.kind.max_total_tokens and not (nodes.kind.decodes and _is_claimed(nodes, claimed))
        ]

    def num_fitting(self, ref: NodeRef, num_tokens: int, total_tokens: int) -> int:
        """Sequences that share `num_tokens` and may grow to `total_tokens` for which a decode node that is a candidate has
        slots, as far as this router knows, and blocks, if nobody else had any. At least one."""
        node = self._nodes[ref]
        block_size = node.entry.fingerprint.block_size
        num_shared = num_tokens // block_size
        num_own = max(1, -(-(total_tokens - 1) // block_size) - num_shared)
        num_slots = node.entry.max_num_seqs - len(node.branches)
        return max(1, min(num_slots, (node.entry.num_blocks - num_shared) // num_own))

    # ---------------------------------------------------------------- work

    def occupy(self, branch: BranchKey, pair: Pair, tokens_to_prefill: int) -> pb.Target:
        """Count a branch's attempt on both of its nodes; the second as the first is told of it.

        `tokens_to_prefill`: 0 if another branch of the attempt brings them.
        """
        prefill = self._nodes[pair.prefill]
        prefill.prefilling[branch] = tokens_to_prefill
        prefill.prefill_tokens += tokens_to_prefill
        prefill.num_prefills += tokens_to_prefill > 0
        self._kinds.changed(prefill)
        return self.occupy_decode(branch, pair.decode)

    def vacate_prefill(self, branch: BranchKey, pair: Pair) -> None:
        """Count the attempt no more on its prefill node; again is harmless, and so is a node that is gone."""
        node = self._nodes.get(pair.prefill)
        if node is not None:
            num_tokens = node.prefilling.pop(branch, 0)
            node.prefill_tokens -= num_tokens
            node.num_prefills -= num_tokens > 0
            self._kinds.changed(node)

    def vacate(self, branch: BranchKey, pair: Pair) -> None:
        """Count the attempt no more on either node."""
        self.vacate_prefill(branch, pair)
        self.vacate_decode(branch, pair.decode)

    def occupy_decode(self, branch: BranchKey, ref: NodeRef) -> pb.Target:
        """Count a branch on a node that it is to move to; the node as the other one is told of it."""
        node = self._nodes[ref]
        node.branches[branch] = None
        self._kinds.changed(node)
        return pb.Target(node=node.entry.node, grpc_address=node.entry.grpc_address)

    def vacate_decode(self, branch: BranchKey, ref: NodeRef) -> None:
        """Count a branch no more on a node that decodes it, or was to; again is harmless, and so is a node that is gone."""
        node = self._nodes.get(ref)
        if node is not None:
            node.branches.pop(branch, None)
            self._kinds.changed(node)


def _longest_by_fingerprint(kinds: Iterable[Kind]) -> dict[bytes, int]:
    """The longest sequence that a node of one of these can hold, by the fingerprint that it shares."""
    longest: dict[bytes, int] = {}
    for kind in kinds:
        longest[kind.fingerprint] = max(longest.get(kind.fingerprint, 0), kind.max_total_tokens)
    return longest


def _is_claimed(nodes: NodesOfKind, claimed: Claims) -> bool:
    length = claimed.get(nodes.kind.fingerprint)
    return length is not None and length <= nodes.kind.max_total_tokens
