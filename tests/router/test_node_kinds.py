"""Whatever becomes of nodes, what their kinds say of all of them is what asking each one would."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proto import baton_pb2 as pb
from proto.attempt_key import BranchKey
from router.events import (
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
from router.nodes import NO_CLAIMS, NodeEvent, NodeTable
from router.placement import CacheAware, Imbalance, LeastLoaded, Pair, Prompt
from router.ranking import Among
from tests.router.core_world import ROLES, node_entry
from tests.router.plain_placement import PlainCacheAware, PlainLeastLoaded, PlainNodes
from tests.thorough import examples

NAMES = ("p1", "p2", "p3", "d1", "d2", "l1", "l2", "m1", "m2")
MOST_PROMPTS = 2
LENGTHS = (0, 40, 100, 300)


class Nodes:
    """A table to which everything happens that can, and now and then what cannot."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.table = NodeTable(MOST_PROMPTS)
        self._branches: list[tuple[BranchKey, Pair]] = []
        self._num_branches = 0
        self._by_load, self._plain_by_load = LeastLoaded(), PlainLeastLoaded()
        imbalance = Imbalance(300, 1.5)
        self._by_cache, self._plain_by_cache = CacheAware(imbalance), PlainCacheAware(imbalance)

    def step(self) -> None:
        """One event, of nodes or of work."""
        self.random.choices([self._node, self._load, self._occupy, self._vacate], weights=[5, 3, 4, 3])[0]()

    def _ref(self) -> NodeRef:
        return NodeRef(self.random.choice(NAMES), 1 if self.random.random() < 0.95 else 2)

    def _node(self) -> None:
        ref = self._ref()
        what = self.random.random()
        if what < 0.5:
            entry = node_entry(
                ref.name,
                ROLES[ref.name[0]],
                incarnation=ref.incarnation,
                max_num_seqs=self.random.choice([1, 2, 4]),
                weights=self.random.choice("wwwwwv"),
                max_model_len=self.random.choice([50, 256, 256]),
                local_prefill=ref.name[0] == "l",
                address=self.random.choice([""] * 9 + ["host:p1"]),
            )
            entry.draining = self.random.random() < 0.1
            self.table.receive(NodeListed(entry))
        if what < 0.45 or what > 0.8:
            self.table.receive(SessionUp(ref))
        elif what > 0.5:
            others: list[NodeEvent] = [
                NodeMissed(ref),
                NodeUnlisted(ref),
                NodeDrains(ref),
                SessionBroken(ref),
                SessionLost(ref),
            ]
            self.table.receive(self.random.choices(others, weights=[4, 1, 1, 2, 1])[0])

    def _load(self) -> None:
        load = pb.LoadReport(
            blocks_used=self.random.randrange(17),
            waiting=self.random.choice([0, 0, 1]),
            prefill_tokens_per_s=self.random.choice([0.0, 1000.0, 1100.0, 5000.0]),
            prefill_tokens=self.random.choice([10, 20_000]),
        )
        self.table.receive(LoadReported(self._ref(), load))

    def _occupy(self) -> None:
        nodes = [node.ref for node in self.table]
        if nodes:
            self._num_branches += 1
            branch = BranchKey(f"r{self._num_branches}", 0), Pair(self.random.choice(nodes), self.random.choice(nodes))
            self.table.occupy(*branch, self.random.choice([0, 5, 50, 500]))
            self._branches.append(branch)

    def _vacate(self) -> None:
        if self._branches:
            branch, pair = self.random.choice(self._branches)
            self.random.choice([self.table.vacate, self.table.vacate_prefill])(branch, pair)
            self.table.vacate_decode(branch, self.random.choice(pair.nodes))

    # ---------------------------------------------------------------- both ways

    def check(self) -> None:
        """Every question, asked of the table and of each of its nodes."""
        plain, table = PlainNodes(self.table, MOST_PROMPTS), self.table
        assert table.max_total_tokens == plain.longest
        assert (table.missing() == []) == plain.is_served
        assert table.num_slots == sum(node.entry.max_num_seqs for node in table if node.decodes)
        names = [node.ref.name for node in table]
        broken = {name for name in names if self.random.random() < 0.2}
        without = table.named([*broken, "nobody"])
        assert without == {node.ref for node in table if node.ref.name in broken}
        length, fingerprints = self.random.choice(LENGTHS), {node.fingerprint for node in table if node.is_expected}
        assert table.fingerprints == fingerprints
        served = {each for each in fingerprints if self.random.random() < 0.8}
        assert table.longest_of(served) == plain.longest_of(served)
        claimed = {each: self.random.choice(LENGTHS) for each in fingerprints if self.random.random() < 0.4}
        held = plain.claimed(claimed)
        working = {node.ref for node in table if node.decodes and node.can_take_work}
        assert table.has_unclaimed(claimed) == (not working <= held)
        assert table.can_serve(length, without, served) == plain.can_serve(length, without, served)
        left_out = without | held
        assert set(table.stranded_candidates(length, without, claimed, without)) == plain.stranded(
            length, left_out, without
        )
        num_tokens, most = self.random.choice([(5, 32), (40, 32)])
        spare = table.spare_candidates(length, without, claimed, num_tokens, most)
        assert set(spare) == plain.spare(length, left_out, num_tokens, most)
        for holder in table:
            assert table.has_target(holder.ref, length, without) == plain.has_target(holder, length, without)
            targets = table.move_targets(holder.ref, num_tokens, length, without)
            assert set(targets) == plain.targets(holder, num_tokens, length, without)
        decodes = table.decode_candidates(length, without, claimed)
        assert set(decodes) == plain.decodes(length, left_out)
        self._check_choice_by_load(decodes)
        prefills = table.prefill_candidates(length, without, claimed)
        assert set(prefills) == plain.prefills(length, left_out)
        self._check_choice_by_cache(prefills)

    def _check_choice_by_load(self, decodes: Among) -> None:
        nodes = [node for ref in decodes if (node := self.table.find(ref)) is not None]
        candidates = [node.decode_candidate() for node in nodes]
        if candidates:
            assert self._by_load.choose(decodes) == self._plain_by_load.choose(candidates, Prompt(0, {}))

    def _check_choice_by_cache(self, prefills: Among) -> None:
        candidates = [prefills.look(ref) for ref in prefills]
        cached = {each.node: 400 for each in candidates if self.random.random() < 0.2}
        if candidates:
            prompt = Prompt(500, cached)
            assert self._by_cache.choose(prefills, prompt) == self._plain_by_cache.choose(candidates, prompt)


@pytest.mark.covers("R01", "R18")
@settings(deadline=None, max_examples=examples(60, 3))
@given(st.integers(0, 2**32), st.integers(10, 120))
def test_after_any_history_what_kinds_say_is_what_asking_each_node_would(seed: int, num_steps: int) -> None:
    nodes = Nodes(seed)
    for _ in range(num_steps):
        nodes.step()
        if nodes.random.random() < 0.5:
            nodes.check()
    nodes.check()


def test_in_such_histories_every_list_is_long_and_every_answer_comes() -> None:
    """Else the test above would prove little."""
    most: dict[str, int] = {}
    answers: set[tuple[str, bool]] = set()
    for seed in range(40):
        nodes = Nodes(seed)
        for _ in range(100):
            nodes.step()
            table = nodes.table
            lists = {
                "prefill": table.prefill_candidates(40),
                "decode": table.decode_candidates(40),
                "stranded": table.stranded_candidates(40, set(), NO_CLAIMS, set()),
                "spare": table.spare_candidates(40, set(), NO_CLAIMS, 5, 32),
                "moves": table.move_targets(NodeRef("d1", 1), 5, 40, set()),
            }
            most |= {name: max(most.get(name, 0), len(list(found))) for name, found in lists.items()}
            answers |= {
                ("served", table.can_serve(40, set(), table.fingerprints)),
                ("degraded", bool(table.degraded())),
            }
            answers |= {
                ("unclaimed", table.has_unclaimed(dict.fromkeys(table.fingerprints, 100))),
                ("target", table.has_target(NodeRef("d1", 1), 40, set())),
            }
    assert all(number >= 2 for number in most.values()), most
    assert len(answers) == 8
