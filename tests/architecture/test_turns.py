"""The order in which a run takes the files: no test is lost or leaves its file, and what is short comes last."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.conftest import QUICK_ROOMS, ROOMS_OF_CLUSTERS, in_turn

ROOT = Path(__file__).parents[1]


def test_files_of_clusters_and_of_computing_come_in_turn_and_quick_ones_last() -> None:
    numbers = {"e2e/a": 2, "e2e/b": 1, "router/c": 1, "router/d": 3, "sim/e": 2, "sim/f": 1, "chaos/g": 1, "cores/h": 4}
    items: list[Any] = [
        SimpleNamespace(path=ROOT / f"{name}.py", number=n) for name, number in numbers.items() for n in range(number)
    ]
    ordered = [(item.path.stem, item.number) for item in list[Any](in_turn(items))]
    files = list(dict.fromkeys(stem for stem, _ in ordered))
    assert files == ["a", "e", "b", "f", "g", "h", "d", "c"]
    assert ordered == [
        (name[-1], n) for stem in files for name in numbers if name[-1] == stem for n in range(numbers[name])
    ]


def test_the_rooms_are_there() -> None:
    assert all((ROOT / room).is_dir() for room in ROOMS_OF_CLUSTERS | QUICK_ROOMS)
