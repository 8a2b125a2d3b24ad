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


def make(checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run make with nothing but the checkout's `bin` on the PATH."""
    make_path = str(shutil.which("make"))
    environment = {"PATH": str(checkout / "bin"), "HOME": "/home/me"}
    return subprocess.run(
        [make_path, *words], cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )


def set_up(checkout: Path) -> None:
    """Leave what `make setup` does, but for what it has installed."""
    (checkout / ".venv" / "bin").mkdir(parents=True)
    for stamp in ("bin/python", ".installed"):
        (checkout / ".venv" / stamp).touch()
    (checkout / "kernels" / "cpu" / "built").mkdir(parents=True)
    for stamp in (".compiled", ".built"):
        (checkout / "kernels" / "cpu" / "built" / stamp).touch()


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
    set_up(checkout)
    assert make(checkout, "setup").returncode == 0
    (checkout / "constraints.txt").write_text("torch==1\n")
    assert make(checkout, "setup").returncode != 0


def test_what_only_tests_want_is_looked_for_by_who_runs_tests_and_not_by_who_serves(checkout: Path) -> None:
    """A production host, as root, would get a browser and a Redis that is started."""
    set_up(checkout)
    (checkout / "bin" / "id").symlink_to(str(shutil.which("false")))
    (checkout / ".venv" / ".helm").touch()
    assert "redis" not in make(checkout, "setup").stdout
    assert not (checkout / ".venv" / ".redis").exists()
    told = make(checkout, "test-setup").stdout
    assert "make: no redis-server or no haproxy" in told and "make: no chromium" in told
    makefile = (ROOT / "Makefile").read_text()
    wanting = {line.split(":")[0] for line in makefile.splitlines() if "$(TEST_PROGRAMS) ##" in line}
    wanting |= {line.split(":")[0] for line in makefile.splitlines() if line.endswith(" $(TEST_PROGRAMS)")}
    assert wanting == {"test-setup", "tested", "soak", "coverage-table"}


def write_recorder(path: Path, answer: str = "") -> Path:
    """A program that says `answer`, and puts its arguments into a file of its own, one a line behind its name; the file."""
    said = path.with_name(f"{path.name}.said")
    path.write_text(
        f'#!/bin/sh\n{{ echo ---; for word in "$@"; do echo "$word"; done; }} >> "{said}"\n'
        f'case "$*" in *"config list"*) echo "{answer}"; esac\n'
    )
    path.chmod(0o755)
    return said


def test_paths_may_have_spaces_and_begin_at_home(checkout: Path) -> None:
    set_up(checkout)
    said = write_recorder(checkout / ".venv" / "bin" / "baton")
    python = write_recorder(checkout / ".venv" / "bin" / "python")
    assert make(checkout, "up", "MODEL=my  models/llama-tiny", "RUN_DIR=a run").returncode == 0
    words = said.read_text().splitlines()
    assert "my  models/llama-tiny" in words and "a run" in words
    assert not python.exists(), "no model was made for another one's name"
    assert make(checkout, "clients", "MODEL=~/a model").returncode == 0
    assert "/home/me/a model" in python.read_text().splitlines()


@pytest.mark.parametrize(
    ("config", "has_gpu", "given", "index"),
    [
        ("", False, None, "https://download.pytorch.org/whl/cpu"),
        ("global.timeout='5'", False, None, "https://download.pytorch.org/whl/cpu"),
        ("", True, None, None),
        ("global.index-url='https://pypi.example/simple'", False, None, None),
        (":env:.extra-index-url='file:///pypi'", False, None, None),
        ("global.find-links='/wheels'", False, None, None),
        (
            "global.index-url='https://pypi.example/simple'",
            True,
            "https://torch.example/cu129",
            "https://torch.example/cu129",
        ),
        ("", False, "", None),
    ],
)
def test_torch_comes_without_cuda_where_there_is_no_gpu_and_pip_is_told_of_no_index(
    config: str, has_gpu: bool, given: str | None, index: str | None, checkout: Path
) -> None:
    (checkout / ".venv" / "bin").mkdir(parents=True)
    said = write_recorder(checkout / ".venv" / "bin" / "python", config)
    if has_gpu:
        write_recorder(checkout / "bin" / "nvidia-smi")
    made = make(checkout, ".venv/.installed", *(() if given is None else (f"TORCH_INDEX={given}",)))
    assert made.returncode == 0, made.stderr
    installs = [call.split() for call in said.read_text().split("---") if "torch==2" in call]
    (words,) = installs
    assert words[words.index("--extra-index-url") + 1 :][:1] == [index] if index else "--extra-index-url" not in words
    assert said.read_text().count("--extra-index-url") == (index is not None), "nothing else comes from there"


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
