"""What `make` says on a machine that lacks something, and that it does nothing twice."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.architecture.source_tree import ROOT

TOOLS = ("sh", "grep", "awk", "touch")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What set-up reads, and a `bin` with the shell's tools but no Python."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        (tmp_path / "bin" / tool).symlink_to(str(shutil.which(tool)))
    return tmp_path


def make(checkout: Path, target: str) -> subprocess.CompletedProcess[str]:
    """Run make with nothing but the checkout's `bin` on the PATH."""
    make_path = str(shutil.which("make"))
    environment = {"PATH": str(checkout / "bin")}
    return subprocess.run(
        [make_path, target], cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )


def write_python(checkout: Path, name: str, works_for: str) -> None:
    """A Python that can run only code in which `works_for` occurs."""
    path = checkout / "bin" / name
    path.write_text(f'#!/bin/sh\ncase "$2" in *{works_for}*) exit 0;; *) exit 1;; esac\n')
    path.chmod(0o755)


def test_without_a_new_enough_python_set_up_says_so_in_one_line(checkout: Path) -> None:
    """An old one is there."""
    write_python(checkout, "python3", "nothing at all")
    result = make(checkout, "setup")
    assert result.returncode != 0
    assert result.stderr.splitlines()[0] == "make setup: no Python >= 3.11 on the PATH"


def test_without_the_venv_module_set_up_names_the_package_to_install(checkout: Path) -> None:
    """Debian ships Python without it. The older python3 is passed over."""
    write_python(checkout, "python3", "nothing at all")
    write_python(checkout, "python3.12", "version_info")
    result = make(checkout, "setup")
    assert result.returncode != 0
    assert result.stderr.splitlines()[0] == (
        "make setup: python3.12 has no venv module; install it first (Debian, Ubuntu: apt-get install python3-venv)"
    )


def test_set_up_does_nothing_when_the_stamp_is_newer_than_what_it_depends_on(checkout: Path) -> None:
    """No Python is even looked for."""
    (checkout / ".venv" / "bin").mkdir(parents=True)
    for stamp in ("bin/python", ".installed", ".redis", ".helm", ".browser"):
        (checkout / ".venv" / stamp).touch()
    (checkout / "kernels" / "cpu" / "built").mkdir(parents=True)
    (checkout / "kernels" / "cpu" / "built" / ".built").touch()
    assert make(checkout, "setup").returncode == 0
    (checkout / "constraints.txt").write_text("torch==1\n")
    assert make(checkout, "setup").returncode != 0


def test_help_lists_every_target_that_a_user_calls(checkout: Path) -> None:
    """From the Makefile itself."""
    told = make(checkout, "help").stdout
    for target in ("setup", "up", "test", "lint", "proto", "tree", "coverage-table", "clean"):
        assert f"make {target} " in told


def test_ci_calls_make_test() -> None:
    """And is executable."""
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert "make test" in script.read_text()
