"""What others may do with KV memory that they were shown: read it, and nothing else, for ever."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import shared_bytes
from engine.shared_bytes import HUGE_PAGE, SharedBytes, mapped_bytes

MIB = 1 << 20


def test_it_is_zeroed_writable_here_and_seen_by_whoever_maps_it() -> None:
    shared = SharedBytes(3, 5000)
    assert shared.bytes.shape == (3, 5000)
    assert not shared.bytes.any()
    with mmap.mmap(shared.descriptor, 15_000, prot=mmap.PROT_READ) as seen:
        shared.bytes[2, 4999] = 77
        assert seen[14_999] == 77


def kib_mapped(shared: SharedBytes) -> dict[str, int]:
    """What /proc/self/smaps says of the bytes' mapping, by its own names."""
    lines = Path("/proc/self/smaps").read_text(encoding="ascii").splitlines()
    begin = next(
        i for i, line in enumerate(lines) if "/memfd:baton-kv" in line and f"{shared.bytes.ctypes.data:x}-" in line
    )
    words = (line.split() for line in lines[begin + 1 : begin + 25])
    return {name.removesuffix(":"): int(rest[0]) for name, *rest in words if rest[-1] == "kB"}


def test_all_of_it_is_there_before_anybody_uses_it() -> None:
    shared = SharedBytes(8, MIB)
    assert os.fstat(shared.descriptor).st_blocks * 512 >= 8 * MIB
    assert kib_mapped(shared)["Rss"] == 8 * 1024  # no step pays for a page fault


def has_huge_pages() -> bool:
    """Whether this kernel makes huge pages of a memfd when it is asked to."""
    version = tuple(int(part) for part in os.uname().release.split(".")[:2])
    return version >= (6, 1) and Path("/sys/kernel/mm/transparent_hugepage").exists()


def test_whole_huge_pages_of_it_are_huge_where_the_kernel_has_them_and_the_rest_is_there_too() -> None:
    shared = SharedBytes(9, MIB)  # four of them, and a half
    assert shared.bytes.ctypes.data % HUGE_PAGE == 0
    mapped = kib_mapped(shared)
    assert (mapped["ShmemPmdMapped"] > 0) == has_huge_pages()
    assert mapped["Rss"] == 9 * 1024
    assert not shared.bytes.any()


def test_all_of_it_is_there_where_the_kernel_refuses_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.shared_bytes._MADV_COLLAPSE", -1)
    shared = SharedBytes(9, MIB)
    mapped = kib_mapped(shared)
    assert (mapped["ShmemPmdMapped"], mapped["Rss"]) == (0, 9 * 1024)
    shared.bytes[:] = 1


@pytest.mark.parametrize(
    "attack",
    [
        lambda fd: os.ftruncate(fd, 0),
        lambda fd: os.ftruncate(fd, 8192),
        lambda fd: os.write(fd, b"x"),
        lambda fd: mmap.mmap(fd, 4096),
        lambda fd: mmap.mmap(os.open(f"/proc/self/fd/{fd}", os.O_RDWR), 4096),
        lambda fd: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        lambda fd: os.posix_fallocate(fd, 0, 1 << 20),
    ],
)
def test_the_descriptor_allows_reading_only(attack: Callable[[int], object]) -> None:
    shared = SharedBytes(1, 4096)
    with pytest.raises(PermissionError):
        attack(shared.descriptor)
    assert not shared.bytes.any()


def test_a_page_cannot_be_taken_away_even_by_its_owner() -> None:
    shared = SharedBytes(1, 4096)
    shared.bytes[:] = 5
    assert shared.descriptor >= 0  # shown to others
    owner: Any = shared.bytes
    while not isinstance(owner, mmap.mmap):  # at the end of numpy's chain of views
        owner = owner.obj if isinstance(owner, memoryview) else owner.base
    with pytest.raises(PermissionError):
        owner.madvise(mmap.MADV_REMOVE)
    assert (shared.bytes == 5).all()


def test_processes_of_our_own_map_it_for_writing_before_it_is_shown_to_others_and_never_after() -> None:
    shared = SharedBytes(2, 4096)
    theirs = mapped_bytes(shared.writers_descriptor, 2, 4096)
    assert shared.descriptor == shared.descriptor  # sealed once
    theirs[1, 7] = 9  # who had it keeps it
    assert shared.bytes[1, 7] == 9
    with pytest.raises(RuntimeError, match="was shown to others"):
        _ = shared.writers_descriptor
    with pytest.raises(ValueError, match=r"^0 MiB of KV memory: Operation not permitted$"):
        mapped_bytes(shared.descriptor, 2, 4096)


def test_the_descriptor_goes_with_the_object_and_the_bytes_stay_as_long_as_somebody_has_them() -> None:
    shared = SharedBytes(1, 4096)
    descriptor, data = shared.descriptor, shared.bytes
    assert "memfd:baton-kv" in str(Path(f"/proc/self/fd/{descriptor}").readlink())
    del shared
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    data[:] = 1


def test_more_than_there_is_is_refused_in_one_sentence() -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, limits[1]))
    try:
        with pytest.raises(ValueError, match=r"^3 MiB of KV memory: File too large$"):
            SharedBytes(3, MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_memory_that_others_take_meanwhile_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """As two nodes do that start at once, each of which found enough: the kernel would kill one, without a word."""
    monkeypatch.setattr(shared_bytes, "_BYTES_AT_ONCE", MIB)
    free = iter([9 * MIB, 5 * MIB, MIB - 1])
    said = "4 MiB of KV memory: behind 2 of them only 0 were free, others took the rest"
    monkeypatch.setattr(shared_bytes, "free_memory_bytes", lambda: next(free))
    with pytest.raises(ValueError, match=f"^{said}$"):
        SharedBytes(4, MIB)
    monkeypatch.setattr(shared_bytes, "free_memory_bytes", lambda: MIB)
    assert SharedBytes(4, MIB).bytes.nbytes == 4 * MIB
