"""docs/protocol.md shows the tables as they are, all of them."""

from __future__ import annotations

import re

import pytest

from connector import handoff
from proto import baton_pb2 as pb
from router import ownership
from router.retry import COST, Cost
from runtime import session
from tests.architecture.protocol_page import PAGE, SECTION, SECTIONS, generated, status_of
from tests.architecture.source_tree import ROOT


def test_the_page_of_protocols_is_what_the_tables_say() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == generated(text), "stale: make docs"
    assert sorted(name for _, name, _ in SECTION.findall(text)) == sorted(SECTIONS)


@pytest.mark.parametrize(
    ("table", "sections"),
    [
        (handoff.SENDER_TABLE, ["connector/handoff.py:SENDER_TABLE"]),
        (handoff.RECEIVER_TABLE, ["connector/handoff.py:RECEIVER_TABLE"]),
        (ownership.TABLE, ["router/ownership.py:TABLE"]),
        (session.TABLE, ["runtime/session.py:TABLE,dialer", "runtime/session.py:TABLE,listener"]),
    ],
)
def test_every_row_of_a_table_is_shown_once_and_every_change_of_state_has_an_arrow(
    table: dict[tuple[handoff.SenderState, handoff.SenderEvent], tuple[handoff.SenderState, object]],
    sections: list[str],
) -> None:
    text = "".join(SECTIONS[section]() for section in sections)
    for (before, event), (after, _) in table.items():
        then = "stays" if after is before else after.name
        assert text.count(f"\n| {before.name} | {event.name} | {then} |") == 1
        arrows = [line for line in text.split("\n") if line.startswith(f"    {before.name} --> {after.name}: ")]
        if after is before:
            assert not arrows
        else:
            assert any(event.name in arrow.partition(": ")[2].split(", ") for arrow in arrows)


def test_a_changed_table_makes_the_page_stale() -> None:
    """Else the test above could not fail."""
    text = PAGE.read_text(encoding="utf-8")
    changed = text.replace("| RESERVED | EXPIRE | QUARANTINED |", "| RESERVED | EXPIRE | RELEASED |")
    assert changed != text == generated(changed)


def test_operators_are_told_the_status_with_which_a_pd_error_reaches_a_client() -> None:
    """The page said 502 of a broken handoff and 503 of full nodes: the one is 503, the other waits to the deadline."""
    told: dict[str, set[str]] = {name: set() for name, _ in pb.ErrorCode.items()}
    for status, names in re.findall(r"(?m)^\| (\d{3}) (`[^|]*)\|", (ROOT / "docs/operations.md").read_text("utf-8")):
        for name in told.keys() & set(re.findall("`([A-Z_]+)`", names)):
            told[name].add(status)
    for name, code in pb.ErrorCode.items():
        is_told = code not in (pb.ERROR_UNSPECIFIED, pb.INVALID) and COST.get(code) is not Cost.NOTHING
        bugs = {"500"} if code == pb.INTERNAL else set()  # the router's own, beside what nodes say
        assert told[name] == ({status_of(code)} | bugs if is_told else set()), name
