"""Every link between our pages leads somewhere, and every page of docs/ can be reached from the README."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from tests.architecture.source_tree import ROOT

_LINK: Final = re.compile(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)")
_CODE: Final = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def _pages() -> list[Path]:
    return [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "bench" / "results").rglob("*.md")),
    ]


def _linked(page: Path) -> set[Path]:
    """Files that a page links to, however they are spelt."""
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    targets = (found.partition("#")[0] for found in _LINK.findall(text))
    return {(page.parent / target).resolve() for target in targets if target and "://" not in target}


def test_every_link_between_pages_leads_to_a_file() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}" for page in _pages() for target in _linked(page) if not target.exists()
    ]
    assert not broken, "\n".join(broken)


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, found = set[Path](), {ROOT / "README.md"}
    while found - reached:
        page = (found - reached).pop()
        reached.add(page)
        found |= {target for target in _linked(page) if target.suffix == ".md" and target.is_file()}
    assert not [page.name for page in (ROOT / "docs").glob("*.md") if page not in reached]
