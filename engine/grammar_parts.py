"""What a structural tag is made of: the grammars within it, and the tokens that it names. Pure.

The format is xgrammar's (structural_tag.py of its package, version 0.2).
"""

from __future__ import annotations

import functools
import json
from typing import Any, Literal, NamedTuple

Kind = Literal["json_schema", "regex", "ebnf"]


class TagParts(NamedTuple):
    """Of one tag."""

    grammars: tuple[tuple[Kind, str], ...]  # each once
    token_ids: frozenset[int]

    @property
    def has_json(self) -> bool:
        """Whether some of its text is JSON."""
        return any(kind == "json_schema" for kind, _ in self.grammars)


@functools.lru_cache(maxsize=64)
def parts_of(tag: str) -> TagParts:
    """Nothing, where it is none: who compiles it says so."""
    try:
        waiting: list[Any] = [json.loads(tag)]
    except (ValueError, RecursionError):
        return TagParts((), frozenset())
    grammars: dict[tuple[Kind, str], None] = {}
    token_ids: set[int] = set()
    while waiting:
        match waiting.pop():
            case {"type": "json_schema", "json_schema": schema}:
                grammars["json_schema", json.dumps(schema, ensure_ascii=False)] = None
            case {"type": "regex", "pattern": str(pattern)}:
                grammars["regex", pattern] = None
            case {"type": "grammar", "grammar": str(text)}:
                grammars["ebnf", text] = None
            case {"type": "token", "token": int(token_id)}:
                token_ids.add(token_id)
            case dict() as others:
                waiting += others.values()
            case list() as elements:
                waiting += elements
    return TagParts(tuple(grammars), frozenset(token_ids))
