"""Bugs around the KV pool, planted while a test runs, and the load that meets them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from engine.saving import Save, Saves
from node import events as ev
from prefill_node.fetching import Fetching
from tests.sim.scenario import ClientPlan, Fault, Knobs, Scenario

_KNOBS = Knobs(num_prefill=3, num_decode=2, num_blocks=96, max_model_len=96, step_s=0.02, policy="round_robin")


def one_beginning(seed: int, *flaws: str) -> Scenario:
    """Requests that begin alike, one after the other, at prefill nodes in turn; one of these is killed in between."""
    rng = random.Random(seed)
    shared = tuple(rng.randrange(11) for _ in range(56))
    clients = tuple(
        ClientPlan(f"r{number}", 1.0 + number * 0.5, 0, (*shared, number % 11, number // 11), 6, number)
        for number in range(14)
    )
    knobs = replace(_KNOBS, kv_pool_flaws=flaws)
    return Scenario(seed, knobs, clients, (Fault(4.2, "crash", "prefill-0", seconds=0.5),))


def over_a_lying_pool(seed: int) -> Scenario:
    """It says that it has what it has not."""
    return one_beginning(seed, "corrupts", "lies", "full")


def leaving_while_kv_is_fetched(seed: int) -> Scenario:
    """Clients leave while a slow pool is read for them."""
    scenario = one_beginning(seed, "slow")
    rng = random.Random(seed)
    clients = tuple(
        replace(plan, aborts_after_s=rng.choice((None, rng.uniform(0.01, 0.2)))) for plan in scenario.clients
    )
    return replace(scenario, clients=clients)


def what_did_not_come_counts_as_fetched(patch: pytest.MonkeyPatch) -> None:
    """Whatever a fetch brings, all its blocks are published."""
    right = Fetching.take

    def take(self: Any, event: Any, now: float) -> Any:
        if isinstance(event, ev.BlocksFetched):
            event = replace(event, num_blocks=len(self._fetches[event.fetch_id].keys))
        return right(self, event, now)

    patch.setattr(Fetching, "take", take)


def a_fetch_ends_with_its_request(patch: pytest.MonkeyPatch) -> None:
    """The blocks that are read into for a request are free when it is cancelled."""
    right = Fetching.drop

    def drop(self: Any, key: Any) -> None:
        right(self, key)
        for fetch in self._fetches.values():
            if key in fetch.waiters:
                self._pool.release_lease(fetch.block_ids)
                fetch.block_ids.clear()

    patch.setattr(Fetching, "drop", drop)


def what_is_to_be_saved_is_not_kept(patch: pytest.MonkeyPatch) -> None:
    """Blocks that are to be copied for the KV pool go with their sequence."""
    right = Saves._keep

    def keep(self: Any, sequence: Any) -> Save:
        save = right(self, sequence)
        self._pool.free([block_id for _, block_id in save.blocks])
        self._kept[save.save_id] = replace(save, blocks=())
        return save

    patch.setattr(Saves, "_keep", keep)
