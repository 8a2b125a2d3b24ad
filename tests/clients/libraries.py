"""The client libraries: each asks the same, and must hand its user what plain HTTP gets."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import jsonschema_rs

from tests.clients.asks import ANSWER, FUNCTIONS, Answer, Ask, as_json, plainly
from tests.clients.programs import Programs
from tests.clients.served import Served

INSIDE: Final = Path(__file__).resolve().parent / "inside"
_BOUND_S: Final = 300.0
_ROUNDING: Final = 1e-6
_MIN_PIECES: Final = 4  # of a stream: several tokens may come as one
_MIN_SHARE_AT_WORK: Final = 0.25  # of streams: a reader that is held up finds a short one whole


@dataclass(frozen=True, slots=True)
class Library:
    """What one is asked, and what must come of it."""

    name: str
    version: str
    asks: tuple[Ask, ...]
    facts: dict[str, object] = field(default_factory=dict)
    parsed: tuple[str, ...] = ()  # what it read by itself into an object of the schema ANSWER
    wordless: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by path: fields of Answer that it cannot say


def problems_of(library: Library, programs: Programs, served: Served) -> list[str]:
    """What is wrong with what a library got; nothing, if all is well."""
    expected = {ask.name: plainly(served, ask) for ask in library.asks}
    asked_at, told_at = programs.scratch / "asked.json", programs.scratch / "told.json"
    asked_at.write_text(as_json(library.asks))
    script = INSIDE / f"{library.name}_asks.py"
    programs.run("python", script, served.url, served.model, asked_at, told_at, bound_s=_BOUND_S)
    told: dict[str, Any] = json.loads(told_at.read_text())
    found = [] if told["version"] == library.version else [f"version {told['version']}, not {library.version}"]
    for what in sorted(library.facts.keys() | told["facts"].keys()):
        fact, wanted = told["facts"].get(what), library.facts.get(what)
        found += [] if fact == wanted else [f"{what}: {fact!r}, not {wanted!r}"]
    read = told.get("parsed", {})
    for what in sorted(set(library.parsed) | read.keys()):
        found += [f"{what}: {problem}" for problem in _misfits(ANSWER, read.get(what))]
    for ask in library.asks:
        got = told["answers"][ask.name]
        wordless = library.wordless.get(ask.path, ())
        problems = _differences(expected[ask.name], got, wordless) + _unfitting(ask, got)
        found += [f"{ask.name}: {problem}" for problem in problems]
    return found + _no_streams({ask.name: told["answers"][ask.name] for ask in library.asks if ask.stream})


def _no_streams(streams: dict[str, dict[str, Any]]) -> list[str]:
    """A server, or a library, that keeps its pieces back is done before anybody sees the first one."""
    few = {name: num for name, told in streams.items() if (num := told["num_pieces"]) < _MIN_PIECES}
    found = [f"{name}: it was no stream: {num} pieces" for name, num in few.items()]
    at_work = [name for name, told in streams.items() if told["was_at_work"]]
    if len(at_work) < _MIN_SHARE_AT_WORK * len(streams):
        found.append(f"{len(at_work)} of {len(streams)} streams had a first piece while the server was still at work")
    return found


def _unfitting(ask: Ask, got: dict[str, Any]) -> list[str]:
    """What does not fit the schema that was asked for, in answers that plain HTTP gets as well."""
    found: list[str] = []
    if "response_format" in ask.body or "text" in ask.body:
        for text in got["texts"]:
            found += _misfits(ANSWER, _read(text))
    if "tools" in ask.body:
        if not got["calls"]:
            found.append("nothing was called")
        for _, name, arguments in got["calls"]:
            found += _misfits(FUNCTIONS[name], arguments) if name in FUNCTIONS else [f"a call of {name!r}"]
    return found


def _read(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _misfits(schema: dict[str, Any], value: object) -> list[str]:
    return [f"{value!r}: {error.message}" for error in jsonschema_rs.iter_errors(schema, value)]


def _differences(plain: Answer, got: dict[str, Any], wordless: tuple[str, ...]) -> list[str]:
    found = []
    for what, value in asdict(plain).items():
        told = got[what]
        if what in wordless:
            same = told is None
        elif what == "logprobs":
            same = len(told) == len(value) and all(abs(a - b) < _ROUNDING for a, b in zip(told, value, strict=True))
        else:
            same = told == value
        if not same:
            found.append(f"{what} {told!r}, {'no word expected' if what in wordless else f'plain HTTP got {value!r}'}")
    return found
