"""The diagrams and tables of docs/protocol.md, from the tables that the code runs on. `make docs` writes them anew.

The page's prose is written by hand; what stands between `<!-- from X -->` and `<!-- end -->` comes from here.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from typing import Final, TypeVar

from connector import handoff
from decode_node import moving
from node.pd_error import NOT_RETRYABLE
from proto import baton_pb2 as pb
from router import ownership
from router.retry import COST, PREEMPTIONS_PER_RETRY, STATUS, Cost
from runtime import session
from tests.architecture.source_tree import ROOT

PAGE: Final = ROOT / "docs" / "protocol.md"
SECTION: Final = re.compile(r"(<!-- from (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)
DIALER: Final = (session.State.CONNECTING, session.State.OPEN, session.State.BROKEN, session.State.LOST)
LISTENER: Final = (session.State.AWAITED, session.State.ATTACHED, session.State.DETACHED, session.State.LOST)


def diagram(start: S, rows: Mapping[tuple[S, E], tuple[S, Collection[Enum]]]) -> str:
    """A mermaid state diagram; what leads from one state to another stands on one arrow, and what changes no state on none."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for (before, event), (after, _) in rows.items():
        if before is not after:
            arrows.setdefault((before.name, after.name), []).append(event.name)
    lines = [f"    [*] --> {start.name}"]
    lines += [f"    {before} --> {after}: {', '.join(events)}" for (before, after), events in arrows.items()]
    ends = {after for _, after in arrows} - {before for before, _ in arrows}
    lines += [f"    {end} --> [*]" for end in sorted(ends)]
    return "```mermaid\nstateDiagram-v2\n" + "\n".join(lines) + "\n```\n"


def transitions(rows: Mapping[tuple[S, E], tuple[S, Collection[Enum]]], ignored: Iterable[tuple[S, E]]) -> str:
    """Every row, in the code's order, and what is ignored in which state."""
    lines = ["", "| state | event | then | actions, in order |", "|---|---|---|---|"]
    for (before, event), (after, actions) in rows.items():
        then = "stays" if after is before else after.name
        lines.append(f"| {before.name} | {event.name} | {then} | {', '.join(each.name for each in actions)} |")
    races: dict[str, list[str]] = {}
    for state, event in sorted(ignored, key=lambda pair: (pair[0].value, pair[1].value)):
        races.setdefault(state.name, []).append(event.name)
    lines += ["", "Ignored, as races that right peers produce:", ""]
    lines += [f"- {state}: {', '.join(events)}" for state, events in races.items()]
    return "\n".join(lines) + "\n"


def meanings(title: str, members: type[Enum]) -> str:
    """What the code says of a member behind it; of one whose name says it all, nothing."""
    comments = dict(re.findall(r"^ +(\w+) = auto\(\)(?:  # (.*))?$", inspect.getsource(members), re.MULTILINE))
    lines = ["", f"| {title} | |", "|---|---|"]
    lines += [f"| {member.name} | {comments[member.name]} |" for member in members if comments[member.name]]
    return "\n".join(lines) + "\n"


def _sender() -> str:
    words = meanings("state", handoff.SenderState) + meanings("event", handoff.SenderEvent)
    words += meanings("action", handoff.SenderAction)
    table = handoff.SENDER_TABLE
    return diagram(handoff.SenderState.IDLE, table) + words + transitions(table, handoff.SENDER_IGNORED)


def _move() -> str:
    words = meanings("state", moving.MoveState) + meanings("event", moving.MoveEvent)
    words += meanings("action", moving.MoveAction)
    table = moving.MOVE_TABLE
    return diagram(moving.MoveState.RESTING, table) + words + transitions(table, moving.MOVE_IGNORED)


def _receiver() -> str:
    words = meanings("state", handoff.ReceiverState) + meanings("event", handoff.ReceiverEvent)
    words += meanings("action", handoff.ReceiverAction)
    table = handoff.RECEIVER_TABLE
    return diagram(handoff.ReceiverState.RESERVED, table) + words + transitions(table, handoff.RECEIVER_IGNORED)


def _owner() -> str:
    rows = {pair: (owner, (verdict,)) for pair, (owner, verdict) in ownership.TABLE.items()}
    words = (
        meanings("owner", ownership.Owner) + meanings("word", ownership.Word) + meanings("verdict", ownership.Verdict)
    )
    return diagram(ownership.Owner.SENDER, rows) + words + transitions(rows, ownership.IGNORED)


def _session(start: session.State, states: Collection[session.State]) -> str:
    rows = {pair: row for pair, row in session.TABLE.items() if pair[0] in states}
    ignored = [pair for pair in session.IGNORED if pair[0] in states]
    return diagram(start, rows) + transitions(rows, ignored)


_PRICES: Final[Mapping[Cost | None, str]] = {
    Cost.NOTHING: "nothing: it waits for capacity",
    Cost.PART: f"{1 / PREEMPTIONS_PER_RETRY:.3f} of a retry",
    Cost.RETRY: "a retry",
    None: "there is none",
}


def status_of(code: pb.ErrorCode.ValueType) -> str:
    """The status that a client gets for a request of which nothing was streamed, when nodes end its attempts with this."""
    if COST.get(code) is Cost.NOTHING:
        return "504, at its deadline"
    return str(503 if code in COST else STATUS.get(code, 500))


def _errors() -> str:
    lines = [
        "",
        "| code | retryable, says the node | what another attempt costs | HTTP status, if nothing was streamed |",
        "|---|---|---|---|",
    ]
    for code in pb.ErrorCode.values():
        if code == pb.ERROR_UNSPECIFIED:
            continue
        is_retryable = "no" if code in NOT_RETRYABLE else "yes"
        lines.append(f"| {pb.ErrorCode.Name(code)} | {is_retryable} | {_PRICES[COST.get(code)]} | {status_of(code)} |")
    return "\n".join(lines) + "\n"


SECTIONS: Final[Mapping[str, Callable[[], str]]] = {
    "connector/handoff.py:SENDER_TABLE": _sender,
    "connector/handoff.py:RECEIVER_TABLE": _receiver,
    "decode_node/moving.py:MOVE_TABLE": _move,
    "router/ownership.py:TABLE": _owner,
    "runtime/session.py:words": lambda: meanings("event", session.Event) + meanings("action", session.Action),
    "runtime/session.py:TABLE,dialer": lambda: _session(session.State.CONNECTING, DIALER),
    "runtime/session.py:TABLE,listener": lambda: _session(session.State.AWAITED, LISTENER),
    "router/retry.py:COST": _errors,
}


def generated(text: str) -> str:
    """The page with each of its sections as the code has it now. KeyError: a section that nothing is known of."""
    return SECTION.sub(lambda found: f"{found[1]}{SECTIONS[found[2]]()}{found[3]}", text)


def main() -> int:
    """Write the sections into the page."""
    PAGE.write_text(generated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
