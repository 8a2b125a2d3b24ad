"""What pydantic finds wrong with a client's value, in plain words: a field, and the end of a sentence that begins with its name.

Every kind of error that the bodies' types can have is here by name, so that no word of the library's is shown. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import ErrorDetails

SHOWN_LENGTH: Final = 60  # characters of a wrong value that its error repeats
NO_CHARACTER: Final = "holds half a surrogate pair, which is no character"
NOT_FINITE: Final = "holds a number that is not finite"  # 1e400 is JSON to read; what we would write of it is none

# What a value must be -> how it is called; those of one place are branches of a union.
_KINDS: Final[Mapping[str, str]] = {
    "string_type": "a text",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
}
_BOUNDS: Final[Mapping[str, str]] = {
    "greater_than": "greater than {gt}",
    "greater_than_equal": "greater than or equal to {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "less than or equal to {le}",
    "literal_error": "{expected}",
}


@dataclass(frozen=True, slots=True)
class Wrong:
    """One thing that is wrong."""

    field: str
    message: str
    code: str = "invalid_value"


def wrong_of(
    values: Mapping[str, Any],
    found: Sequence[ErrorDetails],
    patterns: Mapping[str, str],
    lists: Mapping[str, str],
) -> Wrong:
    """The first thing that is wrong with `values`; of one that fits no branch of a union the branch that got furthest says most.

    `patterns`: what they ask for, in words. `lists`: last name of a field -> what a list there has, where "a list" says too little.
    """
    of_first = [each for each in found if each["loc"][:1] == found[0]["loc"][:1]]
    worst = max(of_first, key=lambda each: len(each["loc"]))
    location = _in(values, worst)
    field = ".".join(str(part)[:SHOWN_LENGTH] for part in location)
    value, kind = worst["input"], worst["type"]
    match kind:
        case "missing":
            return Wrong(field, "is required", "missing_parameter")
        case "extra_forbidden":
            return Wrong(field, "unknown parameter", "unknown_parameter")
        case "too_short" | "string_too_short":
            return Wrong(field, "must not be empty")
        case "string_unicode":
            return Wrong(field, NO_CHARACTER)
        case "too_long" | "string_too_long":
            unit = "characters" if kind == "string_too_long" else "items"
            size = shown(value) if isinstance(value, list) else len(value)
            return Wrong(field, f"must have at most {worst['ctx']['max_length']} {unit}, not {size}")
        case "union_tag_invalid" | "union_tag_not_found" if isinstance(value, dict):
            return Wrong(f"{field}.type", f"not supported by this version (got {shown(value.get('type'))})")
        case "union_tag_invalid" | "union_tag_not_found":
            return Wrong(field, f"must be an object, not {shown(value)}")
        case "string_pattern_mismatch":
            told = patterns[worst["ctx"]["pattern"]]
        case _ if kind in _KINDS:
            last = next((part for part in reversed(location) if isinstance(part, str)), "")
            called = dict(_KINDS) | ({"list_type": lists[last]} if last in lists else {})
            kinds = [
                called[each["type"]] for each in of_first if _in(values, each) == location and each["type"] in called
            ]
            is_huge = kind == "float_type" and type(value) is int  # no float holds it
            told = "must be a finite number" if is_huge else f"must be {' or '.join(dict.fromkeys(kinds))}"
        case _ if kind in _BOUNDS:
            bounds = {name: _whole(bound) for name, bound in worst["ctx"].items()}
            told = f"must be {_BOUNDS[kind].format(**bounds)}"
        case _:
            told = "must be another value"
    return Wrong(field, f"{told}, not {shown(value)}")


def _in(values: Mapping[str, Any], error: ErrorDetails) -> tuple[int | str, ...]:
    """Where it is in what the client wrote: without the names of branches, and of a text that stands for a list of one the text."""
    place: Any = values
    location: list[int | str] = []
    for index, part in enumerate(error["loc"]):
        is_last = index == len(error["loc"]) - 1
        if isinstance(place, dict) and isinstance(part, str):
            if part in place or (is_last and error["type"] == "missing"):
                location.append(part)
                place = place.get(part)
        elif isinstance(place, list) and isinstance(part, int) and part < len(place):
            location.append(part)
            place = place[part]
    return tuple(location)


def _whole(bound: object) -> object:
    return int(bound) if isinstance(bound, float) and bound.is_integer() else bound


def shown(value: object) -> str:
    """A client's value in an error: ASCII, and no longer than one can read."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, str):
        return json.dumps(value if len(value) <= SHOWN_LENGTH else value[:SHOWN_LENGTH] + "...")
    text = json.dumps(value)
    return text if len(text) <= SHOWN_LENGTH else text[:SHOWN_LENGTH] + "..."
