"""What to draw of one request's timeline: panels with a lane for the router, each node and the wire, bars and marks on them. Pure.

    beginning    from the arrival to the second token: where the time to the first two went
    retry        one for each of the first failures: from a bit before it until the next attempt generates
    whole        from the arrival to the end: attempts, what failed, what moved

Made from the JSON that clients get (timeline_json.py), so what is drawn can be had as numbers, too. Where in an attempt a node's
own time lies nobody knows exactly: such bars say `estimated`. A page scales it to pixels and does nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final

from router.timeline import MOVE_OFF

MAX_RETRIES_DRAWN: Final = 3
WIRE: Final = "wire"
ROUTER: Final = "router"
DECODE, RETRY, LOST, MOVE, HANDOFF = "decode", "retry", "lost", "move", "handoff"
_BEFORE: Final = 0.25  # of a retry's length, that is shown in front of it
_BEHIND: Final = 0.15  # and behind it
_OF_SENDER: Final = ("queue", "prefill", "reserve_wait")
_OF_RECEIVER: Final = ("admit", "first_step")


@dataclass(frozen=True, slots=True)
class Bar:
    """A stretch on a lane, in seconds from the arrival."""

    lane: str
    kind: str
    start: float
    end: float
    attempt: int | None = None
    estimated: bool = False
    cuts: tuple[float, ...] = ()  # where one chunk of a prompt ended and the next began


@dataclass(frozen=True, slots=True)
class Mark:
    """An instant."""

    at: float
    kind: str  # first_token, failed, moved, ended
    text: str
    lane: str | None = None  # None: of all lanes


def picture(timeline: Mapping[str, Any], choice: int | None = None) -> dict[str, Any]:
    """Panels of one choice: the one asked for, else the one that was first."""
    index = timeline["choice"] if choice is None else choice
    found = next((each for each in timeline["choices"] if each["index"] == index), timeline["choices"][0])
    end = max(float(timeline["seconds"]), 0.0)
    bars, marks = list(_bars(timeline, found, end)), list(_marks(timeline, found, end))
    panels = [_panel("beginning", 0.0, second, bars, marks)] if (second := _second_token_at(found)) is not None else []
    for failed, resumed in _retries(found, bars, end)[:MAX_RETRIES_DRAWN]:
        length = resumed - failed
        first, last = max(failed - _BEFORE * length, 0.0), min(resumed + _BEHIND * length, end)
        panels.append(_panel("retry", first, last, bars, marks))
    return {"choice": found["index"], "panels": [*panels, _panel("whole", 0.0, end, bars, marks)]}


def _panel(kind: str, start: float, end: float, bars: Sequence[Bar], marks: Sequence[Mark]) -> dict[str, Any]:
    """What lies in this stretch, cut off at its edges; what would end before it begins, told late, is left out."""
    shown = [bar for bar in bars if start < bar.end >= bar.start < end]
    used = {ROUTER, *(bar.lane for bar in shown)}
    used |= {mark.lane for mark in marks if start <= mark.at <= end and mark.lane is not None}
    lanes = [lane for lane in _lanes(bars, marks) if lane in used]
    cut = [_within(bar, start, end) for bar in shown]
    inside = [asdict(mark) for mark in marks if start <= mark.at <= end and (mark.lane is None or mark.lane in lanes)]
    return {"kind": kind, "start": start, "end": end, "lanes": lanes, "bars": cut, "marks": inside}


def _within(bar: Bar, start: float, end: float) -> dict[str, Any]:
    """What of a bar lies in a panel."""
    first, last = max(bar.start, start), min(bar.end, end)
    return asdict(bar) | {"start": first, "end": last, "cuts": [each for each in bar.cuts if first < each < last]}


def _lanes(bars: Sequence[Bar], marks: Sequence[Mark]) -> list[str]:
    """The router, then who has something to show in the order in which it comes first; the wire behind the first node."""
    shown = [
        *((bar.start, bar.lane) for bar in bars),
        *((mark.at, mark.lane) for mark in marks if mark.lane is not None),
    ]
    ordered = sorted(shown, key=lambda each: each[0])
    nodes = list(dict.fromkeys(lane for _, lane in ordered if lane not in (ROUTER, WIRE)))
    wire = [WIRE] if any(bar.lane == WIRE for bar in bars) else []
    return [ROUTER, *nodes[:1], *wire, *nodes[1:]]


def _bars(timeline: Mapping[str, Any], choice: Mapping[str, Any], end: float) -> Iterator[Bar]:
    index = choice["index"]
    for span in timeline["spans"]:
        if span["choice"] == index and span["name"] != "attempt":
            start, stop = span["start"], span["start"] + span["seconds"]
            is_retry = span["lane"] == ROUTER and span["name"] == "queue" and _has_failed_before(choice, start)
            kind = RETRY if is_retry else span["name"]
            is_estimated, cuts = span.get("estimated", False), tuple(span.get("cuts", ()))
            yield Bar(span["lane"], kind, start, stop, span["attempt"], is_estimated, cuts)
    attempts = _attempts(choice)
    for position, attempt in enumerate(attempts):
        yield from _bars_of(timeline, choice, attempt, end, is_last=position == len(attempts) - 1)


def _bars_of(
    timeline: Mapping[str, Any], choice: Mapping[str, Any], attempt: Mapping[str, Any], end: float, *, is_last: bool
) -> Iterator[Bar]:
    """What the spans do not have: what was behind the second token, moves, and attempts that came to nothing."""
    number, receiver = attempt["attempt"], attempt["receiver"]
    ended = attempt["ended_at"]
    stop = end if ended is None else ended
    if attempt["kind"] == MOVE:
        moved = _at(timeline, choice, "moved", number)
        if moved is not None:
            yield Bar(WIRE, MOVE, attempt["at"], moved, number)
            yield Bar(receiver, DECODE, moved, stop, number)
        return
    begun = _decodes_from(timeline, choice, attempt)
    if begun is not None and begun <= stop:
        if attempt["kind"] == HANDOFF and begun != _second_token_at(choice):
            committed = max(begun - _told(attempt, *_OF_RECEIVER), attempt["at"])
            computed = min(attempt["at"] + _told(attempt, *_OF_SENDER), committed)
            yield Bar(WIRE, "transfer", computed, committed, number, True)
            yield Bar(receiver, "first_step", committed, begun, number, True)
        yield Bar(receiver, DECODE, begun, stop, number)
    elif not is_last or ended is not None:
        told = _told(attempt, *_OF_SENDER)
        yield Bar(attempt["sender"], LOST, min(attempt["at"] + told, stop), stop, number, True)


def _decodes_from(timeline: Mapping[str, Any], choice: Mapping[str, Any], attempt: Mapping[str, Any]) -> float | None:
    """When the receiver generates: behind the second token, or, of a later attempt, behind its first batch (`handed_over`)."""
    number, ended = attempt["attempt"], attempt["ended_at"]
    second = _second_token_at(choice)
    if second is not None and attempt["at"] <= second and (ended is None or ended >= second):
        return second
    handed = _at(timeline, choice, "handed_over", number)
    if handed is not None:
        return handed
    if attempt["kind"] != HANDOFF and "prefill" in attempt["parts"]:
        return float(attempt["at"]) + _told(attempt, *_OF_SENDER)
    return None


def _told(attempt: Mapping[str, Any], *names: str) -> float:
    """Seconds that nodes told of these parts."""
    return float(sum(attempt["parts"].get(name, 0.0) for name in names))


def _marks(timeline: Mapping[str, Any], choice: Mapping[str, Any], end: float) -> Iterator[Mark]:
    receivers = {each["attempt"]: each["receiver"] for each in choice["attempts"]}
    for event in timeline["events"]:
        if event["choice"] not in (None, choice["index"]):
            continue
        match event["what"]:
            case "first_token":
                yield Mark(event["at"], "first_token", "first token")
            case "failed":
                blamed = event["nodes"][0] if event["nodes"] else receivers.get(event["attempt"], ROUTER)
                yield Mark(event["at"], "failed", f"{event['code'] or 'failed'}: {blamed}", blamed)
            case "moved":
                yield Mark(event["at"], "moved", f"moved to {event['nodes'][0]}", event["nodes"][0])
            case "given_up":
                yield Mark(event["at"], "failed", f"given up: {event['code']}")
    outcome = timeline["outcome"]
    if outcome is not None:
        yield Mark(end, "ended" if timeline["ended_well"] else "failed", f"ended: {outcome}")


def _retries(choice: Mapping[str, Any], bars: Sequence[Bar], end: float) -> list[tuple[float, float]]:
    """When an attempt failed, and when the next one generated or failed as well."""
    found = []
    for attempt, following in pairwise(_attempts(choice)):
        if attempt["ended_at"] is None or following["kind"] == MOVE or attempt["end"] == "moved":
            continue
        resumed = [bar.start for bar in bars if bar.attempt == following["attempt"] and bar.kind == DECODE]
        until = resumed[0] if resumed else following["ended_at"]
        if until is not None and min(until, end) > attempt["ended_at"]:
            found.append((attempt["ended_at"], min(until, end)))
    return found


def _has_failed_before(choice: Mapping[str, Any], instant: float) -> bool:
    ends = [each["ended_at"] for each in _attempts(choice) if each["end"] != "moved"]
    return any(each is not None and each <= instant + 1e-9 for each in ends)


def _attempts(choice: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Where it was: a move that came to nothing is not drawn."""
    return [each for each in choice["attempts"] if each["end"] != MOVE_OFF]


def _second_token_at(choice: Mapping[str, Any]) -> float | None:
    legs = (choice["time_to_first_token"], choice["first_to_second_token"])
    return None if legs[0] is None or legs[1] is None else legs[0]["seconds"] + legs[1]["seconds"]


def _at(timeline: Mapping[str, Any], choice: Mapping[str, Any], what: str, attempt: int) -> float | None:
    """The last instant of such an event of an attempt."""
    instants = [
        float(event["at"])
        for event in timeline["events"]
        if event["what"] == what and event["choice"] == choice["index"] and event["attempt"] == attempt
    ]
    return instants[-1] if instants else None
