"""The grammar of an answer behind a thought that its prompt has begun: any text, the end of it, and what binds the answer. Pure.

A structural tag, as either_grammar.py makes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from router.either_grammar import Format, json_format, piece, sequence
from router.events import Grammar
from router.structured import check_size
from router.thought_text import CLOSES

_BLANKS = r"[ \n]{0,4}"  # behind the tag; mostly two line breaks


def behind_thought(grammar: Grammar, special: Mapping[int, str]) -> Grammar:
    """The same where a thought comes first; raises ApiError. special: tags that are special tokens, and so no text, by id."""
    ids = {text: token_id for token_id, text in special.items()}
    thought: Format = {"type": "any_text", "excludes": [CLOSES]}
    if CLOSES in ids:  # which is no text, so that any text would have it
        thought = {"type": "any_tokens", "exclude_tokens": [ids[CLOSES]]}
    tag = sequence(thought, piece(CLOSES, ids), {"type": "regex", "pattern": _BLANKS}, _format(grammar))
    text = json.dumps({"type": "structural_tag", "format": tag}, ensure_ascii=False)
    check_size(text, grammar.field)
    return replace(grammar, kind="structural_tag", text=text, is_compact=False)


def _format(grammar: Grammar) -> Format:
    match grammar.kind:
        case "json_schema":
            return json_format(grammar.text, is_compact=grammar.is_compact)
        case "regex":
            return {"type": "regex", "pattern": grammar.text}
        case "ebnf":
            return {"type": "grammar", "grammar": grammar.text}
        case "structural_tag":
            within: Format = json.loads(grammar.text)["format"]
            return within
