"""Contrast of two colours as WCAG 2.2 reckons it, and the colours of the page's style sheet, by theme."""

from __future__ import annotations

import re
from typing import Final

from tests.architecture.source_tree import ROOT

STYLE: Final = ROOT / "router" / "page" / "dashboard.css"


def colours() -> tuple[dict[str, str], dict[str, str]]:
    """Of light and dark: name -> #rrggbb."""
    found = re.findall(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", STYLE.read_text())
    return {name: light for name, light, _ in found}, {name: dark for name, _, dark in found}


def contrast(first: str, second: str) -> float:
    """From 1 to 21 (WCAG 2.2, contrast ratio)."""
    dim, bright = sorted((_luminance(first), _luminance(second)))
    return (bright + 0.05) / (dim + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
