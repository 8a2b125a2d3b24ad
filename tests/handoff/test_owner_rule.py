"""The owner rule against both handoff machines: whatever order the two sessions deliver in, the router believes the right node.

The world (owner_world.py) is one attempt at its sender, its receiver and the router. Whatever the router decides it cancels at both
nodes, later or never: after a loss or a grace the attempt may run on for a while, and no word of it may count then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from connector.handoff import ReceiverEvent, ReceiverState, SenderAction, SenderEvent, SenderState, step_sender
from router.ownership import IGNORED, TABLE, Owner, Verdict, Word, judge
from tests.handoff.exploring import reachable
from tests.handoff.owner_world import Ends, hearing_steps, link_steps, receiver_step, receiver_steps

S, E, A = SenderState, SenderEvent, SenderAction
R, V = ReceiverState, ReceiverEvent
W = Word

ONLY_OF_BROKEN_PEERS = (
    # The receiver's first batch repeats a token, and comes before its last word.
    {(owner, word) for owner in (Owner.SENDER, Owner.UNSURE) for word in (W.RECEIVER_FINISH, W.RECEIVER_ERROR)}
    # A sender whose Commit was taken cannot say for certain that it was not, nor that the branch ended before it.
    | {(Owner.RECEIVER, word) for word in (W.SENDER_FINISH, W.SENDER_ERROR)}
    # It holds nothing that it could ask for.
    | {(owner, W.HOLDER_ASKS) for owner in (Owner.SENDER, Owner.UNSURE, Owner.NOBODY, Owner.RECEIVER)}
    # What has been unsure says nothing more but that it is lost.
    | {(Owner.UNSURE, word) for word in (W.SENDER_TOKENS, W.SENDER_FINISH, W.SENDER_ERROR, W.SENDER_UNSURE)}
    | {(owner, W.GRACE_OVER) for owner in (Owner.SENDER, Owner.RECEIVER, Owner.NOBODY)}
)
HEARD: set[tuple[Owner, Word]] = set()


@dataclass(frozen=True)
class World(Ends):
    """One attempt, from the lease on."""

    has_sampled: bool = False  # the sender has told its token
    verdict: Verdict | None = None  # that ended the attempt
    cancels: frozenset[str] = frozenset()  # under way to these nodes


def sender_step(w: World, event: SenderEvent) -> World:
    state, actions = step_sender(w.sender, event)
    w = replace(w, sender=state)
    for action in actions:
        match action:
            case A.SEND_COMMIT:
                w = replace(w, is_commit_in_flight=True)
            case A.SEND_RELEASE:
                w = replace(w, is_release_in_flight=True)
            case A.REPORT:
                w = replace(w, from_sender=(*w.from_sender, W.SENDER_ERROR))
            case A.REPORT_UNANSWERED:
                w = replace(w, from_sender=(*w.from_sender, W.SENDER_UNSURE))
            case _:
                pass
    return sender_step(w, E.QUIET) if w.sender is S.DRAINING else w


def hear(w: World, word: Word) -> World:
    """The router's side of it."""
    HEARD.add((w.owner, word))
    owner, verdict = judge(w.owner, word)
    if verdict is Verdict.RETRY and word is W.RECEIVER_ERROR:
        assert not w.is_running, "the receiver has given an attempt up that it runs"
    elif verdict is Verdict.RETRY and word is W.SENDER_ERROR:
        assert not w.has_run, "retried an attempt that runs"
        assert w.receiver is not R.COMMITTED and not w.is_commit_in_flight, "retried an attempt that may still run"
    if w.owner is Owner.RECEIVER and owner is not Owner.RECEIVER:
        assert word in (W.RECEIVER_FINISH, W.RECEIVER_ERROR, W.RECEIVER_LOST), "the sender took an attempt back"
    if w.owner is Owner.NOBODY:
        assert verdict is Verdict.IGNORE, "a second end"
    has_ended = owner is Owner.NOBODY and w.owner is not Owner.NOBODY
    return replace(
        w,
        owner=owner,
        verdict=verdict if has_ended else w.verdict,
        is_grace_set=verdict is Verdict.AWAIT_RECEIVER or (w.is_grace_set and owner is Owner.UNSURE),
        cancels=frozenset({"sender", "receiver"}) if has_ended else w.cancels,
    )


def session_steps(w: World) -> Iterator[World]:
    yield from hearing_steps(w, hear)
    if not w.is_sender_lost:  # the process dies: what it sent is lost with the session, or is heard first
        lost = replace(w, is_sender_lost=True, sender=S.FAILED, ack=None)
        yield replace(lost, from_sender=(W.SENDER_LOST,))
        yield replace(lost, from_sender=(*w.from_sender, W.SENDER_LOST))
    if not w.is_receiver_lost:
        lost = replace(w, is_receiver_lost=True, is_receiver_dead=True, receiver=R.RELEASED, is_running=False, ack=None)
        yield replace(lost, from_receiver=(W.RECEIVER_LOST,))
        yield replace(lost, from_receiver=(*w.from_receiver, W.RECEIVER_LOST))
    for node in w.cancels:
        left = replace(w, cancels=w.cancels - {node})
        yield left  # its session is lost
        if node == "sender" and w.sender in (S.WRITING, S.COMMITTING):
            yield sender_step(left, E.CANCEL)
        elif node == "receiver" and not w.is_receiver_lost:
            yield replace(left, is_running=False) if w.receiver is R.RUNNING else receiver_step(left, V.CANCEL)


def sender_steps(w: World) -> Iterator[World]:
    if w.is_sender_lost:
        return
    if w.sender is S.WRITING:
        if not w.has_sampled:
            told = replace(w, has_sampled=True, from_sender=(*w.from_sender, W.SENDER_TOKENS))
            yield sender_step(told, E.ALL_WRITTEN)
            ended = replace(w, has_sampled=True, from_sender=(*w.from_sender, W.SENDER_FINISH))
            yield sender_step(ended, E.WITHDRAW)
        yield sender_step(w, E.LEASE_GONE)
    yield from link_steps(w, sender_step)


@pytest.fixture(scope="module")
def worlds() -> set[World]:
    return reachable(World(), lambda w: (*session_steps(w), *sender_steps(w), *receiver_steps(w)))


@pytest.mark.covers("R21", "R04")
def test_in_every_order_a_running_attempt_is_neither_retried_nor_taken_back(worlds: set[World]) -> None:
    """The assertions inside `hear` held everywhere; and the races that they are about were reached."""
    lost_ack = [w for w in worlds if w.is_running and w.owner is Owner.UNSURE]
    decided = [w for w in worlds if w.owner is Owner.RECEIVER and w.from_sender[:1] == (W.SENDER_UNSURE,)]
    assert lost_ack and decided and len(worlds) > 1000


@pytest.mark.covers("R21")
def test_from_every_world_the_attempt_still_ends(worlds: set[World]) -> None:
    """What is under way is heard, what waits is over: nobody waits for ever for a word that does not come."""
    for start in worlds:
        w = replace(start, is_commit_in_flight=False, ack=None)
        if w.sender is S.COMMITTING:
            w = sender_step(w, E.OVERDUE)
        elif w.sender is S.WRITING:
            w = sender_step(w, E.LEASE_GONE)
        if w.receiver is R.COMMITTED:
            w = receiver_step(w, V.QUIET)
        while w.from_receiver:
            w = hear(replace(w, from_receiver=w.from_receiver[1:]), w.from_receiver[0])
        while w.from_sender:
            w = hear(replace(w, from_sender=w.from_sender[1:]), w.from_sender[0])
        if w.is_running:
            w = hear(w, W.RECEIVER_FINISH)
        if w.is_grace_set:
            w = hear(w, W.GRACE_OVER)
        assert w.owner is Owner.NOBODY and w.verdict is not None, start


@pytest.mark.usefixtures("worlds")
@pytest.mark.covers("R21")
def test_every_row_of_the_rule_is_reached() -> None:
    """But for those that a right peer, or a timer that is cleared, cannot bring. They are there because sessions are hostile."""
    of_moves = {row for row in TABLE.keys() | IGNORED if row[0] in (Owner.MOVING, Owner.DOUBTED)}
    missed = (TABLE.keys() | IGNORED) - of_moves - HEARD
    assert missed == ONLY_OF_BROKEN_PEERS, sorted((o.name, w.name) for o, w in missed ^ ONLY_OF_BROKEN_PEERS)


@pytest.mark.parametrize("owner", Owner)
@pytest.mark.parametrize("word", Word)
def test_each_pair_is_in_one_place(owner: Owner, word: Word) -> None:
    assert ((owner, word) in TABLE) + ((owner, word) in IGNORED) == 1
