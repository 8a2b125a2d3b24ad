"""What is drawn of a timeline: bars within their panels on lanes that are there, and of each fault its mark and its panel."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey
from router.events import Noted
from router.timeline import Record
from router.timeline_json import timeline
from router.timeline_picture import DECODE, LOST, MAX_RETRIES_DRAWN, MOVE, WIRE, picture
from router.timelines import Timelines
from tests.thorough import examples

NAME = "r"


class Story:
    """One request, told as the core tells it."""

    def __init__(self) -> None:
        self.timelines = Timelines(10)
        self.at = 0.01
        self.attempt = -1
        self.timelines.begin(Record(NAME, None, 8, 1, 0.0, self.at))

    def note(self, what: str, *nodes: str, code: str = "", attempt: int | None = None) -> None:
        number = self.attempt if attempt is None else attempt
        self.timelines.noted(Noted(NAME, 0, what, number, nodes, code), self.at)

    def timing(self, *, chunk_end_us: tuple[int, ...] = (), **parts_us: int) -> None:
        key = AttemptKey(NAME, 0, self.attempt).to_proto()
        self.timelines.timed(pb.Timing(key=key, chunk_end_us=chunk_end_us, **parts_us))

    def dispatch(self, sender: str, receiver: str, kind: str = "handoff") -> None:
        self.attempt += 1
        self.note("dispatched", sender, receiver, code=kind)

    def hand_over(self, receiver: str) -> None:
        """Its prompt is computed, it is handed over, and the receiver's first token is there."""
        self.timing(queue_us=1_000, prefill_us=9_000, chunk_end_us=(3_000, 6_000))
        self.at += 0.012
        self.timelines.emitted(NAME, 0, 1, self.at)
        self.at += 0.010
        self.timing(queue_us=0, admit_us=1_000, first_step_us=2_000)
        self.note("handed_over", receiver)
        self.timelines.emitted(NAME, 0, 1, self.at)

    def end(self, outcome: str = "length") -> None:
        self.timelines.finished(NAME, 0, outcome, self.at)
        self.timelines.ended(NAME, outcome, 9, self.at)

    def drawn(self) -> dict[str, Any]:
        record = self.timelines.find(NAME)
        assert record is not None
        return checked(picture(timeline(record, self.at)))


def checked(made: dict[str, Any]) -> dict[str, Any]:
    """What holds of every picture."""
    for panel in made["panels"]:
        assert panel["start"] <= panel["end"]
        assert panel["lanes"][0] == "router" and len(set(panel["lanes"])) == len(panel["lanes"])
        for bar in panel["bars"]:
            assert bar["lane"] in panel["lanes"]
            assert panel["start"] <= bar["start"] <= bar["end"] <= panel["end"], bar
        for mark in panel["marks"]:
            assert panel["start"] <= mark["at"] <= panel["end"] and mark["lane"] in {None, *panel["lanes"]}
    assert made["panels"][-1]["kind"] == "whole"
    return made


def bars(panel: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [bar for bar in panel["bars"] if bar["kind"] == kind]


@pytest.mark.covers("O03")
def test_a_node_that_dies_is_a_mark_on_its_lane_a_panel_of_its_own_and_two_bars_of_decode() -> None:
    story = Story()
    story.dispatch("p", "d0")
    story.hand_over("d0")
    story.at += 1.0
    story.note("failed", "d0", code="NODE_LOST")
    died_at = story.at
    story.dispatch("p", "d1")
    story.hand_over("d1")
    resumed_at = story.at
    story.at += 2.0
    story.end()
    beginning, retry, whole = story.drawn()["panels"]
    assert [beginning["kind"], retry["kind"]] == ["beginning", "retry"]
    assert beginning["end"] == pytest.approx(0.032) and {each["lane"] for each in bars(beginning, "prefill")} == {"p"}
    assert retry["start"] < died_at < resumed_at < retry["end"] and retry["end"] - retry["start"] < 0.1
    assert retry["lanes"] == whole["lanes"] == ["router", "p", WIRE, "d0", "d1"]
    first, second = bars(whole, DECODE)
    assert (first["lane"], first["end"], second["lane"]) == ("d0", pytest.approx(died_at), "d1")
    assert second["start"] == pytest.approx(resumed_at) and second["end"] == pytest.approx(story.at)
    (transfer,) = [bar for bar in bars(retry, "transfer") if bar["attempt"] == 1]
    assert transfer["end"] == pytest.approx(resumed_at - 0.003)
    (mark,) = [each for each in whole["marks"] if each["kind"] == "failed"]
    assert mark == {"at": pytest.approx(died_at), "kind": "failed", "text": "NODE_LOST: d0", "lane": "d0"}


def moving_story() -> Story:
    """Half a second of a move from d0 to d1, a second behind its handoff."""
    story = Story()
    story.dispatch("p", "d0")
    story.hand_over("d0")
    story.at += 1.0
    story.note("move_begun", "d0", "d1", attempt=1)
    story.at += 0.5
    return story


def test_a_move_is_a_bar_on_the_wire_and_no_failure() -> None:
    story = moving_story()
    story.note("moved", "d1", attempt=1)
    story.at += 1.0
    story.end()
    (_, whole) = story.drawn()["panels"]
    (move,) = bars(whole, MOVE)
    assert (move["lane"], move["end"] - move["start"]) == (WIRE, pytest.approx(0.5))
    assert [bar["lane"] for bar in bars(whole, DECODE)] == ["d0", "d1"]
    assert {each["kind"] for each in whole["marks"]} == {"first_token", "moved", "ended"}


@pytest.mark.covers("O03")
def test_a_move_that_came_to_nothing_hides_no_retry_and_is_none() -> None:
    """The holder dies behind it: the retry is what the client waited for."""
    story = moving_story()
    story.note("move_off", "d1")
    story.at += 0.5
    assert [panel["kind"] for panel in story.drawn()["panels"]] == ["beginning", "whole"]
    story.note("failed", "d0", code="NODE_LOST")
    died_at = story.at
    story.attempt = 1
    story.dispatch("p", "d2")
    story.hand_over("d2")
    resumed_at = story.at
    story.at += 1.0
    story.end()
    _, retry, whole = story.drawn()["panels"]
    assert retry["kind"] == "retry" and retry["start"] < died_at < resumed_at < retry["end"] < died_at + 0.1
    assert not bars(whole, MOVE) and not bars(whole, LOST) and "d1" not in whole["lanes"]
    assert [bar["lane"] for bar in bars(whole, DECODE)] == ["d0", "d2"]


def test_an_attempt_that_came_to_nothing_is_drawn_as_lost_and_one_that_lives_is_not() -> None:
    story = Story()
    story.dispatch("p", "d0")
    story.at += 0.2
    (whole,) = story.drawn()["panels"]
    assert not bars(whole, LOST) and not bars(whole, DECODE)
    story.note("failed", "p", code="NODE_LOST")
    story.dispatch("p2", "d0")
    story.at += 0.1
    (whole,) = story.drawn()["panels"]
    (lost,) = bars(whole, LOST)
    assert (lost["lane"], lost["start"], lost["end"]) == ("p", pytest.approx(0.01), pytest.approx(0.21))


def test_a_node_that_dies_before_it_has_done_anything_has_a_lane_for_its_mark() -> None:
    story = Story()
    story.dispatch("p", "d0")
    story.at += 0.1
    story.note("failed", "d0", code="NODE_LOST")
    story.dispatch("p", "d1")
    story.hand_over("d1")
    story.end()
    for panel in story.drawn()["panels"]:
        assert "d0" in panel["lanes"] and [each["lane"] for each in panel["marks"] if each["kind"] == "failed"] == [
            "d0"
        ]


def test_where_one_node_does_all_it_decodes_behind_its_own_prefill() -> None:
    story = Story()
    story.dispatch("m", "m", "mixed")
    story.timing(prefill_us=5_000)
    story.at += 0.01
    story.timelines.emitted(NAME, 0, 2, story.at)
    story.at += 0.5
    story.end()
    whole = story.drawn()["panels"][-1]
    assert whole["lanes"] == ["router", "m"]
    (decode,) = bars(whole, DECODE)
    assert decode["end"] == pytest.approx(story.at)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("dispatch", "hand_over", "failed", "move", "moved", "emitted", "finish")),
        st.sampled_from(("a", "b", "c")),
        st.sampled_from(("a", "b", "c")),
        st.sampled_from(("handoff", "mixed", "local_short")),
        st.floats(0, 2),
    ),
    max_size=25,
)


@pytest.mark.covers("O03")
@given(STEPS, st.integers(0, 5))
@settings(max_examples=examples(300, 3), deadline=None)
def test_whatever_happens_to_a_request_it_can_be_drawn(steps: list[tuple[Any, ...]], choice: int) -> None:
    story = Story()
    for what, node, other, kind, seconds in steps:
        story.at += seconds
        match what:
            case "dispatch":
                story.dispatch(node, other, kind)
            case "hand_over" if story.attempt >= 0:
                story.hand_over(other)
            case "failed":
                story.note("failed", node, code="NODE_LOST")
            case "move":
                story.note("move_begun", node, other, attempt=story.attempt + 1)
            case "moved":
                story.attempt += 1
                story.note("moved", other)
            case "emitted":
                story.timelines.emitted(NAME, 0, 1, story.at)
            case "finish":
                story.end()
    panels = story.drawn()["panels"]
    assert len(panels) <= MAX_RETRIES_DRAWN + 2
    record = story.timelines.find(NAME)
    assert record is not None
    assert checked(picture(timeline(record, story.at), choice))["choice"] == 0, "one that is not there: the first"


@pytest.mark.covers("O03")
def test_a_prefill_shows_where_its_chunks_ended() -> None:
    story = Story()
    story.dispatch("prefill-0", "decode-0")
    story.hand_over("decode-0")
    story.end()
    for panel in story.drawn()["panels"]:
        (bar,) = bars(panel, "prefill")
        assert [round(cut - bar["start"], 6) for cut in bar["cuts"]] == [0.003, 0.006]
        assert not any(other["cuts"] for other in panel["bars"] if other is not bar)
