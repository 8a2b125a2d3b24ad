"""Each core alone under random orders of everything that can happen to attempts of several branches, hostile peers included."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import pytest

from tests.cores import decode_life, fetching_life, local_life, prefill_life

NUM_LIVES = 60
NUM_EVENTS = 250


@pytest.mark.covers("R04", "H04", "H05", "H06", "H07", "D01", "D02", "A02")
def test_a_decode_node_keeps_its_blocks_slots_and_fences_in_any_order_of_events(fresh_seed: int) -> None:
    happened: Counter[str] = Counter()
    for number in range(NUM_LIVES):
        life = decode_life.Life(fresh_seed + number)
        life.live(NUM_EVENTS)
        happened += life.happened
    rare = {"granted to some", "started with others", "started without all", "the same lease", "NO_BLOCKS", "BUSY"}
    assert all(happened[event] for event in {*decode_life.EVENTS} | rare), happened


@pytest.mark.covers("R04", "H04", "H06", "P08", "A02")
def test_a_prefill_node_says_each_token_once_and_hands_over_who_is_left_in_any_order_of_events(fresh_seed: int) -> None:
    happened: Counter[str] = Counter()
    for number in range(NUM_LIVES):
        life = prefill_life.Life(fresh_seed + number)
        life.live(NUM_EVENTS)
        happened += life.happened
    rare = {"stale", "busy", "partly replaced", "cancelled among others", "committed", "committed in part"}
    assert all(happened[event] for event in {*prefill_life.EVENTS} | rare), happened


@pytest.mark.covers("S12", "W07", "W08", "P08")
def test_a_node_that_reads_the_kv_pool_says_the_right_tokens_and_gives_every_block_back_in_any_order_of_events(
    fresh_seed: int,
) -> None:
    happened: Counter[str] = Counter()
    for number in range(NUM_LIVES):
        life = fetching_life.FetchingLife(fresh_seed + number)
        life.live(NUM_EVENTS)
        happened += life.happened
    rare = {"fetches behind a match", "fetched all", "fetched less", "waited", "committed", "kv_pool_too_late"}
    assert all(happened[event] for event in {*fetching_life.FetchingLife.events} | rare), happened


@pytest.mark.covers("S10", "S01", "Q02", "R04", "P08", "A02")
@pytest.mark.parametrize("role", ["mixed", "decode"])
def test_a_node_that_prefills_for_itself_says_the_right_tokens_once_and_ends_each_branch_once_in_any_order_of_events(
    fresh_seed: int, role: Literal["mixed", "decode"]
) -> None:
    happened: Counter[str] = Counter()
    for number in range(NUM_LIVES):
        life = local_life.Life(fresh_seed + number, role)
        life.live(NUM_EVENTS)
        happened += life.happened
    rare = {"stale in part", "busy", "replaced", "cancelled while it ran", "finished", "DEADLINE", "INTERNAL"}
    assert all(happened[event] for event in {*local_life.EVENTS} | rare), happened
    assert happened["preempted"] > NUM_LIVES, happened
    assert (happened["PREEMPTED"] > 0) == (role == "decode"), "a mixed node resumes what gave way"
