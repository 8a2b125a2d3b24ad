"""Files and functions that fit into a head."""

from __future__ import annotations

import ast
from typing import Final

from tests.architecture.source_tree import sources, sources_of_rooms

MAX_FILE_LINES: Final = 400
MAX_FUNCTION_LINES: Final = 60
MAX_PARAMETERS: Final = 7


def test_no_file_is_longer_than_400_lines() -> None:
    """Tests included."""
    long = [f"{source.path}: {n}" for source in sources() if (n := source.text.count("\n")) > MAX_FILE_LINES]
    assert not long, "\n".join(long)


def test_no_function_is_longer_than_60_lines_or_takes_more_than_7_parameters() -> None:
    """`self` does not count; `knob` declares, and its parameters are a form to fill in."""
    breaches = []
    for source in sources_of_rooms():
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            parameters = len([name for name in names if name not in ("self", "cls")])
            if any("triton.jit" in ast.unparse(each) for each in node.decorator_list):
                parameters = 0  # a device's function takes addresses, strides and sides of tiles one by one
            if lines > MAX_FUNCTION_LINES or parameters > MAX_PARAMETERS:
                breaches.append(f"{source.path}:{node.lineno} {node.name}: {lines} lines, {parameters} parameters")
    assert not breaches, "\n".join(breaches)


def test_every_module_and_public_function_says_what_it_is() -> None:
    """In the rooms; a class whose name and fields say it all needs no sentence."""
    breaches = []
    for source in sources_of_rooms():
        if source.text.strip() and not ast.get_docstring(source.tree):
            breaches.append(f"{source.path}:1 has no module docstring")
        functions = [each for each in source.tree.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
        for each in functions:
            if not each.name.startswith("_") and not ast.get_docstring(each):
                breaches.append(f"{source.path}:{each.lineno} {each.name} has no docstring")
    assert not breaches, "\n".join(breaches)
