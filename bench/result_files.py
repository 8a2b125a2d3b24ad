"""Results as a report's arguments: the files of benchmarks that it knows, read, or one line and exit code 2."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from runtime.process import fatal


def results_of(
    report: str, about: str, benches: Sequence[Collection[str]], argv: Sequence[str], *, has_more: bool = False
) -> list[dict[str, Any]]:
    """What the files hold that `argv` names, in this order. `benches`: whose results each may be; `has_more`: the last, any number.

    `report`: the module, `about`: what it does, both for --help.
    """
    parser = argparse.ArgumentParser(f"python -m {report}", description=about)
    for number, each in enumerate(benches):
        is_last = has_more and number == len(benches) - 1
        name = "RESULT.json" if len(benches) == 1 else f"{next(iter(each)).upper()}.json"
        told = f"what {_named(each)} has written"
        parser.add_argument(f"results_{number}", nargs="+" if is_last else 1, type=Path, metavar=name, help=told)
    paths = vars(parser.parse_args(argv))
    return [
        read_result(report, path, each) for number, each in enumerate(benches) for path in paths[f"results_{number}"]
    ]


class _Recorded(dict[str, Any]):
    """An object of a result, of which a report asks for what every result of that benchmark has."""

    def __init__(self, where: str, items: Mapping[str, Any]) -> None:
        super().__init__(items)
        self._where = where

    def __missing__(self, key: str) -> NoReturn:
        fatal(f"{self._where}: is no whole result: {key!r} is not there")


def parse_result(text: str, path: Path, report: str) -> Any:
    """What the text of a file says; ValueError. Whoever asks it for what it lacks ends the process with one line and 2."""
    return json.loads(text, object_hook=partial(_Recorded, f"python -m {report}: {path}"))


def bench_of(result: object) -> str:
    """The module of bench/ that has written a result; "" for what is none."""
    command = str(result.get("command", "")) if isinstance(result, dict) else ""
    return command.removeprefix("python -m bench.").split(" ")[0]


def read_result(report: str, path: Path, benches: Collection[str]) -> dict[str, Any]:
    """What a file holds, which one of these benchmarks has written; else one line that names the report, and exit code 2."""
    try:
        result: dict[str, Any] = parse_result(path.read_text(encoding="utf-8"), path, report)
    except OSError as error:
        fatal(f"python -m {report}: {path}: {error.strerror}")
    except ValueError:
        fatal(f"python -m {report}: {path}: is not JSON")
    if (bench := bench_of(result)) not in benches:
        fatal(f"python -m {report}: {path}: is a result of {bench or 'nothing known'}, not of {_named(benches)}")
    return result


def _named(benches: Collection[str]) -> str:
    return " or ".join(f"bench.{each}" for each in benches)
