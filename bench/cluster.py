"""A cluster for a benchmark: `baton up` with a file of settings, ready when the context is entered, gone when it is left.

Not here: load (load.py). The launcher is a process like any user's; nothing of deploy/ is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from runtime.config import child_environment
from runtime.knobs import ENVIRONMENT_PREFIX

BATON: Final = str(Path(sys.executable).with_name("baton"))
_LAST_LINE: Final = "baton up: Ctrl-C stops everything"
_PREFIX: Final = "baton_node_"

Settings = Mapping[str, int | str]  # of one role: keys and values of its table in a TOML file
Samples = dict[str, float]  # a metric's name without its common beginning, its labels' values in braces -> value


class ClusterProblem(Exception):
    """The cluster did not start; the message is one sentence for the user, with the launcher's last line."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A ready cluster with one node of each role."""

    url: str
    nodes: dict[str, str]  # role -> host:port of its HTTP server
    pids: dict[str, int]  # role -> process; the router's, too

    def samples(self, role: str) -> Samples:
        """The node's metrics as they are now."""
        text = httpx.get(f"http://{self.nodes[role]}/metrics", timeout=60, trust_env=False).text
        return {
            sample.name.removeprefix(_PREFIX)
            + "".join(f"{{{value}}}" for value in sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


def environment_of_a_cluster() -> dict[str, str]:
    """Ours without what would win over a file or a default, and so over what is to be measured.

    The back end alone is the user's to choose.
    """
    return {
        name: value
        for name, value in child_environment().items()
        if not name.startswith(ENVIRONMENT_PREFIX) or name in ("BATON_KERNELS", "BATON_DEVICE")
    }


@contextmanager
def started_cluster(model: Path, roles: Mapping[str, Settings]) -> Iterator[Cluster]:
    """One router, one prefill and one decode node on free ports, their run directory a temporary one. ClusterProblem."""
    with tempfile.TemporaryDirectory(prefix="baton-bench-", ignore_cleanup_errors=True) as folder:
        run_dir, config = Path(folder, "run"), Path(folder, "cluster.toml")
        config.write_text(to_toml(roles), encoding="utf-8")
        command = [BATON, "up", "--config", str(config), "--model", str(model.absolute())]
        command += ["--port", "0", "--run-dir", str(run_dir), "--parent-pid", str(os.getpid())]
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env=environment_of_a_cluster(),
        ) as launcher:
            try:
                _wait_until_ready(launcher)
                content: dict[str, Any] = json.loads((run_dir / "cluster.json").read_text(encoding="utf-8"))
                router, nodes = content["router"], content["nodes"]
                pids = {"router": router["pid"], **{node["role"]: node["pid"] for node in nodes}}
                yield Cluster(router["url"], {node["role"]: node["http"] for node in nodes}, pids)
            finally:
                launcher.kill()  # its processes end with it, at once, and what they said is read already


def to_toml(roles: Mapping[str, Settings]) -> str:
    """A table for each role; values are whole numbers and words."""
    tables = []
    for role, settings in roles.items():
        lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
        tables.append("\n".join([f"[{role}]", *lines, ""]))
    return "\n".join(tables)


def _wait_until_ready(launcher: subprocess.Popen[str]) -> None:
    assert launcher.stdout is not None
    last = "nothing"
    for line in launcher.stdout:
        if line.rstrip("\n") == _LAST_LINE:
            return
        last = line.strip() or last
    raise ClusterProblem(f"the cluster did not start; the launcher's last words: {last}")
