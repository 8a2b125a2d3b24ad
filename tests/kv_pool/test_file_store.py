"""What is particular to a directory: writers killed in the middle, leftovers, several processes, and what else may lie there."""

from __future__ import annotations

import gc
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from connector.file_store import AHEAD_S, LEFTOVER_S, FileStore
from connector.kv_record import KvRecords
from connector.kv_store import KvStoreError, KvStoreLimits, RunRead
from tests.kv_pool.file_writer import NUM_KEYS, content, key_of
from tests.kv_pool.places import FilePlace, blocks_of, keys_of, pairs, views

SMALL: Final = 100
RECORDS: Final = KvRecords(SMALL)
BIG: Final = 256 << 10  # of a block that a writer is killed in the middle of
_PATIENCE_S: Final = 60.0


class Writers:
    """Processes of file_writer.py."""

    def __init__(self, root: Path, max_bytes: int, number: int) -> None:
        command = [sys.executable, "-m", "tests.kv_pool.file_writer", str(root), str(BIG), str(max_bytes)]
        self._parents = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(number)
        ]
        self._children: list[int] = []

    def start(self) -> None:
        """Let each begin to write."""
        for parent in self._parents:
            assert parent.stdin is not None and parent.stdout is not None
            parent.stdin.write("\n")
            parent.stdin.flush()
            self._children.append(int(parent.stdout.readline()))

    def kill(self) -> None:
        """SIGKILL each; returns when they have ended."""
        for parent, child in zip(self._parents, self._children, strict=True):
            assert parent.stdout is not None
            os.kill(child, signal.SIGKILL)
            assert parent.stdout.readline() == "ended\n"
        self._children.clear()

    def close(self) -> None:
        """End everything."""
        if self._children:
            self.kill()
        for parent in self._parents:
            with parent:
                parent.kill()


class Reader(threading.Thread):
    """Reads everything again and again until told to stop, and compares."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.store = FileStore(root, KvRecords(BIG), KvStoreLimits())
        self.expected = [np.frombuffer(content(number, BIG), np.uint8) for number in range(NUM_KEYS)]
        self.num_read = 0
        self.num_corrupt = 0
        self.num_wrong = 0
        self.is_over = threading.Event()

    def run(self) -> None:
        into = np.zeros((1, BIG), np.uint8)
        while not self.is_over.is_set():
            for number, block in enumerate(self.expected):
                run = self.store.read([key_of(number)], views(into))
                self.num_read += run.num_blocks
                self.num_corrupt += run.is_corrupt
                self.num_wrong += run.num_blocks == 1 and not np.array_equal(into[0], block)


@pytest.mark.covers("W10")
def test_however_often_writers_are_killed_in_the_middle_no_half_block_is_ever_read(tmp_path: Path) -> None:
    root = tmp_path / "pool"
    max_bytes = 20 * (BIG + 64)
    reader = Reader(root)
    writers = Writers(root, max_bytes, number=2)
    try:
        reader.start()
        for round_number in range(200):
            writers.start()
            seen = reader.num_read
            while reader.num_read < seen + 5 + round_number % 7:  # what was written meanwhile is read meanwhile
                assert reader.is_alive()
            writers.kill()
            leftovers = [path.stat().st_size for path in (root / "tmp").iterdir()]
            if round_number >= 15 and sum(size < BIG + 64 for size in leftovers) >= 2:
                break
        assert leftovers, "no writer was killed in the middle of a block"
    finally:
        reader.is_over.set()
        reader.join(_PATIENCE_S)
        writers.close()
    assert reader.num_read > 100
    assert (reader.num_corrupt, reader.num_wrong) == (0, 0)


@pytest.mark.covers("W10")
def test_what_dead_writers_left_is_removed_and_what_living_ones_are_at_is_not(tmp_path: Path) -> None:
    counted: Counter[str] = Counter()
    root = tmp_path / "pool"
    store = FileStore(root, RECORDS, KvStoreLimits(), counted.__setitem__)
    dead, alive, stranger = (root / "tmp" / name for name in ("0123456789abcdef-7", "0123456789abcdef-8", "notes.txt"))
    for path in (dead, alive, stranger):
        path.write_bytes(b"x" * 50)
    now = alive.stat().st_mtime
    for path in (dead, stranger):
        os.utime(path, (now - LEFTOVER_S - 60,) * 2)
    store.write(pairs(keys_of(1), blocks_of(1, SMALL)))
    assert sorted(path.name for path in (root / "tmp").iterdir()) == [alive.name, stranger.name]
    assert counted["leftover"] == 1


@pytest.mark.covers("W10")
def test_several_writers_together_keep_the_bound(tmp_path: Path) -> None:
    root = tmp_path / "pool"
    max_records = 64
    limits = KvStoreLimits(max_bytes=max_records * RECORDS.record_bytes)
    stores = [FileStore(root, RECORDS, limits) for _ in range(4)]  # none knows what the others write
    place = FilePlace(root)
    keys, blocks = keys_of(300), blocks_of(300, SMALL)
    most = 0
    for number in range(300):
        stores[number % 4].write(pairs(keys[number : number + 1], blocks[number : number + 1]))
        most = max(most, len(place.names()))
    assert max_records * 3 // 4 < most <= max_records
    assert place.names() > set(keys[-40:])
    assert list((root / "tmp").iterdir()) == []


@pytest.mark.covers("W05", "W10")
def test_a_look_at_a_large_pool_keeps_the_interpreter_for_no_longer_than_one_at_a_small_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who sorts lets no other thread run: with a terabyte of blocks no step began for a second. Nor do walks over all objects."""
    sorted_at_once: list[int] = []

    def sorting(items: Iterable[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
        files = sorted(items)
        sorted_at_once.append(len(files))
        gc.collect(0)
        assert not any(map(gc.is_tracked, files))
        return files

    store = FileStore(tmp_path / "pool", RECORDS, KvStoreLimits(max_bytes=2000 * RECORDS.record_bytes))
    keys, blocks = keys_of(2500), blocks_of(2500, SMALL)
    monkeypatch.setattr("connector.file_store.sorted", sorting, raising=False)
    store.write(pairs(keys, blocks))
    assert sum(sorted_at_once) > 2500 and max(sorted_at_once) < 100
    assert FilePlace(tmp_path / "pool").names() > set(keys[-1000:])


@pytest.mark.covers("W10")
def test_what_nobody_used_for_long_goes_though_there_is_room(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "pool", RECORDS, KvStoreLimits(ttl_s=1000))
    place = FilePlace(tmp_path / "pool")
    keys, blocks = keys_of(4), blocks_of(4, SMALL)
    store.write(pairs(keys[:3], blocks[:3]))
    for key, age_s in zip(keys[:3], (1100, 900, 1100), strict=True):
        path = place.path(key)
        os.utime(path, (path.stat().st_mtime - age_s,) * 2)
    store.read(keys[2:3], views(np.zeros((1, SMALL), np.uint8)))
    FileStore(tmp_path / "pool", RECORDS, KvStoreLimits(ttl_s=1000)).write(pairs(keys[3:], blocks[3:]))
    assert store.missing(keys) == [True, False, False, False]


@pytest.mark.covers("W10")
def test_what_was_used_before_the_clock_was_set_back_is_not_the_last_to_go_for_ever(tmp_path: Path) -> None:
    """All that was written afterwards went at each look instead, and a dead writer's leftovers stayed."""
    root = tmp_path / "pool"
    limits = KvStoreLimits(max_bytes=64 * RECORDS.record_bytes, ttl_s=1000)
    place = FilePlace(root)
    keys, blocks = keys_of(120), blocks_of(120, SMALL)
    FileStore(root, RECORDS, limits).write(pairs(keys[:50], blocks[:50]))
    leftover = root / "tmp" / "0123456789abcdef-7"
    leftover.write_bytes(b"x")
    ahead = leftover.stat().st_mtime + 365 * 86_400
    for path in (leftover, *map(place.path, keys[:50])):
        os.utime(path, (ahead, ahead))
    FileStore(root, RECORDS, limits).write(pairs(keys[50:51], blocks[50:51]))
    for path in (leftover, *map(place.path, keys[:51])):  # time passes
        at = path.stat().st_mtime - LEFTOVER_S - AHEAD_S
        os.utime(path, (at, at))
    FileStore(root, RECORDS, limits).write(pairs(keys[51:], blocks[51:]))
    assert place.names() > set(keys[-40:])
    assert not leftover.exists()


@pytest.mark.covers("W08", "W10")
def test_what_is_no_file_under_a_record_s_name_holds_nobody_up_and_gives_nothing(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "pool", RECORDS, KvStoreLimits())
    place = FilePlace(tmp_path / "pool")
    keys, blocks = keys_of(3), blocks_of(3, SMALL)
    store.write(pairs(keys, blocks))
    place.path(keys[0]).rename(tmp_path / "elsewhere")
    place.path(keys[0]).symlink_to(tmp_path / "elsewhere")
    place.path(keys[1]).unlink()
    os.mkfifo(place.path(keys[1]))
    assert store.missing(keys) == [True, True, False]
    into = np.zeros((1, SMALL), np.uint8)
    assert store.read(keys[1:2], views(into)) == RunRead(0, is_corrupt=True)
    with pytest.raises(KvStoreError):
        store.read(keys[:1], views(into))
    assert store.write(pairs(keys, blocks)) == 2
    assert store.num_leading(keys) == 3
    assert (tmp_path / "elsewhere").stat().st_size == RECORDS.record_bytes


@pytest.mark.covers("W08", "W10")
def test_what_cannot_be_removed_is_no_block_and_costs_none_of_those_before_it(tmp_path: Path) -> None:
    """On a disk that takes no writes any more, say; here it is a directory."""
    store = FileStore(tmp_path / "pool", RECORDS, KvStoreLimits())
    keys, blocks = keys_of(3), blocks_of(3, SMALL)
    store.write(pairs(keys, blocks))
    path = FilePlace(tmp_path / "pool").path(keys[2])
    path.unlink()
    (path / "within").mkdir(parents=True)
    into = np.zeros((3, SMALL), np.uint8)
    assert store.read(keys, views(into)) == RunRead(2, is_corrupt=True)
    assert np.array_equal(into[:2], blocks[:2])


@pytest.mark.covers("W08", "W10")
def test_files_of_others_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    root = tmp_path / "pool"
    store = FileStore(root, RECORDS, KvStoreLimits(max_bytes=4 * RECORDS.record_bytes))
    for path in (root / "ab" / "report.txt", root / "models" / f"{'0' * 64}.kv", root / f"{'0' * 64}.kv"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 10_000)
        os.utime(path, (0, 0))
    keys, blocks = keys_of(20), blocks_of(20, SMALL)
    assert store.write(pairs(keys, blocks)) == 20
    assert (root / "ab" / "report.txt").exists() and (root / f"{'0' * 64}.kv").exists()
    assert (root / "models" / f"{'0' * 64}.kv").exists()


@pytest.mark.covers("W08")
def test_a_directory_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for root, why in (
        (tmp_path / "missing" / "pool", f"{tmp_path / 'missing'} is not there; make it, or mount what is to be there"),
        (tmp_path / "file", "a file is there, no directory"),
        (tmp_path / "file" / "pool", "Not a directory"),
    ):
        with pytest.raises(KvStoreError, match=f"^{why}$"):
            FileStore(root, RECORDS, KvStoreLimits())


@pytest.mark.covers("W08")
def test_a_directory_that_goes_away_fails_and_serves_again_once_it_is_back(tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    mount.mkdir()
    store = FileStore(mount / "pool", RECORDS, KvStoreLimits())
    keys, blocks = keys_of(2), blocks_of(2, SMALL)
    store.write(pairs(keys[:1], blocks[:1]))
    mount.rename(tmp_path / "away")
    with pytest.raises(KvStoreError):
        store.write(pairs(keys, blocks))
    assert store.num_leading(keys) == 0
    (tmp_path / "away").rename(mount)
    assert store.write(pairs(keys, blocks)) == 1
    assert store.num_leading(keys) == 2


@pytest.mark.covers("W08")
@pytest.mark.parametrize("is_there", [True, False])
def test_nothing_is_made_on_the_disk_below_a_file_system_that_was_unmounted(tmp_path: Path, is_there: bool) -> None:
    """A pool of its bound would fill it, unseen once the other is back."""
    elsewhere = Path("/dev/shm") / f"baton-test-{os.getpid()}-{is_there}"  # another file system
    mount = tmp_path / "mount"
    mount.symlink_to(elsewhere)
    elsewhere.mkdir()
    try:
        assert elsewhere.stat().st_dev != tmp_path.stat().st_dev
        store = FileStore(mount / "pool", RECORDS, KvStoreLimits())
        keys, blocks = keys_of(2), blocks_of(2, SMALL)
        store.write(pairs(keys[:1], blocks[:1]))
        mount.unlink()
        (mount / "pool" if is_there else mount).mkdir(parents=True)
        for _ in range(3):
            with pytest.raises(KvStoreError):
                store.write(pairs(keys, blocks))
        assert list(mount.iterdir()) == ([mount / "pool"] if is_there else [])
        assert not is_there or not list((mount / "pool").iterdir())
        shutil.rmtree(mount)
        mount.symlink_to(elsewhere)
        assert store.write(pairs(keys, blocks)) == 1
        assert store.num_leading(keys) == 2
    finally:
        shutil.rmtree(elsewhere)


@pytest.mark.covers("W08")
@pytest.mark.parametrize("is_removed", [True, False])
@pytest.mark.parametrize("num_blocks", [1, 2])
def test_a_directory_that_somebody_empties_or_removes_is_written_again_after_one_failure(
    tmp_path: Path, num_blocks: int, is_removed: bool
) -> None:
    root = tmp_path / "pool"
    limits = KvStoreLimits(max_bytes=64 * RECORDS.record_bytes)  # the second block is behind a look at what lies there
    store = FileStore(root, RECORDS, limits)
    keys, blocks = keys_of(num_blocks), blocks_of(num_blocks, SMALL)
    assert store.write(pairs(keys, blocks)) == num_blocks
    before = store.identity()
    for each in [root] if is_removed else [*root.iterdir()]:
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    assert store.num_leading(keys) == 0
    with pytest.raises(KvStoreError):
        store.write(pairs(keys, blocks))
    assert store.write(pairs(keys, blocks)) == num_blocks
    assert store.num_leading(keys) == num_blocks
    assert FileStore(root, RECORDS, limits).identity() == before


@pytest.mark.covers("W08", "W10")
def test_a_full_disk_fails_and_leaves_nothing_half_behind(tmp_path: Path) -> None:
    """Its stand-in: no file of this process may be longer than two thirds of a record."""
    records = KvRecords(30_000)
    store = FileStore(tmp_path / "pool", records, KvStoreLimits())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(KvStoreError, match="File too large"):
            store.write(pairs(keys_of(1), blocks_of(1, 30_000)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert FilePlace(tmp_path / "pool").names() == set()
    assert list((tmp_path / "pool" / "tmp").iterdir()) == []
    assert store.write(pairs(keys_of(1), blocks_of(1, 30_000))) == 1


@pytest.mark.covers("W10")
def test_on_a_full_disk_what_nobody_used_for_long_goes_before_the_next_write(tmp_path: Path) -> None:
    """Nothing was written, so nothing was summed up, and the disk stayed full for as long as the nodes lived."""
    root = tmp_path / "pool"
    store = FileStore(root, RECORDS, KvStoreLimits(ttl_s=1000))
    keys, blocks = keys_of(3), blocks_of(3, SMALL)
    store.write(pairs(keys[:2], blocks[:2]))
    for key in keys[:2]:
        path = FilePlace(root).path(key)
        os.utime(path, (path.stat().st_mtime - 1100,) * 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, before[1]))
    try:
        for _ in range(2):
            with pytest.raises(KvStoreError, match="File too large"):
                store.write(pairs(keys[2:], blocks[2:]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert FilePlace(root).names() == set()


@pytest.mark.covers("R02", "W10")
def test_who_comes_when_the_directory_was_emptied_finds_the_identity_of_those_who_write(tmp_path: Path) -> None:
    """Or routers would see two pools where there is one."""
    root = tmp_path / "kv"
    store = FileStore(root, RECORDS, KvStoreLimits())
    before = store.identity()
    for entry in root.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    with pytest.raises(KvStoreError):
        store.write(pairs(keys_of(1), blocks_of(1, SMALL)))
    assert store.write(pairs(keys_of(1), blocks_of(1, SMALL))) == 1
    assert FileStore(root, RECORDS, KvStoreLimits()).identity() == before == store.identity()
