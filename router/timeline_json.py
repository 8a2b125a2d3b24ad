"""A request's timeline as JSON: its parts, its attempts, what happened, and spans to draw it from. Pure.

Times are seconds from the request's arrival. What a node measured is a duration: where in an attempt it began is not known to
anybody, so a span of a node's is put where it fits (half of what lies between, the way, before it and half behind), and says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from router.timeline import (
    ADMIT,
    FIRST_STEP,
    PREFILL,
    QUEUE,
    RESERVE_WAIT,
    ROUTE,
    TO_FIRST,
    TO_SECOND,
    TRANSFER,
    Attempt,
    Leg,
    Record,
    Track,
)

_DIGITS: Final = 6  # microseconds


def timeline(record: Record, now: float) -> dict[str, Any]:
    """All of a record; `now` is how far a request has come that lives."""
    first = record.first
    return {
        "object": "request.timeline",
        **summary(record, now),
        "choice": first.choice,  # the one that had its first token first: the next two are of it
        "time_to_first_token": _leg(first.to_first, TO_FIRST),
        "first_to_second_token": _leg(first.to_second, TO_SECOND),
        "choices": [_choice(track, record.arrived_at) for track in record.tracks],
        "events": [
            {
                "at": _round(each.at - record.arrived_at),
                "what": each.what,
                "choice": each.choice,
                "attempt": each.attempt,
                "nodes": list(each.nodes),
                "code": each.code or None,
            }
            for each in record.happenings
        ],
        "events_left_out": record.num_dropped,
        "spans": [span for track in record.tracks for span in _spans(track, record.arrived_at, now)],
    }


def summary(record: Record, now: float) -> dict[str, Any]:
    """One line of a list of requests."""
    ended_at = now if record.ended_at is None else record.ended_at
    to_first = record.first.to_first.seconds
    return {
        "id": record.request_id,
        "client_request_id": record.client_id,
        "outcome": record.outcome,  # null while it lives
        "ended_well": record.ended_well,
        "seconds": _round(ended_at - record.arrived_at),
        "age_s": _round(now - record.arrived_at),
        "first_token_s": None if to_first is None else _round(to_first),
        "prompt_tokens": record.num_prompt_tokens,
        "completion_tokens": record.num_completion_tokens if record.outcome is not None else None,
        "num_choices": len(record.tracks),
        "num_attempts": sum(track.num_attempts for track in record.tracks),
        "nodes": sorted(
            {name for track in record.tracks if track.current is not None for name in _nodes(track.current)}
        ),
    }


def _nodes(attempt: Attempt) -> tuple[str, ...]:
    return attempt.sender, attempt.receiver


def _leg(leg: Leg | None, names: tuple[str, ...]) -> dict[str, Any] | None:
    """None: it has not ended. Parts that are always there, and others where a retry lies in it."""
    if leg is None or leg.seconds is None:
        return None
    parts = dict.fromkeys(names, 0.0) | leg.parts()
    return {"seconds": _round(leg.seconds), "parts": _rounded(parts)}


def _rounded(parts: Mapping[str, float]) -> dict[str, float]:
    return {name: _round(seconds) for name, seconds in parts.items()}


def _round(seconds: float) -> float:
    return round(seconds, _DIGITS)


def _choice(track: Track, arrived_at: float) -> dict[str, Any]:
    return {
        "index": track.choice,
        "finish_reason": track.finish_reason,
        "time_to_first_token": _leg(track.to_first, TO_FIRST),
        "first_to_second_token": _leg(track.to_second, TO_SECOND),
        "num_attempts": track.num_attempts,
        "attempts": [
            {
                "attempt": each.number,
                "kind": each.kind,
                "sender": each.sender,
                "receiver": each.receiver,
                "at": _round(each.at - arrived_at),
                "ended_at": None if each.ended_at is None else _round(each.ended_at - arrived_at),
                "end": each.end,
                "parts": _rounded(each.parts),
            }
            for each in track.attempts.values()
        ],
    }


def _spans(track: Track, arrived_at: float, now: float) -> Iterator[dict[str, Any]]:
    """What is to be drawn of a choice, lane by lane."""

    def span(lane: str, name: str, start: float, seconds: float, attempt: int | None, **more: Any) -> dict[str, Any]:
        what = {"lane": lane, "name": name, "start": _round(start - arrived_at), "seconds": _round(max(seconds, 0.0))}
        return what | {"choice": track.choice, "attempt": attempt} | more

    route = dict(track.to_first.spent).get(ROUTE, 0.0)
    yield span("router", ROUTE, arrived_at, route, None)
    free_from = arrived_at + route
    for attempt in track.attempts.values():
        ended_at = now if attempt.ended_at is None else attempt.ended_at
        if attempt.at > free_from:
            yield span("router", QUEUE, free_from, attempt.at - free_from, None)
        ended = {"end": attempt.end, "kind": attempt.kind}
        yield span("router", "attempt", attempt.at, ended_at - attempt.at, attempt.number, **ended)
        for lane, name, start, seconds in _spans_of_nodes(track, attempt):
            cuts = {"cuts": [_round(start + end - arrived_at) for end in attempt.chunk_ends]} if name == PREFILL else {}
            yield span(lane, name, start, seconds, attempt.number, estimated=True, **cuts)
        free_from = max(free_from, ended_at)


def _spans_of_nodes(track: Track, attempt: Attempt) -> Iterator[tuple[str, str, float, float]]:
    """Lane, name, start and length of what the nodes of an attempt have told, and of the way between them."""
    told = attempt.parts
    computed, at = told.get(QUEUE, 0.0) + told.get(PREFILL, 0.0), attempt.at
    for leg in (track.to_first, track.to_second):
        if leg is not None and leg.attempt is attempt and leg.is_dispatched:
            at += max(leg.last_stretch - computed, 0.0) / 2
    for name in (QUEUE, PREFILL):
        if name in told:
            yield attempt.sender, name, at, told[name]
            at += told[name]
    leg = track.to_second
    if leg is None or leg.attempt is not attempt or leg.ends_at is None or leg.is_dispatched:
        return
    parts, at = leg.parts(), leg.begins_at
    for lane, name in (
        (attempt.sender, RESERVE_WAIT),
        ("wire", TRANSFER),
        (attempt.receiver, ADMIT),
        (attempt.receiver, FIRST_STEP),
    ):
        if name in parts:
            yield lane, name, at, parts[name]
            at += parts[name]
