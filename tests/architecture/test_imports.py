"""The import table of docs/design.md, section 2."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

from tests.architecture.source_tree import ROOMS, ROOT, Source, sources_of_rooms

MAY_IMPORT: Final = {
    "proto": set[str](),
    "kernels": set[str](),
    "runtime": {"proto"},
    "engine": {"kernels"},
    "connector": {"proto"},
    "node": {"proto", "runtime", "engine", "connector"},
    "prefill_node": {"node", "proto", "runtime", "engine", "connector"},
    "decode_node": {"node", "proto", "runtime", "engine", "connector"},
    "mixed_node": {"node", "proto", "runtime", "engine", "connector"},
    "router": {"proto", "runtime"},
    "deploy": {"proto", "runtime"},
    "bench": set(ROOMS) - {"bench", "deploy"},
}
EXCEPTIONS: Final = {  # (file or room) -> what else it may import
    "engine": ("proto.block_key",),
    "deploy/own_machine.py": ("kernels.cpu_build",),
    "deploy/node_process.py": ("prefill_node", "decode_node", "mixed_node", "node.assembly"),
}
ROOMS_WITHOUT_TORCH: Final = ("proto", "runtime", "router", "deploy")
FILES_WITHOUT_TORCH: Final = (  # what decides, wherever it is
    "core.py",
    "local_core.py",
    "placement.py",
    "admission.py",
    "block_pool.py",
    "scheduler.py",
    "prefix_cache.py",
    "sequence.py",
    "plan.py",
    "handoff.py",
    "lease.py",
    "token_log.py",
    "session.py",
    "split.py",
    "block_key.py",
    "config.py",
    "events.py",
)

IMPORT_ALL: Final = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"importing {name} loads torch")
"""


def _is_allowed(source: Source, imported: str) -> bool:
    room = imported.split(".")[0]
    if room not in ROOMS or room == source.room or room in MAY_IMPORT[source.room]:
        return True
    extra = EXCEPTIONS.get(source.room, ()) + EXCEPTIONS.get(source.path, ())
    return any(imported == name or imported.startswith(name + ".") for name in extra)


def test_no_room_imports_what_the_table_does_not_allow() -> None:
    """Also inside functions and under TYPE_CHECKING: an edge is an edge."""
    assert set(MAY_IMPORT) == set(ROOMS)
    breaches = [
        f"{source.path}:{line} imports {imported}"
        for source in sources_of_rooms()
        for line, imported in source.imports()
        if not _is_allowed(source, imported)
    ]
    assert not breaches, "\n".join(breaches)


def test_imports_are_absolute_and_no_room_imports_tests() -> None:
    """A reader sees from the line alone which room is meant."""
    breaches = [
        f"{source.path}:{line} imports {imported}"
        for source in sources_of_rooms()
        for line, imported in source.imports()
        if imported.startswith((".", "tests"))
    ]
    assert not breaches, "\n".join(breaches)


def test_what_decides_and_what_serves_clients_imports_without_torch() -> None:
    """A subprocess imports each of them and looks: an edge can also lead to torch through a neighbour."""
    modules = [
        source.module
        for source in sources_of_rooms()
        if (source.room in ROOMS_WITHOUT_TORCH or source.name in FILES_WITHOUT_TORCH) and source.name != "__main__.py"
    ]
    assert {"router", "runtime.config", "deploy.launcher", "engine.plan"} <= set(modules)
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *modules], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_the_connector_imports_torch_only_where_tensors_move() -> None:
    """Its machines and its wire format are bytes and integers."""
    torch_files = {
        source.path
        for source in sources_of_rooms()
        if source.room == "connector" and any(imported.split(".")[0] == "torch" for _, imported in source.imports())
    }
    assert all(path.startswith("connector/transports/") for path in torch_files), torch_files


def test_every_room_says_in_its_init_what_it_is() -> None:
    """One sentence, what is not there, and who may import it."""
    inits = {source.room: source for source in sources_of_rooms() if source.path == f"{source.room}/__init__.py"}
    assert set(inits) == set(ROOMS)
    for room, source in inits.items():
        assert len(source.tree.body) == 1, f"{room}/__init__.py holds more than its docstring"
        assert "mport" in source.text, f"{room}/__init__.py does not say who may import it"
