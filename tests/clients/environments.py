"""An environment for one client: made from an index, and taken away when it has served."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.clients.programs import FailedError, run

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / ".venv" / "clients"
TORCH: Final = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
_INSTALL_BOUND_S: Final = 3600.0  # minutes are usual; a busy machine with a slow index takes many
_MARK: Final = ".installed"
# Has importlib.metadata find a package by another name, too.
_ALIAS: Final = """
import importlib.metadata, pathlib, re, sys
name, alias = sys.argv[1:]
files = pathlib.Path(importlib.metadata.distribution(name)._path)
its_own = files.parent / f"{alias}-{importlib.metadata.version(name)}.dist-info"
its_own.mkdir()
told = re.sub("(?m)^(Requires-Dist: .*|Name: .*)\\n", "", (files / "METADATA").read_text())
(its_own / "METADATA").write_text(re.sub("(?m)^Version:", f"Name: {alias}\\nVersion:", told, count=1))
"""
_REQUIRES: Final = "import importlib.metadata as m, sys; print(*m.requires(sys.argv[1]) or (), sep='\\n')"
_DOWNLOAD: Final = re.compile(r"\s*Downloading \S+ \(([\d.]+) (bytes|kB|MB|GB)\)")  # a line of pip's
_UNITS: Final = {"bytes": 1e-6, "kB": 1e-3, "MB": 1.0, "GB": 1e3}


class CannotInstallError(FailedError):
    """What pip says."""


class NoIndexError(CannotInstallError):
    """Pip reaches none: nothing else can be installed either."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a client wants installed."""

    packages: tuple[str, ...]
    has_torch: bool = False  # the pinned one, whose CPU build pip finds where ours was found: never CUDA's libraries
    without_torch: str = ""  # a package whose own wish for a torch is overruled
    alias: str = ""  # a name by which it looks for itself, and which is not its own


@dataclass(slots=True)
class Environment:
    """One, and what it cost."""

    programs: Path
    log: Path
    downloaded_mb: float = 0.0

    def disk_mb(self) -> float:
        """What it takes."""
        return sum(each.lstat().st_blocks for each in self.programs.parent.rglob("*")) * 512 / 1e6


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep others from making environments there meanwhile. Raises BlockingIOError where somebody does."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


@contextmanager
def environment(folder: Path, needs: Needs, keep: bool, waiting: Callable[[str], None]) -> Iterator[Environment]:
    """One that was kept is used again; one that is not whole is taken away, whatever happens. Raises CannotInstallError."""
    made = Environment(folder / "bin", log_of(folder))
    made.log.write_bytes(b"")
    is_whole = is_installed(folder, needs)
    try:
        if not is_whole:
            _remove(folder)
            folder.mkdir(parents=True)
            _Installer(made, waiting).install(needs)
            (folder / _MARK).write_text(repr(needs))
            is_whole = True
        yield made
    finally:
        if not (keep and is_whole):
            _remove(folder)


def log_of(folder: Path) -> Path:
    """Beside it, and left there: what was written while it was made, and by what runs there."""
    return folder.with_name(f"{folder.name}.log")


def is_installed(folder: Path, needs: Needs) -> bool:
    """Whether it was kept, and for the same."""
    mark = folder / _MARK
    return mark.is_file() and mark.read_text() == repr(needs)


def _remove(folder: Path) -> None:
    (folder / _MARK).unlink(missing_ok=True)  # first: what is half removed is not whole
    if folder.exists():
        shutil.rmtree(folder)


class _Installer:
    """Fills one environment by pip, ours: it needs none of its own."""

    def __init__(self, made: Environment, waiting: Callable[[str], None]) -> None:
        self._made, self._waiting = made, waiting
        self._python = made.programs / "python"
        temporary = made.programs.parent / "tmp"  # of pip, gigabytes: an interrupted one leaves nothing elsewhere
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self._environment |= {"TMPDIR": str(temporary)}

    def install(self, needs: Needs) -> None:
        """All of them."""
        folder = self._made.programs.parent
        (folder / "tmp").mkdir()
        self._run(sys.executable, "-m", "venv", "--without-pip", folder)
        bound = folder / "constraints.txt"
        bound.write_text(f"{TORCH}\n" if needs.has_torch else "")
        if needs.has_torch:
            self._pip("--no-deps", TORCH)
        if needs.without_torch:
            name = needs.without_torch.partition("==")[0]
            self._pip("--no-deps", needs.without_torch)
            required = self._run(self._python, "-c", _REQUIRES, name)
            self._pip("-c", bound, *(line for line in required if _is_wanted(line)))
            if needs.alias:
                self._run(self._python, "-c", _ALIAS, name, needs.alias)
        if needs.packages:
            self._pip("-c", bound, *needs.packages)
        shutil.rmtree(folder / "tmp")

    def _pip(self, *words: str | Path) -> None:
        pip = (sys.executable, "-m", "pip", "--python", self._python, "--no-color", "--disable-pip-version-check")
        flags = ("install", "--no-input", "--no-compile", "--progress-bar", "off", "--root-user-action", "ignore")
        lines = self._run(*pip, *flags, *words)
        self._made.downloaded_mb += downloaded_mb(lines)

    def _run(self, *command: str | Path) -> list[str]:
        made, folder = self._made, self._made.programs.parent
        try:
            return run(
                command, made.log, _INSTALL_BOUND_S, folder=folder, environment=self._environment, waiting=self._waiting
            )
        except FailedError as error:
            raise why(error) from None


def _is_wanted(requirement: str) -> bool:
    return "extra ==" not in requirement and not requirement.lower().startswith("torch")


def downloaded_mb(lines: Sequence[str]) -> float:
    """By what pip says; what it has in its cache or finds in a folder costs nothing."""
    found = (_DOWNLOAD.match(line) for line in lines)
    return sum(float(each[1]) * _UNITS[each[2]] for each in found if each)


def why(failed: FailedError) -> CannotInstallError:
    """One sentence from what pip wrote."""
    lost = [line for line in failed.lines if "Retry(total=0," in line]
    if lost:
        told = re.search(r"broken by '(?:.*<[^>]*>: |\w+\(\W?)?(.*?)\W*: /", lost[-1])
        return NoIndexError(f"no package index can be reached: {told[1] if told else lost[-1]}", failed.lines)
    errors = [line.removeprefix("ERROR: ") for line in failed.lines if line.startswith("ERROR: ")]
    if errors == ["Exception:"]:  # a traceback is behind it, of a connection that breaks in the middle of a file
        errors = [failed.lines[-1]]
    return CannotInstallError(errors[0] if errors else str(failed), failed.lines)
