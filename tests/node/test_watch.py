"""Durations from events and actions alone: from where to where, which attempts count, and that nothing is remembered for ever."""

from __future__ import annotations

import random

import pytest
from prometheus_client.core import Metric

from connector.transport import Answered, LeaseRef
from engine.plan import NO_DECODES, DecodeRow, Decodes, Plan, PrefillChunk, StepResult
from node import events as ev
from node.measures import Measures
from node.watch import MAX_WATCHED, Watch
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey

ROUTER = ev.RouterId("router", 1)
KEY = AttemptKey("r", 0, 0)
LEASE = LeaseRef(7, bytes(16))


class Watched:
    """A watch with the test as its loop."""

    def __init__(self) -> None:
        self.measures = Measures()
        self.watch = Watch(self.measures)

    def dispatch(self, key: AttemptKey, now: float) -> None:
        message = pb.Dispatch(request_id=key.request_id, attempt=key.attempt, branches=[pb.Branch(choice=key.choice)])
        self.watch.received(ev.FromRouter(ROUTER, pb.RouterMessage(dispatch=message)), now)

    def reserve(self, key: AttemptKey, sent_at: float, answered_at: float, lease_id: int | None) -> None:
        self.watch.performed(ev.SendReserve(key, "d:1", pb.ReserveRequest(), 2.0), sent_at)
        reply = None if lease_id is None else pb.ReserveReply(lease=pb.Lease(lease_id=lease_id))
        self.watch.received(ev.ReserveAnswered(key, reply), answered_at)

    def write(self, lease: LeaseRef, now: float) -> None:
        self.watch.performed(ev.WriteBlocks("d@1/1", lease, ((0, 3),)), now)

    def commit(self, key: AttemptKey, lease_id: int, now: float) -> None:
        message = pb.DataMessage(commit=pb.Commit(key=key.to_proto(), lease_id=lease_id))
        self.watch.performed(ev.NotifyLink("d@1/1", message), now)

    def answer(self, key: AttemptKey, lease_id: int, now: float) -> None:
        message = pb.DataMessage(answer=pb.CommitAnswer(key=key.to_proto(), lease_id=lease_id))
        self.watch.received(Answered("d@1/1", message.SerializeToString()), now)

    def end(self, key: AttemptKey, outcome: str, now: float) -> None:
        self.watch.performed(ev.Ended(key, outcome), now)

    def seconds(self, name: str) -> tuple[int, float]:
        """How many durations of the name there are, and their sum."""
        families: list[Metric] = [family for family in self.measures.collect() if family.name == f"baton_node_{name}"]
        samples = {sample.name.removeprefix(f"baton_node_{name}"): sample.value for sample in families[0].samples
                   if "le" not in sample.labels}  # fmt: skip
        return int(samples["_count"]), samples["_sum"]


@pytest.mark.covers("O01")
def test_an_attempt_that_is_handed_over_gives_one_duration_of_each_kind() -> None:
    it = Watched()
    it.dispatch(KEY, 100.0)
    it.reserve(KEY, 101.0, 101.25, LEASE.lease_id)
    it.write(LEASE, 102.0)
    it.write(LEASE, 103.0)  # the first one counts
    it.commit(KEY, LEASE.lease_id, 103.5)
    it.answer(KEY, LEASE.lease_id, 104.0)
    it.answer(KEY, LEASE.lease_id, 109.0)  # a peer that says it twice
    it.end(KEY, "committed", 104.0)
    assert it.seconds("queue_seconds") == (1, 1.0)
    assert it.seconds("reserve_seconds") == (1, 0.25)
    assert it.seconds("transfer_seconds") == (1, 2.0)
    assert it.measures.amounts()["attempts_ended"]["committed"] == 1
    assert set(it.measures.amounts()["transfer_failures"].values()) == {0}
    assert it.watch.num_watched == 0


def test_where_the_receiver_holds_every_block_the_transfer_begins_with_the_commit() -> None:
    it = Watched()
    it.dispatch(KEY, 0.0)
    it.reserve(KEY, 0.0, 1.0, LEASE.lease_id)
    it.commit(KEY, LEASE.lease_id, 2.0)
    it.answer(KEY, LEASE.lease_id, 2.5)
    assert it.seconds("transfer_seconds") == (1, 0.5)


@pytest.mark.parametrize("payload", [b"\xff\xff", b"", pb.DataMessage(answer=pb.CommitAnswer()).SerializeToString()])
def test_an_answer_that_belongs_to_nobody_is_no_duration(payload: bytes) -> None:
    it = Watched()
    it.dispatch(KEY, 0.0)
    it.reserve(KEY, 0.0, 1.0, LEASE.lease_id)
    it.write(LEASE, 2.0)
    it.watch.received(Answered("d@1/1", payload), 3.0)
    it.answer(KEY, 8, 3.0)  # another lease
    it.answer(AttemptKey("s", 0, 0), LEASE.lease_id, 3.0)  # another attempt
    assert it.seconds("transfer_seconds") == (0, 0.0)


@pytest.mark.covers("O01")
def test_a_failure_counts_as_the_transfers_only_once_a_lease_was_granted() -> None:
    it = Watched()
    for number, (lease_id, outcome) in enumerate(
        [(1, "TRANSFER_FAILED"), (2, "LEASE_EXPIRED"), (3, "cancelled"), (4, "committed"), (None, "TRANSFER_FAILED")]
    ):
        key = AttemptKey("r", number, 0)
        it.dispatch(key, 0.0)
        it.reserve(key, 0.0, 1.0, lease_id)
        it.end(key, outcome, 2.0)
    failures = it.measures.amounts()["transfer_failures"]
    assert {code: number for code, number in failures.items() if number} == {"TRANSFER_FAILED": 1, "LEASE_EXPIRED": 1}
    ended = it.measures.amounts()["attempts_ended"]
    assert (ended["TRANSFER_FAILED"], ended["cancelled"], ended["committed"]) == (2, 1, 1)


@pytest.mark.covers("O01")
def test_a_failure_of_several_branches_counts_for_each_that_failed_even_if_the_first_had_ended_before() -> None:
    it = Watched()
    branches = [pb.Branch(choice=choice) for choice in range(3)]
    message = pb.RouterMessage(dispatch=pb.Dispatch(request_id="r", branches=branches))
    it.watch.received(ev.FromRouter(ROUTER, message), 0.0)
    it.reserve(KEY, 0.0, 1.0, 7)
    for choice, outcome in enumerate(("finished", "TRANSFER_FAILED", "TRANSFER_FAILED")):
        it.end(KEY._replace(choice=choice), outcome, 2.0)
    assert it.measures.amounts()["transfer_failures"]["TRANSFER_FAILED"] == 2
    assert it.seconds("queue_seconds")[0] == it.seconds("reserve_seconds")[0] == 1
    assert it.watch.num_watched == 0


def test_an_answer_behind_the_attempts_end_still_tells_how_long_it_took_and_leaves_nothing() -> None:
    it = Watched()
    it.dispatch(KEY, 0.0)
    it.watch.performed(ev.SendReserve(KEY, "d:1", pb.ReserveRequest(), 2.0), 1.0)
    it.end(KEY, "cancelled", 1.5)
    it.watch.received(ev.ReserveAnswered(KEY, pb.ReserveReply(lease=pb.Lease(lease_id=7))), 3.0)
    assert it.seconds("reserve_seconds") == (1, 2.0)
    assert it.watch.num_watched == 0


@pytest.mark.covers("O01")
def test_a_step_lasts_from_when_the_runner_was_free_for_it_and_counts_its_tokens_when_it_is_done() -> None:
    it = Watched()
    rows = Decodes.of(*(DecodeRow(slot, 0, 5, ()) for slot in range(3)))
    chunk = PrefillChunk(4, 0, 0, tuple(range(10)), (1,), True)
    for step, at in ((0, 10.0), (1, 10.0), (2, 20.0)):
        it.watch.performed(ev.RunStep(Plan(step, (), rows if step else NO_DECODES, (chunk,))), at)
        if step == 1:
            for done, done_at in ((0, 11.0), (1, 14.0)):
                assert it.measures.amounts()["tokens_computed"]["prefill"] == 10 * done
                it.watch.received(ev.StepDone(StepResult.of(done, ())), done_at)
    it.watch.received(ev.StepDone(StepResult.of(2, ())), 20.5)
    assert it.seconds("step_seconds") == (3, 1.0 + 3.0 + 0.5)  # not the 6 s in which there was nothing to do
    assert it.measures.amounts()["tokens_computed"] == {"prefill": 30, "decode": 6}
    assert it.watch.num_watched == 0


def test_whatever_order_attempts_come_and_go_in_nothing_is_left(fresh_seed: int) -> None:
    rng = random.Random(fresh_seed)
    it = Watched()
    keys = [AttemptKey("r", number, 0) for number in range(50)]
    for number, key in enumerate(keys):
        it.dispatch(key, number)
    rng.shuffle(keys)
    for number, key in enumerate(keys):
        stage, now = rng.randrange(4), 100.0 + number
        if stage > 0:
            it.reserve(key, now, now, rng.choice((None, number + 1)))
        if stage > 1:
            it.write(LeaseRef(number + 1, bytes(16)), now)
        if stage > 2:
            it.commit(key, number + 1, now)
            it.answer(key, number + 1, now)
        it.end(key, rng.choice(("committed", "finished", "cancelled", "TRANSFER_FAILED")), now)
    assert it.watch.num_watched == 0


def test_dispatches_that_the_core_drops_without_an_end_do_not_add_up() -> None:
    it = Watched()
    for number in range(MAX_WATCHED + 10):
        it.dispatch(AttemptKey("r", number, 0), 0.0)
    assert it.watch.num_watched == MAX_WATCHED
