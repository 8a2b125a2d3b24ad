"""The circuit of the KV pool as a table: every state, everything that can happen in it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.kv_breaker import (
    CLOSED,
    BreakerTiming,
    Circuit,
    Closed,
    Open,
    Probing,
    after_asking,
    after_failure,
    after_nothing,
    lets_through,
)

TIMING = BreakerTiming(num_failures=3, first_s=1.0, longest_s=5.0)
NOW = 100.0


@pytest.mark.covers("W08")
@pytest.mark.parametrize(
    ("circuit", "asking", "failure", "nothing"),
    [
        (Closed(0), Closed(0), Closed(1), Closed(0)),
        (Closed(1), Closed(1), Closed(2), Closed(1)),
        (Closed(2), Closed(2), Open(NOW + 1, 1), Closed(2)),
        (Open(NOW + 0.1, 1), None, Open(NOW + 0.1, 1), Open(NOW + 0.1, 1)),
        (Open(NOW, 1), Probing(1), Open(NOW, 1), Open(NOW, 1)),
        (Open(NOW - 50, 4), Probing(4), Open(NOW - 50, 4), Open(NOW - 50, 4)),
        (Probing(1), None, Open(NOW + 2, 2), Open(NOW, 1)),
        (Probing(2), None, Open(NOW + 4, 3), Open(NOW, 2)),
        (Probing(3), None, Open(NOW + 5, 4), Open(NOW, 3)),
        (Probing(3000), None, Open(NOW + 5, 3001), Open(NOW, 3000)),
    ],
)
def test_what_follows_in_each_state(
    circuit: Circuit, asking: Circuit | None, failure: Circuit, nothing: Circuit
) -> None:
    assert lets_through(circuit, NOW) == (asking is not None)
    if asking is None:
        with pytest.raises(ValueError, match="no call"):
            after_asking(circuit, NOW)
    else:
        assert after_asking(circuit, NOW) == asking
    assert after_failure(circuit, NOW, TIMING) == failure
    assert after_nothing(circuit, NOW) == nothing


@pytest.mark.covers("W08")
@given(st.lists(st.tuples(st.sampled_from(["succeeded", "failed", "nothing"]), st.floats(0, 10)), max_size=60))
def test_a_pool_that_is_asked_again_and_again_is_never_left_alone_for_good(calls: list[tuple[str, float]]) -> None:
    circuit: Circuit = CLOSED
    now = 0.0
    in_a_row = 0
    for outcome, pause_s in calls:
        now += pause_s
        if not lets_through(circuit, now):
            assert in_a_row >= TIMING.num_failures, "left alone without a reason"
            assert isinstance(circuit, Open) and circuit.until - now <= TIMING.longest_s
            continue
        circuit = after_asking(circuit, now)
        match outcome:
            case "succeeded":
                circuit, in_a_row = CLOSED, 0
            case "failed":
                circuit, in_a_row = after_failure(circuit, now, TIMING), in_a_row + 1
            case _:
                circuit = after_nothing(circuit, now)
        assert not isinstance(circuit, Probing), "a call that has ended holds up nobody"
