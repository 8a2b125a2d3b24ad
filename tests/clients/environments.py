"""An environment for one client: made from an index, and taken away when it has served."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / ".venv" / "clients"
TORCH: Final = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
_INSTALL_BOUND_S: Final = 3600  # minutes are usual; a busy machine with a slow index takes many
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


class CannotInstallError(Exception):
    """What pip says, in one line."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a client wants installed."""

    packages: tuple[str, ...]
    has_torch: bool = False  # the pinned one, whose CPU build pip finds where ours was found: never CUDA's libraries
    without_torch: str = ""  # a package whose own wish for a torch is overruled
    alias: str = ""  # a name by which it looks for itself, and which is not its own


@contextmanager
def environment(name: str, needs: Needs, keep: bool) -> Iterator[Path]:
    """The folder of its programs; an environment that was kept is used again. Raises CannotInstallError."""
    folder = FOLDER / name
    mark = folder / ".installed"
    if not mark.exists() or mark.read_text() != repr(needs):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
        _fill(folder / "bin", needs)
        mark.write_text(repr(needs))
    try:
        yield folder / "bin"
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _fill(programs: Path, needs: Needs) -> None:
    install = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "install", "-q", "--no-compile"]
    bound = programs.parent / "constraints.txt"
    bound.write_text(f"{TORCH}\n" if needs.has_torch else "")
    if needs.has_torch:
        _run([*install, "--no-deps", TORCH])
    if needs.without_torch:
        name = needs.without_torch.partition("==")[0]
        _run([*install, "--no-deps", needs.without_torch])
        _run([*install, "-c", str(bound), *_requirements_but_torch(programs, name)])
        if needs.alias:
            _run([str(programs / "python"), "-c", _ALIAS, name, needs.alias])
    if needs.packages:
        _run([*install, "-c", str(bound), *needs.packages])


def _requirements_but_torch(programs: Path, package: str) -> list[str]:
    asked = f"import importlib.metadata as m; print(*m.requires({package!r}) or (), sep='\\n')"
    lines = subprocess.run([programs / "python", "-c", asked], capture_output=True, text=True, check=True).stdout
    return [line for line in lines.splitlines() if "extra ==" not in line and not line.lower().startswith("torch")]


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_BOUND_S, check=False)
    except subprocess.TimeoutExpired:
        raise CannotInstallError(f"pip took longer than {_INSTALL_BOUND_S} s") from None
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise CannotInstallError((errors or ["no reason given"])[-1])


def quiet_environment() -> dict[str, str]:
    """For a client's process: no telemetry, no downloads, no path of ours, and no proxy between us."""
    ours = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    kept = {name: value for name, value in os.environ.items() if name not in ours and not name.startswith("BATON_")}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    offline |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return kept | offline | {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost", "TQDM_DISABLE": "1"}
