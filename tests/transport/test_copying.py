"""Bytes into place, hashed on the way: numpy's way and each compiled variant that this CPU runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.checksum import seeded_checksum
from connector.copying import Bytes, Places, StripeCopier, Words, copy_pieces
from engine.shared_bytes import SharedBytes
from kernels.cpu_build import library_path, usable_variants
from kernels.cpu_copies import CpuCopier, find_copier
from kernels.cpu_library import Library
from tests.thorough import examples

_VARIANTS = {each.name: library_path(each) for each in usable_variants() if library_path(each).exists()}
_POOL_BYTES = 1 << 20


@pytest.fixture(params=["numpy", *_VARIANTS], scope="module")
def copier(request: pytest.FixtureRequest) -> StripeCopier | None:
    """What `copy_pieces` is given."""
    return None if request.param == "numpy" else CpuCopier(Library(_VARIANTS[request.param]))


@pytest.fixture(scope="module")
def pool() -> Iterator[Bytes]:
    """A destination as a node has it: [bytes], a page's beginning."""
    shared = SharedBytes(_POOL_BYTES >> 10, 1 << 10)
    yield shared.bytes.reshape(-1)


def table(*places: tuple[int, int, int]) -> Places:
    return np.array(places, np.int64)


@st.composite
def drawn_places(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Pieces side by side, mostly of whole stripes, some across xxh3's blocks of 1,024 bytes; their sources where they like."""
    unit = draw(st.sampled_from([64, 64, 1]))
    lengths = draw(st.lists(st.integers(1, 4096 // unit).map(lambda units: units * unit), min_size=1, max_size=8))
    lengths += draw(st.lists(st.sampled_from([1024, 2048, 65536]), max_size=2))
    places, to = [], draw(st.integers(0, 2)) * unit
    for length in lengths:
        places.append((to, draw(st.integers(0, 300)), length))
        to += length + draw(st.integers(0, 2)) * unit
    return places


@pytest.mark.covers("H09")
@settings(deadline=None, max_examples=examples(150, 3))
@given(places=drawn_places(), seed=st.integers(0, 2**64 - 1), has_seeds=st.booleans())
def test_every_way_puts_the_same_bytes_in_place_and_nothing_beside_them_and_hashes_as_xxh3_does(
    copier: StripeCopier | None, pool: Bytes, places: list[tuple[int, int, int]], seed: int, has_seeds: bool
) -> None:
    source = np.random.default_rng(seed).integers(0, 256, 300 + 65536, np.uint8)
    pool[:] = 0
    expected = pool.copy()
    for to, begin, length in places:
        expected[to : to + length] = source[begin : begin + length]
    seeds = np.array([(seed + i) % 2**64 for i in range(len(places))], np.uint64)
    digests = copy_pieces(pool, source, table(*places), seeds if has_seeds else None, copier)
    assert np.array_equal(pool, expected)
    wanted = [
        seeded_checksum(source[begin : begin + length], int(each))
        for (_, begin, length), each in zip(places, seeds, strict=True)
    ]
    assert digests.tolist() == (wanted if has_seeds else [])


@pytest.mark.covers("H09")
def test_a_source_that_changes_meanwhile_gives_the_digest_of_what_was_written(
    copier: StripeCopier | None, pool: Bytes
) -> None:
    source = np.zeros(_POOL_BYTES, np.uint8)
    words, is_over = source.view(np.uint64), threading.Event()

    def change() -> None:
        while not is_over.is_set():
            np.add(words, 1, out=words)

    changing = threading.Thread(target=change)
    changing.start()
    torn, seed, patience = 0, 0, time.monotonic() + 10
    try:
        while torn < 400 and time.monotonic() < patience:
            seed += 1
            places = table(*((at, at, _POOL_BYTES // 4) for at in range(0, _POOL_BYTES, _POOL_BYTES // 4)))
            seeds: Words = np.full(4, seed, np.uint64)
            digests = copy_pieces(pool, source, places, seeds, copier)
            for (to, _, length), digest in zip(places.tolist(), digests.tolist(), strict=True):
                assert digest == seeded_checksum(pool[to : to + length], seed)
            torn += bool((pool.view(np.uint64) != pool.view(np.uint64)[0]).any())
    finally:
        is_over.set()
        changing.join()
    assert torn > 0, "nothing changed while it was copied"


def test_whole_stripes_take_the_compiled_way_and_others_do_not(pool: Bytes) -> None:
    lengths: list[list[int]] = []

    def count(to: Bytes, source: Bytes, places: Places, seeds: Words | None) -> Words:
        lengths.append(places[:, 2].tolist())
        return np.zeros(len(places), np.uint64)

    source = np.zeros(4096, np.uint8)
    for place in [(0, 0, 256), (64, 3, 320), (0, 0, 192), (32, 0, 256), (0, 0, 257)]:
        copy_pieces(pool, source, table(place), None, count)
    copy_pieces(pool[1:], source, table((0, 0, 256)), None, count)
    copy_pieces(pool, source, table((0, 0, 256), (256, 0, 300)), None, count)
    assert lengths == [[256], [320]]


@pytest.mark.parametrize("place", [(_POOL_BYTES - 256, 0, 512), (0, 4096 - 64, 256), (-64, 0, 256), (0, 0, -256)])
def test_a_place_outside_of_either_memory_is_refused_before_a_byte_is_copied(
    copier: StripeCopier | None, pool: Bytes, place: tuple[int, int, int]
) -> None:
    pool[:] = 0
    with pytest.raises(ValueError, match="outside"):
        copy_pieces(pool, np.ones(4096, np.uint8), table((0, 0, 256), place), None, copier)
    assert not pool.any()


def test_a_node_finds_what_was_compiled() -> None:
    assert (find_copier() is None) == (not any(path.exists() for path in _VARIANTS.values()))
