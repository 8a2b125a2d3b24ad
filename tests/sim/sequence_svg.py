"""Sequence diagrams as SVG: a lane for each process, an arrow for each message, time downwards but not to scale.

Reads well in light and dark, without a script and without a font of its own. Not here: what is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

_LANE_WIDTH, _ROW_HEIGHT, _TOP, _MARGIN = 190, 26, 58, 95
_STYLE: Final = """
  text { font: 12px system-ui, sans-serif; fill: #24292f; }
  .lane { font-weight: 600; font-size: 13px; }
  .life { stroke: #c4cad1; }
  .head { fill: #eef1f4; stroke: #c4cad1; }
  .say { stroke: #57606a; fill: none; }
  .token { stroke: #1a7f5a; fill: none; }
  .data { stroke: #0b6bcb; stroke-width: 3; fill: none; }
  .mark { fill: #ffffff; stroke: #c4cad1; }
  .bad { fill: #fbe9e7; stroke: #c62828; }
  .badtext { fill: #b3261e; font-weight: 600; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .life, .head, .mark { stroke: #444c56; }
    .head { fill: #22272e; } .mark { fill: #161b22; }
    .say { stroke: #9aa4af; } .token { stroke: #4cc38a; } .data { stroke: #58a6ff; }
    .bad { fill: #3a1614; stroke: #ff7b72; } .badtext { fill: #ff9a92; }
  }
"""
_HEADS: Final = "".join(
    f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="{size}" markerHeight="{size}" orient="auto">'
    f'<path d="M0 0 L8 4 L0 8 z" fill="{colour}"/></marker>\n'
    for name, size, colour in (("say", 7, "#6e7781"), ("token", 7, "#2a9d6f"), ("data", 3.5, "#2f81d8"))
)


@dataclass(frozen=True, slots=True)
class Lane:
    """One process."""

    name: str
    title: str


@dataclass(frozen=True, slots=True)
class Arrow:
    """A message, or a piece of KV."""

    source: str
    target: str
    text: str
    is_token: bool = False
    is_data: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happens in one process."""

    lane: str
    text: str
    is_bad: bool = False


def sequence_svg(about: str, lanes: Sequence[Lane], rows: Sequence[Arrow | Mark]) -> str:
    """The whole file. `about` is read to those who cannot see it."""
    width = _LANE_WIDTH * (len(lanes) - 1) + 2 * _MARGIN
    height = _TOP + _ROW_HEIGHT * (len(rows) + 1)
    across = {lane.name: _MARGIN + _LANE_WIDTH * index for index, lane in enumerate(lanes)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">\n'
        f"<title>{escape(about)}</title>\n<style>{_STYLE}</style>\n<defs>{_HEADS}</defs>\n"
    ]
    for lane in lanes:
        x = across[lane.name]
        parts.append(f'<line class="life" x1="{x}" y1="40" x2="{x}" y2="{height - 8}"/>\n')
        parts.append(f'<rect class="head" x="{x - 70}" y="10" width="140" height="30" rx="5"/>\n')
        parts.append(f'<text class="lane" x="{x}" y="30" text-anchor="middle">{escape(lane.title)}</text>\n')
    for index, row in enumerate(rows):
        y = _TOP + _ROW_HEIGHT * index + 16
        parts.append(_arrow(row, across, y) if isinstance(row, Arrow) else _mark(row, across[row.lane], y))
    return "".join(parts) + "</svg>\n"


def _arrow(arrow: Arrow, across: dict[str, int], y: int) -> str:
    source, target = across[arrow.source], across[arrow.target]
    kind = "data" if arrow.is_data else "token" if arrow.is_token else "say"
    step = 1 if target > source else -1
    middle = source + step * _LANE_WIDTH // 2  # beside who says it: a long arrow's text would lie on other lanes
    return (
        f'<line class="{kind}" x1="{source}" y1="{y}" x2="{target - 2 * step}" y2="{y}" marker-end="url(#{kind})"/>\n'
        f'<text x="{middle}" y="{y - 5}" text-anchor="middle">{escape(arrow.text)}</text>\n'
    )


def _mark(mark: Mark, x: int, y: int) -> str:
    width = 7 * len(mark.text) + 14
    box, text = ("bad", ' class="badtext"') if mark.is_bad else ("mark", "")
    return (
        f'<rect class="{box}" x="{x - width // 2}" y="{y - 14}" width="{width}" height="20" rx="4"/>\n'
        f'<text{text} x="{x}" y="{y}" text-anchor="middle">{escape(mark.text)}</text>\n'
    )
