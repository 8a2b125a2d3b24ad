"""What all tests share: the seed of the run, the order of its files, and `--coverage-table`.

A test that draws at random takes the fixture `fresh_seed`: a new number each run, shown when the test fails, and drawn again
with `--seed`. Hypothesis shows how to reproduce its own failures.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import os
import random
from collections.abc import Generator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, Phase, settings

from runtime.config import set_grpc_environment
from tests.coverage_table import COVERS, CoverageTable
from tests.thorough import examples

RUN_SEED: Final = pytest.StashKey[int]()
# Whose tests start clusters: seconds a test, in which the machine often waits.
ROOMS_OF_CLUSTERS: Final = frozenset({"bench", "by_hand", "chaos", "dashboard", "e2e", "security"})
# Whose files take moments, most of them.
QUICK_ROOMS: Final = frozenset({"chat", "clients", "engine_pure", "handoff", "kv_pool", "router", "transport"})

# Whoever began it late would end it alone.
LONGEST: Final = "test_triton.py"
# Files of quick rooms that take their time, with few tests.
SLOW_ALL_THE_SAME: Final = frozenset(
    {
        "test_chat.py",
        "test_draining.py",
        "test_process.py",
        "test_shm_pressure.py",
        "test_step_time.py",
        "test_workers.py",
    }
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Flags of ours."""
    group = parser.getgroup("baton")
    group.addoption("--seed", type=int, help="draw what an earlier run drew")
    group.addoption("--no-shrink", action="store_true", help="show the first example that fails, not the smallest")
    group.addoption("--coverage-table", type=Path, metavar="FILE", help="write which tests prove which checklist row")


def pytest_configure(config: pytest.Config) -> None:
    """Draw the seed of the run; have gRPC here as it is in our processes."""
    gc.disable()  # as what is tested does while it loads (runtime/collecting.py)
    set_grpc_environment()
    # How fast examples are drawn says how busy the machine is, nothing about the code.
    quick = settings(max_examples=examples(100), deadline=None, print_blob=True)
    settings.register_profile("baton", quick, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("no-shrink", settings.get_profile("baton"), phases=(Phase.explicit, Phase.generate))
    settings.load_profile("no-shrink" if config.getoption("--no-shrink") else "baton")
    given: int | None = config.getoption("--seed")
    if (told := getattr(config, "workerinput", None)) is not None:  # one of several processes of a run
        given = told["run_seed"]
        atexit.register(
            os._exit, 0
        )  # behind all that is registered later: to take apart what worlds hold takes seconds
    config.stash[RUN_SEED] = random.SystemRandom().getrandbits(32) if given is None else given
    if hasattr(config.option, "loadscopereorder"):  # pytest-xdist would keep for the end what is slow: few tests a file
        config.option.loadscopereorder = False
    table: Path | None = config.getoption("--coverage-table")
    if table is not None and told is None:
        config.pluginmanager.register(CoverageTable(table))


def pytest_collection_finish() -> None:
    """What has been loaded stays: no walk in search of cycles goes over it; and over what worlds hold, few do."""
    gc.freeze()
    gc.set_threshold(20_000, 50, 20)
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have what waits run beside what computes, and what is short come last, so that all processes of a run end together."""
    items[:] = in_turn(items)


def in_turn(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The same tests, a file's together and in its order: files of clusters in turn with those that compute, then quick ones."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    rooms = [
        ("" if path.name in SLOW_ALL_THE_SAME and path.parent.name in QUICK_ROOMS else path.parent.name, tests)
        for path, tests in files.items()
    ]
    waiting = [tests for room, tests in rooms if room in ROOMS_OF_CLUSTERS]
    computing = [tests for room, tests in rooms if room not in ROOMS_OF_CLUSTERS | QUICK_ROOMS]
    computing.sort(key=lambda tests: tests[0].path.name != LONGEST)
    quick = sorted((tests for room, tests in rooms if room in QUICK_ROOMS), key=len, reverse=True)
    turns = [(place / len(some), tests) for some in (waiting, computing) for place, tests in enumerate(some)]
    ordered = [tests for _, tests in sorted(turns, key=itemgetter(0))] + quick
    return [item for tests in ordered for item in tests]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """All processes of a run (pytest-xdist) draw from one seed."""
    node.workerinput["run_seed"] = node.config.stash[RUN_SEED]


@pytest.fixture
def fresh_seed(request: pytest.FixtureRequest) -> int:
    """A number of 64 bits that is new in every run and differs from test to test."""
    text = f"{request.config.stash[RUN_SEED]} {request.node.nodeid}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say with each failure how to draw the same again, and with each report which rows it is about."""
    report = yield
    report.user_properties += [(COVERS, row) for mark in item.iter_markers(COVERS) for row in mark.args]
    if report.failed and "fresh_seed" in getattr(item, "fixturenames", ()):
        report.sections.append(("seed", f"to draw the same again: --seed {item.config.stash[RUN_SEED]}"))
    return report
