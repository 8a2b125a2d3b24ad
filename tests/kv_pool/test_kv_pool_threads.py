"""The threads between a node's loop and the KV pool: nobody waits for the pool, each call is answered once."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest

from connector.kv_breaker import BreakerTiming
from connector.kv_record import HEADER_BYTES
from node.events import BlocksFetched, BlocksStaged, FetchBlocks, LookInPool, PoolLooked, PoolSaid, SaveBlocks
from node.kv_pool import KvPoolBounds
from tests.kv_pool.places import keys_of
from tests.kv_pool.pool_bed import NEVER_OPENS, PATIENCE_S, PoolBed, pool_bed

KEYS: Final = keys_of(64)
LONG_S: Final = 1000.0
PATIENT: Final = KvPoolBounds(breaker=NEVER_OPENS, look_timeout_s=LONG_S, fetch_timeout_s=LONG_S)


def run(test: Coroutine[Any, Any, None]) -> None:
    """In a fresh loop."""
    asyncio.run(test)


def save(save_id: int, first: int, num: int) -> SaveBlocks:
    """Blocks and keys of equal numbers."""
    return SaveBlocks(save_id, tuple((KEYS[n], n) for n in range(first, first + num)))


async def stored(bed: PoolBed, num: int) -> None:
    """Let the first blocks be in the pool."""
    bed.pool.save(save(0, 0, num))
    await bed.until(lambda: bed.amount("kv_pool_saves", "written") == num)
    bed.events.clear()
    bed.store.asked.clear()


@pytest.mark.covers("W01", "W03", "W07")
def test_blocks_are_copied_before_the_answer_written_behind_it_and_come_back_into_other_blocks() -> None:
    async def test() -> None:
        async with pool_bed(num_blocks=30, bounds=PATIENT) as bed:
            original = bed.memory.copy()
            bed.store.may_write.clear()
            assert await bed.saved(save(7, 0, 10)) == BlocksStaged(7, 10)
            bed.memory[:10] = 0xEE  # the core may give them to somebody else now
            bed.store.may_write.set()
            await bed.until(lambda: bed.amount("kv_pool_saves", "written") == 10)
            assert await bed.looked(LookInPool(8, tuple(KEYS[:12]))) == PoolLooked(8, 10)
            targets = [25, 13, 20, 14, 29, 21, 12, 17, 11, 19]
            fetched = await bed.fetched(FetchBlocks(9, tuple(zip(KEYS[:10], targets, strict=True))))
            assert (fetched.fetch_id, fetched.num_blocks) == (9, 10) and 0 <= fetched.seconds < PATIENCE_S
            assert np.array_equal(bed.memory[targets], original[:10])
            others = [n for n in range(10, 30) if n not in targets]
            assert np.array_equal(bed.memory[others], original[others])
            assert len(bed.events) == 3

    run(test())


@pytest.mark.covers("R02", "W01")
def test_what_the_pool_turns_out_to_have_and_to_lack_is_said_beside_the_answers() -> None:
    async def test() -> None:
        async with pool_bed(bounds=PATIENT) as bed:
            await bed.until(lambda: len(bed.said) == 1)
            assert bed.said == [PoolSaid(bed.store.identity())], "whose it is, before anything is asked"
            await stored(bed, 4)
            await bed.until(lambda: [key for said in bed.said[1:] for key in said.stored] == KEYS[:4])
            bed.said.clear()
            await bed.looked(LookInPool(1, tuple(KEYS[:8])))
            await bed.until(lambda: len(bed.said) == 1)
            assert (bed.said[0].found, bed.said[0].lacking) == (tuple(KEYS[:4]), (KEYS[4],))
            bed.said.clear()
            bed.store.claims = 6
            await bed.looked(LookInPool(2, tuple(KEYS[:6])))
            await bed.until(lambda: len(bed.said) == 1)  # what is fetched may be read first
            await bed.fetched(FetchBlocks(3, tuple((KEYS[n], n) for n in range(2, 6))))
            await bed.until(lambda: len(bed.said) == 2)
            assert (bed.said[0].found, bed.said[0].lacking) == (tuple(KEYS[:6]), ()), "it lies"
            assert (bed.said[1].found, bed.said[1].lacking) == (tuple(KEYS[2:4]), (KEYS[4],)), "and is found out"
            bed.said.clear()
            bed.store.fails_to_read = bed.store.fails_to_write = True
            await bed.looked(LookInPool(4, tuple(KEYS[:6])))
            await bed.fetched(FetchBlocks(5, ((KEYS[0], 1),)))
            assert await bed.saved(save(6, 10, 1)) == BlocksStaged(6, 1)
            await bed.until(lambda: bed.amount("kv_pool_saves", "failed") == 1)
            assert bed.said == [], "who fails says nothing"

    run(test())


@pytest.mark.covers("W05", "W08", "W01")
def test_a_store_that_hangs_delays_no_save_and_what_finds_no_room_is_dropped_and_counted() -> None:
    async def test() -> None:
        bounds = dataclasses.replace(PATIENT, staging_bytes=10_999)  # ten blocks, and a part of one
        async with pool_bed(bounds=bounds) as bed:
            bed.store.may_write.clear()
            for number in range(5):
                bed.pool.save(save(number, 4 * number, 4))
            await bed.until(lambda: len(bed.events) == 5)
            assert bed.events == [BlocksStaged(n, num) for n, num in enumerate((4, 4, 2, 0, 0))]
            await bed.until(lambda: bed.store.asked == ["write"])  # in which the writer hangs
            assert bed.amount("kv_pool_saves", "full") == 10
            assert bed.pool.snapshot()["staging_blocks_used"] == bed.pool.snapshot()["staging_blocks"] == 10
            bed.store.may_write.set()
            await bed.until(lambda: bed.amount("kv_pool_saves", "written") == 10)
            assert bed.store.missing(KEYS[:11]) == [False] * 10 + [True]
            assert await bed.saved(save(5, 30, 10)) == BlocksStaged(5, 10), "the room is free again"

    run(test())


@pytest.mark.covers("W05")
def test_a_loop_that_saves_for_hours_into_a_store_that_takes_nothing_goes_on_as_if_there_were_none() -> None:
    async def test() -> None:
        async with pool_bed(block_bytes=1 << 16, bounds=dataclasses.replace(PATIENT, staging_bytes=4 << 16)) as bed:
            bed.store.may_write.clear()
            for number in range(200):
                bed.pool.save(save(number, number % 60, 4))
                await asyncio.sleep(0)
            await bed.until(lambda: len(bed.of(BlocksStaged)) == 200)
            assert bed.store.asked in ([], ["write"]), "and it has not come back from that"

    run(test())


@pytest.mark.covers("W06")
def test_only_missing_blocks_are_written_and_a_block_takes_one_place_in_the_buffer() -> None:
    async def test() -> None:
        async with pool_bed(bounds=dataclasses.replace(PATIENT, staging_bytes=8000, recent_s=0.0)) as bed:
            await stored(bed, 4)
            bed.store.may_write.clear()
            bed.pool.save(save(1, 2, 4))
            bed.pool.save(save(2, 0, 8))  # two sequences with one prefix
            await bed.until(lambda: len(bed.events) == 2)
            assert bed.events == [BlocksStaged(1, 4), BlocksStaged(2, 8)]
            bed.store.may_write.set()
            await bed.until(lambda: bed.amount("kv_pool_saves", "present") == 4)
            assert bed.amount("kv_pool_saves", "written") == 8
            assert bed.store.missing(KEYS[:9]) == [False] * 8 + [True]

    run(test())


@pytest.mark.covers("W08", "W07")
def test_a_run_of_many_megabytes_is_read_up_to_the_first_block_that_is_corrupt() -> None:
    async def test() -> None:
        async with pool_bed(block_bytes=1 << 20, num_blocks=32, bounds=PATIENT) as bed:
            await stored(bed, 16)
            original = bed.memory.copy()
            bed.store.shelf.records[KEYS[10]][HEADER_BYTES + 12345] ^= 1
            assert (await bed.fetched(FetchBlocks(1, tuple((KEYS[n], 16 + n) for n in range(16))))).num_blocks == 10
            assert np.array_equal(bed.memory[16:26], original[:10])
            assert np.array_equal(bed.memory[26:], original[26:]), "nothing behind the last right block is touched"
            assert [bed.amount("kv_pool_reads", each) for each in ("read", "corrupt", "absent")] == [10, 1, 5]
            assert bed.store.asked == ["read"] * 3

    run(test())


@pytest.mark.covers("W08")
def test_what_hangs_is_answered_in_time_and_what_it_brings_later_goes_nowhere() -> None:
    async def test() -> None:
        async with pool_bed(bounds=PATIENT) as bed:
            await stored(bed, 8)
            bed.store.may_read.clear()
            came_back: list[int] = []
            bed.store.in_read = lambda: came_back.append(8)
            bed.pool.look(LookInPool(1, tuple(KEYS[:8])))
            bed.pool.fetch(FetchBlocks(2, tuple((KEYS[n], 20 + n) for n in range(8))))
            await bed.until(lambda: set(bed.store.asked) == {"look", "read"})
            bed.let_time_pass(LONG_S)
            await bed.until(lambda: len(bed.events) == 2)
            assert bed.of(PoolLooked) == [PoolLooked(1, 0)]
            assert [(event.fetch_id, event.num_blocks) for event in bed.of(BlocksFetched)] == [(2, 0)]
            bed.memory[20:28] = 0xEE  # they are somebody else's now
            bed.store.may_read.set()
            assert await bed.pool.stop(PATIENCE_S)  # behind the threads that hung
            assert came_back == [8], "and brought what they were sent for"
            assert (bed.memory[20:28] == 0xEE).all()
            assert len(bed.events) == 2, "each was answered once"
            assert bed.amount("kv_pool_looks", "late") == 1 and bed.amount("kv_pool_reads", "late") == 8

    run(test())


@pytest.mark.covers("W08")
def test_calls_that_were_answered_wait_no_longer_for_a_store_that_hangs_for_days() -> None:
    async def test() -> None:
        async with pool_bed(bounds=PATIENT) as bed:
            await stored(bed, 4)
            bed.store.may_read.clear()
            for number in range(2):
                bed.pool.look(LookInPool(number, tuple(KEYS[:4])))
                bed.pool.fetch(FetchBlocks(number, ((KEYS[0], 9 + number),)))
            await bed.until(lambda: sorted(bed.store.asked) == ["look", "read", "read"])
            for number in range(2, 12):
                bed.pool.look(LookInPool(number, tuple(KEYS[:4])))
                bed.pool.fetch(FetchBlocks(number, ((KEYS[0], 9 + number),)))
            assert bed.pool.snapshot()["calls_waiting"] == 21, "three are with the store's threads"
            bed.let_time_pass(LONG_S)
            await bed.until(lambda: len(bed.events) == 24)
            assert bed.pool.snapshot()["calls_waiting"] == 0
            bed.store.may_read.set()
            assert (await bed.looked(LookInPool(12, tuple(KEYS[:4])))).num_blocks == 4, "the thread that hung goes on"
            assert bed.store.asked.count("look") == 2, "and does nothing for who has had an answer"

    run(test())


@pytest.mark.covers("W08")
def test_a_fetch_that_runs_out_of_time_keeps_what_it_has() -> None:
    async def test() -> None:
        async with pool_bed(block_bytes=1 << 20, num_blocks=32, bounds=PATIENT) as bed:
            await stored(bed, 8)
            bed.store.in_read = bed.store.may_read.clear  # the first run of four is read, the second one hangs
            original = bed.memory.copy()
            bed.pool.fetch(FetchBlocks(1, tuple((KEYS[n], 20 + n) for n in range(8))))
            await bed.until(lambda: bed.store.asked == ["read", "read"])
            bed.let_time_pass(LONG_S)
            await bed.until(lambda: len(bed.events) == 1)
            assert [event.num_blocks for event in bed.of(BlocksFetched)] == [4]
            bed.store.may_read.set()
            assert await bed.pool.stop(PATIENCE_S)
            assert np.array_equal(bed.memory[20:24], original[:4])
            assert np.array_equal(bed.memory[24:], original[24:])

    run(test())


@pytest.mark.covers("W08")
def test_a_pool_that_keeps_failing_is_left_alone_for_a_while_and_then_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        timing = BreakerTiming(num_failures=3, first_s=LONG_S, longest_s=LONG_S)
        async with pool_bed(bounds=dataclasses.replace(PATIENT, breaker=timing)) as bed:
            await stored(bed, 4)
            bed.store.fails_to_read = True
            for number in range(3):
                assert await bed.looked(LookInPool(number, tuple(KEYS[:4]))) == PoolLooked(number, 0)
            bed.store.asked.clear()
            bed.pool.look(LookInPool(3, tuple(KEYS[:4])))
            bed.pool.fetch(FetchBlocks(4, ((KEYS[0], 9),)))
            assert bed.events[-2:] == [PoolLooked(3, 0), BlocksFetched(4, 0, bed.of(BlocksFetched)[-1].seconds)]
            assert bed.store.asked == [], "answered at once, and nobody is asked"
            assert bed.pool.snapshot()["circuits"] == {"read": "open", "write": "closed"}
            bed.store.fails_to_read = False
            later = SimpleNamespace(monotonic=lambda: time.monotonic() + LONG_S)
            monkeypatch.setattr("node.kv_pool_circuit.time", later)
            assert (await bed.looked(LookInPool(5, tuple(KEYS[:4])))).num_blocks == 4, "the pause is over"
            assert (await bed.fetched(FetchBlocks(6, ((KEYS[0], 9),)))).num_blocks == 1
            assert bed.pool.snapshot()["circuits"] == {"read": "closed", "write": "closed"}
            assert bed.amount("kv_pool_circuit_opened", "read") == 1
            assert [bed.amount("kv_pool_looks", each) for each in ("failed", "found")] == [3, 1]
            assert bed.amount("kv_pool_looks", "refused") == 1

    run(test())


@pytest.mark.covers("W08")
def test_a_full_pool_is_written_to_no_more_and_read_all_the_same() -> None:
    async def test() -> None:
        timing = BreakerTiming(num_failures=2, first_s=LONG_S)
        async with pool_bed(bounds=dataclasses.replace(PATIENT, breaker=timing)) as bed:
            await stored(bed, 4)
            bed.store.fails_to_write = True
            for number in range(2):
                bed.pool.save(save(number, 10 + number, 1))
                await bed.until(lambda number=number: bed.amount("kv_pool_saves", "failed") == number + 1)  # type: ignore[misc]
            bed.pool.save(save(2, 20, 5))
            assert bed.events[-1] == BlocksStaged(2, 0)
            assert bed.amount("kv_pool_saves", "refused") == 5
            assert bed.store.asked == ["write", "write"]
            assert await bed.looked(LookInPool(3, tuple(KEYS[:4]))) == PoolLooked(3, 4)

    run(test())


@pytest.mark.covers("W08")
def test_a_pool_that_claims_blocks_and_never_gives_one_is_left_alone() -> None:
    async def test() -> None:
        timing = BreakerTiming(num_failures=3, first_s=LONG_S)
        async with pool_bed(bounds=dataclasses.replace(PATIENT, breaker=timing)) as bed:
            bed.store.claims = 1000
            for number in range(3):
                assert await bed.looked(LookInPool(number, tuple(KEYS[:4]))) == PoolLooked(number, 4), (
                    "no more than was asked for"
                )
                assert (await bed.fetched(FetchBlocks(number, tuple((KEYS[n], n) for n in range(4))))).num_blocks == 0
            assert bed.pool.snapshot()["circuits"] == {"read": "open", "write": "closed"}

    run(test())


@pytest.mark.covers("W08")
def test_a_pool_that_claims_less_than_nothing_has_nothing() -> None:
    """The core cannot look at so many of a prompt's keys: the node ended."""

    async def test() -> None:
        async with pool_bed(bounds=PATIENT) as bed:
            bed.store.claims = -5
            await bed.until(lambda: len(bed.said) == 1)
            bed.said.clear()
            assert await bed.looked(LookInPool(1, tuple(KEYS[:8]))) == PoolLooked(1, 0)
            await bed.until(lambda: len(bed.said) == 1)
            assert (bed.said[0].found, bed.said[0].lacking) == ((), (KEYS[0],))
            assert bed.amount("kv_pool_looks", "nothing") == 1

    run(test())


@pytest.mark.covers("W08")
@pytest.mark.parametrize("hangs", [True, False])
def test_calls_too_many_for_the_threads_come_too_late_which_is_the_store_s_fault_only_if_it_hangs(hangs: bool) -> None:
    async def test() -> None:
        bounds = dataclasses.replace(PATIENT, num_readers=1, breaker=BreakerTiming(2, first_s=LONG_S))
        async with pool_bed(bounds=bounds) as bed:
            await stored(bed, 1)
            bed.store.may_read.clear()
            bed.pool.fetch(FetchBlocks(0, ((KEYS[0], 9),)))
            await bed.until(lambda: bed.store.asked == ["read"])
            for number in range(1, 6):
                bed.pool.fetch(FetchBlocks(number, ((KEYS[0], 10),)))
            if not hangs:
                bed.store.in_read = bed.store.may_read.clear
                bed.store.may_read.set()  # for one of them
                await bed.until(lambda: bed.store.asked == ["read", "read"])
            bed.let_time_pass(LONG_S)
            await bed.until(lambda: len(bed.events) == 6)
            assert bed.amount("kv_pool_reads", "late") == (6 if hangs else 5)
            assert bed.pool.snapshot()["circuits"] == {"read": "open" if hangs else "closed", "write": "closed"}

    run(test())


@pytest.mark.covers("W01", "W05")
def test_who_stops_has_what_is_staged_written_while_there_is_time() -> None:
    async def test() -> None:
        async with pool_bed() as bed:
            bed.pool.save(save(1, 0, 60))
            assert await bed.pool.stop(PATIENCE_S)
            assert bed.store.missing(KEYS[:61]) == [False] * 60 + [True]
            assert bed.store.asked[-1] == "close"

    run(test())


@pytest.mark.covers("W05", "W08")
def test_a_store_that_hangs_does_not_keep_a_node_from_stopping() -> None:
    async def test() -> None:
        async with pool_bed() as bed:
            bed.store.may_write.clear()
            bed.store.may_read.clear()
            bed.pool.save(save(1, 0, 4))
            bed.pool.look(LookInPool(2, tuple(KEYS[:4])))
            await bed.until(lambda: set(bed.store.asked) == {"write", "look"})
            began_at = time.monotonic()
            assert not await bed.pool.stop(0.1)
            assert time.monotonic() - began_at < PATIENCE_S
            assert "close" not in bed.store.asked, "somebody is inside"

    run(test())


@pytest.mark.covers("W06", "W01")
def test_what_the_pool_has_said_to_have_is_not_copied_again_for_a_while_and_leaves_room_for_what_is_new() -> None:
    async def test(recent_s: float, num_asked: int) -> None:
        bounds = dataclasses.replace(PATIENT, staging_bytes=4 * 1000, recent_s=recent_s)
        async with pool_bed(bounds=bounds) as bed:
            await stored(bed, 4)
            bed.store.may_write.clear()
            # A prompt that everybody has, and something new behind it.
            assert await bed.saved(save(1, 0, 8)) == BlocksStaged(1, 8 if recent_s else 4)
            bed.store.may_write.set()
            await bed.until(lambda: bed.amount("kv_pool_saves", "present") == 4)
            await bed.until(lambda: bed.amount("kv_pool_saves", "written") == num_asked)

    run(test(LONG_S, 8))
    run(test(0.0, 4))


@pytest.mark.covers("W08", "W06")
def test_what_could_not_be_written_is_copied_again() -> None:
    async def test() -> None:
        async with pool_bed(bounds=PATIENT) as bed:
            bed.store.fails_to_write = True
            bed.pool.save(save(0, 0, 4))
            await bed.until(lambda: bed.amount("kv_pool_saves", "failed") == 4)
            bed.store.fails_to_write = False
            bed.pool.save(save(1, 0, 4))
            await bed.until(lambda: bed.amount("kv_pool_saves", "written") == 4)

    run(test())
