"""Every reachable state of a prefill core with two attempts of one branch: Dispatch and Cancel in any order, repeated or late,
against every answer, step, read, timer and broken link.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from connector.handoff import SenderState
from connector.transport import Answered, BlocksTaken, LinkClosed
from engine.block_pool import BlockState
from engine.plan import NO_TOKEN, Plan, SlotResult, StepResult
from node import events as ev
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey
from tests.copied import Copier
from tests.cores.nodes import ROUTER, Prefill, grant

KEYS = (AttemptKey("r", 0, 0), AttemptKey("r", 0, 1))
DEADLINE_S = 30.0  # of every message
PROMPT = list(range(1, 10))  # chunks of 8 and 1: two full blocks, then a tail
BUSY = pb.ReserveReply(error=pb.PDError(code=pb.BUSY, message="PD Error", retryable=True))


class SenderWorld:
    """The core, and what the rest of the cluster may still do to it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.prefill = Prefill(num_blocks=16)
        self.plans: deque[Plan] = deque()
        self.asked: list[AttemptKey] = []  # Reserve has no answer yet
        self.lease_of: dict[int, AttemptKey] = {}
        self.link_of: dict[int, str] = {}
        self.links: list[str] = []  # open
        self.closing: list[str] = []  # of them those that the core wants closed
        self.unread: list[tuple[str, int, int, int]] = []  # link, lease, block index, block id
        self.committed: list[int] = []  # leases whose Commit has no answer
        self.floor = 0  # of the branch, as the messages have set it
        self.begun: set[AttemptKey] = set()
        self.ended: Counter[AttemptKey] = Counter()
        self.has_committed: set[AttemptKey] = set()
        self.refused: set[AttemptKey] = set()  # whose Commit was
        self.last_words: Counter[AttemptKey] = Counter()  # PD Errors and finishes to the router

    def key(self) -> object:
        snapshot = self.prefill.core.snapshot()
        deadline = self.prefill.core.next_deadline()
        return (
            repr(sorted((name, repr(value)) for name, value in snapshot.items())),
            None if deadline is None else deadline - self.now,
            (len(self.plans), tuple(self.asked), self.floor, frozenset(self.begun), frozenset(self.ended)),
            (
                tuple(self.lease_of.items()),
                tuple(self.links),
                tuple(self.closing),
                tuple(self.unread),
                tuple(self.committed),
            ),
            frozenset(self.last_words),
        )

    # ---------------------------------------------------------------- events

    def dispatch(self, key: AttemptKey) -> None:
        may_begin = key.attempt >= self.floor and key not in self.begun
        self.floor = max(self.floor, key.attempt)
        self.begun |= {key} if may_begin else set()
        actions = self.prefill.dispatch(key, PROMPT, 4, now=self.now, ms_left=int(DEADLINE_S * 1000))
        assert (ev.Count("stale_refused") in actions) == (not may_begin)
        self.take(actions)

    def cancel(self, key: AttemptKey) -> None:
        self.floor = max(self.floor, key.attempt + 1)
        cancel = pb.RouterMessage(cancel=pb.Cancel(key=key.to_proto(), ms_left=int(DEADLINE_S * 1000)))
        self.feed(ev.FromRouter(ROUTER, cancel))

    def answer_reserve(self, key: AttemptKey, reply: pb.ReserveReply | None) -> None:
        self.asked.remove(key)
        if reply is not None and reply.HasField("lease"):
            self.lease_of[reply.lease.lease_id] = key
        self.feed(ev.ReserveAnswered(key, reply))

    def step(self) -> None:
        plan = self.plans.popleft()
        rows = [SlotResult(c.slot, c.generation, 7 if c.samples else NO_TOKEN) for c in plan.chunks]
        self.feed(ev.StepDone(StepResult.of(plan.step_id, rows)))

    def read(self) -> None:
        link_id, lease_id, index, _ = self.unread.pop(0)
        self.feed(BlocksTaken(link_id, lease_id, (index,)))

    def close(self, link_id: str) -> None:
        self.links.remove(link_id)
        self.closing = [each for each in self.closing if each != link_id]
        self.unread = [each for each in self.unread if each[0] != link_id]
        self.feed(LinkClosed(link_id, "gone"))

    def answer_commit(self, lease_id: int, is_taken: bool) -> None:
        self.committed.remove(lease_id)
        self.refused |= set() if is_taken else {self.lease_of[lease_id]}
        error = None if is_taken else pb.PDError(code=pb.CHECKSUM, message="PD Error", retryable=True)
        answer = pb.DataMessage(answer=pb.CommitAnswer(lease_id=lease_id, error=error))
        self.feed(Answered(self.link_of[lease_id], answer.SerializeToString()))

    def wait(self) -> None:
        deadline = self.prefill.core.next_deadline()
        assert deadline is not None
        self.now = max(self.now, deadline)
        self.take(self.prefill.core.tick(self.now))

    # ---------------------------------------------------------------- what came of it

    def feed(self, event: ev.Event) -> None:
        self.take(list(self.prefill.core.receive(event, self.now)))

    def take(self, actions: list[ev.Action] | object) -> None:
        assert isinstance(actions, list)
        for action in actions:
            match action:
                case ev.RunStep(plan):
                    self.plans.append(plan)
                case ev.SendReserve(key):
                    assert key.attempt >= self.floor, "asked for an attempt that is fenced"
                    self.asked.append(key)
                case ev.OpenLink(link_id):
                    self.links.append(link_id)
                case ev.WriteBlocks(link_id, lease, blocks):
                    assert self.lease_of[lease.lease_id].attempt >= self.floor, "wrote for an attempt that is fenced"
                    self.link_of[lease.lease_id] = link_id
                    self.unread += [(link_id, lease.lease_id, index, block_id) for index, block_id in blocks]
                case ev.CloseLink(link_id):
                    self.closing.append(link_id)
                case ev.NotifyLink(_, message):
                    assert self.lease_of[message.commit.lease_id].attempt >= self.floor, "committed what is fenced"
                    self.committed.append(message.commit.lease_id)
                    self.has_committed.add(self.lease_of[message.commit.lease_id])
                case ev.SendRelease(_, request):
                    assert request.key.attempt not in [key.attempt for key in self.has_committed], (
                        "released behind Commit"
                    )
                case ev.ToRouter(_, message) if message.HasField("error"):
                    self.last_words[KEYS[message.error.key.attempt]] += 1
                    key = KEYS[message.error.key.attempt]
                    is_unsure = key in self.has_committed - self.refused
                    assert message.error.commit_unanswered == is_unsure, "certain of what nobody can know"
                case ev.Ended(key):
                    self.ended[key] += 1
        self.check()

    def check(self) -> None:
        states = self.prefill.pool.snapshot()["states"]
        assert isinstance(states, tuple)
        for link_id, _, _, block_id in self.unread:
            assert link_id not in self.links or states[block_id] is BlockState.USED, "freed a block that a link reads"
        for key in KEYS:
            assert self.ended[key] <= (key in self.begun) and self.last_words[key] <= 1
        state = self.prefill.core.snapshot()
        assert state["attempts"] == len(self.begun) - len(self.ended)
        assert state["reserves_unanswered"] == len(self.asked)

    def moves(self) -> Iterator[Callable[[], None]]:
        for key in KEYS if self.now < DEADLINE_S else ():  # later ones may find the floor forgotten, as they should
            yield partial(self.dispatch, key)
            yield partial(self.cancel, key)
        for key in self.asked:
            lease_id = 1 + key.attempt
            for reply in (grant(lease_id, len(PROMPT)), BUSY, None):
                yield partial(self.answer_reserve, key, reply)
        if self.plans:
            yield self.step
        if self.unread:
            yield self.read
        for link_id in self.links:
            yield partial(self.close, link_id)
        for lease_id in self.committed:
            if self.link_of[lease_id] in self.links and not any(each[1] == lease_id for each in self.unread):
                yield partial(self.answer_commit, lease_id, True)
                yield partial(self.answer_commit, lease_id, False)
        if self.begun - self.ended.keys() and self.now < DEADLINE_S:
            yield self.wait

    def end(self) -> None:
        """No message comes any more, the link reads nothing; timers, and steps that were launched, end everything."""
        while self.asked:
            self.answer_reserve(self.asked[0], None)
        while True:
            while self.plans:
                self.step()
            while self.closing:
                self.close(self.closing[0])
            if self.prefill.core.next_deadline() is None:
                break
            self.wait()
        assert self.ended.keys() == self.begun, "an attempt never ended"
        counts = self.prefill.pool.counts()
        assert (counts.used, self.prefill.pool.num_promised) == (0, 0)


@pytest.mark.covers("R04", "H05", "H06", "H08", "P06", "P08", "R21")
def test_in_every_reachable_state_fences_hold_lent_blocks_stay_and_each_attempt_ends_once() -> None:
    start = SenderWorld()
    seen, queue = {start.key()}, deque([start])
    happened: Counter[str] = Counter()
    copier = Copier()
    while queue:
        world = queue.popleft()
        for number in range(sum(1 for _ in world.moves())):
            after = copier.copied(world)
            list(after.moves())[number]()
            if (key := after.key()) not in seen:
                seen.add(key)
                queue.append(after)
        states = world.prefill.core.snapshot()["attempts_by_state"]
        assert isinstance(states, dict)
        happened.update(states)
        world.end()
    assert len(seen) > 1000
    holding = {state.name for state in SenderState} - {"DONE", "FAILED"}
    assert happened.keys() == holding, "the others hold nothing, and are not there"
