"""Every reachable joint state of a move: the holder's table and its handoff, the target's lease, calls and a link that lose things.

One sequence of one block, one try. The model holds what the tables only ask for: whether the sequence's rows run, whether the link
reads its block, what is in flight. There is one owner at most, its tokens are in the Commit, and both ends come to an end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from connector import handoff
from connector.handoff import (
    IllegalTransition,
    ReceiverAction,
    ReceiverEvent,
    ReceiverState,
    SenderAction,
    SenderEvent,
    SenderState,
    step_receiver,
    step_sender,
)
from decode_node import moving
from decode_node.moving import (
    MOVE_IGNORED,
    MOVE_TABLE,
    MoveAction,
    MoveEvent,
    MoveRow,
    MoveState,
    step_move,
)
from tests.handoff.exploring import assert_in_one_place, reachable
from tests.thorough import a_share

M, E, A = MoveState, MoveEvent, MoveAction
S, SE, SA = SenderState, SenderEvent, SenderAction
R, V, B = ReceiverState, ReceiverEvent, ReceiverAction
LIVE = {S.RESERVING, S.WRITING, S.COMMITTING}


@dataclass(frozen=True)
class World:
    """Everything that decides what can happen next, and what has happened."""

    move: MoveState = M.RESTING
    sender: SenderState | None = None  # None: no handoff was begun
    receiver: ReceiverState | None = None  # None: no lease was made
    # the sequence at the holder: runs, marked (by whom: "pause", "pressure"), stopped, gone
    sequence: str = "runs"
    is_unread: bool = False  # the link may read its block
    is_written: bool = False  # the whole of it is queued, or read
    is_lent: bool = False  # its block stays, whatever becomes of it
    is_fenced: bool = False
    rpc: frozenset[str] = frozenset()
    is_reserve_open: bool = False
    flight: tuple[str, ...] = ()  # in order on the link
    answers: tuple[bool, ...] = ()
    is_link_up: bool = False
    is_revoke_open: bool = False
    has_landed: bool = False
    # what has happened
    num_asked: int = 0  # tries that a router answered with a target
    has_committed: bool = False
    has_released: bool = False
    was_refused: bool = False
    end: str = ""  # what the router heard of the branch here: finished, moved, unanswered, preempted, stopped


def holder_step(w: World, event: MoveEvent, used: set[tuple[Any, Any]]) -> World:
    used.add((w.move, event))
    state, actions = step_move(w.move, event)
    w = replace(w, move=state)
    for action in actions:
        match action:
            case A.ASK | A.REPORT_MOVED | A.REPORT_UNANSWERED if action is not A.ASK:
                if action is A.REPORT_MOVED:
                    assert w.receiver is R.RUNNING, "told as moved, and the target does not have it"
                assert w.has_committed and w.sequence != "runs"
                w = replace(w, end="moved" if action is A.REPORT_MOVED else "unanswered")
            case A.RESERVE:
                assert w.sequence != "gone" and w.sender is None
                w = replace(w, is_lent=True, num_asked=w.num_asked + 1, sender=S.IDLE)
                w = sender_step(w, SE.START, used)
            case A.PAUSE:
                w = replace(w, sequence="marked") if w.sequence == "runs" else w
            case A.COMMIT:
                assert w.sequence == "stopped", "its length is not final"
                assert w.is_written
                w = sender_step(replace(w, has_committed=True), SE.ALL_WRITTEN, used)
            case A.RESUME:
                assert w.sequence == "stopped", "resumed what runs, or is gone"
                assert w.receiver is not R.RUNNING and w.receiver is not R.COMMITTED, "two owners"
                w = replace(w, sequence="runs")
            case A.WITHDRAW:
                if w.sender in LIVE:
                    w = sender_step(w, SE.CANCEL, used)
            case A.DROP:
                assert w.sequence != "gone"
                w = replace(w, sequence="gone")
            case A.GIVE_UP:
                assert w.sequence == "stopped" and w.receiver is not R.RUNNING, "told as failed, and the target has it"
                w = replace(w, sequence="gone", end="preempted")
    return w


def sender_step(w: World, event: SenderEvent, used: set[tuple[Any, Any]]) -> World:
    assert w.sender is not None
    state, actions = step_sender(w.sender, event)
    w = replace(w, sender=state)
    for action in actions:
        match action:
            case SA.SEND_RESERVE:
                w = replace(w, rpc=w.rpc | {"reserve"}, is_reserve_open=True)
            case SA.START_WRITING:
                w = replace(w, is_link_up=True)
            case SA.SEND_RELEASE:
                assert not w.has_committed, "released what may be the target's"
                w = replace(w, rpc=w.rpc | {"release"}, has_released=True)
            case SA.SEND_COMMIT if not w.is_unread:
                w = replace(w, flight=(*w.flight, "commit"))
            case SA.CLOSE_LINK:
                w = replace(w, is_link_up=False)
            case SA.REPORT if w.move is not M.OVER:
                w = holder_step(w, E.FAILED, used)
            case SA.REPORT_UNANSWERED if w.move is not M.OVER:
                w = holder_step(w, E.UNKNOWN, used)
            case SA.DROP_BLOCKS:
                assert not w.is_unread, "the block is free while the link reads it"
                if state is S.DONE and w.move is not M.OVER:
                    w = holder_step(w, E.ACKED, used)
                w = replace(w, is_lent=False)
    if w.sender is S.DRAINING and not w.is_unread:
        return sender_step(w, SE.QUIET, used)
    return w


def target_step(w: World, event: ReceiverEvent) -> World:
    assert w.receiver is not None
    state, actions = step_receiver(w.receiver, event)
    w = replace(w, receiver=state)
    for action in actions:
        match action:
            case B.REVOKE:
                w = replace(w, is_revoke_open=True)
            case B.ACTIVATE:
                assert w.has_landed and w.sequence in ("stopped", "gone"), "two nodes compute it"
            case B.ACK_COMMIT | B.REFUSE_COMMIT:
                w = replace(w, answers=(*w.answers, action is B.ACK_COMMIT) if w.is_link_up else w.answers)
    return w


def rpc_steps(w: World, used: set[tuple[Any, Any]]) -> Iterator[World]:
    for message in w.rpc:
        gone = replace(w, rpc=w.rpc - {message})
        yield gone  # lost
        for after in (gone, w):  # delivered, or delivered and still there to come again
            match message:
                case "reserve":
                    if w.is_fenced or w.receiver not in (None, R.RESERVED, R.FILLED):
                        yield replace(after, rpc=after.rpc | {"refuse"})
                    else:
                        yield replace(after, rpc=after.rpc | {"grant"}, receiver=w.receiver or R.RESERVED)
                        if w.receiver is None:
                            yield replace(after, rpc=after.rpc | {"refuse"})
                case "grant" | "refuse" if w.is_reserve_open:
                    event = SE.GRANTED if message == "grant" else SE.REFUSED
                    yield sender_step(
                        replace(gone, is_reserve_open=False, was_refused=message == "refuse"), event, used
                    )
                case "release":
                    is_owned = w.receiver in (None, R.RUNNING, R.COMMITTED)
                    fenced = replace(after, is_fenced=True)
                    yield fenced if is_owned else target_step(fenced, V.RELEASE)
    if w.is_reserve_open:
        yield sender_step(replace(w, is_reserve_open=False), SE.UNANSWERED, used)


def link_steps(w: World, used: set[tuple[Any, Any]]) -> Iterator[World]:
    if not w.is_link_up:
        if w.sender in (S.WRITING, S.COMMITTING, S.DRAINING):  # LinkClosed comes once, when it is quiet
            yield sender_step(replace(w, is_unread=False, flight=(), answers=()), SE.LINK_LOST, used)
        return
    yield replace(w, is_link_up=False)
    if w.is_unread:  # the transport reads the block; a Commit queued behind it follows
        flight = (*w.flight, "write", "commit") if w.sender is S.COMMITTING else (*w.flight, "write")
        yield sender_step(replace(w, is_unread=False, flight=flight), SE.QUIET, used)
    if w.flight:
        head, rest = w.flight[0], replace(w, flight=w.flight[1:])
        match head:
            case "write" if w.receiver is R.RESERVED:
                yield target_step(replace(rest, has_landed=True), V.LAST_BLOCK)
                yield target_step(rest, V.BAD_WRITE)
            case "commit" if w.receiver is not None:
                yield target_step(rest, V.COMMIT)
            case _:
                yield rest
    if w.answers:
        answered = replace(w, answers=w.answers[1:])
        yield answered  # lost on a link that stands
        if w.sender is S.COMMITTING:
            yield sender_step(answered, SE.ACKED if w.answers[0] else SE.COMMIT_REFUSED, used)


def target_steps(w: World) -> Iterator[World]:
    if w.is_revoke_open and w.receiver is not None:
        yield target_step(replace(w, is_revoke_open=False), V.QUIET)
    if w.receiver not in (None, R.RUNNING):
        yield target_step(w, V.EXPIRE)
        yield target_step(replace(w, is_fenced=True), V.CANCEL)


def holder_steps(w: World, used: set[tuple[Any, Any]]) -> Iterator[World]:
    if w.move is M.OVER:
        if w.sender in (S.DRAINING, S.COMMITTING):
            yield sender_step(w, SE.OVERDUE, used)
        return
    if w.sequence == "runs":
        yield replace(w, sequence="pressed")  # marked for older ones' sake
        if w.move is not M.RESTING:
            yield replace(holder_step(w, E.ENDED, used), sequence="gone", end="finished")
    if w.sequence == "marked":
        yield holder_step(replace(w, sequence="stopped"), E.STOPPED, used)
        yield replace(holder_step(w, E.ENDED, used), sequence="gone", end="finished")
    if w.sequence == "pressed":
        yield holder_step(replace(w, sequence="stopped"), E.GAVE_WAY, used)
        if w.move is M.STAYING and not w.is_lent:  # on a node that resumes who gives way
            yield holder_step(replace(w, sequence="runs"), E.REQUEUED, used)
        if w.move is not M.RESTING:
            yield replace(holder_step(w, E.ENDED, used), sequence="gone", end="finished")
    if w.move is M.RESTING and w.sequence == "runs" and w.sender is None:
        yield holder_step(w, E.WANT, used)
    if w.move is not M.RESTING:
        yield replace(holder_step(w, E.STOP, used), end="stopped")
    for event in (E.TARGET, E.NOWHERE):
        can_begin = w.move not in (M.ASKED, M.HELD) or w.sender is None or event is E.NOWHERE
        if can_begin:
            yield holder_step(w, event, used)
    if w.move in (M.HELD, M.YIELDED, M.SURRENDERED):
        yield holder_step(w, E.TOO_LATE, used)
    if w.sender is S.WRITING:
        yield sender_step(w, SE.LEASE_GONE, used)
        if not w.is_written and w.sequence == "stopped":
            yield replace(w, is_written=True, is_unread=True)
        if w.is_written and w.move in (M.PAUSED, M.YIELDED):
            yield holder_step(w, E.WRITTEN, used)
    if w.sender in (S.COMMITTING, S.DRAINING):
        yield sender_step(w, SE.OVERDUE, used)
    if w.move is M.SENDING:
        yield holder_step(w, E.FULL, used)


def explore() -> tuple[set[World], set[tuple[Any, Any]]]:
    used: set[tuple[Any, Any]] = set()

    def steps(w: World) -> Iterator[World]:
        for nxt in (*rpc_steps(w, used), *link_steps(w, used), *target_steps(w), *holder_steps(w, used)):
            check(nxt)
            yield nxt

    return reachable(World(), steps), used


def check(w: World) -> None:
    """One owner at most, and nobody left in doubt without a word."""
    is_targets = w.receiver in (R.COMMITTED, R.RUNNING)
    assert not (is_targets and w.sequence == "runs"), f"two owners: {w}"
    assert not (w.sequence == "gone" and not w.end), f"gone without a word: {w}"
    assert not (is_targets and w.end in ("finished", "preempted")), f"ended here, and the target goes on: {w}"
    if w.move is M.OVER:
        assert w.sender not in LIVE, f"a handoff of nothing: {w}"
        assert not w.is_lent or w.sender is S.DRAINING, f"a block that nobody will drop: {w}"
    if w.sender in (S.DRAINING, S.FAILED) and not w.was_refused:
        assert w.has_released or w.has_committed, f"gave up, and the target is left with the lease: {w}"


@pytest.fixture(scope="module")
def explored() -> tuple[set[World], set[tuple[Any, Any]]]:
    return explore()


@pytest.mark.covers("D10", "D08", "H06", "R21")
def test_whatever_is_lost_a_move_has_one_owner_and_nothing_is_left_behind(
    explored: tuple[set[World], set[tuple[Any, Any]]],
) -> None:
    worlds, _ = explored
    assert {w.move for w in worlds} == set(MoveState)
    assert {w.end for w in worlds} == {"", "finished", "moved", "unanswered", "preempted", "stopped"}
    assert any(w.end == "unanswered" and w.receiver is R.RUNNING for w in worlds), "the race that it is for"
    assert any(w.end == "unanswered" and w.receiver in (None, R.RELEASED) for w in worlds)
    assert len(worlds) > 3000


@pytest.mark.covers("D10", "P06")
def test_from_every_point_of_a_move_timers_alone_reach_an_end(
    explored: tuple[set[World], set[tuple[Any, Any]]],
) -> None:
    """No message is ever delivered again: the sequence runs here, or is over, and no handoff stays open."""
    worlds, used = explored
    for start in worlds:
        w = replace(start, rpc=frozenset(), flight=(), answers=())
        if w.is_reserve_open:
            w = sender_step(replace(w, is_reserve_open=False), SE.UNANSWERED, used)
        if w.sender is S.WRITING:
            w = sender_step(w, SE.LEASE_GONE, used)
        if w.sender is S.COMMITTING:
            w = sender_step(w, SE.OVERDUE, used)
        if w.sender is S.DRAINING:
            w = sender_step(w, SE.OVERDUE, used)
            w = sender_step(replace(w, is_unread=False), SE.LINK_LOST, used)
        if w.sequence == "pressed" and w.move is not M.OVER:
            w = holder_step(replace(w, sequence="stopped"), E.GAVE_WAY, used)
        if w.sequence == "marked" and w.move is not M.OVER:
            w = holder_step(replace(w, sequence="stopped"), E.STOPPED, used)
        if w.move is M.HELD:
            w = holder_step(w, E.TOO_LATE, used)
        assert w.move in (M.RESTING, M.ASKED, M.OVER) and w.sender in (None, S.FAILED, S.DONE), f"stuck: {start}"
        assert w.sequence == "runs" or w.move is M.OVER, f"stopped for ever: {start}"


BUGS: list[tuple[str, tuple[MoveState, MoveEvent], MoveRow]] = [
    ("decodes on though Commit may have come", (M.COMMITTED, E.UNKNOWN), (M.RESTING, (A.RESUME,))),
    ("commits while it decodes", (M.SENDING, E.FULL), (M.PAUSED, ())),
    ("a refused one never goes on", (M.PAUSED, E.FAILED), (M.RESTING, ())),
    ("goes on twice", (M.PAUSING, E.FAILED), (M.RESTING, (A.RESUME,))),
    ("lease left behind", (M.SENDING, E.ENDED), (M.OVER, ())),
    ("told as preempted while it may be the target's", (M.SURRENDERED, E.UNKNOWN), (M.OVER, (A.GIVE_UP,))),
    ("too late behind the Commit", (M.SURRENDERED, E.TOO_LATE), (M.OVER, (A.GIVE_UP,))),
    ("stays for ever where it runs again", (M.STAYING, E.REQUEUED), (M.STAYING, ())),
    ("gone without a word", (M.YIELDED, E.FAILED), (M.OVER, (A.DROP,))),
]


@pytest.mark.covers("D10")
@pytest.mark.parametrize(("pair", "row"), [pytest.param(*bug[1:], id=bug[0]) for bug in a_share(BUGS, 3)])
def test_the_exploration_finds_planted_bugs(
    pair: tuple[MoveState, MoveEvent], row: MoveRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "MOVE_TABLE", {**MOVE_TABLE, pair: row})
    monkeypatch.setattr(moving, "MOVE_IGNORED", MOVE_IGNORED - {pair})
    with pytest.raises((AssertionError, IllegalTransition)):
        test_from_every_point_of_a_move_timers_alone_reach_an_end(explore())


@pytest.mark.covers("D10")
def test_the_exploration_finds_a_release_behind_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    row = (S.DRAINING, (SA.SEND_RELEASE,))
    monkeypatch.setattr(handoff, "SENDER_TABLE", {**handoff.SENDER_TABLE, (S.COMMITTING, SE.CANCEL): row})
    with pytest.raises(AssertionError, match="released what may be the target's"):
        explore()


@pytest.mark.parametrize("state", MoveState)
@pytest.mark.parametrize("event", MoveEvent)
def test_each_pair_is_in_one_place(state: MoveState, event: MoveEvent) -> None:
    assert_in_one_place((state, event), MOVE_TABLE, MOVE_IGNORED, step_move)


def test_every_row_of_the_table_is_reached(explored: tuple[set[World], set[tuple[Any, Any]]]) -> None:
    """A row that nothing reaches would be untested advice; an ignored race that cannot happen would hide a bug."""
    _, used = explored
    assert MOVE_TABLE.keys() | MOVE_IGNORED == used
