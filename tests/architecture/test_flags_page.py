"""docs/flags.md lists every flag of every command as it is."""

from __future__ import annotations

from tests.architecture.flags_page import PAGE, page


def test_the_page_of_flags_is_what_the_commands_take() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "stale: make docs"
    assert "| `--block-size` |" in page()
