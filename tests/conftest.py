"""What all tests share: the seed of the run, and `--coverage-table`.

A test that draws at random takes the fixture `fresh_seed`: a new number each run, shown when the test fails, and drawn again
with `--seed`. Hypothesis shows how to reproduce its own failures.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Generator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.coverage_table import COVERS, CoverageTable

RUN_SEED: Final = pytest.StashKey[int]()
# Whose tests start clusters: seconds a test, in which the machine often waits. The others' compute, and take less.
ROOMS_OF_CLUSTERS: Final = frozenset({"bench", "by_hand", "chaos", "dashboard", "e2e", "security"})


def pytest_addoption(parser: pytest.Parser) -> None:
    """Flags of ours."""
    group = parser.getgroup("baton")
    group.addoption("--seed", type=int, help="draw what an earlier run drew")
    group.addoption("--no-shrink", action="store_true", help="show the first example that fails, not the smallest")
    group.addoption("--coverage-table", type=Path, metavar="FILE", help="write which tests prove which checklist row")


def pytest_configure(config: pytest.Config) -> None:
    """Draw the seed of the run."""
    # How fast examples are drawn says how busy the machine is, nothing about the code.
    settings.register_profile("baton", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("no-shrink", settings.get_profile("baton"), phases=(Phase.explicit, Phase.generate))
    settings.load_profile("no-shrink" if config.getoption("--no-shrink") else "baton")
    given: int | None = config.getoption("--seed")
    if (told := getattr(config, "workerinput", None)) is not None:  # one of several processes of a run
        given = told["run_seed"]
    config.stash[RUN_SEED] = random.SystemRandom().getrandbits(32) if given is None else given
    if hasattr(config.option, "loadscopereorder"):  # pytest-xdist would keep for the end what is slow: few tests a file
        config.option.loadscopereorder = False
    table: Path | None = config.getoption("--coverage-table")
    if table is not None and told is None:
        config.pluginmanager.register(CoverageTable(table))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files in turn, those of clusters and the others, so that what waits runs beside what computes; and short ones at the end."""
    items[:] = in_turn(items)


def in_turn(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The same tests, a file's together and in its order."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    slow = [tests for path, tests in files.items() if path.parent.name in ROOMS_OF_CLUSTERS]
    quick = [tests for path, tests in files.items() if path.parent.name not in ROOMS_OF_CLUSTERS]
    quick.sort(key=len, reverse=True)
    num_early = len(quick) * 3 // 4  # by then the last file of a cluster is to have begun
    keyed = [(place * num_early / len(slow), tests) for place, tests in enumerate(slow)]
    keyed += [(place + 0.5, tests) for place, tests in enumerate(quick)]
    keyed.sort(key=itemgetter(0))
    return [item for _, tests in keyed for item in tests]


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
