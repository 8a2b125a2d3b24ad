"""Hosts of docs/by_hand.md: each a network namespace with a folder for what the page has in /etc and /srv.

Commands run as they stand there, but for these paths and the page's addresses. `systemctl` is played here, by the units.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Final

from bench.cluster import BATON, environment_of_a_cluster
from bench.namespaces import Network
from tests import forked
from tests.by_hand.unit import Unit, file_of

ROOT: Final = Path(__file__).resolve().parents[2]
BOUND_S: Final = 60.0


class Host:
    """One of them."""

    def __init__(self, name: str, folder: Path, net: Network, replaced: dict[str, str]) -> None:
        """`replaced`: what stands in the page for what is here, on all hosts."""
        self.name = name
        self.folder = folder / name
        self._net = net
        self._replaced = {
            "/opt/baton/.venv/bin/baton": BATON,
            "/opt/baton": str(ROOT),
            "/etc/systemd/system": str(self.folder / "units"),
            "/etc/baton": str(self.folder / "etc"),
            "/var/cache/baton": str(self.folder / "cache"),
            **replaced,
        }
        for each in ("units", "etc", "cache"):
            (self.folder / each).mkdir(parents=True)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def address(self) -> str:
        return self._net.address(self.name)

    def here(self, text: str) -> str:
        """The same with the paths and addresses of this host."""
        return re.sub("|".join(map(re.escape, self._replaced)), lambda match: self._replaced[match[0]], text)

    def run(self, block: str) -> str:
        """Run a block of the page; what it printed. AssertionError where a command fails."""
        commands = block.replace("\\\n", " ").splitlines()
        if not any(command.startswith("systemctl ") for command in commands):
            return self._bash(block)
        for command in commands:
            if command.startswith("systemctl "):
                self._systemctl(shlex.split(command)[1:])
            elif not command.startswith("chown "):  # there is no user baton
                self._bash(command)
        return ""

    def log(self, unit: str) -> str:
        return (self.folder / f"{unit}.log").read_text(encoding="utf-8")

    def listening_ports(self, unit: str) -> set[int]:
        """TCP ports of this host."""
        pid, found = self.processes[unit].pid, set()
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
                _, local, _, state = line.split()[:4]
                if state == "0A":
                    found.add(int(local.rpartition(":")[2], 16))
        return found

    def end(self) -> None:
        """Kill whatever runs here."""
        for process in self.processes.values():
            process.kill()
            process.wait(BOUND_S)

    def _bash(self, commands: str) -> str:
        environment = environment_of_a_cluster()
        environment["PATH"] = f"{Path(BATON).parent}:{environment.get('PATH', os.defpath)}"
        with self._net.entered(self.name):
            done = subprocess.run(
                ["bash", "-ec", self.here(commands)],
                cwd=self.folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=BOUND_S,
                check=False,
            )
        assert done.returncode == 0, f"{self.name}: {commands}: {done.stdout}{done.stderr}"
        return done.stdout

    def _systemctl(self, words: list[str]) -> None:
        match words:
            case ["daemon-reload"]:
                assert list((self.folder / "units").iterdir())
            case ["enable", "--now", unit]:
                self._start(unit)
            case ["restart", unit]:
                self._stop(unit)
                self._start(unit)
            case _:
                raise AssertionError(words)

    def _unit(self, unit: str) -> tuple[Unit, str]:
        file, instance = file_of(unit)
        return Unit.parse((self.folder / "units" / file).read_text(encoding="utf-8")), instance

    def _start(self, unit: str) -> None:
        found, instance = self._unit(unit)
        told = found.environment(self.name, instance, self._read)
        variables = environment_of_a_cluster() | {name: self.here(value) for name, value in told.items()}
        variables["BATON_PARENT_PID"] = str(os.getpid())  # whatever happens to this process, it ends
        command = [self.here(word) for word in found.command()]
        with self._net.entered(self.name), (self.folder / f"{unit}.log").open("ab") as log:
            self.processes[unit] = forked.Popen(command, stdout=log, stderr=log, env=variables, cwd="/")

    def _stop(self, unit: str) -> None:
        found, _ = self._unit(unit)
        process = self.processes[unit]
        process.send_signal(signal.Signals[found.one("KillSignal")])
        assert process.wait(float(found.one("TimeoutStopSec"))) == 0, self.log(unit)[-2000:]

    def _read(self, path: str) -> str | None:
        file = Path(self.here(path))
        return file.read_text(encoding="utf-8") if file.exists() else None
