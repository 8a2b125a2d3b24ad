"""Words of a schema that say nothing, or what another word says as well, as that other word; formats as patterns. Pure.

What libraries and OpenAPI write into schemas though it decides nothing (`uniqueItems: false`, `format: int64`) is left out, so that
what is left is what would have to be followed. Not here: which words are taken (structured.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_NUMBERS: Final = frozenset({"integer", "number", "null"})
_NUMBER_FORMATS: Final = ("int32", "int64", "float", "double")  # OpenAPI's: what holds the number, to who reads it
_ANY_NAME: Final[tuple[object, ...]] = ({"type": "string"}, {}, True)
_NULLABLE: Final = "nullable"

_OCTET: Final = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_GROUP: Final = "[0-9a-fA-F]{1,4}"
# No two hyphens in a row: behind two letters they mean another alphabet.
_LABEL: Final = "[a-zA-Z0-9](-?[a-zA-Z0-9]){0,24}"
_CLOCK: Final = "[0-9]{1,9}(H([0-9]{1,9}M([0-9]{1,9}S)?)?|M([0-9]{1,9}S)?|S)"
_DAYS: Final = "[0-9]{1,9}(Y([0-9]{1,9}M([0-9]{1,9}D)?)?|M([0-9]{1,9}D)?|D)"


def _short_addresses() -> str:
    """IPv6 with `::` for at least one group of zeros: so many groups before it, and so many behind."""
    ways = [rf":((:{_GROUP}){{1,7}}|:)", rf"({_GROUP}:){{1,7}}:"]
    ways += [rf"({_GROUP}:){{1,{before}}}(:{_GROUP}){{1,{7 - before}}}" for before in range(1, 7)]
    return "|".join(ways)


# Formats that xgrammar does not know, or takes more for than validators do. Each is a part of what its RFC allows: hostnames
# have at most five labels of 25 letters and digits, durations nine digits.
FORMAT_PATTERNS: Final[Mapping[str, str]] = {
    "ipv4": rf"^{_OCTET}(\.{_OCTET}){{3}}$",  # RFC 2673
    "ipv6": rf"^(({_GROUP}:){{7}}{_GROUP}|{_short_addresses()})$",  # RFC 4291, without IPv4 at its end
    "hostname": rf"^{_LABEL}(\.{_LABEL}){{0,4}}$",  # RFC 1123
    "duration": rf"^P([0-9]{{1,9}}W|{_DAYS}(T{_CLOCK})?|T{_CLOCK})$",  # RFC 3339, appendix A
}


def plain(schema: Any) -> Any:
    """A schema of which nothing is known yet, but that it can be written, without words that say nothing."""
    if not isinstance(schema, dict):
        return schema
    told = dict(schema)
    for name, value in schema.items():
        match name, value:
            case "properties" | "$defs" | "definitions", dict():
                told[name] = {each: plain(inner) for each, inner in value.items()}
            case "items" | "additionalProperties", _:
                told[name] = plain(value)
            case "prefixItems" | "anyOf" | "allOf", list():
                told[name] = [plain(each) for each in value]
    return _without_idle(told)


def _without_idle(told: dict[str, Any]) -> dict[str, Any]:
    types = _types(told)
    if told.get("uniqueItems") is False:
        del told["uniqueItems"]
    if types and told.get("propertyNames") in _ANY_NAME and type(told["propertyNames"]) is not int:
        del told["propertyNames"]
    if types and _NUMBERS.issuperset(types) and told.get("format") in _NUMBER_FORMATS:
        del told["format"]
    factor = told.get("multipleOf")
    if types and {"integer", "null"}.issuperset(types) and type(factor) is int and factor == 1:
        del told["multipleOf"]
    if told.get(_NULLABLE) is False:
        del told[_NULLABLE]
    elif told.get(_NULLABLE) is True and types and _has_null(told):
        # OpenAPI 3.0: it says so of the type beside it, and of nothing else: an `enum` must have the null itself.
        del told[_NULLABLE]
        told["type"] = types if "null" in types else [*types, "null"]
    branches = told.get("anyOf")
    if types and isinstance(branches, list) and branches and all(_is_within(each, types) for each in branches):
        del told["type"]
    return told


def _types(schema: Mapping[str, Any]) -> list[str]:
    """Those that a schema names; none where they are no names."""
    given = schema.get("type")
    types = [each for each in (given if isinstance(given, list) else [given]) if isinstance(each, str)]
    return types if not isinstance(given, list) or len(types) == len(given) else []


def _has_null(schema: Mapping[str, Any]) -> bool:
    """Whether what stands beside the type lets a null be: an enum that has none would say that it was not meant so."""
    if any(name in schema for name in ("$ref", "anyOf", "allOf", "const")):
        return False
    values = schema.get("enum", [None])
    return isinstance(values, list) and None in values


def _is_within(branch: object, types: list[str]) -> bool:
    """Whether all that fits a branch is of one of the types, by what it says itself."""
    own = _types(branch) if isinstance(branch, dict) else []
    return bool(own) and set(types).issuperset(own)
