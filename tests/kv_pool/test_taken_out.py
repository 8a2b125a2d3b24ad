"""Blocks that leave the KV pool, because they broke a row or their bytes are spoilt: they are gone, and may come back anew."""

from __future__ import annotations

import pytest

from connector.kv_record import HEADER_BYTES
from node import events as ev
from node.events import BlocksStaged, FetchBlocks
from tests.kv_pool.pool_bed import pool_bed
from tests.kv_pool.test_kv_pool_threads import KEYS, PATIENT, run, save, stored


@pytest.mark.covers("W06", "W08")
def test_what_is_taken_out_is_not_found_any_more_and_may_be_stored_anew_though_it_was_there_a_moment_ago() -> None:
    async def test() -> None:
        async with pool_bed(bounds=PATIENT) as bed:
            await stored(bed, 4)
            bed.pool.take_out(ev.TakeOutBlocks((*KEYS[1:3], KEYS[9])))
            await bed.until(lambda: any(KEYS[9] in said.lacking for said in bed.said))
            assert bed.said[-1].lacking == (*KEYS[1:3], KEYS[9]), "routers hear of it"
            assert bed.store.missing(KEYS[:4]) == [False, True, True, False] and not bed.events
            bed.pool.save(save(1, 0, 4))
            await bed.until(lambda: bed.amount("kv_pool_saves", "written") == 6)
            assert bed.store.missing(KEYS[:4]) == [False] * 4

    run(test())


@pytest.mark.covers("W08")
def test_what_was_given_to_be_saved_before_it_broke_is_not_stored_behind_its_removal() -> None:
    async def test() -> None:
        async with pool_bed(block_bytes=1 << 20, num_blocks=32, bounds=PATIENT) as bed:
            bed.store.may_write.clear()
            bed.pool.save(save(1, 0, 24))  # in three batches, of which the writer hangs in one; some are not copied yet
            bed.pool.take_out(ev.TakeOutBlocks(tuple(KEYS[:23])))
            bed.pool.save(save(2, 20, 2))  # computed anew
            await bed.until(lambda: len(bed.events) == 2)
            bed.store.may_write.set()
            await bed.until(lambda: bed.pool.snapshot()["staging_blocks_used"] == 0)
            await bed.until(lambda: bool(bed.said) and any(KEYS[0] in said.lacking for said in bed.said))
            await bed.until(lambda: bed.store.missing(KEYS[:24]) == [*[True] * 20, False, False, True, False])

    run(test())


@pytest.mark.covers("W08")
@pytest.mark.parametrize("fault", ["fails", "hangs"])
def test_what_cannot_be_taken_out_holds_up_nobody_who_saves_and_is_not_piled_up(fault: str) -> None:
    async def test() -> None:
        async with pool_bed(bounds=PATIENT) as bed:
            await stored(bed, 4)
            bed.store.fails_to_write = fault == "fails"
            if fault == "hangs":
                bed.store.may_write.clear()
            for _ in range(1000):
                bed.pool.take_out(ev.TakeOutBlocks(tuple(KEYS[:4])))
            assert await bed.saved(save(1, 4, 4)) == BlocksStaged(1, 4)
            bed.store.fails_to_write = False
            bed.store.may_write.set()
            await bed.until(lambda: bed.pool.snapshot()["staging_blocks_used"] == 0)
            assert fault == "fails" or bed.store.asked.count("remove") < 100

    run(test())


@pytest.mark.covers("W06", "W08")
def test_what_the_pool_has_dropped_as_spoilt_is_stored_again_though_it_was_there_a_moment_ago() -> None:
    async def test() -> None:
        async with pool_bed(bounds=PATIENT) as bed:
            await stored(bed, 4)
            bed.store.shelf.records[KEYS[1]][HEADER_BYTES] ^= 1
            assert (await bed.fetched(FetchBlocks(1, tuple((KEYS[n], 16 + n) for n in range(4))))).num_blocks == 1
            assert bed.store.missing(KEYS[:4]) == [False, True, False, False]
            bed.pool.save(save(1, 0, 4))
            await bed.until(lambda: bed.amount("kv_pool_saves", "written") == 5)
            assert bed.store.missing(KEYS[:4]) == [False] * 4

    run(test())
