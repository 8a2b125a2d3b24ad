"""The chart installed by Helm's own code (helm_engine.py), in a process of its own: all cases of a test file at once."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from tests.deploy.chart_cases import RELEASES, WRONG, Values
from tests.deploy.kubernetes_types import TOOLS
from tests.deploy.pods import Install

ROOT: Final = Path(__file__).resolve().parents[2]
LIBRARY: Final = TOOLS / "helm_sdkpy" / "_lib" / "linux-amd64" / "libhelm_sdkpy.so"


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an install."""

    values: Values
    install: Install
    notes: str
    error: str


@dataclasses.dataclass(frozen=True, slots=True)
class Upgrade:
    """What is said at an upgrade, when there are so many routers."""

    routers: int
    values: Values


@dataclasses.dataclass(frozen=True, slots=True)
class Engine:
    """What Helm made of all cases, by name."""

    lint: list[dict[str, Any]]
    outcomes: dict[str, Outcome]

    def good(self) -> list[Outcome]:
        """Those that were to succeed."""
        return [outcome for name, outcome in self.outcomes.items() if name not in WRONG]


def run_helm(cases: dict[str, Values], upgrades: dict[str, Upgrade] | None = None) -> Engine:
    """`upgrades`: what follows an install, by case. Fail or skip where Helm's code is not there."""
    if not LIBRARY.exists():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no {LIBRARY}: make test-setup fetches it, on x86-64")
    told = []
    for i, (name, values) in enumerate(cases.items()):
        release = RELEASES.get(name, ("baton", "llm", "prod-baton")[i % 3])
        upgrade = (upgrades or {}).get(name)
        place = {"release": release, "namespace": "n" * 63 if name == "long names" else "inference"}
        told.append(place | {"values": values, "upgrade": upgrade and dataclasses.asdict(upgrade)})
    command = [sys.executable, "-m", "tests.deploy.helm_engine", str(LIBRARY)]
    done = subprocess.run(command, cwd=ROOT, input=json.dumps(told), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    outcomes = {
        name: Outcome(values, Install(each["manifests"]), each["notes"], each["error"])
        for (name, values), each in zip(cases.items(), found["installs"], strict=True)
    }
    return Engine(found["lint"], outcomes)
