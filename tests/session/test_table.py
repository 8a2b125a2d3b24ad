"""The table of session.py, pair by pair."""

from __future__ import annotations

import pytest

from runtime.session import IGNORED, TABLE, Action, Event, IllegalTransition, State, step

DIALER_ONLY = {Event.DIAL_DUE, Event.DIAL_FAILED, Event.PORT_REFUSED, Event.REFUSED, Event.WELCOMED}
DIALER = {State.CONNECTING, State.OPEN, State.BROKEN}
LISTENER = {State.AWAITED, State.ATTACHED, State.DETACHED}
REPORTS = {Action.REPORT_LOST, Action.REPORT_REFUSED}


@pytest.mark.covers("R12")
@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_each_pair_is_in_exactly_one_place(state: State, event: Event) -> None:
    assert ((state, event) in TABLE) + ((state, event) in IGNORED) <= 1
    if (state, event) in IGNORED:
        assert step(state, event) == (state, ())
    elif (state, event) not in TABLE:
        with pytest.raises(IllegalTransition, match=f"{event.name} in {state.name}"):
            step(state, event)


@pytest.mark.covers("R12")
def test_lost_is_final_and_nothing_is_done_there() -> None:
    assert not [pair for pair in TABLE if pair[0] is State.LOST]


@pytest.mark.covers("R12")
def test_no_end_enters_the_states_or_hears_the_events_of_the_other() -> None:
    for (before, event), (after, _) in TABLE.items():
        own = DIALER if before in DIALER else LISTENER
        assert after in own | {State.LOST}
        assert event not in DIALER_ONLY or before in DIALER
        assert event is not Event.CALLED or before in LISTENER


@pytest.mark.covers("R12")
def test_messages_are_delivered_only_on_a_stream_with_both_hellos() -> None:
    delivering = {before for (before, _), (_, actions) in TABLE.items() if Action.DELIVER in actions}
    assert delivering == {State.OPEN, State.ATTACHED}


@pytest.mark.covers("R12", "C10")
def test_every_loss_of_a_session_that_was_up_is_reported_once_unless_we_wanted_it() -> None:
    for (before, event), (after, actions) in TABLE.items():
        num_reports = sum(action in REPORTS for action in actions)
        was_up = before not in (State.CONNECTING, State.AWAITED)
        if after is State.LOST and was_up:
            assert num_reports == (event is not Event.HANG_UP), (before, event)
        else:
            assert num_reports == (event is Event.REFUSED), (before, event)
