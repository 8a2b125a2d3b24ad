"""A directory on a disk that takes no file any more, or gives one back no more, and somebody's file in the way of a folder."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from connector.file_store import FileStore
from connector.kv_record import KvRecords
from connector.kv_store import KvStoreError, KvStoreLimits, RunRead
from tests.kv_pool.places import FilePlace, blocks_of, keys_of, pairs, views
from tests.without_root import without_root

SMALL = 100
RECORDS = KvRecords(SMALL)


@pytest.mark.covers("W10")
def test_on_a_disk_that_takes_no_file_what_nobody_used_for_long_goes_before_the_next_write(tmp_path: Path) -> None:
    """A disk without a free inode took none to read its clock from, and stayed full. Its stand-in is a folder without the right."""
    with without_root(tmp_path):
        place = FilePlace(Path("pool"))
        store = FileStore(place.root, RECORDS, KvStoreLimits(ttl_s=1000))
        keys, blocks = keys_of(3), blocks_of(3, SMALL)
        store.write(pairs(keys[:2], blocks[:2]))
        path = place.path(keys[0])
        os.utime(path, (path.stat().st_mtime - 1100,) * 2)
        (place.root / "tmp").chmod(0o500)
        for _ in range(2):  # the first write does not look at what lies there
            with pytest.raises(KvStoreError):
                store.write(pairs(keys[2:], blocks[2:]))
        assert place.names() == {keys[1]}
        (place.root / "tmp").chmod(0o700)
        assert store.write(pairs(keys, blocks)) == 2


@pytest.mark.covers("W08", "W10")
def test_a_block_that_the_disk_cannot_read_any_more_costs_itself_and_is_stored_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prompt that began with it failed to fetch anything, nobody wrote it anew, and the whole pool was left alone for it."""
    place = FilePlace(tmp_path / "pool")
    store = place.open(RECORDS)
    keys, blocks = keys_of(4), blocks_of(4, SMALL)
    store.write(pairs(keys, blocks))
    spoilt, read = place.path(keys[2]).stat().st_ino, os.preadv

    def preadv(file: int, buffers: list[memoryview], offset: int) -> int:
        if os.fstat(file).st_ino == spoilt:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    into = np.zeros((4, SMALL), np.uint8)
    assert store.read(keys, views(into)) == RunRead(2, is_corrupt=True)
    assert np.array_equal(into[:2], blocks[:2])
    assert store.missing(keys) == [False, False, True, False]
    monkeypatch.undo()  # where it is written now the disk is sound
    assert store.write(pairs(keys, blocks)) == 1
    assert store.read(keys, views(into)) == RunRead(4, is_corrupt=False)
    store.close()


@pytest.mark.covers("W08", "W10")
def test_somebody_s_file_where_a_folder_belongs_costs_what_would_lie_in_it_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "pool"
    store = FileStore(root, RECORDS, KvStoreLimits(max_bytes=64 * RECORDS.record_bytes))
    keys, blocks = keys_of(3), blocks_of(3, SMALL)
    folder = FilePlace(root).path(keys[1]).parent
    assert len({FilePlace(root).path(key).parent for key in keys}) == 3
    folder.write_text("of somebody else")
    for _ in range(2):  # the second time what lies there is summed up again
        assert store.write(pairs(keys, blocks)) == 2
        assert store.missing(keys) == [False, True, False]
        into = np.zeros((3, SMALL), np.uint8)
        assert store.read(keys, views(into)) == RunRead(1, is_corrupt=False)
        assert np.array_equal(into[0], blocks[0])
        store.remove(keys)
        store = FileStore(root, RECORDS, KvStoreLimits(max_bytes=64 * RECORDS.record_bytes))
    assert folder.read_text() == "of somebody else"
