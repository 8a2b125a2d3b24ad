"""A cluster of real processes, started as a user starts it: `baton up`, in a temporary folder of its own.

Nothing here waits by sleeping: the launcher's lines, process ends and ready answers are what is waited for.
"""

from __future__ import annotations

import json
import os
import select
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests import forked
from tests.plain_http import NO_CERTIFICATES

BATON: Final = str(Path(sys.executable).with_name("baton"))
LAST_LINE: Final = "baton up: Ctrl-C stops everything"
# Handoffs are what most tests are about, however short their prompts: flags of a test that is about the other way win over this.
HANDOFFS_ONLY: Final = {"BATON_LOCAL_PREFILL_MAX_TOKENS": "0"}
# No process counts as lost because the machine had no time for it.
_PATIENT: Final = {"BATON_SESSION_GRACE_S": "60"}
START_BOUND_S: Final = 100.0  # ten times what the design allows
END_BOUND_S: Final = 60.0


class Cluster:
    """A running `baton up`; made by `started_cluster`."""

    def __init__(
        self, launcher: subprocess.Popen[str], run_dir: Path, lines: list[str], trusted: ssl.SSLContext | None = None
    ) -> None:
        self.launcher = launcher
        self.run_dir = run_dir
        self.lines = lines  # what the launcher printed until it was ready
        content: dict[str, Any] = json.loads((run_dir / "cluster.json").read_text())
        self.url: str = content["router"]["url"]
        self.router_pid: int = content["router"]["pid"]
        self.routers: list[dict[str, Any]] = content["routers"]
        self.nodes: list[dict[str, Any]] = content["nodes"]
        self._trusted = trusted or NO_CERTIFICATES
        self._http = httpx.Client(
            timeout=60, trust_env=False, verify=self._trusted
        )  # one for all looks at nodes: making one takes longer

    @property
    def pids(self) -> list[int]:
        """All routers' and nodes' process ids."""
        return [each["pid"] for each in (*self.routers, *self.nodes)]

    def nodes_of(self, role: str) -> list[dict[str, Any]]:
        """The cluster.json entries of one role."""
        return [node for node in self.nodes if node["role"] == role]

    def client(self) -> httpx.Client:
        """An HTTP client of the router."""
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, verify=self._trusted)

    def state(self, node: dict[str, Any]) -> dict[str, Any]:
        """A node's /state."""
        answer: dict[str, Any] = self._http.get(f"{_url(node)}/state").json()
        return answer

    def metrics(self, of: dict[str, Any] | None = None) -> dict[str, float]:
        """A node's /metrics, or the router's: `name` or `name{label}`, a label's value without its name -> value."""
        url = self.url if of is None else _url(of)
        prefix = "baton_router_" if of is None else "baton_node_"
        return {
            sample.name.removeprefix(prefix) + "".join(f"{{{value}}}" for value in sample.labels.values()): sample.value
            for family in text_string_to_metric_families(self._http.get(f"{url}/metrics").text)
            for sample in family.samples
        }

    def close(self) -> None:
        """Hang up; ends nothing of the cluster."""
        self._http.close()

    def end(self, number: signal.Signals) -> int:
        """Send the launcher a signal and wait for its exit code."""
        self.launcher.send_signal(number)
        return self.launcher.wait(END_BOUND_S)


def _url(node: dict[str, Any]) -> str:
    address: str = node["http"]
    return address if address.startswith("http") else f"http://{address}"


@contextmanager
def started_cluster(
    model: Path,
    folder: Path,
    *flags: str,
    trusted: ssl.SSLContext | None = None,
    environment: Mapping[str, str] | None = None,
    is_executed: bool = False,
) -> Iterator[Cluster]:
    """A ready cluster whose run directory and temporary files lie in `folder`; the launcher is killed at the end.

    `trusted`: of a cluster with certificates, its authority. `environment`: variables besides the usual ones. `is_executed`: all
    its processes are started as a user's are; else they are forked from one that has loaded what they load.
    """
    run_dir = folder / "run"
    with (
        started_launcher(model, folder, *flags, environment=environment, is_executed=is_executed) as launcher,
        closing(Cluster(launcher, run_dir, _lines_until_ready(launcher, run_dir), trusted)) as cluster,
    ):
        yield cluster


@contextmanager
def started_launcher(
    model: Path,
    folder: Path,
    *flags: str,
    environment: Mapping[str, str] | None = None,
    is_executed: bool = False,
) -> Iterator[subprocess.Popen[str]]:
    """A `baton up` that has just been started, on a free port unless the flags say otherwise; killed at the end."""
    temporary = folder / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    command = [BATON, "up", "--model", str(model), "--port", "0", "--run-dir", str(folder / "run")]
    command += ["--parent-pid", str(os.getpid()), *flags]  # a test run that is killed leaves no cluster
    usual = {name: os.environ[name] for name in ("PATH", "HOME", "BATON_KERNELS") if name in os.environ}
    popen = subprocess.Popen if is_executed else forked.Popen
    with popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**usual, **HANDOFFS_ONLY, **_PATIENT, "TMPDIR": str(temporary), **(environment or {})},
    ) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


class Watch:
    """Process ids held by descriptors: a process that ended is told from a new one with the same number."""

    def __init__(self, pids: list[int]) -> None:
        self._descriptors = {pid: os.pidfd_open(pid) for pid in pids}

    def alive(self) -> set[int]:
        """Those that have not ended."""
        ended, _, _ = select.select(list(self._descriptors.values()), [], [], 0)
        return {pid for pid, descriptor in self._descriptors.items() if descriptor not in ended}

    def wait_for_end(self, pids: list[int]) -> None:
        """Wait until all of these have ended; fails after END_BOUND_S each."""
        for pid in pids:
            ended, _, _ = select.select([self._descriptors[pid]], [], [], END_BOUND_S)
            assert ended, f"process {pid} is still there"

    def close(self) -> None:
        """Give the descriptors back."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)


def _lines_until_ready(launcher: subprocess.Popen[str], run_dir: Path) -> list[str]:
    assert launcher.stdout is not None
    lines: list[str] = []
    for line in launcher.stdout:
        lines.append(line.rstrip("\n"))
        if lines[-1] == LAST_LINE:
            return lines
    logs = "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(run_dir.glob("*.log")))
    raise AssertionError("the cluster did not start:\n" + "\n".join(lines) + "\n" + logs)
