"""The project's own files, each parsed once at most for the tests of this folder."""

from __future__ import annotations

import ast
import functools
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from runtime.collecting import loading

ROOT: Final = Path(__file__).resolve().parent.parent.parent
DEMO_MODEL: Final = ROOT / "deploy" / "demo_model"  # a directory that a node can load
ROOMS: Final = (
    "proto",
    "kernels",
    "engine",
    "connector",
    "runtime",
    "node",
    "prefill_node",
    "decode_node",
    "mixed_node",
    "router",
    "deploy",
    "bench",
)
GENERATED: Final = ("_pb2.py", "_pb2_grpc.py")


@dataclass(frozen=True, slots=True)
class Source:
    """A Python file that somebody wrote."""

    path: str  # relative to the root, with slashes
    text: str

    @property
    def tree(self) -> ast.Module:
        """Parsed when it is first asked for: most tests look at some rooms only."""
        return _parsed(self)

    @property
    def room(self) -> str:
        """The top-level folder."""
        return self.path.split("/")[0]

    @property
    def name(self) -> str:
        """The file's own name."""
        return self.path.split("/")[-1]

    @property
    def module(self) -> str:
        """Its import name."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def imports(self) -> Iterator[tuple[int, str]]:
        """Line and full name of everything imported, also inside functions; `from a import b` gives `a.b`."""
        return iter(_imports(self))

    def calls(self) -> Iterator[tuple[int, str, ast.Call]]:
        """Line, spelled-out name and node of every call."""
        return iter(_calls(self))


@functools.cache
def _parsed(source: Source) -> ast.Module:
    with loading():  # else walks in search of cycles take three times as long as this
        return ast.parse(source.text, source.path)


@functools.cache
def _imports(source: Source) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            found += ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            found += ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)
    return found


@functools.cache
def _calls(source: Source) -> list[tuple[int, str, ast.Call]]:
    return [(node.lineno, ast.unparse(node.func), node) for node in ast.walk(source.tree) if isinstance(node, ast.Call)]


@functools.cache
def project_files() -> tuple[str, ...]:
    """Every file that belongs to the project: what git tracks, or would (new files that it does not ignore)."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return tuple(sorted({name for name in listed if name and (ROOT / name).is_file()}))


@functools.cache
def sources() -> tuple[Source, ...]:
    """Every Python file of the project, except generated ones."""
    found = []
    for name in project_files():
        if name.endswith(".py") and not name.endswith(GENERATED):
            text = (ROOT / name).read_text(encoding="utf-8")
            found.append(Source(name, text))
    return tuple(found)


def sources_of_rooms() -> tuple[Source, ...]:
    """What runs in production: `sources` without the tests."""
    return tuple(source for source in sources() if source.room in ROOMS)
