"""What the cores of a mixed node owe each other: one queue, one pool, and no attempt in two of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pytest

from connector.transport import RevokeDone
from engine.sequence import Phase, Progress
from mixed_node.core import MixedCore
from node import events as ev
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey
from tests.cores.mixed import MIXED, Mixed, target_of
from tests.cores.nodes import DECODE, ROUTER, only, reserve_request


def key(name: str, attempt: int = 0) -> AttemptKey:
    return AttemptKey(name, 0, attempt)


def dispatch(
    name: str, prompt: list[int], max_tokens: int, target: pb.Target | None = None, attempt: int = 0
) -> pb.Dispatch:
    return pb.Dispatch(
        request_id=name,
        attempt=attempt,
        branches=[pb.Branch(choice=0, seed=1)],
        prompt_token_ids=prompt,
        sampling=pb.Sampling(max_tokens=max_tokens),
        target=target or target_of(MIXED),
        ms_left=60_000,
    )


def ask(node: Mixed, name: str, num_tokens: int, wait_ms: int = 0, max_tokens: int = 4) -> list[ev.Action]:
    """A prefill node's Reserve."""
    request = reserve_request(key(name), list(range(num_tokens)), max_tokens)
    request.wait_ms = wait_ms
    return node.feed(ev.ReserveAsked(ord(name), request))


def tokens_in(actions: list[ev.Action]) -> list[tuple[str, int]]:
    """Whose tokens, and from which index."""
    return [
        (tokens.key.request_id, tokens.first_index)
        for action in actions
        if isinstance(action, ev.ToRouter)
        for tokens in action.message.tokens.branches
    ]


@pytest.mark.covers("S10", "S01")
def test_who_gave_way_goes_on_where_it_was_before_anybody_who_came_later_begins() -> None:
    node = Mixed(num_blocks=16, policy="none", max_batched_tokens=16)
    for name in "ab":
        node.send(dispatch(name, [1, 2, 3, 4, 5, 6, ord(name) % 9], 50))
    said: list[tuple[str, int]] = []
    while not node.scheduler.num_preempted:
        said += tokens_in(node.step())
    node.send(dispatch("c", [9] * 7, 3))
    while node.plans:
        said += tokens_in(node.step())
    assert node.scheduler.num_preempted == 1, "b gave way once"
    assert sorted(said) == [
        (name, index) for name, number in (("a", 50), ("b", 50), ("c", 3)) for index in range(number)
    ]
    first_of_c = said.index(("c", 0))
    assert [index for name, index in said[:first_of_c] if name == "b"] != list(range(50)), "c came in while b ran"
    before_c = {name for name, _ in said[said.index(("a", 49)) + 1 : first_of_c]}
    assert before_c == {"b"}, "a's end made the room: b has it first"
    node.feed(ev.RouterLost(ROUTER))
    node.assert_empty()


@pytest.mark.covers("D01", "S10")
def test_no_lease_is_given_while_somebody_who_was_here_before_finds_no_room() -> None:
    node = Mixed(num_blocks=16, policy="none", max_batched_tokens=64)
    node.send(dispatch("a", [1] * 24, 20))
    node.step()
    assert only(ask(node, "e", 4), ev.AnswerReserve).reply.HasField("lease"), "nobody waits"
    node.send(dispatch("b", [2] * 40, 20))  # ten blocks: more than a leaves
    node.step()
    assert node.scheduler.num_waiting == 1 and node.pool.num_available > 4
    refused = only(ask(node, "f", 4), ev.AnswerReserve).reply.error
    assert refused.code == pb.NO_BLOCKS and "before" in refused.message
    assert not [action for action in ask(node, "g", 4, wait_ms=5000) if isinstance(action, ev.AnswerReserve)]
    answers: list[ev.AnswerReserve] = []
    while not answers:
        answers = [action for action in node.step() if isinstance(action, ev.AnswerReserve)]
    assert answers[0].call_id == ord("g") and answers[0].reply.HasField("lease")
    assert not node.scheduler.num_waiting, "b has its room"


@pytest.mark.covers("D01")
def test_leases_that_fill_the_pool_are_not_followed_by_more_while_the_queue_waits() -> None:
    node = Mixed(num_blocks=16, policy="none")
    lease = only(ask(node, "e", 40), ev.AnswerReserve).reply.lease
    node.send(dispatch("b", [2] * 30, 4))
    assert not node.plans and node.pool.num_available == 5, "b needs eight"
    assert only(ask(node, "f", 4), ev.AnswerReserve).reply.error.code == pb.NO_BLOCKS
    (revoke,) = [action for action in node.core.tick(1.5) if isinstance(action, ev.RevokeLease)]
    assert revoke.lease_id == lease.lease_id, "its life is over"
    node.feed(RevokeDone(lease.lease_id), 1.5)
    assert node.plans and not node.scheduler.num_waiting


def test_who_waits_for_the_step_and_not_for_room_holds_up_no_lease() -> None:
    node = Mixed(num_blocks=64, policy="none", max_batched_tokens=8)
    for name in "abc":
        node.send(dispatch(name, [ord(name) % 9] * 20, 4))
    node.step()
    assert node.scheduler.num_waiting
    assert only(ask(node, "e", 4), ev.AnswerReserve).reply.HasField("lease")


@pytest.mark.covers("R04", "H06")
def test_an_attempt_that_one_core_has_is_refused_by_the_others() -> None:
    """No right router or sender does this; the scheduler would not know whose sequence it is."""
    node = Mixed()
    lease = only(ask(node, "a", 5), ev.AnswerReserve).reply.lease
    for target in (target_of(MIXED), target_of(DECODE)):
        assert node.send(dispatch("a", [1] * 5, 4, target)) == [ev.Count("stale_refused")]
    assert lease.lease_id and not node.plans
    node.send(dispatch("b", [1] * 5, 4))
    node.send(dispatch("c", [1] * 5, 4, target_of(DECODE)))
    for name, target in (("b", target_of(DECODE)), ("c", target_of(MIXED))):
        assert only(ask(node, name, 5), ev.AnswerReserve).reply.error.code == pb.CANCELLED
        assert ev.Count("stale_refused") in node.send(dispatch(name, [1] * 5, 4, target))
    phases = node.scheduler.snapshot()["phases"]
    assert isinstance(phases, dict) and set(phases) == {key("b"), key("c")}


@pytest.mark.covers("R04")
@pytest.mark.parametrize("how", ["cancel", "router lost"])
def test_a_cancel_and_a_lost_router_reach_every_core(how: str) -> None:
    node = Mixed()
    node.send(dispatch("a", [1] * 5, 40))
    node.send(dispatch("b", [2] * 5, 40, target_of(DECODE)))
    ask(node, "c", 5)
    assert node.core.snapshot()["local_branches"] == 1
    lost: list[ev.Action] = []
    if how == "cancel":
        for name in "abc":
            lost += node.send(pb.Cancel(key=key(name).to_proto(), ms_left=60_000))
    else:
        lost = node.feed(ev.RouterLost(ROUTER))
    for action in lost:
        if isinstance(action, ev.RevokeLease):
            lost = [*lost, *node.feed(RevokeDone(action.lease_id))]
    ended = {action.key.request_id for action in lost if isinstance(action, ev.Ended)}
    while node.plans:
        node.step()
    assert ended >= {"a", "c"} and node.core.snapshot()["attempts"] == 0
    for name in "abc" if how == "cancel" else "":
        again = [ev.Count("stale_refused")]
        assert node.send(dispatch(name, [1] * 5, 4)) == again
        assert only(ask(node, name, 5), ev.AnswerReserve).reply.error.code == pb.CANCELLED


def test_a_step_is_read_once_and_planned_once_however_many_cores_have_rows_in_it() -> None:
    node = Mixed(num_blocks=40, max_batched_tokens=64)
    node.send(dispatch("a", [1] * 9, 5))
    node.send(dispatch("b", [2] * 9, 5, target_of(DECODE)))
    assert len(node.plans) == 2, "both are a's: its prompt and its next row"
    assert [tokens_in(node.step()) for _ in range(2)] == [[("a", 0)], [("a", 1)]]
    actions = node.step()
    assert tokens_in(actions) == [("b", 0), ("a", 2)] and len(node.plans) == 2
    from_receiver = [action.message.tokens.from_receiver for action in actions if isinstance(action, ev.ToRouter)]
    assert from_receiver == [False, True], "the prefill core speaks as a sender, the local one as an owner"
    assert node.scheduler.num_in(Phase.RUNNING_DECODE) == 1 and node.core.load().blocks_used > 0


class DrainingPart:
    """Another implementation of a part: it drains when the test says so, and says a last thing behind that."""

    def __init__(self) -> None:
        self.taken: list[ev.Event] = []
        self.says: list[ev.Action] = []

    def take(self, event: ev.Event, now: float) -> None:
        self.taken.append(event)

    def read(self, progress: Iterable[Progress], now: float) -> None:
        pass

    def expire(self, now: float) -> None:
        pass

    def settle(self, now: float) -> list[ev.Action]:
        says, self.says = self.says, []
        return says

    def next_deadline(self) -> float | None:
        return None

    def snapshot(self) -> Mapping[str, object]:
        return {"fences": 0}

    def holds(self, key: AttemptKey) -> bool:
        return False

    def refuse_who(self, is_elsewhere: Callable[[AttemptKey], bool]) -> None:
        pass

    def hold_back(self, is_held_up: bool) -> None:
        pass

    @property
    def has_line(self) -> bool:
        return False

    def sends(self, event: ev.Event) -> bool:
        return False

    def load(self) -> pb.LoadReport:
        return pb.LoadReport(waiting=3)

    def hold(self, router: ev.RouterId, dispatch: pb.Dispatch, now: float) -> bool:
        return False

    def has(self, key: AttemptKey) -> bool:
        return False

    def drop(self, key: AttemptKey) -> None:
        pass

    def take_released(self) -> list[AttemptKey]:
        return []

    def tell_speed(self, report: pb.LoadReport) -> None:
        report.prefill_tokens_per_s = 100.0


@pytest.mark.covers("D08", "H15")
@pytest.mark.parametrize("order", ["prefill first", "decode first", "both at once"])
def test_a_mixed_node_has_drained_when_both_of_its_cores_have_and_says_so_once(order: str) -> None:
    prefill, decode = DrainingPart(), DrainingPart()
    core = MixedCore(MIXED, Mixed().scheduler, prefill, decode)
    assert core.load() == pb.LoadReport(waiting=3, prefill_tokens_per_s=100.0), "what both know"
    asked = ev.DrainAsked(9.0)
    assert core.receive(asked, 1.0) == [] and prefill.taken == decode.taken == [asked]
    first, second = (prefill, decode) if order != "decode first" else (decode, prefill)
    word = ev.Count("unexpected_events")
    first.says = [ev.Drained(), word]
    if order != "both at once":
        assert core.tick(2.0) == [word], "the other has not drained"
        assert core.tick(3.0) == []
        word = ev.Count("stale_refused")
    second.says = [ev.Drained()] if order == "both at once" else [ev.Drained(), word]
    assert core.tick(4.0) == [word, ev.Drained()], "behind all that both say"
    assert core.tick(5.0) == []


def test_a_move_is_the_decode_cores_alone_and_counts_as_expected() -> None:
    prefill, decode = DrainingPart(), DrainingPart()
    core = MixedCore(MIXED, Mixed().scheduler, prefill, decode)
    move = ev.FromRouter(ROUTER, pb.RouterMessage(move=pb.Move(key=pb.AttemptKey(request_id="a"))))
    assert core.receive(move, 1.0) == []
    assert (prefill.taken, decode.taken) == ([], [move])
