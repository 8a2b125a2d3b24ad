"""One program, run to its end: bounded in time, its output in a file, and with it ends whatever it started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SAID_EVERY_S: Final = 30.0
_LAST_LINES: Final = 15
_CHARACTERS: Final = 300  # of a line


class FailedError(Exception):
    """A program ended badly or not in time: one sentence, and what it wrote."""

    def __init__(self, sentence: str, lines: Sequence[str] = ()) -> None:
        super().__init__(sentence[:_CHARACTERS])
        self.lines = tuple(lines)

    def last_lines(self) -> list[str]:
        """As many, and as much of each, as somebody reads."""
        return [line[:_CHARACTERS] for line in self.lines[-_LAST_LINES:]]


def run(
    command: Sequence[str | Path],
    log: Path,
    bound_s: float,
    *,
    folder: Path,
    environment: dict[str, str],
    waiting: Callable[[str], None] | None = None,
) -> list[str]:
    """Append its output to `log` and return the lines. Raises FailedError.

    It leads a group of its own, which is killed on every way out, an interrupt's too: nobody who is still installing, and
    no worker of a benchmark, outlives us. `waiting` hears its last line every SAID_EVERY_S.
    """
    begun = time.monotonic()
    with log.open("ab") as out:
        begin = out.tell()
        with subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
            start_new_session=True,
        ) as process:
            try:
                code = None
                while code is None and (left_s := begun + bound_s - time.monotonic()) > 0:
                    with suppress(subprocess.TimeoutExpired):
                        code = process.wait(min(SAID_EVERY_S, left_s))
                    if code is None and waiting:
                        waiting((_lines(log, begin) or [""])[-1])
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    lines = _lines(log, begin)
    if code is None:
        raise FailedError(f"it took longer than {bound_s:.0f} s", lines)
    if code != 0:
        raise FailedError(f"it ended with {code}: {(lines or ['nothing said'])[-1]}", lines)
    return lines


def _lines(log: Path, begin: int) -> list[str]:
    """What stands behind `begin`, without empty lines; of a line that was written over again and again its last state."""
    with log.open("rb") as file:
        file.seek(begin)
        text = file.read().decode(errors="replace")
    return [line.rstrip().rpartition("\r")[2] for line in text.split("\n") if line.strip()]


def quiet_environment() -> dict[str, str]:
    """For a program of a client: no telemetry, no downloads, no path of ours, and no proxy between us."""
    ours = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    kept = {name: value for name, value in os.environ.items() if name not in ours and not name.startswith("BATON_")}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    offline |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return kept | offline | {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost", "TQDM_DISABLE": "1"}


@dataclass(frozen=True, slots=True)
class Programs:
    """Of a client that is installed."""

    folder: Path  # where they are
    log: Path
    scratch: Path  # empty at first, and gone behind the run

    def run(self, name: str, *arguments: str | Path, bound_s: float, **environment: str) -> None:
        """Run one in `scratch`. Raises FailedError."""
        home = quiet_environment() | {"HF_HOME": str(self.scratch / "hf")} | environment
        run([self.folder / name, *arguments], self.log, bound_s, folder=self.scratch, environment=home)
