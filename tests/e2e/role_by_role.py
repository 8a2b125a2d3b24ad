"""A cluster of real processes, started role by role as on several machines: the benchmarks' Fleet, asked as tests ask.

Nothing is waited for but conditions, each with a bound.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx

from bench.fleet import BOUND_S as BOUND_S
from bench.fleet import HELD as HELD
from bench.fleet import wait_until as wait_until
from tests.e2e.slow_steps import SlowableFleet

_PATIENT: Final = ("--session-grace-s", "60")


class RoleByRole(SlowableFleet):
    """Processes by name, `router` or `<role>-<number>`; made by `started_role_by_role`."""

    def get(self, path: str) -> httpx.Response:
        """A page of the router."""
        return self.http.get(self.url + path)

    def missing(self) -> list[str]:
        """What the router lacks to be ready."""
        answer = self.get("/ready")
        missing: list[str] = answer.json()["missing"]
        assert answer.status_code == (503 if missing else 200)
        return missing

    def wait_until_ready(self, bound_s: float = BOUND_S) -> None:
        """Until every node is up, as the router sees it."""
        super().wait_until_ready(bound_s)
        wait_until("nothing is missing", lambda: self.missing() == [], bound_s)

    def held_blocks(self, *nodes: str) -> int:
        """Blocks that are neither free nor merely cached."""
        return sum(self.state(node)["blocks"][state] for node in nodes for state in HELD)

    def outcomes(self, node: str, request_id: str | None = None) -> list[str]:
        """How attempts (of one request, or all) ended on a node, in the order and the words of its log."""
        request = r"\S+" if request_id is None else re.escape(request_id)
        ended = re.compile(rf'attempt_ended request={request} .*outcome=("[^"]*"|\S+)$', re.MULTILINE)
        return [outcome.strip('"') for outcome in ended.findall(self.log_text(node))]


@contextmanager
def started_role_by_role(model: Path, folder: Path, flags: Mapping[str, Sequence[str]]) -> Iterator[RoleByRole]:
    """A ready cluster of the processes that `flags` names, `router` among them; all are killed at the end.

    Handoffs are what most tests are about, however short their prompts, and no process counts as lost because the machine had no
    time for it: flags of a test that is about the other way win.
    """
    usual = {name: (*_PATIENT, *words) for name, words in flags.items()}
    usual["router"] = (*_PATIENT, "--local-prefill-max-tokens", "0", *flags["router"])
    with RoleByRole.started(model, folder, usual) as cluster:
        yield cluster
