"""Who is refused by gRPC, reckoned from handshakes and calls: exact for members that call, whatever comes in between."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.unheard import Unheard

PATIENCE_S = 10.0


@st.composite
def connections(draw: st.DrawFn) -> list[tuple[float, float | None]]:
    """When each begins, and how long after that its first call comes; None: never."""
    within = st.floats(0, PATIENCE_S, exclude_max=True)
    return draw(st.lists(st.tuples(st.floats(0, 40), st.none() | within), max_size=30))


@pytest.mark.covers("X03")
@given(connections(), st.lists(st.tuples(st.integers(0, 29), st.floats(0, 60)), max_size=20))
def test_in_the_end_strangers_are_refused_each_once_and_members_never(
    each: list[tuple[float, float | None]], again: list[tuple[int, float]]
) -> None:
    """And never more than there are whose time is over. `again`: later calls of who has called."""
    events: list[tuple[float, int, str | None]] = []
    for index, (begun_at, call_after) in enumerate(each):
        events.append((begun_at, 0, None))
        if call_after is not None:
            first = min(begun_at + call_after, begun_at + PATIENCE_S - 1e-6)
            events.append((first, 1, f"ipv4:10.0.0.1:{index}"))
            events += [(first + later, 1, f"ipv4:10.0.0.1:{index}") for which, later in again if which == index]
    strangers = [begun_at for begun_at, call_after in each if call_after is None]
    unheard, num_refused = Unheard(PATIENCE_S), 0
    for now, _, address in sorted(events, key=lambda event: event[:2]):
        while (due := unheard.next_deadline()) is not None and due <= now:
            num_refused += unheard.tick(due)
        num_refused += unheard.begin(now) if address is None else unheard.call(address, now)
        assert num_refused <= sum(begun_at + PATIENCE_S <= now for begun_at in strangers)
    num_refused += unheard.tick(1000.0)
    assert num_refused == len(strangers)
    assert unheard.next_deadline() is None


@pytest.mark.covers("X03")
def test_nobody_is_refused_before_the_time_is_over() -> None:
    unheard = Unheard(PATIENCE_S)
    assert unheard.begin(1.0) == 0
    assert unheard.next_deadline() == 11.0
    assert (unheard.tick(10.9), unheard.tick(11.0), unheard.tick(12.0)) == (0, 1, 0)


@pytest.mark.covers("X03", "X05")
def test_a_flood_is_counted_to_the_last_one_and_takes_bounded_memory() -> None:
    unheard = Unheard(PATIENCE_S, max_waiting=100, max_callers=50)
    num_refused = sum(unheard.begin(0.001 * number) for number in range(1000))
    assert num_refused == 900
    num_refused += sum(unheard.call(f"ipv4:10.0.0.1:{number}", 1.0) for number in range(60))
    assert unheard.snapshot() == {"waiting": 40, "callers": 50}
    assert num_refused + unheard.tick(20.0) == 940


@pytest.mark.covers("X03")
def test_who_has_called_stands_for_one_connection_however_often_it_calls() -> None:
    unheard = Unheard(PATIENCE_S, max_callers=2)
    for _ in range(3):
        unheard.begin(0.0)
    for address in ("a", "a", "b", "a", "b", "a"):
        unheard.call(address, 1.0)
    assert unheard.snapshot()["waiting"] == 1
    unheard.call("c", 1.0)  # b, which was silent longest, is forgotten
    unheard.begin(2.0)
    unheard.call("a", 2.0)
    unheard.call("c", 2.0)
    assert unheard.snapshot()["waiting"] == 1
    unheard.call("b", 2.0)
    assert unheard.snapshot()["waiting"] == 0
