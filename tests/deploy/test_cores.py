"""How many cores a process computes on: a limit of its control group counts, whichever kind of group, and whoever has set it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from deploy.own_machine import look_at_this_machine
from node.config import NodeConfig
from runtime.cores import usable_cores
from tests.architecture.source_tree import sources_of_rooms

V2 = "0::/system.slice/baton.service\n"
V1 = "5:memory:/docker/1\n4:cpu,cpuacct:/docker/1\n1:name=systemd:/docker/1\n"


def tree(root: Path, cgroup: str, files: Mapping[str, str]) -> Path:
    """A machine whose kernel says this of our groups, with these files under /sys/fs/cgroup."""
    for name, text in {"proc/self/cgroup": cgroup, **{f"sys/fs/cgroup/{name}": files[name] for name in files}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        (V2, {}, 16),
        (V2, {"system.slice/baton.service/cpu.max": "max 100000\n"}, 16),
        (V2, {"system.slice/baton.service/cpu.max": "200000 100000\n"}, 2),
        (V2, {"system.slice/baton.service/cpu.max": "150000 100000\n"}, 2),
        (V2, {"system.slice/baton.service/cpu.max": "5000 100000\n"}, 1),
        (V2, {"system.slice/baton.service/cpu.max": "9999999 100000\n"}, 16),
        (V2, {"system.slice/baton.service/cpu.max": "800000 100000\n", "system.slice/cpu.max": "300000 100000\n"}, 3),
        ("0::/\n", {"cpu.max": "100000 50000\n"}, 2),  # in a container
        (V2, {"cpu.max": "400000 100000\n"}, 4),  # in one that sees the machine's path
        (V1, {"cpu/docker/1/cpu.cfs_quota_us": "-1\n", "cpu/docker/1/cpu.cfs_period_us": "100000\n"}, 16),
        (V1, {"cpu/docker/1/cpu.cfs_quota_us": "250000\n", "cpu/docker/1/cpu.cfs_period_us": "100000\n"}, 3),
        (V1, {"memory/docker/1/cpu.max": "100000 100000\n", "cpu.max": "100000 100000\n"}, 16),
    ],
)
def test_no_more_cores_than_the_control_groups_may_use(
    cgroup: str, files: Mapping[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert usable_cores(tree(tmp_path, cgroup, files)) == expected


def test_a_machine_that_says_nothing_of_groups_has_the_cores_that_one_may_run_on(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))


def test_nodes_and_the_doctor_go_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr("node.config.usable_cores", lambda: 3)
    monkeypatch.setattr("deploy.own_machine.usable_cores", lambda: 3)
    assert NodeConfig(model=Path("m"), router=("r:1",)).num_threads == 3
    (found,) = [each for each in look_at_this_machine(None) if each.what == "cores"]
    assert found.sentence == "3 for this process: its control group may use no more of its 16"


def test_nobody_who_serves_counts_cores_in_another_way() -> None:
    counting = {each.path for each in sources_of_rooms() if "sched_getaffinity" in each.text and each.room != "bench"}
    assert counting == {"runtime/cores.py", "deploy/own_machine.py"}, "the doctor shows both numbers"
