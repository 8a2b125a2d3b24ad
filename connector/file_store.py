"""The KV pool in a directory: on a local disk for the nodes of one host, on a shared file system for all.

    ROOT/ab/ab12…ef.kv     one record (kv_record.py), named by its name, whole or not there
    ROOT/tmp/…             records that are being written
    ROOT/id                drawn by whoever made the pool: its identity; laid there again should somebody empty or remove ROOT

**No half block is ever read.** A record is written under a name of its own in tmp and renamed: what has its final name is
whole, whenever its writer was killed. After a loss of power a file may be short or full of zeros all the same (nothing waits
for the disk): then its length or its checksum gives it away, and it is removed. Two writers of a key rename equal records
over each other.

**Bounded.** What lies there is summed up before the first write, and then whenever a 32nd of max_bytes was written here,
since others write, too: up to four writing processes keep the bound, each one more may be a 32nd (or one block) above it.
Where seven eighths are full, an eighth is freed at once; what was read or written last stays (mtime, which is renewed by
whoever reads a block or would have written it).

Ages are differences of the file system's own clock, never of a host's. What was used in that clock's future, since somebody has
set it back, was used when that is found: else it would stay until then, and whatever is written would go before it. Only what
has a name as above is ever removed. A file system that hangs holds up the calling thread for as long: who must not wait gives up
on the thread (node/kv_pool.py).
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import Final

from connector.kv_record import HEADER_BYTES, KvRecords
from connector.kv_store import Count, KvStoreError, KvStoreLimits, KvStoreUnready, RunRead, count_nowhere

LEFTOVER_S: Final = 600.0  # a file in tmp that nobody has written to for so long has no writer any more
AHEAD_S: Final = 60.0  # of the clock as it was before the look: others write meanwhile
_TMP: Final = "tmp"
_ID: Final = "id"
_FOLDER: Final = re.compile(r"[0-9a-f]{2}")
_FILE: Final = re.compile(r"[0-9a-f]{64}\.kv")
_PART: Final = re.compile(r"[0-9a-f]{16}-\d+")
_SHARES: Final = 32  # of max_bytes: one is written here between two looks at what others wrote
_NUM_WRITERS: Final = 4  # shares that are left to what is not seen
_SHARES_FREED: Final = 4
# A pipe or a device under a record's name must not hold up who opens it; a link leads elsewhere.
_OPEN_FLAGS: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC

# Somebody frees some, or mounts it anew.
_MAY_PASS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE})

# mtime_ns, num_bytes, path. Of a large pool there are many: plain ones, which no walk over all objects looks at again.
_File = tuple[int, int, str]


class FileStore:
    """Implements KvStore."""

    def __init__(self, root: Path, records: KvRecords, limits: KvStoreLimits, count: Count = count_nowhere) -> None:
        """Makes `root`, but not its parents: a mount that is missing is an error.

        Raises KvStoreError; of a disk that is full, or cannot be read or written now, KvStoreUnready.
        """
        self._root = str(root)
        self._records = records
        self._limits = limits
        self._count = count
        self._lock = Lock()  # of the next, and of summing up
        self._num_unseen: int | None = (
            None  # bytes written here since what lies there was summed up; None: it never was
        )
        self._part_numbers = itertools.count()  # of C: a generator cannot be asked by two threads at once
        try:
            Path(self._root).mkdir(0o770, exist_ok=True)
            self._device = Path(self._root).stat().st_dev
            self._make_folders()
            if not os.access(f"{self._root}/{_TMP}", os.W_OK | os.X_OK):
                if os.statvfs(self._root).f_flag & os.ST_RDONLY:
                    raise OSError(errno.EROFS, os.strerror(errno.EROFS))
                raise KvStoreError(f"{self._root}: cannot be written to")
            self._drawn = self._id_or(secrets.token_bytes(HEADER_BYTES))
        except FileNotFoundError:
            raise KvStoreError(
                f"{Path(self._root).parent} is not there; make it, or mount what is to be there"
            ) from None
        except FileExistsError:
            raise KvStoreError("a file is there, no directory") from None
        except OSError as error:
            kind = KvStoreUnready if error.errno in _MAY_PASS else KvStoreError
            raise kind(error.strerror or type(error).__name__) from None

    def identity(self) -> bytes:
        """As KvStore.identity."""
        return self._records.identity(self._drawn)

    def missing(self, keys: Sequence[bytes]) -> list[bool]:
        """As KvStore.missing."""
        return [not self._has(self._path(key)) for key in keys]

    def num_leading(self, keys: Sequence[bytes]) -> int:
        """As KvStore.num_leading, but that it looks for one that is not there by halves.

        A file system that many hosts share takes a round trip for each look, and a block is rarely there without those before it.
        """
        num_there, step = 0, 1  # the block before num_there was there
        while num_there + step <= len(keys) and self._has(self._path(keys[num_there + step - 1])):
            num_there, step = num_there + step, 2 * step
        while step > 1:
            step //= 2
            if num_there + step <= len(keys) and self._has(self._path(keys[num_there + step - 1])):
                num_there += step
        return num_there

    def write(self, blocks: Sequence[tuple[bytes, memoryview]]) -> int:
        """As KvStore.write."""
        num_stored = 0
        for key, block in blocks:
            header = self._records.header(key, block)
            path = self._path(key)
            try:
                if self._has(path):
                    _renew(path)
                    continue
                if not self._has_room():
                    continue
                self._put(path, header, block)
            except NotADirectoryError:  # somebody's file where a folder belongs: nothing is kept below it
                continue
            except FileNotFoundError as error:
                with contextlib.suppress(OSError):
                    self._make_folders()  # somebody has emptied the directory, or removed it: for the next write
                    self._id_or(self._drawn)  # and for who comes later: the pool is the one that it was
                raise _failed(error) from None
            except OSError as error:
                with self._lock:
                    self._num_unseen = None  # the disk may be full of what is too old: the next write looks
                raise _failed(error) from None
            num_stored += 1
        return num_stored

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> RunRead:
        """As KvStore.read."""
        self._records.check_lengths(into)
        for index, (key, block) in enumerate(zip(keys, into, strict=True)):
            path = self._path(key)
            try:
                is_right = self._get(path, key, block)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise _failed(error) from None
                is_right = False  # the disk cannot read it any more: written anew it lies elsewhere
            if is_right is False:
                with contextlib.suppress(OSError):  # a disk that takes no writes keeps it; what is before it is right
                    Path(path).unlink()
            if not is_right:
                return RunRead(index, is_corrupt=is_right is False)
        return RunRead(len(keys), is_corrupt=False)

    def remove(self, keys: Sequence[bytes]) -> None:
        """As KvStore.remove."""
        try:
            self._count("broken", sum(map(_remove, map(self._path, keys))))
        except OSError as error:
            raise _failed(error) from None

    def close(self) -> None:
        """As KvStore.close."""

    def _make_folders(self) -> None:
        """ROOT and ROOT/tmp, where they are not there. Raises OSError, also if that would be on another file system than before.

        Below one that was unmounted there is a disk that a pool would fill, and which nobody looks into.
        """
        root = Path(self._root)
        if (root if root.exists() else root.parent).stat().st_dev != self._device:
            raise FileNotFoundError
        for folder in (root, root / _TMP):
            folder.mkdir(0o770, exist_ok=True)

    def _id_or(self, drawn: bytes) -> bytes:
        """What stands in ROOT/id, whole from the beginning and never changed; where nothing does, this. Raises OSError."""
        path = Path(self._root, _ID)
        if not path.exists():
            part = self._part_path()
            _write_file(part, drawn, memoryview(b""))
            try:
                with contextlib.suppress(FileExistsError):  # another process was faster
                    os.link(part, path)
            except OSError:  # a file system without links: who comes last stays, and who has read before is alone
                Path(part).rename(path)
            finally:
                Path(part).unlink(missing_ok=True)
        with path.open("rb") as file:
            return file.read(HEADER_BYTES).ljust(HEADER_BYTES, b"\0")  # a loss of power may have cut it short

    # ------------------------------------------------------------ one record

    def _path(self, key: bytes) -> str:
        name = self._records.name(key).hex()
        return f"{self._root}/{name[:2]}/{name}.kv"

    def _has(self, path: str) -> bool:
        """Whether a record of the right length is there; of another one it would only be found corrupt."""
        try:
            found = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise _failed(error) from None
        return stat.S_ISREG(found.st_mode) and found.st_size == self._records.record_bytes

    def _part_path(self) -> str:
        """Where nobody else writes: no other thread, process or host."""
        return f"{self._root}/{_TMP}/{secrets.token_hex(8)}-{next(self._part_numbers)}"

    def _put(self, path: str, header: bytes, block: memoryview) -> None:
        part = self._part_path()
        try:
            _write_file(part, header, block)
            try:
                Path(part).rename(path)
            except FileNotFoundError:  # the first record of its folder
                Path(path).parent.mkdir(0o770, exist_ok=True)
                Path(part).rename(path)
        except OSError:
            with contextlib.suppress(OSError):  # what it failed of is told already
                Path(part).unlink()
            raise
        with self._lock:
            self._num_unseen = (self._num_unseen or 0) + self._records.record_bytes

    def _get(self, path: str, key: bytes, block: memoryview) -> bool | None:
        """Read it; None: it is not there; False: it is not right."""
        header = bytearray(HEADER_BYTES)
        try:
            file = os.open(path, _OPEN_FLAGS)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode) or found.st_size != self._records.record_bytes:
                return False
            if not _read_all(file, (memoryview(header), block)) or not self._records.is_right(key, header, block):
                return False
            _renew(file)
            return True
        finally:
            os.close(file)

    # ------------------------------------------------------------ the bound

    def _has_room(self) -> bool:
        """Make room for one record; False if that cannot be."""
        record_bytes, share = self._records.record_bytes, self._limits.max_bytes // _SHARES
        if record_bytes > self._limits.max_bytes:
            return False
        with self._lock:
            if self._num_unseen is None or self._num_unseen + record_bytes > share:
                self._sum_up(self._limits.max_bytes - _NUM_WRITERS * share - record_bytes, _SHARES_FREED * share)
                self._num_unseen = 0
        return True

    def _sum_up(self, most_bytes: int, freed_bytes: int) -> None:
        """Remove what is too old and, where there is more than `most_bytes`, that and some more, the least recently used first."""
        now_ns = self._clock_ns()
        num_leftovers = 0
        for mtime_ns, _, path in _entries(f"{self._root}/{_TMP}", _PART, now_ns):
            if now_ns - mtime_ns > LEFTOVER_S * 1e9 and _remove(path):
                num_leftovers += 1
        there = [entry for entry in os.scandir(self._root) if _FOLDER.fullmatch(entry.name)]
        folders = [entry.path for entry in there if entry.is_dir(follow_symlinks=False)]
        # By folder: while a sort goes on no other thread has the interpreter.
        found = [sorted(_entries(folder, _FILE, now_ns)) for folder in folders]
        num_bytes = sum(file_bytes for files in found for _, file_bytes, _ in files)
        kept_bytes = most_bytes if num_bytes <= most_bytes else most_bytes - freed_bytes
        num_evicted = 0
        for mtime_ns, file_bytes, path in heapq.merge(*found):
            if num_bytes <= kept_bytes and now_ns - mtime_ns <= self._limits.ttl_s * 1e9:
                break
            num_bytes -= file_bytes
            num_evicted += _remove(path)
        self._count("leftover", num_leftovers)
        self._count("evicted", num_evicted)

    def _clock_ns(self) -> int:
        """What the file system's clock says. Makes no file: a full disk may take none, and what is too old is to go even so."""
        folder = Path(self._root, _TMP)
        os.utime(folder)
        return folder.stat().st_mtime_ns


def _failed(error: OSError) -> KvStoreError:
    return KvStoreError(f"{type(error).__name__}: {error.strerror}")


def _renew(file: int | str) -> None:
    """It was used now."""
    with contextlib.suppress(OSError):  # it is gone meanwhile, or somebody else's, who lets others read only
        os.utime(file)


def _write_file(path: str, header: bytes, block: memoryview) -> None:
    """Raises OSError."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o660)
    try:
        num_written = os.writev(file, (header, block))
        while num_written < HEADER_BYTES + block.nbytes:  # of a signal, or a disk that is nearly full
            rest = (header[num_written:], block[max(0, num_written - HEADER_BYTES) :])
            num_written += os.writev(file, rest)
    finally:
        os.close(file)


def _read_all(file: int, parts: tuple[memoryview, memoryview]) -> bool:
    """Fill both from the beginning of the file; False: it is shorter."""
    num_bytes = parts[0].nbytes + parts[1].nbytes
    num_read = 0
    while num_read < num_bytes:
        rest = (parts[0][num_read:], parts[1][max(0, num_read - parts[0].nbytes) :])
        step = os.preadv(file, rest, num_read)
        if step == 0:
            return False
        num_read += step
    return True


def _entries(folder: str, pattern: re.Pattern[str], now_ns: int) -> Iterator[_File]:
    """Files with such names; others may remove them meanwhile. Those of the clock's future are renewed."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if pattern.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    if found.st_mtime_ns > now_ns + AHEAD_S * 1e9:
                        with contextlib.suppress(PermissionError):  # somebody else's: renewed by one of theirs
                            os.utime(entry.path, follow_symlinks=False)
                    yield min(found.st_mtime_ns, now_ns), found.st_size, entry.path


def _remove(path: str) -> bool:
    """False: it is not there, or not any more."""
    try:
        Path(path).unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
