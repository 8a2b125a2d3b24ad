"""How much memory a node may take: of the machine, and of the control groups that it is in."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.host_memory import free_memory_bytes

MIB = 1 << 20


def machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    """A machine with 2 GiB free; `groups`: /proc/self/cgroup; files below /sys/fs/cgroup."""
    told = {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   2097152 kB\n", "proc/self/cgroup": groups}
    for name, text in (told | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_a_limit_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert free_memory_bytes(machine(tmp_path, "", {})) == 2048 * MIB
    limits = {"memory.max": "max\n", "memory.current": "5\n", "memory.stat": "inactive_file 0\n"}
    assert free_memory_bytes(machine(tmp_path, "0::/\n", limits)) == 2048 * MIB


@pytest.mark.parametrize("path", ["/", "/kubepods/pod7/c9"])
def test_a_container_has_what_is_left_below_its_limit(tmp_path: Path, path: str) -> None:
    limits = {
        "memory.max": f"{1024 * MIB}\n",
        "memory.current": f"{300 * MIB}\n",
        # The model's files, some as fresh as its loading is, which asks again: all of them go when room is needed.
        "memory.stat": f"anon 1\ninactive_file {70 * MIB}\nactive_file {30 * MIB}\n",
    }
    assert free_memory_bytes(machine(tmp_path, f"0::{path}\n", limits)) == 824 * MIB


def test_the_groups_around_a_group_count_too(tmp_path: Path) -> None:
    files = {
        "pod/c/memory.max": "max",
        "pod/c/memory.current": "0",
        "pod/memory.max": str(64 * MIB),
        "pod/memory.current": str(4 * MIB),
    }
    assert free_memory_bytes(machine(tmp_path, "0::/pod/c\n", files)) == 60 * MIB


def test_the_older_kind_of_groups_has_names_of_its_own(tmp_path: Path) -> None:
    files = {
        "memory/docker/c/memory.limit_in_bytes": str(512 * MIB),
        "memory/docker/c/memory.usage_in_bytes": str(12 * MIB),
        "memory/docker/c/memory.stat": f"active_file 0\ninactive_file 0\ntotal_inactive_file {MIB}\ntotal_active_file {MIB}\n",
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "memory/memory.usage_in_bytes": "1",
    }
    groups = "5:cpu,cpuacct:/docker/c\n4:memory:/docker/c\n0::/\n"
    assert free_memory_bytes(machine(tmp_path, groups, files)) == 502 * MIB


def test_a_group_that_is_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    assert free_memory_bytes(machine(tmp_path, "0::/", {"memory.max": "5", "memory.current": "9"})) == 0


def test_this_machine_says_something() -> None:
    assert 0 < free_memory_bytes() < 1 << 50
