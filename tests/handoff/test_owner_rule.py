"""The owner rule against the handoff machines: whatever order the two sessions deliver in, the router believes the right node.

The handoff is reduced to what the router can see of it: the sender's reports as step_sender gives them, and the receiver's, which
exist only if the receiver runs. Each session is ordered; there is no order between them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from connector.handoff import SenderAction, SenderEvent, SenderState, step_sender
from router.ownership import IGNORED, TABLE, Owner, Verdict, Word, judge

S, E, A, W, V = SenderState, SenderEvent, SenderAction, Word, Verdict


@dataclass(frozen=True)
class World:
    """One attempt, from Commit on and before."""

    sender: SenderState = S.WRITING
    is_running: bool = False  # the receiver took the Commit
    is_commit_in_flight: bool = False
    ack: bool | None = None  # on its way back: owns it, refuses it
    from_sender: tuple[Word, ...] = (W.SENDER_TOKENS,)
    from_receiver: tuple[Word, ...] = ()
    owner: Owner = Owner.SENDER
    verdict: Verdict | None = None  # that ended the attempt
    is_grace_set: bool = False


def sender_step(w: World, event: SenderEvent) -> World:
    state, actions = step_sender(w.sender, event)
    w = replace(w, sender=state)
    for action in actions:
        if action is A.SEND_COMMIT:
            w = replace(w, is_commit_in_flight=True)
        elif action is A.REPORT:
            w = replace(w, from_sender=(*w.from_sender, W.SENDER_ERROR))
        elif action is A.REPORT_UNANSWERED:
            w = replace(w, from_sender=(*w.from_sender, W.SENDER_UNSURE))
    return w


def hear(w: World, word: Word) -> World:
    owner, verdict = judge(w.owner, word)
    if verdict is V.RETRY:
        assert not w.is_running, "retried an attempt that runs"
    if verdict is V.FAIL and word in (W.SENDER_ERROR, W.SENDER_LOST):
        assert not w.is_running or w.owner is Owner.SENDER
    if w.owner is Owner.RECEIVER and owner is not Owner.RECEIVER:
        assert word in (W.RECEIVER_FINISH, W.RECEIVER_ERROR, W.RECEIVER_LOST), "the sender took an attempt back"
    ended = verdict if owner is Owner.NOBODY and w.owner is not Owner.NOBODY else w.verdict
    return replace(w, owner=owner, verdict=ended, is_grace_set=verdict is V.AWAIT_RECEIVER or w.is_grace_set)


def successors(w: World) -> Iterator[World]:
    if w.from_sender:
        yield hear(replace(w, from_sender=w.from_sender[1:]), w.from_sender[0])
    if w.from_receiver:
        yield hear(replace(w, from_receiver=w.from_receiver[1:]), w.from_receiver[0])
    if w.is_grace_set:
        yield hear(replace(w, is_grace_set=False), W.GRACE_OVER)
    if w.is_commit_in_flight:
        arrived = replace(w, is_commit_in_flight=False)
        yield replace(arrived, is_running=True, ack=True, from_receiver=(W.RECEIVER_TOKENS,))
        yield replace(arrived, ack=False)
        yield arrived  # lost with the link
    if w.is_running and not w.from_receiver:
        yield replace(w, is_running=False, from_receiver=(W.RECEIVER_FINISH,))
        yield replace(w, is_running=False, from_receiver=(W.RECEIVER_ERROR,))
    if w.ack is not None:
        answered = replace(w, ack=None)
        yield answered  # lost
        if w.sender is S.COMMITTING:
            yield sender_step(answered, E.ACKED if w.ack else E.COMMIT_REFUSED)
    if w.sender is S.WRITING:
        yield sender_step(w, E.ALL_WRITTEN)
        yield sender_step(w, E.LEASE_GONE)
    if w.sender in (S.WRITING, S.COMMITTING):
        yield sender_step(w, E.LINK_LOST)
    if w.sender is S.COMMITTING:
        yield sender_step(w, E.OVERDUE)


@pytest.fixture(scope="module")
def worlds() -> set[World]:
    seen, queue = {World()}, deque([World()])
    while queue:
        for nxt in successors(queue.popleft()):
            if nxt not in seen:
                seen.add(nxt)
                queue.append(nxt)
    return seen


@pytest.mark.covers("R21", "R04")
def test_in_every_order_a_running_attempt_is_neither_retried_nor_taken_back(worlds: set[World]) -> None:
    """The assertions inside `hear` held everywhere; and the races that they are about were reached."""
    lost_ack = [w for w in worlds if w.is_running and w.owner is Owner.UNSURE]
    decided = [w for w in worlds if w.owner is Owner.RECEIVER and w.from_sender[:1] == (W.SENDER_UNSURE,)]
    assert lost_ack and decided and len(worlds) > 100


@pytest.mark.covers("R21")
def test_from_every_world_the_attempt_still_ends(worlds: set[World]) -> None:
    """What is under way is heard, what waits is over: nobody waits for ever for a word that does not come."""
    for start in worlds:
        w = replace(start, is_commit_in_flight=False, ack=None)
        if w.sender is S.COMMITTING:
            w = sender_step(w, E.OVERDUE)
        elif w.sender is S.WRITING:
            w = sender_step(w, E.LEASE_GONE)
        while w.from_receiver:
            w = hear(replace(w, from_receiver=w.from_receiver[1:]), w.from_receiver[0])
        while w.from_sender:
            w = hear(replace(w, from_sender=w.from_sender[1:]), w.from_sender[0])
        if w.is_running:
            w = hear(w, W.RECEIVER_FINISH)
        if w.is_grace_set:
            w = hear(w, W.GRACE_OVER)
        assert w.owner is Owner.NOBODY and w.verdict is not None, start


@pytest.mark.parametrize("owner", Owner)
@pytest.mark.parametrize("word", Word)
def test_each_pair_is_in_one_place(owner: Owner, word: Word) -> None:
    assert ((owner, word) in TABLE) + ((owner, word) in IGNORED) == 1
