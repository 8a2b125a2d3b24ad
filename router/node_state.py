"""One node process as the router sees it: its registry entry, its session, what of ours is on it. All of them: nodes.py."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from proto import baton_pb2 as pb
from proto.attempt_key import BranchKey
from proto.prefill_speed import FetchSpeed, PrefillSpeed, read_fetch_speed
from router.events import NodeRef
from router.ranking import Candidate

PREFILLING: Final = frozenset({pb.ROLE_PREFILL, pb.ROLE_MIXED})
DECODING: Final = frozenset({pb.ROLE_DECODE, pb.ROLE_MIXED})


class Session(Enum):
    """The state of the session with a node."""

    DIALING = "dialing"  # never up yet
    UP = "up"
    BROKEN = "broken"  # may be resumed within its grace
    LOST = "lost"  # what was there is gone; the dialer goes on trying while the node is listed


@dataclass(slots=True)
class Node:
    """One node process."""

    ref: NodeRef
    entry: pb.NodeEntry
    fingerprint: bytes
    session: Session = Session.DIALING
    is_listed: bool = True  # the registry hears of it: it is dialed again where its session is lost
    is_gone: bool = False  # by its own word, or replaced
    is_left_out: bool = False  # its tokenizer is not ours: it is never dialed, and what it would say is no text
    has_said_draining: bool = False  # in answer to us: the registry may not have heard
    load: pb.LoadReport = field(default_factory=pb.LoadReport)
    fetch: FetchSpeed | None = None  # of its KV pool, as it said last
    prefilling: dict[BranchKey, int] = field(default_factory=dict)  # -> its tokens to prefill
    # Those that hold a sequence of a decode node, by age: what its loss does to them has one order, whatever their names' hashes.
    branches: dict[BranchKey, None] = field(default_factory=dict)
    prefill_tokens: int = 0  # sum over `prefilling`
    num_prefills: int = 0  # attempts in `prefilling`: those with tokens

    def hear(self, load: pb.LoadReport) -> None:
        """What it says of itself."""
        told = load.fetch
        is_told = load.HasField("fetch")
        self.fetch = read_fetch_speed(told.latency_s, told.block_s, told.share, told.look_s) if is_told else None
        self.load = load

    def snapshot(self) -> dict[str, object]:
        """JSON-able state."""
        return {
            "role": pb.Role.Name(self.entry.role).removeprefix("ROLE_").lower(),
            "session": self.session.value,
            "listed": self.is_listed,
            "takes_work": self.can_take_work,
            "prefilling": len(self.prefilling),
            "attempts": self.num_prefills,
            "prefill_tokens": self.prefill_tokens,
            "branches": len(self.branches),
        }

    @property
    def can_take_work(self) -> bool:
        """Connected and not about to end; whether there is room is another question."""
        return self.session is Session.UP and self.is_expected

    @property
    def is_expected(self) -> bool:
        """Can take work now, or as soon as its broken stream is resumed."""
        return self.session in (Session.UP, Session.BROKEN) and not (self.is_gone or self.drains)

    @property
    def drains(self) -> bool:
        """Whether it takes no new work, since it is about to end."""
        return self.entry.draining or self.has_said_draining

    @property
    def max_total_tokens(self) -> int:
        """The longest sequence, prompt and completion, that the node can hold."""
        return min(self.entry.max_model_len, self.entry.num_blocks * self.entry.fingerprint.block_size)

    @property
    def pool(self) -> bytes:
        """Identity of the KV pool that it uses, or empty."""
        return self.load.kv_pool

    def has_blocks_for(self, num_tokens: int) -> bool:
        """Whether a sequence had room there when the node spoke last; a node that has not spoken yet is empty."""
        load, block_size = self.load, self.entry.fingerprint.block_size
        num_taken = load.blocks_used + load.blocks_leased + load.blocks_quarantined
        return self.entry.num_blocks - num_taken > num_tokens // block_size

    @property
    def prefills(self) -> bool:
        """Whether its role takes prompts."""
        return self.entry.role in PREFILLING

    @property
    def decodes(self) -> bool:
        """Whether its role generates what others, or itself, have prefilled."""
        return self.entry.role in DECODING

    @property
    def num_slots(self) -> int:
        """Sequences that it decodes at once, if it decodes."""
        return self.entry.max_num_seqs if self.decodes else 0

    @property
    def prefills_locally(self) -> bool:
        """Whether it only decodes, but computes prompts that stay there where it is asked to."""
        return self.entry.role == pb.ROLE_DECODE and self.entry.local_prefill

    def prefill_candidate(self, tokens_per_s: float | None) -> Candidate:
        """The node as placement sees it for a prompt, which it computes at this rate; see there for what load means."""
        load = (self.prefill_tokens, self._share_of_slots)
        if tokens_per_s is None:
            return Candidate(self.ref, self.fingerprint, load)
        speed = PrefillSpeed(1 / tokens_per_s, max(self.entry.fingerprint.block_size, 1), self.fetch)
        return Candidate(self.ref, self.fingerprint, load, speed, self.pool)

    def decode_candidate(self) -> Candidate:
        """The node as placement sees it for what follows the prompt."""
        taken = self.load.blocks_used + self.load.blocks_leased + self.load.blocks_quarantined
        return Candidate(self.ref, self.fingerprint, (self._share_of_slots, taken / max(self.entry.num_blocks, 1)))

    @property
    def _share_of_slots(self) -> float:
        """Of its sequences, how many decode or will: none on a prefill node."""
        return len(self.branches) / max(self.entry.max_num_seqs, 1)


def left_out(nodes: Iterable[Node]) -> list[str]:
    """A sentence of those that have another tokenizer, or none."""
    number = sum(node.is_left_out for node in nodes)
    return [f"left out for another tokenizer than the router's: {number}"] if number else []
