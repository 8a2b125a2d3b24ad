"""The pages of several workers as one: nothing is left out, nothing is counted twice, and what is worst is what is shown."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.worker_pages import found_timeline, no_timeline, whole_requests, whole_state


def node(name: str, session: str = "up", **more: Any) -> dict[str, Any]:
    usual = {"circuit": "closed", "listed": True, "draining": False, "prefilling": 0, "sequences": 0, "num_blocks": 9}
    return {"name": name, "incarnation": "1", "session": session} | usual | more


def state(*nodes: dict[str, Any], missing: tuple[str, ...] = (), live: int = 0, pid: int = 1) -> dict[str, Any]:
    own = {"router": f"router-{pid}", "pid": pid, "versions": {}, "ready": not missing, "missing": list(missing)}
    return own | {"degraded": [], "is_draining": False, "queued": live, "live_requests": live, "nodes": list(nodes)}


def shown(*states: dict[str, Any], asked: int = 0) -> dict[str, Any]:
    return whole_state({index: json.dumps(each) for index, each in enumerate(states)}, asked)


@pytest.mark.covers("R16")
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from(("up", "lost"))), min_size=1, max_size=5)
)
def test_counts_add_up_and_a_node_is_as_well_as_the_worst_off_worker_finds_it(
    parts: list[tuple[int, int, str]],
) -> None:
    states = [
        state(node("d", session, sequences=held), live=live, pid=pid) for pid, (live, held, session) in enumerate(parts)
    ]
    for asked in range(len(parts)):
        whole = shown(*states, asked=asked)
        assert whole["pid"] == asked, "the rest is what the one that was asked says"
        assert whole["queued"] == whole["live_requests"] == sum(live for live, _, _ in parts)
        (only,) = whole["nodes"]
        assert only["sequences"] == sum(held for _, held, _ in parts)
        assert (only["session"] == "up") == all(session == "up" for _, _, session in parts)
        assert [(each["worker"], each["live_requests"]) for each in whole["workers"]] == [
            (index, live) for index, (live, _, _) in enumerate(parts)
        ]


def test_a_node_that_one_worker_alone_knows_is_there_and_what_one_lacks_is_lacking() -> None:
    whole = shown(
        state(node("a")), state(node("b", circuit="open", draining=True), missing=("no decode node",)), state(node("b"))
    )
    assert {each["name"]: (each["circuit"], each["draining"]) for each in whole["nodes"]} == {
        "a": ("closed", False),
        "b": ("open", True),
    }
    assert not whole["ready"] and whole["missing"] == ["no decode node"]


@given(st.lists(st.lists(st.floats(0, 100), max_size=6), min_size=1, max_size=4), st.integers(0, 12))
def test_the_newest_requests_of_all_are_listed_newest_first(ages: list[list[float]], limit: int) -> None:
    texts = {
        index: json.dumps({"data": [{"age_s": age} for age in sorted(each)[:limit]]}) for index, each in enumerate(ages)
    }
    listed = [each["age_s"] for each in whole_requests(texts, limit)["data"]]
    assert listed == sorted(age for each in ages for age in each)[:limit]


def test_a_timeline_is_found_at_whoever_has_it() -> None:
    assert found_timeline({0: "", 1: ""}) is None
    assert found_timeline({0: "", 1: json.dumps({"id": "x", "age_s": 3})}) == {"id": "x", "age_s": 3}
    both = {0: json.dumps({"id": "old", "age_s": 3}), 1: json.dumps({"id": "new", "age_s": 1})}
    assert found_timeline(both) == {"id": "new", "age_s": 1}


def test_who_was_not_asked_in_time_may_have_the_timeline() -> None:
    late, gone = no_timeline("x", 1, 2), no_timeline("x", 2, 2)
    assert (late.status, late.retry_after_s) == (503, 1.0) and "1 of 2 workers" in late.message
    assert (gone.status, gone.retry_after_s) == (404, None) and "/v1/requests" in gone.message
