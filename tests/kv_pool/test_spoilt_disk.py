"""A directory on a disk that takes no file any more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from connector.file_store import FileStore
from connector.kv_record import KvRecords
from connector.kv_store import KvStoreError, KvStoreLimits
from tests.kv_pool.places import FilePlace, blocks_of, keys_of, pairs
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
