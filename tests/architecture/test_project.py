"""What is written twice is equal: the tree, the generated modules, the rows that tests name, the names we claim."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.readme_tree import HEADING, expected_tree
from tests.architecture.source_tree import ROOMS, ROOT, sources
from tests.coverage_table import checklist_rows


def test_the_readme_ends_with_the_tree_as_it_is_on_disk() -> None:
    """`make tree` writes it."""
    _, heading, tree = (ROOT / "README.md").read_text(encoding="utf-8").partition(HEADING)
    assert heading
    assert tree.strip() == expected_tree().strip(), "README.md is stale: run make tree"


def test_the_generated_protobuf_modules_are_fresh(tmp_path: Path) -> None:
    """Generated again they are the same, byte for byte."""
    out = ("--python_out", "--mypy_out", "--grpc_python_out", "--mypy_grpc_out")
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        "-I.",
        *(f"{flag}={tmp_path}" for flag in out),
        "proto/baton.proto",
    ]
    plugins = f"{Path(sys.executable).parent}:/usr/bin:/bin"  # protoc finds protoc-gen-mypy on the PATH
    subprocess.run(command, cwd=ROOT, check=True, env={"PATH": plugins})
    generated = sorted(path.name for path in (tmp_path / "proto").iterdir())
    assert len(generated) == 4
    for name in generated:
        assert (ROOT / "proto" / name).read_text() == (tmp_path / "proto" / name).read_text(), f"{name}: run make proto"


def test_every_row_that_a_test_claims_to_cover_is_in_the_checklist() -> None:
    """A typo in an id would be a row that nobody proves."""
    rows = checklist_rows()
    assert len(rows) > 100
    unknown = [
        f"{source.path}:{line} {ast.unparse(argument)}"
        for source in sources()
        for line, called, call in source.calls()
        if called == "pytest.mark.covers"
        for argument in call.args
        if not (isinstance(argument, ast.Constant) and argument.value in rows)
    ]
    assert not unknown, "\n".join(unknown)


@pytest.mark.parametrize("room", ROOMS)
def test_nobody_else_in_the_environment_claims_the_name_of(room: str) -> None:
    """`proto` and `kernels` are packages elsewhere too; here they must be ours alone."""
    assert set(importlib.metadata.packages_distributions().get(room, [])) == {"baton"}
    spec = importlib.util.find_spec(room)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).is_relative_to(ROOT)


def test_every_dependency_is_pinned() -> None:
    """constraints.txt names an exact version for everything in this environment but pip, setuptools and ourselves."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").split("\n")
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    names = {each.name.lower().replace("_", "-") for each in importlib.metadata.distributions()}
    assert names - {"baton", "pip", "setuptools", "wheel"} <= pinned


def test_nobody_is_told_to_install_baton_from_an_index() -> None:
    """There the name is somebody else's: `pip install 'baton[trace]'` outside of .venv brings a stranger's code."""
    pages = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")}
    texts = pages | {source.path: source.text for source in sources() if not source.path.startswith("tests/")}
    asks = re.compile(r"baton\[|pip install baton\b")
    assert not [f"{name}: {found}" for name, text in texts.items() for found in asks.findall(text)]


def test_nodes_are_drained_by_the_names_that_the_page_starts_them_under() -> None:
    """A node without `--node-id` draws one: who followed the page was told `no such node`."""
    page = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^baton (?:drain|role) (\S+)", page, re.MULTILINE))
    assert named
    assert named <= set(re.findall(r"^baton \w+ .*--node-id (\S+)", page, re.MULTILINE))
