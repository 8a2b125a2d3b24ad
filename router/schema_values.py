"""What a schema says of values that xgrammar 0.2 would follow otherwise: patterns, numbers with bounds, wide whole numbers. Pure.

Not here: which keywords are taken (structured.py), what expressions are (regex_rules.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, localcontext
from typing import Any, Final

from router.regex_rules import within_quotes
from router.schema_words import FORMAT_PATTERNS

LARGEST: Final = 2**53  # of bounds and counts
DECIMALS: Final = {"integer": 0, "number": 6}  # of a number that has bounds, as xgrammar writes it
_WIDEST: Final = 2**63


def followed(schema: Any) -> Any:
    """A schema that was checked, with its patterns and the items of its arrays as xgrammar follows them."""
    if not isinstance(schema, dict):
        return schema
    told = dict(schema)
    for name, value in schema.items():
        match name:
            case "pattern":
                told[name] = within_quotes(value)
            case "format" if value in FORMAT_PATTERNS:
                del told[name]
                told["pattern"] = within_quotes(FORMAT_PATTERNS[value])
            case "properties" | "$defs" | "definitions":
                told[name] = {each: followed(inner) for each, inner in value.items()}
            case "items" | "additionalProperties":
                told[name] = followed(value)
            case "prefixItems" | "anyOf" | "allOf":
                told[name] = [followed(each) for each in value]
    if "items" not in schema and _counts_unnamed_items(schema):
        told["items"] = True  # anything, as where nothing is counted either; it would allow none
    return told


def _counts_unnamed_items(schema: Mapping[str, Any]) -> bool:
    num_named = len(schema.get("prefixItems", ()))
    return schema.get("minItems", 0) > num_named or ("maxItems" in schema and not num_named)


def has_number(schema: Mapping[str, Any], decimals: int) -> bool:
    """Whether a number of at most so many decimals lies within a schema's bounds."""
    with localcontext(prec=60):
        scale = 10**decimals
        low, above = (Decimal(str(schema.get(name, -LARGEST))) * scale for name in ("minimum", "exclusiveMinimum"))
        high, below = (Decimal(str(schema.get(name, LARGEST))) * scale for name in ("maximum", "exclusiveMaximum"))
        least = max(low.to_integral_value(ROUND_CEILING), above.to_integral_value(ROUND_FLOOR) + 1)
        most = min(high.to_integral_value(ROUND_FLOOR), below.to_integral_value(ROUND_CEILING) - 1)
        return bool(least <= most)


def too_wide(value: object) -> int | None:
    """A whole number within a JSON value that xgrammar would write as another one."""
    match value:
        case int() if not -_WIDEST <= value < _WIDEST:
            return value
        case list():
            return next((found for each in value if (found := too_wide(each)) is not None), None)
        case dict():
            return too_wide([*value.values()])
    return None
