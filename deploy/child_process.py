"""One process that the launcher started: its log, its ready file, its end.

A child is told its parent's process id: it has the kernel kill it when that dies (runtime/process.py). It has a process group of
its own, so that Ctrl-C reaches the launcher alone, and inherits no file but its log. Not here: which processes there are, and what
a node is forked from (forker.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from runtime.process import EXIT_NOT_NOW, EXIT_USAGE

READY_POLL_S: Final = 0.02  # a rename cannot be awaited without inotify, which the standard library lacks


class Process(Protocol):
    """What runs: asyncio's own, or one that was forked."""

    @property
    def pid(self) -> int:
        """Its number."""

    @property
    def returncode(self) -> int | None:
        """Minus the signal's number if one ended it; None while it runs."""

    async def wait(self) -> int:
        """Its exit code, once it has ended."""

    def send_signal(self, signal: int) -> None:
        """To it, if it still runs."""

    def kill(self) -> None:
        """SIGKILL."""


Starter = Callable[[Sequence[str], int], Awaitable[Process]]  # what to run, and the descriptor of its log


def executed(environment: Mapping[str, str]) -> Starter:
    """Starts `python -m …` with this environment."""

    async def start(command: Sequence[str], log_fd: int) -> Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # the current directory is the user's: a folder called `node` there is not ours
            "-m",
            *command,
            *("--parent-pid", str(os.getpid())),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            env=environment,
            process_group=0,
        )

    return start


class ChildProcess:
    """A running child; made by `start`."""

    def __init__(self, name: str, log_path: Path, ready_path: Path, process: Process) -> None:
        self.name = name
        self.log_path = log_path
        self.pid = process.pid
        self._ready_path = ready_path
        self._process = process
        self.is_ready = False  # it listens

    @classmethod
    async def start(
        cls, name: str, command: Sequence[str], run_dir: Path, starter: Starter, *, keeps_log: bool = False
    ) -> ChildProcess:
        """Run the command with a log and a ready file in `run_dir`; `keeps_log`: behind what the log has already."""
        log_path, ready_path = run_dir / f"{name}.log", run_dir / f".{name}.ready.json"
        ready_path.unlink(missing_ok=True)
        if not keeps_log:
            log_path.open("wb").close()
        # Appended to: who cuts the file off while it is written, such as logrotate with copytruncate, has the room back.
        with log_path.open("ab") as log:
            process = await starter([*command, "--ready-file", str(ready_path.resolve())], log.fileno())
        return cls(name, log_path, ready_path, process)

    async def ready(self) -> dict[str, Any]:
        """What the child wrote when it began to listen; waits for ever if it ends instead (see `ended`)."""
        while not self._ready_path.exists():  # noqa: ASYNC110 - another process makes the file
            await asyncio.sleep(READY_POLL_S)
        content: dict[str, Any] = json.loads(self._ready_path.read_text(encoding="utf-8"))
        self._ready_path.unlink()
        self.is_ready = True
        return content

    async def ended(self) -> None:
        """Wait until it has ended."""
        await self._process.wait()

    @property
    def exit_code(self) -> int | None:
        """Of the ended process; minus the signal's number if one ended it; None while it runs."""
        return self._process.returncode

    @property
    def was_refused(self) -> bool:
        """Whether it ended with one sentence of its own, about what it was told or what is not there now."""
        return self.exit_code in (EXIT_USAGE, EXIT_NOT_NOW)

    def how_it_ended(self) -> str:
        """One line for the user about a child that has ended."""
        code = self._process.returncode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return f"{self.name} (pid {self.pid}) ended with {how}; see {self.log_path}"

    def last_sentence(self) -> str:
        """The last line of its log: for a process that ended, why."""
        try:
            text = self.log_path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:  # somebody has taken the run directory away
            return f"its log cannot be read: {error.strerror}"
        # An exception group is drawn with a frame, which says nothing.
        lines = [line.strip(" |+-") for line in text.splitlines()]
        return next((line for line in reversed(lines) if line), "nothing")

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        if self._process.returncode is None:
            self._process.kill()

    async def stop(self, timeout_s: float) -> None:
        """Ask it to stop now, not to drain; after `timeout_s` seconds do not ask."""
        if self._process.returncode is None:
            # Who is still loading has nothing to drain, and would end of a SIGINT with a traceback in its log.
            self._process.send_signal(signal.SIGINT if self.is_ready else signal.SIGTERM)
            try:
                await asyncio.wait_for(self._process.wait(), timeout_s)
            except TimeoutError:
                self.kill()
                await self._process.wait()
        self._ready_path.unlink(missing_ok=True)
