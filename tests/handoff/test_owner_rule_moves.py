"""The owner rule of a move, against both handoff machines: the holder decodes on, hands over, or goes on when it came to nothing.

The world is one move: its holder, its target and the router, from the lease on (owner_world.py). The
holder decodes while it writes, and stops before Commit. What it does after a failure that is certain is free: it goes on and asks
again, goes on to its end, or gives up. A target whose session is lost may be dead, or alive and unheard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from connector.handoff import ReceiverState, SenderAction, SenderEvent, SenderState, step_sender
from router.ownership import IGNORED, TABLE, Owner, Verdict, Word, judge
from tests.handoff.exploring import reachable
from tests.handoff.owner_world import MAX_WORDS, Ends, hearing_steps, link_steps, receiver_steps

S, E, A = SenderState, SenderEvent, SenderAction
R = ReceiverState
W = Word

OF_MOVES = {row for row in TABLE.keys() | IGNORED if row[0] in (Owner.MOVING, Owner.DOUBTED)}
ONLY_OF_BROKEN_PEERS = (
    # The target's first batch repeats a token, and comes before its last word; it is cut off once it is lost.
    {(Owner.MOVING, word) for word in (W.RECEIVER_FINISH, W.RECEIVER_ERROR)}
    | {(Owner.DOUBTED, w) for w in (W.RECEIVER_TOKENS, W.RECEIVER_FINISH, W.RECEIVER_ERROR, W.RECEIVER_LOST)}
    | {(Owner.MOVING, W.GRACE_OVER)}
)
HEARD: set[tuple[Owner, Word]] = set()


@dataclass(frozen=True)
class World(Ends):
    """One move."""

    owner: Owner = Owner.MOVING
    is_decoding: bool = True  # the holder
    must_decide: bool = False  # the holder, after a failure that is certain
    is_asked_again: bool = False


def sender_step(w: World, event: SenderEvent) -> World:
    state, actions = step_sender(w.sender, event)
    w = replace(w, sender=state)
    for action in actions:
        match action:
            case A.SEND_COMMIT:
                w = replace(w, is_commit_in_flight=True, is_decoding=False)
            case A.SEND_RELEASE:
                w = replace(w, is_release_in_flight=True)
            case A.REPORT:
                w = replace(w, must_decide=True)
            case A.REPORT_UNANSWERED:
                w = replace(w, from_sender=(*w.from_sender, W.SENDER_UNSURE))
            case _:
                pass
    return sender_step(w, E.QUIET) if w.sender is S.DRAINING else w


def hear(w: World, word: Word) -> World:
    """The router's side of it."""
    HEARD.add((w.owner, word))
    owner, verdict = judge(w.owner, word)
    if verdict is Verdict.PLACE or (verdict is Verdict.RETRY and word is W.SENDER_ERROR and w.owner is Owner.MOVING):
        assert not w.has_run, "given to another while the target runs it"
        assert w.receiver is not R.COMMITTED and not w.is_commit_in_flight, (
            "given to another while the target may run it"
        )
    if w.owner is Owner.RECEIVER and not w.is_asked_again and owner is not Owner.RECEIVER:
        assert word in (W.RECEIVER_FINISH, W.RECEIVER_ERROR, W.RECEIVER_LOST), "the holder took it back"
    if w.owner is Owner.NOBODY:
        assert verdict is Verdict.IGNORE, "a second end"
    is_awaited = verdict in (Verdict.AWAIT_RECEIVER, Verdict.AWAIT_SENDER)
    return replace(
        w,
        owner=owner,
        is_grace_set=is_awaited or (w.is_grace_set and owner in (Owner.UNSURE, Owner.DOUBTED)),
        is_asked_again=w.is_asked_again or verdict is Verdict.PLACE,
    )


def session_steps(w: World) -> Iterator[World]:
    if w.is_asked_again:
        return  # the next move is another world
    yield from hearing_steps(w, hear)
    if not w.is_sender_lost:
        lost = replace(w, is_sender_lost=True, is_decoding=False, must_decide=False, sender=S.FAILED, ack=None)
        yield replace(lost, from_sender=(W.SENDER_LOST,))
        yield replace(lost, from_sender=(*w.from_sender, W.SENDER_LOST))
    if not w.is_receiver_lost:
        unheard = replace(w, is_receiver_lost=True)
        dead = replace(unheard, is_receiver_dead=True, receiver=R.RELEASED, is_running=False, ack=None)
        for lost in (unheard, dead):
            yield replace(lost, from_receiver=(W.RECEIVER_LOST,))
            yield replace(lost, from_receiver=(*w.from_receiver, W.RECEIVER_LOST))


def sender_steps(w: World) -> Iterator[World]:
    if w.is_sender_lost:
        return
    if w.is_decoding and len(w.from_sender) < MAX_WORDS:
        yield replace(w, from_sender=(*w.from_sender, W.SENDER_TOKENS))
    if w.is_decoding:  # it ends, by itself or because its blocks are needed
        ended = sender_step(w, E.WITHDRAW) if w.sender is S.WRITING else w
        for word in (W.SENDER_FINISH, W.SENDER_ERROR):
            yield replace(ended, is_decoding=False, from_sender=(*w.from_sender, word))
    if w.must_decide:
        decided = replace(w, must_decide=False)
        yield replace(decided, is_decoding=True, from_sender=(*w.from_sender, W.HOLDER_ASKS))
        yield replace(decided, is_decoding=True)
        yield replace(decided, is_decoding=False, from_sender=(*w.from_sender, W.SENDER_ERROR))
    if w.sender is S.WRITING:
        yield sender_step(w, E.ALL_WRITTEN)
        yield sender_step(w, E.LEASE_GONE)
    yield from link_steps(w, sender_step)


@pytest.fixture(scope="module")
def worlds() -> set[World]:
    return reachable(World(), lambda w: (*session_steps(w), *sender_steps(w), *receiver_steps(w)))


@pytest.mark.covers("R21", "R04", "D08")
def test_a_branch_that_moved_is_not_taken_back_and_one_that_stayed_is_not_given_away(worlds: set[World]) -> None:
    """The assertions inside `hear` held everywhere; and the races that they are about were reached."""
    for reached in (
        [w for w in worlds if w.is_running and w.owner is Owner.UNSURE],
        [w for w in worlds if w.is_running and w.owner is Owner.DOUBTED],
        [w for w in worlds if w.owner is Owner.RECEIVER and W.SENDER_UNSURE in w.from_sender],
        [w for w in worlds if w.owner is Owner.MOVING and W.HOLDER_ASKS in w.from_sender],
        [w for w in worlds if w.owner is Owner.DOUBTED and w.sender is S.DONE],
        [w for w in worlds if w.owner is Owner.DOUBTED and w.is_decoding],
    ):
        assert reached
    assert len(worlds) > 1000


@pytest.mark.covers("D08")
def test_no_silence_is_for_ever(worlds: set[World]) -> None:
    """Where nobody works on the branch, nothing is under way and no timer runs, it has ended or is looked after anew."""
    still = [
        w
        for w in worlds
        if not (w.from_sender or w.from_receiver or w.is_decoding or w.is_running or w.must_decide or w.is_grace_set)
        and not w.is_commit_in_flight
        and w.receiver is not R.COMMITTED
        and w.sender is not S.COMMITTING
    ]
    assert len(still) > 20
    assert {w.owner for w in still if not w.is_asked_again} == {Owner.NOBODY}


@pytest.mark.usefixtures("worlds")
@pytest.mark.covers("R21", "D08")
def test_every_row_about_moves_is_reached() -> None:
    """But for those that a right peer cannot bring. They are there because sessions are hostile."""
    missed = OF_MOVES - HEARD
    assert missed == ONLY_OF_BROKEN_PEERS, sorted((o.name, w.name) for o, w in missed ^ ONLY_OF_BROKEN_PEERS)
