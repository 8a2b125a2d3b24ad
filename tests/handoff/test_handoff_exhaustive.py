"""Every reachable joint state of a handoff: both ends, RPCs that are lost, repeated and reordered, and a link that can break.

The model holds what the machines only ask for: whether the transport reads source blocks, whether a copy into the receiver's
blocks runs, what is in flight. One attempt, one block; a second attempt is the event that raises the fence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from connector.handoff import (
    RECEIVER_IGNORED,
    RECEIVER_TABLE,
    SENDER_IGNORED,
    SENDER_TABLE,
    ReceiverAction,
    ReceiverEvent,
    ReceiverState,
    SenderAction,
    SenderEvent,
    SenderState,
    step_receiver,
    step_sender,
)
from tests.handoff.exploring import assert_in_one_place, reachable

S, E, A = SenderState, SenderEvent, SenderAction
R, V, B = ReceiverState, ReceiverEvent, ReceiverAction

USED_SENDER_PAIRS: set[tuple[SenderState, SenderEvent]] = set()
USED_RECEIVER_PAIRS: set[tuple[ReceiverState, ReceiverEvent]] = set()


# What senders put on the link for one block: right ones, ones that corrupt, repeat, or forget it.
SENDERS = (("write",), ("bad write",), ("write", "write"), ("write", "bad write"), ())
COMMITS = (("commit",), ("bad commit",), ("commit", "commit"), ("commit", "bad commit"))


@dataclass(frozen=True)
class World:
    """Everything that decides what can happen next, and what has happened."""

    sender: SenderState = S.IDLE
    receiver: ReceiverState | None = None  # None: no lease was made
    is_fenced: bool = False  # the receiver refuses this attempt
    rpc: frozenset[str] = frozenset()  # reserve, grant, refuse, release
    is_reserve_open: bool = False  # the sender's RPC has no result yet
    is_link_up: bool = False
    is_unread: bool = False  # the link may read the sender's block
    flight: tuple[str, ...] = ()  # in order on the link: write, bad write, commit, bad commit
    answers: tuple[bool, ...] = ()  # in order on the link, back
    is_copying: bool = False  # a write into the receiver's block runs
    is_revoke_open: bool = False  # asked, not yet quiet
    is_revoked: bool = False
    is_first_token_known: bool = False
    # what has happened
    is_dropped: bool = False
    num_freed: int = 0
    num_activated: int = 0
    has_asked: bool = False  # Reserve was sent
    was_refused: bool = False
    has_released: bool = False
    has_landed: bool = False  # right bytes are in the receiver's block
    has_committed: bool = False
    has_reported: bool = False


def sender_step(w: World, event: SenderEvent) -> World:
    USED_SENDER_PAIRS.add((w.sender, event))
    state, actions = step_sender(w.sender, event)
    w = replace(w, sender=state)
    for action in actions:
        match action:
            case A.SEND_RESERVE:
                w = replace(w, rpc=w.rpc | {"reserve"}, is_reserve_open=True, has_asked=True)
            case A.START_WRITING:
                w = replace(w, is_link_up=True, is_unread=True)
            case A.SEND_COMMIT:
                w = replace(w, has_committed=True, flight=(*w.flight, "commit") if not w.is_unread else w.flight)
            case A.SEND_RELEASE:
                assert not w.has_committed, "released what may belong to the receiver"
                w = replace(w, rpc=w.rpc | {"release"}, has_released=True)
            case A.CLOSE_LINK:
                w = replace(w, is_link_up=False)
            case A.DROP_BLOCKS:
                assert not w.is_unread, "dropped blocks that the link reads"
                assert not w.is_dropped, "dropped twice"
                w = replace(w, is_dropped=True)
            case A.REPORT:
                assert not w.num_activated, "reported a certain failure of what the receiver runs"
                w = replace(w, has_reported=True)
            case A.REPORT_UNANSWERED:
                w = replace(w, has_reported=True)
            case A.STOP_COMPUTING:
                pass
    if w.sender is S.DRAINING and not w.is_unread:
        return sender_step(w, E.QUIET)
    return w


def receiver_step(w: World, event: ReceiverEvent) -> World:
    assert w.receiver is not None
    USED_RECEIVER_PAIRS.add((w.receiver, event))
    state, actions = step_receiver(w.receiver, event)
    w = replace(w, receiver=state)
    for action in actions:
        match action:
            case B.REVOKE:
                assert not w.is_revoked and not w.is_revoke_open, "revoked twice"
                w = replace(w, is_revoke_open=True)
            case B.FREE_BLOCKS:
                assert w.is_revoked and not w.is_copying, "freed blocks that a write touches"
                w = replace(w, num_freed=w.num_freed + 1)
            case B.ACTIVATE:
                assert w.is_revoked and not w.is_copying, "running on blocks that a write touches"
                assert w.has_landed, "running on blocks that were never written"
                w = replace(w, num_activated=w.num_activated + 1)
            case B.ACK_COMMIT | B.REFUSE_COMMIT:
                w = replace(w, answers=(*w.answers, action is B.ACK_COMMIT) if w.is_link_up else w.answers)
            case B.QUARANTINE:
                pass
    return w


def end_at_receiver(w: World, event: ReceiverEvent) -> World:
    """Release or Cancel reached the receiver: the fence is raised, the lease ends unless it became a sequence."""
    w = replace(w, is_fenced=True)
    is_owned = w.receiver is R.COMMITTED and event is V.RELEASE  # only a broken peer releases what it committed
    return w if w.receiver in (None, R.RUNNING) or is_owned else receiver_step(w, event)


def rpc_steps(w: World) -> Iterator[World]:
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
                            yield replace(after, rpc=after.rpc | {"refuse"})  # no room
                case "grant" | "refuse" if w.is_reserve_open:  # an RPC has one result
                    event = E.GRANTED if message == "grant" else E.REFUSED
                    yield sender_step(replace(gone, is_reserve_open=False, was_refused=message == "refuse"), event)
                case "release":
                    yield end_at_receiver(after, V.RELEASE)
    if w.is_reserve_open:
        yield sender_step(replace(w, is_reserve_open=False), E.UNANSWERED)


def link_steps(w: World) -> Iterator[World]:
    if not w.is_link_up:
        if w.is_unread or w.sender in (S.WRITING, S.COMMITTING, S.DRAINING):  # LinkClosed comes once, when it is quiet
            yield sender_step(replace(w, is_unread=False, flight=(), answers=()), E.LINK_LOST)
        return
    yield replace(w, is_link_up=False)
    if w.is_unread:  # the transport reads the block; a Commit queued behind it follows
        for writes in SENDERS:
            for commits in COMMITS:
                flight = (*writes, *commits) if w.has_committed else writes
                yield sender_step(replace(w, is_unread=False, flight=flight), E.QUIET)
    if w.flight and not w.is_copying:
        head, rest = w.flight[0], replace(w, flight=w.flight[1:])
        admits = w.receiver is not None and not w.is_revoked and not w.is_revoke_open
        match head:
            case "write" if admits:
                yield replace(rest, is_copying=True)
            case "bad write" if admits:
                yield receiver_step(rest, V.BAD_WRITE)
            case "commit" | "bad commit":
                if w.receiver in (None, R.RUNNING):
                    yield replace(rest, answers=(*w.answers, False))
                elif head == "commit":
                    after = receiver_step(rest, V.COMMIT)
                    assert after.receiver is R.COMMITTED or len(after.answers) > len(w.answers), "a Commit unanswered"
                    yield after
                else:
                    yield receiver_step(replace(rest, answers=(*w.answers, False)), V.BAD_WRITE)
            case _:
                yield rest
    if w.answers:
        answered = replace(w, answers=w.answers[1:])
        if w.sender is S.COMMITTING:
            yield sender_step(answered, E.ACKED if w.answers[0] else E.COMMIT_REFUSED)
        else:
            yield answered


def local_steps(w: World) -> Iterator[World]:
    if w.is_copying:
        landed = replace(w, is_copying=False, has_landed=True)
        yield receiver_step(landed, V.LAST_BLOCK) if w.receiver is R.RESERVED else landed
    elif w.is_revoke_open:
        yield receiver_step(replace(w, is_revoke_open=False, is_revoked=True), V.QUIET)
    if w.receiver not in (None, R.RUNNING):
        yield receiver_step(w, V.EXPIRE)
    yield end_at_receiver(w, V.CANCEL)
    match w.sender:
        case S.IDLE:
            yield sender_step(w, E.START)
            yield sender_step(w, E.WITHDRAW)
            yield sender_step(w, E.CANCEL)
        case S.RESERVING:
            yield sender_step(w, E.WITHDRAW)
            yield sender_step(w, E.CANCEL)
        case S.WRITING:
            for event in (E.ALL_WRITTEN, E.WITHDRAW, E.CANCEL, E.LEASE_GONE):
                yield sender_step(w, event)
        case S.COMMITTING:
            for event in (E.OVERDUE, E.CANCEL, E.LEASE_GONE):
                yield sender_step(w, event)
        case S.DRAINING:
            for event in (E.OVERDUE, E.CANCEL, E.LEASE_GONE):
                yield sender_step(w, event)


@pytest.fixture(scope="module")
def worlds() -> set[World]:
    return reachable(World(), lambda w: (*rpc_steps(w), *link_steps(w), *local_steps(w)))


@pytest.mark.covers("H04", "H06", "H08", "D05", "R21")
def test_every_reachable_world_is_safe(worlds: set[World]) -> None:
    """The assertions inside the steps held everywhere; here is what must hold of each state as a whole."""
    for w in worlds:
        assert w.num_freed + w.num_activated <= 1, f"two fates of the receiver's blocks: {w}"
        if w.receiver is R.RELEASED:
            assert w.num_freed == 1
        if w.receiver is R.RUNNING:
            assert w.num_activated == 1 and w.has_committed
        if w.sender is S.DONE:
            assert w.num_activated == 1, "the sender is done, the receiver does not run"
        assert w.is_dropped == (w.sender in (S.DONE, S.FAILED))
        if w.sender in (S.DRAINING, S.FAILED) and w.has_asked and not w.was_refused:
            assert w.has_released or w.has_committed, "gave up, and the receiver is left with the lease"
    assert {w.sender for w in worlds} == set(SenderState)
    assert {w.receiver for w in worlds} == {*ReceiverState, None}
    assert len(worlds) > 1000


@pytest.mark.covers("H07", "P06")
def test_from_every_world_timers_alone_reach_an_end(worlds: set[World]) -> None:
    """No message is ever delivered again, the link reads nothing: timers end both ends, and no block stays taken."""
    for start in worlds:
        w = replace(start, rpc=frozenset(), flight=(), answers=())
        if w.sender is S.IDLE:
            w = sender_step(w, E.CANCEL)  # the deadline
        if w.is_reserve_open:
            w = sender_step(replace(w, is_reserve_open=False), E.UNANSWERED)
        if w.sender is S.WRITING:
            w = sender_step(w, E.LEASE_GONE)
        if w.sender is S.COMMITTING:
            w = sender_step(w, E.OVERDUE)
        if w.sender is S.DRAINING:
            w = sender_step(w, E.OVERDUE)
            assert not w.is_link_up, "a link that reads nothing is left open"
            w = sender_step(replace(w, is_unread=False), E.LINK_LOST)
        if w.receiver not in (None, R.RUNNING):
            if w.is_copying:
                w = replace(w, is_copying=False)
            w = receiver_step(w, V.EXPIRE)
            if w.is_revoke_open:
                w = receiver_step(replace(w, is_revoke_open=False, is_revoked=True), V.QUIET)
        assert w.sender in (S.DONE, S.FAILED), f"stuck sender: {start}"
        assert w.receiver in (None, R.RUNNING, R.RELEASED), f"stuck receiver: {start}"


@pytest.mark.covers("R21")
def test_a_lost_acknowledgement_leaves_the_receiver_running_and_the_sender_unsure(worlds: set[World]) -> None:
    unsure = [w for w in worlds if w.receiver is R.RUNNING and w.sender is S.FAILED and w.has_reported]
    assert unsure, "the race that REPORT_UNANSWERED exists for was never reached"


@pytest.mark.parametrize("state", SenderState)
@pytest.mark.parametrize("event", SenderEvent)
def test_each_sender_pair_is_in_one_place(state: SenderState, event: SenderEvent) -> None:
    assert_in_one_place((state, event), SENDER_TABLE, SENDER_IGNORED, step_sender)


@pytest.mark.parametrize("state", ReceiverState)
@pytest.mark.parametrize("event", ReceiverEvent)
def test_each_receiver_pair_is_in_one_place(state: ReceiverState, event: ReceiverEvent) -> None:
    assert_in_one_place((state, event), RECEIVER_TABLE, RECEIVER_IGNORED, step_receiver)


@pytest.mark.usefixtures("worlds")
def test_every_row_of_the_tables_is_reached() -> None:
    """A row that nothing reaches would be untested advice; an ignored race that cannot happen would hide a bug."""
    assert SENDER_TABLE.keys() | SENDER_IGNORED == USED_SENDER_PAIRS
    assert RECEIVER_TABLE.keys() | RECEIVER_IGNORED == USED_RECEIVER_PAIRS
