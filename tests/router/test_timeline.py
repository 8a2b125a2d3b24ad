"""Timelines: parts that are what truly took the time, whatever clocks say; sums that hold whatever is said; bounded memory."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.timing import Computed, Received
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey
from router.events import Noted
from router.timeline import (
    ADMIT,
    FIRST_STEP,
    MAX_ATTEMPTS,
    MAX_EVENTS,
    PREFILL,
    QUEUE,
    RESERVE_WAIT,
    RETRY,
    RETURN,
    ROUTE,
    TRANSFER,
    Leg,
    Record,
)
from router.timeline_json import summary, timeline
from router.timeline_picture import picture
from router.timelines import Timelines
from tests.thorough import examples

NAME = "r"
US = 1e-6
CLOSE = 5e-6  # a node tells whole microseconds

durations = st.integers(0, 3_000_000).map(lambda micros: micros * US)
offsets = st.floats(-1e6, 1e6)


def key(attempt: int, choice: int = 0) -> AttemptKey:
    return AttemptKey(NAME, choice, attempt)


def begun(
    timelines: Timelines, now: float = 0.0, num_choices: int = 1, name: str = NAME, client: str | None = None
) -> None:
    timelines.begin(Record(name, client, 8, num_choices, now, now))


def dispatched(attempt: int, kind: str = "handoff", choice: int = 0) -> Noted:
    return Noted(NAME, choice, "dispatched", attempt, ("p", "d"), kind)


def legs(timelines: Timelines) -> tuple[Leg, Leg]:
    record = timelines.find(NAME)
    assert record is not None
    second = record.tracks[0].to_second
    assert second is not None
    return record.tracks[0].to_first, second


def checked(leg: Leg) -> dict[str, float]:
    """Its parts: none negative, together what it took."""
    parts = leg.parts()
    assert all(seconds >= 0 for seconds in parts.values())
    assert leg.seconds is not None and sum(parts.values()) == pytest.approx(leg.seconds, abs=1e-9)
    return parts


def assert_like(parts: dict[str, float], expected: dict[str, float]) -> None:
    for name in {*parts, *expected}:
        assert parts.get(name, 0.0) == pytest.approx(expected.get(name, 0.0), abs=CLOSE), name


@dataclass
class Truth:
    """One request as somebody saw it who has one clock for all hosts; each host's own is off by anything."""

    draw: random.Random
    at: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)

    def pass_time(self, part: str, most_s: float = 1.0) -> float:
        """The part takes some time; the instant of its end."""
        seconds = self.draw.choice((0.0, 0.001, most_s)) * self.draw.random()
        self.spent[part] = self.spent.get(part, 0.0) + seconds
        self.at += seconds
        return self.at

    def take(self) -> dict[str, float]:
        spent, self.spent = self.spent, {}
        return spent


@pytest.mark.covers("O02")
@given(st.randoms(use_true_random=False), offsets, offsets, offsets, st.integers(0, 3), st.booleans(), st.booleans())
@settings(max_examples=examples(300, 3), deadline=None)
def test_the_parts_are_what_truly_took_the_time_whatever_the_clocks_of_the_hosts(
    draw: random.Random,
    router: float,
    sender: float,
    receiver: float,
    num_failed: int,
    fails_between: bool,
    streams: bool,
) -> None:
    truth, timelines, attempt = Truth(draw), Timelines(10), num_failed
    arrived = truth.at
    timelines.begin(Record(NAME, None, 8, 1, router + arrived, router + truth.pass_time(ROUTE)))
    for number in range(num_failed):
        timelines.noted(dispatched(number), router + truth.pass_time(QUEUE))
        if draw.random() < 0.5:  # what it computed for nothing is told, and is no part of anything
            timelines.timed(pb.Timing(key=key(number).to_proto(), queue_us=3, prefill_us=5_000_000))
        timelines.noted(Noted(NAME, 0, "failed", number, ("d",), "NODE_LOST"), router + truth.pass_time(RETRY))

    def compute(number: int) -> Computed:
        """A Dispatch, as far as the first token is on its way."""
        timelines.noted(dispatched(number), router + truth.pass_time(QUEUE))
        times = Computed(sender + truth.pass_time(RETURN, 0.01))
        times.begun_at = sender + truth.pass_time(QUEUE)
        timing = times.first_token(key(number), sender + truth.pass_time(PREFILL), 0)
        timelines.timed(timing)
        return times

    times = compute(attempt)
    said_at, way_back = truth.at, draw.random() * 0.001
    timelines.emitted(NAME, 0, 1, router + said_at + way_back)
    seen_at = said_at + way_back
    if streams:
        seen_at += 0.0005
        timelines.written(NAME, 0, 1, router + seen_at)
    expected = truth.take()
    expected[RETURN] += seen_at - said_at
    first, second = legs(timelines)
    assert_like(checked(first), expected)
    assert first.seconds == pytest.approx(seen_at - arrived, abs=CLOSE)

    if fails_between:
        truth.at = seen_at
        timelines.noted(Noted(NAME, 0, "failed", attempt, ("d",), "NODE_LOST"), router + truth.pass_time(RETRY))
        compute(attempt + 1)
        rest = RETURN
    else:
        reserve_wait_us = times.reserve_wait_us(sender + truth.pass_time(RESERVE_WAIT))
        committed_at = receiver + truth.pass_time(TRANSFER, 0.1)
        received = Received(reserve_wait_us, committed_at, receiver + truth.pass_time(ADMIT))
        timing, goes_on = received.next_token(key(attempt), receiver + truth.pass_time(FIRST_STEP), 0)
        assert not goes_on
        timelines.timed(timing)
        truth.spent[TRANSFER] -= seen_at - said_at  # the client had the first token so much later
        rest = TRANSFER
    later = 0.01  # more than the first token took back, so that nothing of the sum is hidden behind that
    assert timelines.emitted(NAME, 0, 1, router + truth.at + later)
    expected = truth.take()
    expected[rest] = expected.get(rest, 0.0) + later
    assert_like(checked(second), expected)
    assert second.seconds == pytest.approx(truth.at + later - seen_at, abs=CLOSE)


@pytest.mark.covers("O02")
def test_where_one_node_does_all_the_second_token_took_a_step() -> None:
    timelines = Timelines(10)
    begun(timelines)
    timelines.noted(dispatched(0, "local_short"), 1.0)
    times = Computed(50.0, begun_at=52.0)
    for now, at in ((52.5, 3.6), (52.7, 3.8)):
        timing, _ = times.next_token(key(0), now, 0)
        timelines.timed(timing)
        timelines.emitted(NAME, 0, 1, at)
    first, second = legs(timelines)
    assert_like(checked(first), {QUEUE: 1.0 + 2.0, PREFILL: 0.5, RETURN: 0.1})
    assert_like(checked(second), {FIRST_STEP: 0.2})


@pytest.mark.covers("O02")
def test_a_late_first_token_hides_what_went_before_the_second() -> None:
    """The client waits for the first token until 2.0; what happened before that, it did not wait for any more."""
    timelines = Timelines(10)
    begun(timelines)
    timelines.noted(dispatched(0), 0.0)
    timelines.emitted(NAME, 0, 1, 1.0)
    timelines.timed(pb.Timing(key=key(0).to_proto(), reserve_wait_us=700_000, admit_us=200_000, first_step_us=100_000))
    timelines.emitted(NAME, 0, 1, 2.1)
    timelines.written(NAME, 0, 1, 2.0)
    timelines.written(NAME, 0, 2, 2.25)
    _, second = legs(timelines)
    assert_like(checked(second), {FIRST_STEP: 0.1, ADMIT: 0.15})


@pytest.mark.covers("O03")
def test_a_request_that_moved_says_where_and_when() -> None:
    timelines = Timelines(10)
    begun(timelines, client="mine")
    timelines.noted(dispatched(0), 1.0)
    timelines.emitted(NAME, 0, 1, 2.0)
    timelines.noted(Noted(NAME, 0, "move_begun", 1, ("d", "e")), 3.0)
    timelines.noted(Noted(NAME, 0, "moved", 1, ("e",)), 4.0)
    timelines.noted(Noted(NAME, 0, "failed", 1, ("e",), "NODE_LOST"), 5.0)
    timelines.noted(dispatched(2), 6.0)
    timelines.finished(NAME, 0, "length", 8.0)
    timelines.ended(NAME, "length", 9, 8.0)
    record = timelines.find("mine")
    assert record is not None and record is timelines.find(f"cmpl-{NAME}")
    shown = timeline(record, 99.0)
    assert json.loads(json.dumps(shown)) == shown and shown["seconds"] == 8.0
    attempts = shown["choices"][0]["attempts"]
    assert [(each["attempt"], each["kind"], each["end"], each["at"], each["ended_at"]) for each in attempts] == [
        (0, "handoff", "moved", 1.0, 4.0),
        (1, "move", "NODE_LOST", 3.0, 5.0),
        (2, "handoff", "length", 6.0, 8.0),
    ]
    assert [each["what"] for each in shown["events"]] == [
        "dispatched", "first_token", "move_begun", "moved", "failed", "dispatched", "finished", "ended"
    ]  # fmt: skip
    assert summary(record, 99.0)["num_attempts"] == 3
    queued = [span for span in shown["spans"] if span["name"] == "queue"]
    assert [(span["start"], span["seconds"]) for span in queued] == [(0.0, 1.0), (5.0, 1.0)]


@pytest.mark.parametrize(
    ("reasons", "outcome", "ended_well"),
    [
        (("stop", "length"), "mixed", True),
        (("stop", "pd_reschedule"), "mixed", False),
        (("stop", None), "aborted", False),
        (("length", "length"), "length", True),
        ((None, None), None, None),
    ],
)
def test_a_request_has_ended_well_where_each_choice_has(
    reasons: tuple[str | None, str | None], outcome: str | None, ended_well: bool | None
) -> None:
    timelines = Timelines(10)
    begun(timelines, num_choices=2)
    for choice, reason in enumerate(reasons):
        if reason is not None:
            timelines.finished(NAME, choice, reason, 2.0)
    if outcome is not None:
        timelines.ended(NAME, outcome, 9, 3.0)
    record = timelines.find(NAME)
    assert record is not None
    drawn = picture(shown := timeline(record, 4.0))
    assert (summary(record, 4.0)["ended_well"], shown["ended_well"]) == (ended_well, ended_well)
    ends = [mark["kind"] for mark in drawn["panels"][-1]["marks"] if mark["text"].startswith("ended")]
    assert ends == [] if outcome is None else ["ended" if ended_well else "failed"]


@pytest.mark.covers("O03")
@pytest.mark.parametrize("word", ["move_off", "failed", "finished"])
def test_a_move_that_came_to_nothing_has_an_end_and_is_where_nobody_was(word: str) -> None:
    """Called off, or over with the attempt that was to move: it does not last for as long as somebody looks."""
    timelines = Timelines(10)
    begun(timelines)
    timelines.noted(dispatched(0), 1.0)
    timelines.noted(Noted(NAME, 0, "move_begun", 1, ("d", "e")), 3.0)
    if word == "move_off":
        timelines.noted(Noted(NAME, 0, "move_off", 0, ("e",)), 4.0)
        timelines.noted(Noted(NAME, 0, "move_begun", 2, ("d", "f")), 5.0)
        timelines.noted(Noted(NAME, 0, "moved", 2, ("f",)), 6.0)
    elif word == "failed":
        timelines.noted(Noted(NAME, 0, "failed", 0, ("d",), "NODE_LOST"), 4.0)
        timelines.noted(dispatched(2), 6.0)
    timelines.finished(NAME, 0, "length", 8.0)
    timelines.ended(NAME, "length", 9, 8.0)
    record = timelines.find(NAME)
    assert record is not None
    shown = timeline(record, 99.0)
    first, move, *more = shown["choices"][0]["attempts"]
    ends = {"move_off": ("moved", 6.0, 4.0), "failed": ("NODE_LOST", 4.0, 4.0), "finished": ("length", 8.0, 8.0)}
    assert (first["end"], first["ended_at"], move["ended_at"]) == ends[word]
    assert (move["kind"], move["end"]) == ("move", "move_off")
    assert [each["end"] for each in more] == ["length"] * (word != "finished")
    assert max(span["start"] + span["seconds"] for span in shown["spans"]) == 8.0
    queued = [(span["start"], span["seconds"]) for span in shown["spans"] if span["name"] == "queue"]
    assert queued == [(0.0, 1.0), (4.0, 2.0)][: 2 if word == "failed" else 1]


# ---------------------------------------------------------------- whatever is said


def act(timelines: Timelines, rng: random.Random, now: float) -> None:
    """Something that makes sense, or not."""
    choice, attempt = rng.randrange(3), rng.randrange(5)
    match rng.randrange(9):
        case 0 | 1:
            timelines.noted(dispatched(attempt, rng.choice(("handoff", "mixed")), choice), now)
        case 2:
            timelines.noted(Noted(NAME, choice, "failed", attempt, ("d",), "NODE_LOST"), now)
        case 3:
            timelines.noted(Noted(NAME, choice, "move_begun", attempt, ("d", "e")), now)
        case 4:
            timelines.noted(Noted(NAME, choice, "moved", attempt, ("e",)), now)
        case 5:
            numbers = {f"{name}_us": rng.randrange(10**7) for name in (QUEUE, PREFILL, RESERVE_WAIT, ADMIT, FIRST_STEP)}
            ends = [rng.randrange(10**7) for _ in range(rng.randrange(100))]
            timelines.timed(pb.Timing(key=key(attempt, choice).to_proto(), chunk_end_us=ends, **numbers))
        case 6 | 7:
            timelines.emitted(NAME, choice, rng.randrange(1, 4), now)
        case _:
            timelines.written(NAME, choice, rng.randrange(1, 3), now)


@pytest.mark.covers("O02", "O03")
def test_whatever_is_said_in_whatever_order_sums_hold_and_it_is_json(fresh_seed: int) -> None:
    rng = random.Random(fresh_seed)
    for _ in range(300):
        timelines, now = Timelines(10), 0.0
        begun(timelines, num_choices=2)
        for _ in range(rng.randrange(30)):
            now += rng.choice((0.0, rng.random()))
            act(timelines, rng, now)
        record = timelines.find(NAME)
        assert record is not None
        for track in record.tracks:
            for leg in (track.to_first, track.to_second):
                if leg is not None and leg.ends_at is not None:
                    checked(leg)
        shown = timeline(record, now)
        assert json.loads(json.dumps(shown)) == shown
        assert all(span["seconds"] >= 0 for span in shown["spans"])


# ---------------------------------------------------------------- bounds


def test_the_newest_are_kept_and_what_is_said_of_others_is_dropped() -> None:
    timelines = Timelines(3)
    for number in range(10):
        begun(timelines, name=f"r{number}", client="same")
        timelines.ended(f"r{number}", "stop", 0, number)
    assert [record.request_id for record in timelines.newest()] == ["r9", "r8", "r7"]
    found = timelines.find("same")
    assert found is not None and found.request_id == "r9"
    assert timelines.find("r0") is None and timelines.find("") is None
    assert timelines.emitted("r0", 0, 1, 1.0), "nothing more is to be told of it"
    timelines.noted(Noted("r0", 0, "dispatched", 0, ("p", "d")), 1.0)
    timelines.timed(pb.Timing(key=pb.AttemptKey(request_id="r9", choice=7)))
    assert timelines.ended("r0", "stop", 1, 1.0) is None


def test_who_lives_is_kept_however_many_newer_ones_have_ended() -> None:
    """A long stream's parts are counted when it ends, and its timeline is what somebody looks for while it lasts."""
    timelines = Timelines(3)
    begun(timelines, name="long")
    for number in range(10):
        begun(timelines, name=f"r{number}")
        timelines.ended(f"r{number}", "stop", 0, number)
    assert [record.request_id for record in timelines.newest()] == ["r9", "r8", "r7", "long"]
    record = timelines.ended("long", "stop", 0, 99.0)
    assert record is not None and timelines.find("long") is record and timelines.find("r7") is None


def test_many_choices_take_more_room_and_none_at_all_takes_none() -> None:
    timelines = Timelines(100)
    for number in range(100):
        begun(timelines, name=f"r{number}", num_choices=39)
        timelines.ended(f"r{number}", "stop", 0, number)
    assert len(timelines) == 10
    begun(timelines, name="huge", num_choices=1024)
    assert timelines.find("huge") is None and len(timelines) == 10
    nothing = Timelines(0)
    begun(nothing)
    assert len(nothing) == 0


def test_a_request_that_is_tried_for_ever_takes_no_more_memory() -> None:
    timelines = Timelines(10)
    begun(timelines)
    for attempt in range(1000):
        timelines.noted(dispatched(attempt), attempt)
        timelines.noted(Noted(NAME, 0, "failed", attempt, ("d",), "NO_BLOCKS"), attempt + 0.5)
    timelines.emitted(NAME, 0, 1, 1000.0)
    record = timelines.find(NAME)
    assert record is not None
    track = record.tracks[0]
    assert len(record.happenings) == MAX_EVENTS and record.num_dropped > 1000
    assert next(iter(track.attempts)) == 0 and list(track.attempts)[-1] == 999 and len(track.attempts) == MAX_ATTEMPTS
    assert_like(checked(track.to_first), {QUEUE: 999 * 0.5, RETRY: 1000 * 0.5, RETURN: 0.5})
