"""The client libraries: each asks the same, and must hand its user what plain HTTP gets."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import httpx

from tests.clients.asks import Answer, Ask, as_json, plainly
from tests.clients.environments import quiet_environment

INSIDE: Final = Path(__file__).resolve().parent / "inside"
_BOUND_S: Final = 300
_ROUNDING: Final = 1e-6


def problems_of(name: str, asks: tuple[Ask, ...], facts: dict[str, object], programs: Path, url: str) -> list[str]:
    """What is wrong with what a library got; nothing, if all is well."""
    with httpx.Client(base_url=url, trust_env=False) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        expected = {ask.name: plainly(client, model, ask) for ask in asks}
    script = INSIDE / f"{name}_asks.py"
    done = subprocess.run(
        [programs / "python", script, url, model],
        input=as_json(asks),
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
        for what, fact in facts.items()
        if told["facts"].get(what) != fact
    ]
    for ask in asks:
        found += [
            f"{ask.name}: {problem}" for problem in _differences(ask, expected[ask.name], told["answers"][ask.name])
        ]
    return found


def _differences(ask: Ask, plain: Answer, got: dict[str, Any]) -> list[str]:
    found = []
    for what, value in asdict(plain).items():
        told = got[what]
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
            found.append(f"it was no stream: {len(at_s)} chunks of text at {at_s}")
    return found
