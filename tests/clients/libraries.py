"""The client libraries: each asks the same, and must hand its user what plain HTTP gets."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import jsonschema_rs

from tests.clients.asks import ANSWER, FUNCTIONS, Answer, Ask, as_json, plainly
from tests.clients.environments import quiet_environment

INSIDE: Final = Path(__file__).resolve().parent / "inside"
_BOUND_S: Final = 300
_ROUNDING: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Library:
    """What one is asked, and what must come of it."""

    name: str
    asks: tuple[Ask, ...]
    facts: dict[str, object] = field(default_factory=dict)
    parsed: tuple[str, ...] = ()  # what it read by itself into an object of the schema ANSWER


def problems_of(library: Library, programs: Path, url: str) -> list[str]:
    """What is wrong with what a library got; nothing, if all is well."""
    with httpx.Client(base_url=url, trust_env=False) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        expected = {ask.name: plainly(client, model, ask) for ask in library.asks}
    script = INSIDE / f"{library.name}_asks.py"
    done = subprocess.run(
        [programs / "python", script, url, model],
        input=as_json(library.asks),
        capture_output=True,
        text=True,
        timeout=_BOUND_S,
        env=quiet_environment(),
        cwd=INSIDE,
        check=False,
    )
    if done.returncode != 0:
        return [f"it ended with {done.returncode}: {(done.stderr.strip().splitlines() or ['nothing said'])[-1]}"]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found = [
        f"{what}: {told['facts'].get(what)!r}, not {fact!r}"
        for what, fact in library.facts.items()
        if told["facts"].get(what) != fact
    ]
    for what in library.parsed:
        found += [f"{what}: {problem}" for problem in _misfits(ANSWER, told["parsed"].get(what))]
    for ask in library.asks:
        got = told["answers"][ask.name]
        problems = _differences(ask, expected[ask.name], got) + _unfitting(ask, got)
        found += [f"{ask.name}: {problem}" for problem in problems]
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


def _differences(ask: Ask, plain: Answer, got: dict[str, Any]) -> list[str]:
    found = []
    for what, value in asdict(plain).items():
        told = got.get(what, [] if what == "calls" else None)
        if what == "logprobs":
            told, value = told or [], value if told is not None else []
            same = len(told) == len(value) and all(abs(a - b) < _ROUNDING for a, b in zip(told, value, strict=True))
        else:
            same = told is None or told == value  # None: this library has no word for it
        if not same:
            found.append(f"{what} {told!r}, plain HTTP got {value!r}")
    if ask.stream:
        at_s = got["chunks_at_s"]
        if len(at_s) < 4 or at_s[-1] <= at_s[0]:
            found.append(f"it was no stream: {len(at_s)} chunks at {at_s}")
    return found
