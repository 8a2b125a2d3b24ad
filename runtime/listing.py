"""The registry's list: which nodes there are, kept while they repeat themselves. Pure: `now` is an argument everywhere.

An entry belongs to a name and to an address; whoever registers under either replaces what was there, unless that process says that
it started later: then what comes is late, of a process that has been replaced. Registering again with nothing changed only renews,
and so does a word from before a process began to drain.
Who falls silent is missed, which says nothing but that: registry and node may not reach each other. Who deregisters, or is
replaced, is unlisted for good.
Not here: gRPC and the clock (registry_server.py); who is alive, which only the session says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from proto import baton_pb2 as pb
from proto.bounds import MAX_PORT, is_address
from runtime.session import Peer

MAX_ENTRIES: Final = 4_096
MAX_TEXT_CHARS: Final = 256
MAX_GONE: Final = 4_096  # process incarnations that were replaced or deregistered

_FINGERPRINT_TEXTS: Final = ("architecture", "dtype", "weights", "kernels")
_FINGERPRINT_SIZES: Final = ("num_layers", "num_kv_heads", "head_dim", "block_size")
_SIZES: Final = ("num_blocks", "max_num_seqs", "max_model_len")


@dataclass(frozen=True, slots=True)
class Listed:
    """New, or changed."""

    entry: pb.NodeEntry


@dataclass(frozen=True, slots=True)
class Missed:
    """Silent for too long: it is off the list, and may come back."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class Unlisted:
    """Deregistered, or replaced by another process: it does not come back."""

    peer: Peer


Change = Listed | Missed | Unlisted


def entry_problem(entry: pb.NodeEntry) -> str | None:
    """What is wrong with an entry, in one sentence that names field, value and bound; None if nothing is."""
    if not entry.node.incarnation:
        return "node.incarnation is 0, it must be a random number that is not 0."
    if entry.role not in (pb.ROLE_PREFILL, pb.ROLE_DECODE, pb.ROLE_MIXED):
        return f"role is {entry.role}, it must be ROLE_PREFILL, ROLE_DECODE or ROLE_MIXED."
    texts = {"node.name": entry.node.name, "grpc_address": entry.grpc_address, "http_address": entry.http_address}
    texts |= {f"fingerprint.{name}": getattr(entry.fingerprint, name) for name in _FINGERPRINT_TEXTS}
    for field, text in texts.items():
        if not 1 <= len(text) <= MAX_TEXT_CHARS or not text.isprintable():
            return f"{field} is {text[:64]!r}, it must have 1 to {MAX_TEXT_CHARS} printable characters."
    if len(entry.tokenizer) > MAX_TEXT_CHARS or not entry.tokenizer.isprintable():
        return f"tokenizer is {entry.tokenizer[:64]!r}, it must have at most {MAX_TEXT_CHARS} printable characters."
    for field in ("grpc_address", "http_address"):
        if not is_address(texts[field]):
            return f"{field} is {texts[field]!r}, it must be host:port with a port from 1 to {MAX_PORT}."
    sizes = {f"fingerprint.{name}": getattr(entry.fingerprint, name) for name in _FINGERPRINT_SIZES}
    sizes |= {name: getattr(entry, name) for name in _SIZES}
    for field, size in sizes.items():
        if size < 1:
            return f"{field} is {size}, it must be at least 1."
    return None


FULL_SENTENCE: Final = f"{MAX_ENTRIES} nodes are registered, that is the most."


def gone_sentence(peer: Peer) -> str:
    """Refuses a process that was sent away."""
    return f"node.incarnation {peer.incarnation:016x} of {peer.name} was replaced or deregistered."


def older_sentence(peer: Peer) -> str:
    """Refuses a process that another has followed."""
    return f"node.incarnation {peer.incarnation:016x} of {peer.name} started before the one that is listed."


LATE_S: Final = 0.25  # an expiry looked at later than this was not looked at in time


class Listing:
    """All entries, in the order of their last repetition."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._entries: dict[str, tuple[pb.NodeEntry, float]] = {}  # by name: (entry, when it expires), earliest first
        self._names: dict[str, str] = {}  # by gRPC address: whose entry has it
        self._gone: dict[Peer, None] = {}  # oldest first; what they still say comes late
        self._silent: dict[str, Peer] = {}  # by name, oldest first: expired; may come back until another takes the name

    def register(self, entry: pb.NodeEntry, now: float) -> list[Change] | str:
        """Take an entry or its repetition: what changed, or the sentence that refuses it."""
        known, _ = self._entries.get(entry.node.name, (None, 0.0))
        if entry == known:  # as nearly always: it was looked at when it came
            self._renew(entry, now)
            return []
        problem = entry_problem(entry)
        if problem is not None:
            return problem
        peer = Peer(entry.node.name, entry.node.incarnation)
        if peer in self._gone:
            return gone_sentence(peer)
        if known is None and len(self._entries) >= MAX_ENTRIES:
            return FULL_SENTENCE
        if known is not None and known.draining and _peer(known) == peer and not entry.draining:
            entry = known  # a late word: nobody who drains takes it back
        found = (self._entries.get(name) for name in (peer.name, self._names.get(entry.grpc_address, "")))
        others = {_peer(each[0]): each[0] for each in found if each is not None and _peer(each[0]) != peer}
        if any(0 < entry.started_ms < other.started_ms for other in others.values()):
            return older_sentence(peer)
        changes: list[Change] = [self._unlist(other) for other in others.values()]
        silent = self._silent.pop(peer.name, peer)
        if silent != peer:  # a hung process that was replaced: it must not take the name back when it wakes
            self._remember_gone(silent)
        self._renew(entry, now)
        if known != entry:
            changes.append(Listed(entry))
        return changes

    def _renew(self, entry: pb.NodeEntry, now: float) -> None:
        name = entry.node.name
        if name in self._entries:  # of the same process, perhaps with another address
            self._take_out(name)
        self._entries[name] = (entry, now + self._ttl_s)  # at the end: the latest to expire
        self._names[entry.grpc_address] = name

    def deregister(self, peer: Peer) -> list[Change]:
        """The process goes, and does not come back under this incarnation; also one that is missed."""
        if self._silent.get(peer.name) == peer:
            del self._silent[peer.name]
            self._remember_gone(peer)
            return [Unlisted(peer)]
        entry, _ = self._entries.get(peer.name, (None, 0.0))
        if entry is None or _peer(entry) != peer:
            return []
        return [self._unlist(entry)]

    def expire(self, now: float) -> list[Change]:
        """Drop what was not repeated in time; it may come back.

        A call that comes late says that we were away: what the nodes said meanwhile is not read yet, so all get that time.
        """
        deadline = self.next_deadline()
        if deadline is not None and now - deadline > LATE_S:
            away_s = now - deadline + LATE_S
            self._entries = {name: (entry, at + away_s) for name, (entry, at) in self._entries.items()}
        due = [entry for entry, expires_at in self._entries.values() if now >= expires_at]
        return [self._miss(entry) for entry in due]

    def next_deadline(self) -> float | None:
        """When expire must be called at the latest."""
        for _, expires_at in self._entries.values():
            return expires_at
        return None

    def entries(self) -> tuple[pb.NodeEntry, ...]:
        """What is listed now."""
        return tuple(entry for entry, _ in self._entries.values())

    def _unlist(self, entry: pb.NodeEntry) -> Unlisted:
        peer = _peer(entry)
        self._take_out(peer.name)
        self._remember_gone(peer)
        return Unlisted(peer)

    def _miss(self, entry: pb.NodeEntry) -> Missed:
        peer = _peer(entry)
        self._take_out(peer.name)
        self._silent[peer.name] = peer
        if len(self._silent) > MAX_GONE:
            del self._silent[next(iter(self._silent))]
        return Missed(peer)

    def _remember_gone(self, peer: Peer) -> None:
        self._gone[peer] = None
        if len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]

    def _take_out(self, name: str) -> None:
        entry, _ = self._entries.pop(name)
        del self._names[entry.grpc_address]


def _peer(entry: pb.NodeEntry) -> Peer:
    return Peer(entry.node.name, entry.node.incarnation)
