"""The simulation can fail: each invariant finds a bug that is planted for it, and the shrinker makes the run short.

A planted bug is one line of production code that does not do its work. The seeds are tried in order until one finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from connector.admissions import Admissions
from connector.fence import FenceFloor
from decode_node import admission
from decode_node.core import DecodeCore
from engine.block_pool import BlockPool
from prefill_node.core import PrefillCore
from router.nodes import NodeTable
from router.token_log import Appended, TokenLog
from router.waiting import WaitingBranches
from runtime.session_end import SessionEnd
from tests.sim.outcome import Outcome, run_scenario
from tests.sim.scenario import draw_scenario

MAX_SEEDS = 150
Patch = pytest.MonkeyPatch


def find(seeds: Sequence[int]) -> Outcome:
    for seed in seeds:
        outcome = run_scenario(draw_scenario(seed))
        if outcome.error is not None:
            return outcome
    pytest.fail(f"nothing was found within {len(seeds)} seeds")


def _repeats_are_taken(patch: Patch) -> None:
    def append(self: Any, first_index: int, token_ids: Sequence[int]) -> Appended:
        self._token_ids.extend(token_ids)
        return Appended(first_index, tuple(token_ids))

    patch.setattr(TokenLog, "append", append)


def _promises_are_kept_for_ever(patch: Patch) -> None:
    right = BlockPool.unpromise
    is_lease = lambda pool, blocks: (pool.release_lease(blocks.leased), pool.free(blocks.held))  # noqa: E731
    patch.setattr(admission, "return_blocks", is_lease)
    assert right is BlockPool.unpromise


def _blocks_are_quiet_before_their_last_write(patch: Patch) -> None:
    right = Admissions.revoke

    def revoke(self: Any, lease_id: int) -> bool:
        is_known = lease_id in self._leases
        right(self, lease_id)
        return is_known

    patch.setattr(Admissions, "revoke", revoke)


def _the_fence_admits_everything(patch: Patch) -> None:
    patch.setattr(FenceFloor, "admits", lambda self, key: True)


def _a_lost_router_is_not_noticed(patch: Patch) -> None:
    patch.setattr(DecodeCore, "_router_lost", lambda self, router, now: None)


def _renewals_are_forgotten(patch: Patch) -> None:
    right = PrefillCore._on_timer
    patch.setattr(PrefillCore, "_on_timer", lambda self, task, now: None)
    assert right is not None


def _a_resumed_session_starts_behind_what_was_lost(patch: Patch) -> None:
    right = SessionEnd._attach

    def attach(self: Any, stream: int | None, now: float) -> None:
        right(self, stream, now)
        self._cursor = max(self._cursor, self._sent + 1)

    patch.setattr(SessionEnd, "_attach", attach)


def _a_lost_node_orphans_nobody(patch: Patch) -> None:
    def lose(self: Any, node: Any, change: Any) -> None:
        node.session = type(node.session).LOST
        if not node.is_listed:
            self._remove(node, change)

    patch.setattr(NodeTable, "_lose", lose)


def _refused_branches_are_not_queued(patch: Patch) -> None:
    right = WaitingBranches.put

    def put(self: Any, branch: Any) -> None:
        right(self, branch)
        if branch.num_refusals > 1:
            self._by_arrival.discard(branch.key)

    patch.setattr(WaitingBranches, "put", put)


BUGS: tuple[tuple[Callable[[Patch], None], str], ...] = (
    (_repeats_are_taken, "gap or repeat|wrong"),
    (_promises_are_kept_for_ever, "promises|leak"),
    (_blocks_are_quiet_before_their_last_write, "a write landed|LEASED|lease"),
    (_the_fence_admits_everything, "."),
    (_a_lost_router_is_not_noticed, "leak|still holds|do not end|does not end|timer"),
    (_renewals_are_forgotten, "timer|do not end"),
    (_a_resumed_session_starts_behind_what_was_lost, "."),
    (_a_lost_node_orphans_nobody, "do not end|does not end|not whole|excus|struck"),
    (_refused_branches_are_not_queued, "do not end|does not end"),
)


@pytest.mark.parametrize(("plant", "found"), BUGS, ids=[plant.__name__.strip("_") for plant, _ in BUGS])
@pytest.mark.covers("C01")
def test_a_planted_bug_is_found(plant: Callable[[Patch], None], found: str, monkeypatch: Patch) -> None:
    import re

    plant(monkeypatch)
    outcome = find(range(MAX_SEEDS))
    assert outcome.error is not None and re.search(found, outcome.error), outcome.error
