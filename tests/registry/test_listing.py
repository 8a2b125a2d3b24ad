"""The registry's list: who is on it, for how long, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from proto import baton_pb2 as pb
from runtime.listing import MAX_ENTRIES, MAX_TEXT_CHARS, Change, Listed, Listing, Missed, Unlisted, entry_problem
from runtime.session import Peer
from tests.thorough import examples

TTL_S = 1.5


def entry(name: str = "decode-0", incarnation: int = 1, port: int = 5001, num_blocks: int = 10) -> pb.NodeEntry:
    fingerprint = pb.Fingerprint(
        architecture="LlamaForCausalLM",
        num_layers=2,
        num_kv_heads=2,
        head_dim=16,
        dtype="fp32",
        block_size=16,
        weights="abc",
        kernels="torch",
    )
    return pb.NodeEntry(
        node=pb.PeerId(name=name, incarnation=incarnation),
        role=pb.ROLE_DECODE,
        grpc_address=f"127.0.0.1:{port}",
        http_address=f"127.0.0.1:{port + 1}",
        fingerprint=fingerprint,
        num_blocks=num_blocks,
        max_num_seqs=8,
        max_model_len=128,
    )


@pytest.mark.covers("R13")
def test_a_repetition_changes_nothing_and_keeps_the_entry() -> None:
    listing = Listing(TTL_S)
    assert listing.register(entry(), 0.0) == [Listed(entry())]
    assert listing.register(entry(), 1.0) == []
    assert listing.expire(2.4) == []
    assert listing.next_deadline() == 2.5
    assert listing.expire(2.5) == [Missed(Peer("decode-0", 1))]
    assert listing.next_deadline() is None


@pytest.mark.covers("R13")
def test_a_router_that_was_held_up_gives_the_nodes_the_time_that_it_did_not_listen() -> None:
    listing = Listing(TTL_S)
    listing.register(entry(), 0.0)
    assert listing.expire(10.0) == [], "it may have registered twenty times meanwhile"
    deadline = listing.next_deadline()
    assert deadline is not None and deadline <= 10.0 + TTL_S
    assert listing.expire(deadline) == [Missed(Peer("decode-0", 1))]


@pytest.mark.covers("R13", "C06")
def test_what_went_silent_does_not_come_back_once_another_process_has_its_name() -> None:
    listing = Listing(TTL_S)
    listing.register(entry(), 0.0)
    listing.expire(TTL_S)
    successor = entry()
    successor.node.incarnation += 1
    assert listing.register(successor, 2.0) == [Listed(successor)]
    assert "replaced" in str(listing.register(entry(), 2.1))
    assert listing.entries() == (successor,)


@pytest.mark.covers("R13")
def test_what_went_silent_comes_back() -> None:
    listing = Listing(TTL_S)
    listing.register(entry(), 0.0)
    assert listing.expire(TTL_S) == [Missed(Peer("decode-0", 1))]
    assert listing.register(entry(), 10.0) == [Listed(entry())]


@pytest.mark.covers("R13")
def test_a_changed_entry_of_the_same_process_is_listed_again() -> None:
    listing = Listing(TTL_S)
    listing.register(entry(), 0.0)
    assert listing.register(entry(num_blocks=20), 0.1) == [Listed(entry(num_blocks=20))]


def draining(entry: pb.NodeEntry) -> pb.NodeEntry:
    entry.draining = True
    return entry


@pytest.mark.covers("D08", "R13")
def test_a_node_that_drains_is_listed_again_and_what_it_said_before_comes_too_late_to_take_it_back() -> None:
    listing = Listing(TTL_S)
    listing.register(entry(), 0.0)
    assert listing.register(draining(entry()), 0.1) == [Listed(draining(entry()))]
    assert listing.register(entry(), 0.2) == []
    assert listing.entries() == (draining(entry()),)
    assert listing.next_deadline() == 0.2 + TTL_S, "it was alive when it said so"
    assert listing.register(draining(entry()), 0.3) == []
    successor = entry(incarnation=2)
    assert listing.register(successor, 0.4) == [Unlisted(Peer("decode-0", 1)), Listed(successor)], "it does not drain"


@pytest.mark.covers("R13", "C06")
def test_a_new_incarnation_replaces_the_old_under_the_same_name_or_address_and_the_old_stays_out() -> None:
    listing = Listing(TTL_S)
    listing.register(entry(), 0.0)
    restarted = entry(incarnation=2, port=6001)
    assert listing.register(restarted, 0.1) == [Unlisted(Peer("decode-0", 1)), Listed(restarted)]
    renamed = entry("decode-9", incarnation=3, port=6001)
    assert listing.register(renamed, 0.2) == [Unlisted(Peer("decode-0", 2)), Listed(renamed)]
    late = listing.register(entry(), 0.3)
    assert isinstance(late, str) and "replaced" in late
    assert listing.entries() == (renamed,)


@pytest.mark.covers("R13")
@pytest.mark.parametrize("same", ["name", "address"])
def test_what_a_replaced_process_says_late_does_not_unlist_its_successor(same: str) -> None:
    old, new = entry(incarnation=1), entry(incarnation=2)
    old.started_ms, new.started_ms = 1_000, 2_000
    if same == "address":
        new.node.name = "decode-1"
    else:
        new.grpc_address = "127.0.0.1:9"
    listing = Listing(TTL_S)
    assert listing.register(new, 0.0) == [Listed(new)]
    refusal = listing.register(old, 0.1)
    assert isinstance(refusal, str) and "started before" in refusal
    assert listing.entries() == (new,) and listing.register(new, 0.2) == []
    old.started_ms = 0  # of a version that does not say: who comes last is the newer
    assert listing.register(old, 0.3) == [Unlisted(Peer(new.node.name, 2)), Listed(old)]


@pytest.mark.covers("R13")
def test_one_entry_can_replace_two() -> None:
    listing = Listing(TTL_S)
    listing.register(entry("a", 1, 5001), 0.0)
    listing.register(entry("b", 2, 6001), 0.0)
    both = entry("a", 3, 6001)
    assert listing.register(both, 0.1) == [Unlisted(Peer("a", 1)), Unlisted(Peer("b", 2)), Listed(both)]


@pytest.mark.covers("R13")
def test_a_process_that_deregisters_is_gone_at_once_and_another_s_goodbye_is_not_its_own() -> None:
    listing = Listing(TTL_S)
    listing.register(entry(), 0.0)
    assert listing.deregister(Peer("decode-0", 2)) == []
    assert listing.deregister(Peer("decode-0", 1)) == [Unlisted(Peer("decode-0", 1))]
    assert isinstance(listing.register(entry(), 0.1), str), "its last repetition came late"


def _set(field: str, value: object) -> Callable[[pb.NodeEntry], None]:
    def change(message: pb.NodeEntry) -> None:
        *path, name = field.split(".")
        owner = message
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, name, value)

    return change


BAD = [
    ("node.name", ""),
    ("node.name", "x" * (MAX_TEXT_CHARS + 1)),
    ("node.name", "two\nlines"),
    ("node.incarnation", 0),
    ("role", pb.ROLE_UNSPECIFIED),
    ("role", 77),
    ("grpc_address", ""),
    ("grpc_address", "localhost"),
    ("grpc_address", ":5001"),
    ("grpc_address", "host:0"),
    ("grpc_address", "host:65536"),
    ("grpc_address", "host:+1"),
    ("grpc_address", "host:\u0663"),
    ("http_address", "host:http"),
    *[(f"fingerprint.{name}", "") for name in ("architecture", "dtype", "weights", "kernels")],
    *[("tokenizer", text) for text in ("x" * 257, "a\nb")],
    *[(f"fingerprint.{name}", 0) for name in ("num_layers", "num_kv_heads", "head_dim", "block_size")],
    *[(name, 0) for name in ("num_blocks", "max_num_seqs", "max_model_len")],
]


@pytest.mark.covers("R13")
@pytest.mark.parametrize(("field", "value"), BAD)
def test_a_bad_entry_is_refused_in_one_sentence_that_names_the_field(field: str, value: object) -> None:
    bad = entry()
    _set(field, value)(bad)
    sentence = entry_problem(bad)
    assert sentence is not None and sentence.startswith(field) and " must " in sentence and len(sentence) < 400
    assert "\n" not in sentence
    listing = Listing(TTL_S)
    assert listing.register(bad, 0.0) == sentence
    assert listing.entries() == ()


def test_a_good_entry_is_not_refused() -> None:
    assert entry_problem(entry()) is None
    ipv6 = entry()
    ipv6.grpc_address = "[::1]:5001"
    assert entry_problem(ipv6) is None


@pytest.mark.covers("R13")
def test_the_list_is_bounded() -> None:
    listing = Listing(TTL_S)
    for number in range(1, MAX_ENTRIES):
        assert isinstance(listing.register(entry(f"n{number}", number, number), 0.0), list)
    assert isinstance(listing.register(entry("last", 1, 7001), 0.0), list)
    refused = listing.register(entry("one-more", 1, 8001), 0.0)
    assert isinstance(refused, str) and str(MAX_ENTRIES) in refused
    assert isinstance(listing.register(entry("last", 2, 7001), 0.0), list), "a restarted node replaces itself"


class ListingModel(RuleBasedStateMachine):
    """Against a naive model: who registered last under a name and an address, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.listing = Listing(TTL_S)
        self.now = 0.0
        self.heard: dict[Peer, tuple[pb.NodeEntry, float]] = {}
        self.gone: set[Peer] = set()
        self.silent: dict[str, Peer] = {}
        self.reported: dict[Peer, pb.NodeEntry] = {}
        self.missed: set[Peer] = set()

    def take(self, changes: list[Change]) -> None:
        for change in changes:
            if isinstance(change, Listed):
                peer = Peer(change.entry.node.name, change.entry.node.incarnation)
                assert self.reported.get(peer) != change.entry, "nothing changed"
                self.reported[peer] = change.entry
            elif isinstance(change, Missed):
                del self.reported[change.peer]
                self.missed.add(change.peer)
            else:
                assert change.peer in self.gone, "only who has gone by its own word, or was replaced"
                self.missed.discard(change.peer)
                self.reported.pop(change.peer, None)

    @rule(name=st.sampled_from("abc"), incarnation=st.integers(1, 4), port=st.integers(1, 4), drains=st.booleans())
    def register(self, name: str, incarnation: int, port: int, drains: bool) -> None:
        new, peer = entry(name, incarnation, port), Peer(name, incarnation)
        new.draining = drains
        changes = self.listing.register(new, self.now)
        if peer in self.heard and self.heard[peer][0].draining and not drains:
            new, _ = self.heard[peer]
        if peer in self.gone:
            assert isinstance(changes, str)
            return
        assert isinstance(changes, list)
        silent = self.silent.pop(name, peer)
        if silent != peer:
            self.gone.add(silent)
        for other, (known, _) in list(self.heard.items()):
            if other != peer and (other.name == name or known.grpc_address == new.grpc_address):
                del self.heard[other]
                self.gone.add(other)
        self.heard[peer] = (new, self.now)
        self.take(changes)

    @rule(name=st.sampled_from("abc"), incarnation=st.integers(1, 4))
    def deregister(self, name: str, incarnation: int) -> None:
        peer = Peer(name, incarnation)
        is_known = self.heard.pop(peer, None) is not None
        if self.silent.get(name) == peer:
            is_known = bool(self.silent.pop(name))
        if is_known:
            self.gone.add(peer)
        changes = self.listing.deregister(peer)
        assert changes == [Unlisted(peer)] * is_known
        self.take(changes)

    @rule(seconds=st.sampled_from([0.25, 0.5, 1.0, 1.5]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        deadline = self.listing.next_deadline()
        while (instant := self.listing.next_deadline()) is not None and instant <= self.now:
            self.take(self.listing.expire(instant))
        is_due = any(self.now >= at + TTL_S for _, at in self.heard.values())
        assert is_due == (deadline is not None and deadline <= self.now)
        for peer, (_, at) in list(self.heard.items()):
            if self.now >= at + TTL_S:
                del self.heard[peer]
                self.silent[peer.name] = peer
                assert peer in self.missed

    @invariant()
    def the_list_is_what_was_reported_and_what_was_heard(self) -> None:
        listed = {Peer(e.node.name, e.node.incarnation): e for e in self.listing.entries()}
        assert listed == self.reported == {peer: known for peer, (known, _) in self.heard.items()}


TestListingModel = pytest.mark.covers("R13")(ListingModel.TestCase)
TestListingModel.settings = settings(deadline=None, max_examples=examples(60, 3), stateful_step_count=30)
