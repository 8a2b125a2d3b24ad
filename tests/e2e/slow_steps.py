"""Nodes whose steps take some milliseconds more as long as a test wants it.

The small model says thousands of tokens a second. A fault that is to come in the middle of a stream would come behind its end
wherever this process stands still for a moment between a token that it has seen and the fault.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from unittest.mock import patch

from bench.fleet import Fleet
from tests import forked

# Python runs it in every process of a cluster before anything else; only a node has the thread that computes, or what
# `baton up` forks its nodes from.
_IN_EACH_PROCESS: Final = """
import os, sys, time

if "-m" in sys.orig_argv and {"prefill", "decode", "mixed", "deploy.node_forker"} & set(sys.orig_argv):
    try:
        from node.runner_thread import RunnerThread

        next_plan = RunnerThread._next_plan
    except Exception as error:
        sys.exit(f"tests/e2e/slow_steps.py: {error!r}")

    def next_plan_later(self, launched):
        plan = next_plan(self, launched)
        try:
            with open(os.environ["SLOW_STEPS"]) as wanted:
                step_s, *nodes = wanted.read().split()
            if not nodes or set(nodes) & set(sys.orig_argv):
                time.sleep(float(step_s))
        except FileNotFoundError:
            pass
        return plan

    RunnerThread._next_plan = next_plan_later
    open(os.environ["SLOW_STEPS"] + "_is_heard", "w").close()
"""


class SlowSteps:
    """Of the nodes of one cluster that were started with this environment."""

    def __init__(self, folder: Path) -> None:
        """`folder`: the cluster's own."""
        code = folder / "slow_steps"
        code.mkdir(exist_ok=True)
        (code / "sitecustomize.py").write_text(_IN_EACH_PROCESS)
        self._wanted = folder / "slow_steps_are_wanted"
        paths = os.pathsep.join([str(code), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.environment: Final[dict[str, str]] = {"PYTHONPATH": paths, "SLOW_STEPS": str(self._wanted)}

    @contextmanager
    def wanted(self, step_s: float = 0.02, *nodes: str) -> Iterator[None]:
        """Every step of every node, or of those named that were started by hand, takes so much longer until the block ends."""
        part = self._wanted.with_suffix(".part")
        part.write_text(" ".join([str(step_s), *nodes]))
        part.rename(self._wanted)
        try:
            yield
            assert self._wanted.with_name(f"{self._wanted.name}_is_heard").exists(), "no node looks there"
        finally:
            self._wanted.unlink()


class SlowableFleet(Fleet):
    """A Fleet with slow steps when they are wanted."""

    popen = forked.Popen

    def start(self, *names: str) -> None:
        """As a Fleet does."""
        with patch.dict(os.environ, SlowSteps(self._folder).environment):
            super().start(*names)

    @contextmanager
    def slow_steps(self, step_s: float = 0.02, *nodes: str) -> Iterator[None]:
        """Of these nodes, or all, until the block ends."""
        with SlowSteps(self._folder).wanted(step_s, *nodes):
            yield
