"""Walks of the garbage collector over more than what is young come where a process is at rest, and never by themselves."""

from __future__ import annotations

import asyncio
import gc
from random import Random

from runtime.collecting import LONGEST_S, REST_S, FullWalks, collect_at_rest, loading


def test_walks_keep_their_distance_and_none_is_put_off_for_ever(fresh_seed: int) -> None:
    rng, now, last = Random(fresh_seed), 100.0, 100.0
    walks, num_at_rest, num_busy = FullWalks(now), 0, 0
    for _ in range(3000):
        now += rng.expovariate(1.0)
        is_at_rest = rng.random() < 0.1 if now % 2000 < 1000 else False
        is_due = walks.is_due(now, is_at_rest)
        assert is_due == (now - last >= (REST_S if is_at_rest else LONGEST_S))
        if is_due:
            num_at_rest, num_busy, last = num_at_rest + is_at_rest, num_busy + (not is_at_rest), now
    assert num_at_rest > 20 and num_busy > 2


def test_long_walks_come_the_more_seldom_and_short_ones_not_more_often() -> None:
    walks = FullWalks(0.0)
    assert walks.is_due(LONGEST_S, False)
    walks.took(0.25)  # a ten-thousandth of 2500 s
    assert not walks.is_due(LONGEST_S + 2499, False) and walks.is_due(LONGEST_S + 2501, False)
    walks.took(0.0001)
    now = LONGEST_S + 2501
    assert not walks.is_due(now + LONGEST_S - 1, False) and walks.is_due(now + LONGEST_S + 1, False)
    walks.took(0.25)
    assert walks.is_due(now + LONGEST_S + 1 + REST_S, True), "at rest nobody is kept waiting"


def test_a_process_walks_when_it_is_at_rest_and_its_end_walks_over_nothing_that_was_there() -> None:
    before, long = gc.get_threshold(), list[str]()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] > 0:
            long.append(phase)

    async def run() -> None:
        rests = False
        task = asyncio.create_task(collect_at_rest(lambda: rests, 0.001, 0.0))
        await asyncio.sleep(0)
        assert gc.get_freeze_count() > 0 and gc.get_threshold()[2] > 1 << 20
        gc.callbacks.append(note)
        try:
            kept = [[number] for number in range(200_000)]  # Python's own rules would walk for these
            await asyncio.sleep(0.01)
            assert not long and len(kept) == 200_000
            rests = True
            async with asyncio.timeout(20):
                while not long:  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0.001)
        finally:
            gc.callbacks.remove(note)
            task.cancel()
            await asyncio.wait([task])

    try:
        asyncio.run(run())
        assert gc.get_threshold() == before and gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_nothing_walks_while_modules_load_nor_ever_over_what_they_hold() -> None:
    try:
        with loading():
            assert not gc.isenabled() and gc.get_freeze_count() == 0
        assert gc.isenabled() and gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
