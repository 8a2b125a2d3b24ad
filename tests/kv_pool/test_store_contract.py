"""What every store of the KV pool must do, run against each of them."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from connector.kv_record import HEADER_BYTES, IDENTITY_BYTES, KvRecords
from connector.kv_store import KvStoreLimits, RunRead
from tests.kv_pool.places import PLENTY, Place, blocks_of, keys_of, pairs, views

SMALL = 100  # bytes of a block
RECORDS = KvRecords(SMALL)
SECRET = KvRecords(SMALL, b"of the cluster")


@pytest.mark.covers("W10")
@pytest.mark.parametrize("secret", [None, b"of the cluster", b"long " * 100])
@pytest.mark.parametrize("block_bytes", [1, 4096, (1 << 20) + 3])
def test_what_was_written_is_read_back_bit_for_bit_in_any_order(
    place: Place, block_bytes: int, secret: bytes | None
) -> None:
    records = KvRecords(block_bytes, secret)
    writer, reader = place.open(records), place.open(records)
    keys, blocks = keys_of(20), blocks_of(20, block_bytes)
    before = blocks.copy()
    assert writer.write(pairs(keys, blocks)) == 20
    assert np.array_equal(blocks, before)
    order = [7, 0, 19, 3, 3, 11]
    into = np.zeros((8, block_bytes), np.uint8)
    assert reader.read([keys[n] for n in order], views(into[1:7])) == RunRead(6, is_corrupt=False)
    assert np.array_equal(into[1:7], blocks[order])
    assert not into[0].any() and not into[7].any()
    writer.close()
    assert reader.num_leading(keys) == 20
    reader.close()


@pytest.mark.covers("R02", "W10")
def test_whoever_finds_the_same_blocks_has_the_same_identity_and_nobody_else(place: Place) -> None:
    stores = [place.open(RECORDS), place.open(KvRecords(SMALL + 1)), place.open(SECRET)]
    first, longer, keyed = (store.identity() for store in stores)
    assert first == longer == stores[0].identity() != keyed
    assert len(first) == IDENTITY_BYTES
    stores[0].write(pairs(keys_of(2), blocks_of(2, SMALL)))
    stores.append(place.open(RECORDS))
    assert stores[-1].identity() == first, "it is the place's, not the process's"
    place.begin_anew()
    stores.append(place.open(RECORDS))
    assert stores[-1].identity() not in (first, keyed)
    for store in stores:
        store.close()


@pytest.mark.covers("W10")
def test_a_run_ends_at_the_first_block_that_is_not_there(place: Place) -> None:
    store = place.open(RECORDS)
    keys, blocks = keys_of(8), blocks_of(8, SMALL)
    assert store.num_leading(keys) == 0
    store.write(pairs(keys[:3] + keys[4:], blocks[[0, 1, 2, 4, 5, 6, 7]]))
    assert store.missing(keys) == [False, False, False, True, False, False, False, False]
    assert store.num_leading(keys) in (3, 8), "a hole may be overlooked, and is found by reading"
    assert (store.num_leading(keys[:3]), store.num_leading(keys[4:]), store.num_leading(keys[3:])) == (3, 4, 0)
    into = np.zeros((8, SMALL), np.uint8)
    assert store.read(keys, views(into)) == RunRead(3, is_corrupt=False)
    assert np.array_equal(into[:3], blocks[:3])
    assert (store.missing([]), store.num_leading([]), store.write([])) == ([], 0, 0)
    assert store.read([], []) == RunRead(0, is_corrupt=False)
    store.close()


@pytest.mark.covers("W06", "W10")
def test_only_missing_blocks_are_written_and_a_second_writer_of_a_key_is_harmless(place: Place) -> None:
    first, second = place.open(RECORDS), place.open(RECORDS)
    keys, blocks = keys_of(6), blocks_of(6, SMALL)
    assert first.write(pairs(keys[:4], blocks[:4])) == 4
    laid = {name: place.look(name) for name in place.names()}
    # The pool knows blocks by their keys: what it has under one stays, whatever a second writer brings.
    assert second.write(pairs(keys, np.concatenate((blocks_of(4, SMALL, seed=1), blocks[4:])))) == 2
    assert {name: place.look(name) for name in laid} == laid
    assert first.write(pairs(keys, blocks)) == 0
    into = np.zeros((6, SMALL), np.uint8)
    assert first.read(keys, views(into)).num_blocks == 6
    assert np.array_equal(into, blocks)
    first.close()
    second.close()


@pytest.mark.covers("W06", "W10")
def test_many_writers_and_readers_of_the_same_keys_at_once_never_see_a_wrong_block(place: Place) -> None:
    records = KvRecords(50_000)
    keys, blocks = keys_of(12), blocks_of(12, 50_000)
    stores = [place.open(records) for _ in range(4)]

    def use(number: int) -> int:
        rng = np.random.default_rng(number)
        num_stored = num_read = 0
        while num_read < 100:
            chosen = rng.permutation(12)[:5]
            num_stored += stores[number % 4].write(pairs([keys[n] for n in chosen], blocks[chosen]))
            into = np.zeros((5, 50_000), np.uint8)
            chosen = rng.permutation(12)[:5]
            run = stores[(number + 1) % 4].read([keys[n] for n in chosen], views(into))
            assert not run.is_corrupt
            assert np.array_equal(into[: run.num_blocks], blocks[chosen[: run.num_blocks]])
            num_read += run.num_blocks
        return num_stored

    with ThreadPoolExecutor(6) as threads:
        assert sum(threads.map(use, range(6))) >= 12  # a file may be renamed over its equal
    assert stores[0].num_leading(keys) == 12
    for store in stores:
        store.close()


@pytest.mark.covers("W08", "W10")
@pytest.mark.parametrize("records", [RECORDS, SECRET], ids=["checksum", "keyed"])
def test_a_record_with_any_one_byte_changed_is_never_returned_and_makes_room_for_a_right_one(
    place: Place, records: KvRecords
) -> None:
    store = place.open(records)
    keys, blocks = keys_of(3), blocks_of(3, SMALL)
    store.write(pairs(keys, blocks))
    name = records.name(keys[1])
    right = place.look(name)
    assert len(right) == records.record_bytes
    into = np.zeros((3, SMALL), np.uint8)
    for index in range(len(right)):
        wrong = bytearray(right)
        wrong[index] ^= 1 << index % 8
        place.lay(name, bytes(wrong))
        assert store.read(keys, views(into)) == RunRead(1, is_corrupt=True), index
        assert store.missing(keys) == [False, True, False]
        place.lay(name, right)
    assert store.read(keys, views(into)) == RunRead(3, is_corrupt=False)
    place.lay(name, bytes(wrong))
    store.read(keys, views(into))
    assert store.write(pairs(keys, blocks)) == 1
    assert store.read(keys, views(into)) == RunRead(3, is_corrupt=False)
    assert np.array_equal(into, blocks)
    store.close()


@pytest.mark.covers("W08", "W09", "W10")
@pytest.mark.parametrize("num_bytes", [0, 1, HEADER_BYTES, HEADER_BYTES + SMALL - 1, HEADER_BYTES + SMALL + 1])
def test_a_record_of_another_length_is_never_returned_and_may_be_written_anew(place: Place, num_bytes: int) -> None:
    store = place.open(RECORDS)
    keys, blocks = keys_of(2), blocks_of(2, SMALL)
    store.write(pairs(keys, blocks))
    name = RECORDS.name(keys[0])
    place.lay(name, (place.look(name) + b"\0")[:num_bytes])
    into = np.zeros((2, SMALL), np.uint8)
    assert store.read(keys, views(into)).num_blocks == 0
    assert store.write(pairs(keys, blocks)) == 1
    assert store.read(keys, views(into)) == RunRead(2, is_corrupt=False)
    assert np.array_equal(into, blocks)
    store.close()


@pytest.mark.covers("W08", "W10")
@pytest.mark.parametrize("records", [RECORDS, SECRET], ids=["checksum", "keyed"])
def test_what_is_removed_is_not_found_and_may_be_written_anew(place: Place, records: KvRecords) -> None:
    counted: Counter[str] = Counter()
    store, other = place.open(records, count=lambda name, amount: counted.update({name: amount})), place.open(records)
    keys, blocks = keys_of(6), blocks_of(6, SMALL)
    store.write(pairs(keys[:4], blocks[:4]))
    store.remove([*keys[1:3], keys[5]])
    store.remove([])
    assert other.missing(keys) == [False, True, True, False, True, True] and +counted == {"broken": 2}
    assert other.write(pairs(keys[:4], blocks[2:])) == 2
    into = np.zeros((4, SMALL), np.uint8)
    assert store.read(keys[:4], views(into)) == RunRead(4, is_corrupt=False)
    assert np.array_equal(into, blocks[[0, 3, 4, 3]])
    store.close()
    other.close()


@pytest.mark.covers("W08", "W10")
def test_a_pool_that_lies_about_what_belongs_to_a_key_is_found_out(place: Place) -> None:
    store = place.open(RECORDS)
    keys, blocks = keys_of(2), blocks_of(2, SMALL)
    store.write(pairs(keys, blocks))
    place.lay(RECORDS.name(keys[0]), place.look(RECORDS.name(keys[1])))
    assert store.num_leading(keys) == 2
    assert store.read(keys, views(np.zeros((2, SMALL), np.uint8))) == RunRead(0, is_corrupt=True)
    store.close()


@pytest.mark.covers("W10")
def test_nobody_finds_the_blocks_of_a_cluster_with_another_secret_or_takes_a_record_that_he_made_for_it(
    place: Place,
) -> None:
    ours, theirs, open_one = place.open(SECRET), place.open(KvRecords(SMALL, b"another")), place.open(RECORDS)
    keys, blocks = keys_of(2), blocks_of(2, SMALL)
    forged = blocks_of(2, SMALL, seed=1)
    into = np.zeros((2, SMALL), np.uint8)
    open_one.write(pairs(keys, forged))
    theirs.write(pairs(keys, forged))
    assert ours.missing(keys) == [True, True]
    assert ours.write(pairs(keys, blocks)) == 2
    for records in (RECORDS, KvRecords(SMALL, b"another")):
        place.lay(SECRET.name(keys[0]), place.look(records.name(keys[0])))
        assert ours.read(keys, views(into)) == RunRead(0, is_corrupt=True)
    assert theirs.read(keys, views(into)).num_blocks == 2
    for store in (ours, theirs, open_one):
        store.close()


@pytest.mark.covers("W10")
def test_a_full_store_drops_what_was_used_least_recently_and_counts_it(place: Place) -> None:
    counted: Counter[str] = Counter()

    def count(name: str, amount: int) -> None:
        counted[name] += amount

    max_records = 16
    limits = KvStoreLimits(max_bytes=max_records * RECORDS.record_bytes)
    store, reader = place.open(RECORDS, limits, count), place.open(RECORDS, limits)
    keys, blocks = keys_of(200), blocks_of(200, SMALL)
    into = np.zeros((1, SMALL), np.uint8)
    for number in range(200):
        store.write(pairs(keys[number : number + 1], blocks[number : number + 1]))
        assert reader.read(keys[:1], views(into)).num_blocks == 1  # which keeps it in use
        assert reader.missing(keys[number : number + 1]) == [False]
        assert len(place.names()) <= max_records
    assert counted["evicted"] == 200 - len(place.names())
    assert not any(store.missing(keys[-max_records * 5 // 8 :]))  # one may free more than it needs
    store.close()
    reader.close()


@pytest.mark.covers("W10")
def test_what_would_be_written_again_and_again_is_in_use_and_stays(place: Place) -> None:
    store = place.open(RECORDS, KvStoreLimits(max_bytes=16 * RECORDS.record_bytes))
    keys, blocks = keys_of(100), blocks_of(100, SMALL)
    store.write(pairs(keys[:1], blocks[:1]))
    for number in range(1, 100):  # sequences with one prefix
        assert store.write(pairs([keys[0], keys[number]], blocks[[0, number]])) == 1
    store.close()


@pytest.mark.covers("W10")
def test_however_many_blocks_of_a_prompt_there_are_they_are_counted(place: Place) -> None:
    store = place.open(RECORDS)
    keys, blocks = keys_of(40), blocks_of(40, SMALL)
    for number in range(40):
        assert [store.num_leading(keys[:num]) for num in (number, 39, 40)] == [number, min(number, 39), number]
        store.write(pairs(keys[number : number + 1], blocks[number : number + 1]))
    assert store.num_leading(keys) == 40
    store.close()


@pytest.mark.covers("W10")
def test_many_blocks_at_once_are_bounded_as_one_by_one(place: Place) -> None:
    limits = KvStoreLimits(max_bytes=10 * RECORDS.record_bytes)
    store = place.open(RECORDS, limits)
    keys, blocks = keys_of(64), blocks_of(64, SMALL)
    store.write(pairs(keys, blocks))
    assert 6 <= len(place.names()) <= 10
    into = np.zeros((1, SMALL), np.uint8)
    assert store.read(keys[-1:], views(into)).num_blocks == 1
    store.close()


@pytest.mark.covers("W10")
@pytest.mark.parametrize("max_bytes", [0, RECORDS.record_bytes - 1])
def test_a_store_without_room_for_one_block_takes_none(place: Place, max_bytes: int) -> None:
    store = place.open(RECORDS, KvStoreLimits(max_bytes=max_bytes))
    assert store.write(pairs(keys_of(3), blocks_of(3, SMALL))) == 0
    assert place.names() == set()
    store.close()


@pytest.mark.covers("W09")
@pytest.mark.parametrize("num_bytes", [0, 1, SMALL - 1, SMALL + 1])
def test_only_whole_blocks_are_taken_or_given(place: Place, num_bytes: int) -> None:
    store = place.open(RECORDS, PLENTY)
    keys, blocks = keys_of(2), blocks_of(2, SMALL)
    part = np.zeros(num_bytes, np.uint8)
    with pytest.raises(ValueError, match="a block of"):
        store.write([(keys[1], part.data)])
    assert place.names() == set()
    store.write(pairs(keys, blocks))
    with pytest.raises(ValueError):
        store.read(keys[:1], [part.data])
    with pytest.raises(ValueError, match="a key of"):
        store.write([(b"short", blocks[0].data)])
    store.close()
