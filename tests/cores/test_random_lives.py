"""Each core alone under random orders of everything that can happen to attempts of several branches, hostile peers included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from itertools import count
from typing import Literal, Protocol

import pytest

from tests.cores import decode_life, fetching_life, local_life, prefill_life
from tests.thorough import examples

NUM_LIVES = examples(60, 3)
MOST_LIVES = 400
NUM_EVENTS = 250


class Life(Protocol):
    """One core, and all that happens to it."""

    happened: Counter[str]

    def live(self, num_events: int) -> None: ...


def lived(life_of: Callable[[int], Life], seed: int, wanted: Collection[str], most: str = "") -> Counter[str]:
    """What happens in NUM_LIVES, and in as many more as it takes until all that is wanted has happened, and `most` as often.

    One life in ten has what is rarest.
    """
    happened: Counter[str] = Counter()
    for number in count(1):
        life = life_of(seed + number)
        life.live(NUM_EVENTS)
        happened += life.happened
        is_all = all(happened[event] for event in wanted) and (not most or happened[most] > NUM_LIVES)
        if number >= NUM_LIVES and (is_all or number >= MOST_LIVES):
            break
    return happened


@pytest.mark.covers("R04", "H04", "H05", "H06", "H07", "D01", "D02", "A02")
def test_a_decode_node_keeps_its_blocks_slots_and_fences_in_any_order_of_events(fresh_seed: int) -> None:
    rare = {"granted to some", "started with others", "started without all", "the same lease", "NO_BLOCKS", "BUSY"}
    wanted = {*decode_life.EVENTS} | rare
    happened = lived(decode_life.Life, fresh_seed, wanted)
    assert all(happened[event] for event in wanted), happened


@pytest.mark.covers("R04", "H04", "H06", "P08", "A02")
def test_a_prefill_node_says_each_token_once_and_hands_over_who_is_left_in_any_order_of_events(fresh_seed: int) -> None:
    rare = {"stale", "busy", "partly replaced", "cancelled among others", "committed", "committed in part"}
    wanted = {*prefill_life.EVENTS} | rare
    happened = lived(prefill_life.Life, fresh_seed, wanted)
    assert all(happened[event] for event in wanted), happened


@pytest.mark.covers("S12", "W07", "W08", "P08")
def test_a_node_that_reads_the_kv_pool_says_the_right_tokens_and_gives_every_block_back_in_any_order_of_events(
    fresh_seed: int,
) -> None:
    rare = {"fetches behind a match", "fetched all", "fetched less", "waited", "committed", "kv_pool_too_late"}
    wanted = {*fetching_life.FetchingLife.events} | rare
    happened = lived(fetching_life.FetchingLife, fresh_seed, wanted)
    assert all(happened[event] for event in wanted), happened


@pytest.mark.covers("S10", "S01", "Q02", "R04", "P08", "A02")
@pytest.mark.parametrize("role", ["mixed", "decode"])
def test_a_node_that_prefills_for_itself_says_the_right_tokens_once_and_ends_each_branch_once_in_any_order_of_events(
    fresh_seed: int, role: Literal["mixed", "decode"]
) -> None:
    rare = {"stale in part", "busy", "replaced", "cancelled while it ran", "finished", "DEADLINE", "INTERNAL"}
    wanted = {*local_life.EVENTS} | rare | ({"PREEMPTED"} if role == "decode" else set())
    happened = lived(lambda seed: local_life.Life(seed, role), fresh_seed, wanted, "preempted")
    assert all(happened[event] for event in wanted), happened
    assert happened["preempted"] > NUM_LIVES, happened
    assert (happened["PREEMPTED"] > 0) == (role == "decode"), "a mixed node resumes what gave way"
