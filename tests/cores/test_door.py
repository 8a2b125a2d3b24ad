"""What becomes of a Reserve: room to the last block, the line in front of a full node, and who leaves it how."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from connector.transport import BlocksLanded, NotifyArrived, RevokeDone
from engine.fake_runner import BYTES_PER_TOKEN, FakeRunner
from engine.plan import Plan
from node import events as ev
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey
from tests.cores.nodes import BLOCK_SIZE, ROUTER, VOCAB_SIZE, Decode, commit, reserve_request


def key(name: str, attempt: int = 0) -> AttemptKey:
    return AttemptKey(name, 0, attempt)


def ask(
    name: str,
    num_tokens: int,
    max_tokens: int = 5,
    *,
    sender: str = "prefill-0",
    wait_ms: int = 60_000,
    attempt: int = 0,
) -> pb.ReserveRequest:
    """A Reserve of a prompt that nobody else has."""
    prompt = [(ord(name[0]) + index) % VOCAB_SIZE for index in range(num_tokens)]
    request = reserve_request(key(name, attempt), prompt, max_tokens)
    request.sender.name, request.wait_ms = sender, wait_ms
    return request


class Line:
    """A decode node of 16 blocks in front of which Reserves arrive; answers by call id, in the order they came."""

    def __init__(self, **fields: object) -> None:
        self.node = Decode(**fields)  # type: ignore[arg-type]
        self.answers: dict[int, pb.ReserveReply] = {}
        self.calls: dict[str, int] = {}
        self.now = 0.0

    def take(self, actions: list[ev.Action]) -> list[ev.Action]:
        self.answers |= {each.call_id: each.reply for each in actions if isinstance(each, ev.AnswerReserve)}
        return actions

    def feed(self, event: ev.Event) -> list[ev.Action]:
        core = self.node.core
        return self.take([*core.tick(self.now), *core.receive(event, self.now)])

    def asks(self, request: pb.ReserveRequest) -> int:
        call_id = len(self.calls) + 1
        self.calls[f"{request.key.request_id} {call_id}"] = call_id
        self.feed(ev.ReserveAsked(call_id, request))
        return call_id

    def release(self, name: str) -> None:
        for action in self.feed(ev.ReleaseAsked(pb.ReleaseRequest(key=key(name).to_proto(), ms_left=60_000))):
            if isinstance(action, ev.RevokeLease):
                self.feed(RevokeDone(action.lease_id))

    def result(self, call_id: int) -> str:
        """What a call was told: lease, a code's name, or nothing yet."""
        reply = self.answers.get(call_id)
        if reply is None:
            return "waits"
        return "lease" if reply.HasField("lease") else pb.ErrorCode.Name(reply.error.code)

    def is_clean(self) -> bool:
        snapshot, counts = self.node.core.snapshot(), self.node.pool.counts()
        return snapshot["waiting_reserves"] == 0 and counts.leased == counts.used == 0


@pytest.mark.covers("D01", "S08")
@pytest.mark.parametrize("num_free", range(1, 12))
def test_a_reserve_is_granted_to_the_last_block_beside_what_is_left_to_others(num_free: int) -> None:
    line = Line(policy="ratio", num_blocks=20)
    assert line.result(line.asks(ask("a", 8, 21))) == "lease"
    held = line.node.pool.lease(line.node.pool.num_available - num_free)
    # b takes 2 full blocks and a last one; a may say 20 more tokens and b 8: ceil(20 * 0.7 / 4) + ceil(8 * 0.7 / 4) = 4 + 2.
    assert line.result(line.asks(ask("b", 8, 9, wait_ms=0))) == ("lease" if num_free >= 9 else "NO_BLOCKS")
    line.node.pool.release_lease(held)


@pytest.mark.covers("D01", "S08")
@pytest.mark.parametrize("num_free", [2, 3])
def test_without_decode_reserve_only_the_blocks_themselves_count(num_free: int) -> None:
    line = Line(policy="ratio", num_blocks=20, reserves_for_running=False)
    assert line.result(line.asks(ask("a", 8, 21))) == "lease"
    held = line.node.pool.lease(line.node.pool.num_available - num_free)
    assert line.result(line.asks(ask("b", 8, 9, wait_ms=0))) == ("lease" if num_free >= 3 else "NO_BLOCKS")
    line.node.pool.release_lease(held)


def test_who_waits_gets_the_lease_when_room_comes_and_the_time_is_not_used_up() -> None:
    line = Line()
    first, second = line.asks(ask("a", 40, 9)), line.asks(ask("b", 40, 9))
    assert (line.result(first), line.result(second)) == ("lease", "waits")
    line.release("a")
    assert line.result(second) == "lease"
    line.release("b")
    assert line.is_clean()


def test_who_does_not_wait_is_refused_at_once_and_nobody_overtakes_who_does() -> None:
    line = Line()
    line.asks(ask("a", 40, 9))
    large = line.asks(ask("b", 40, 9))
    small, impatient = line.asks(ask("c", 4, 2)), line.asks(ask("d", 4, 2, wait_ms=0))
    assert [line.result(each) for each in (large, small, impatient)] == ["waits", "waits", "NO_BLOCKS"]
    line.release("a")
    assert [line.result(each) for each in (large, small)] == ["lease", "lease"]


def test_senders_take_turns_however_much_one_of_them_asks_for() -> None:
    line = Line()
    line.asks(ask("z", 40, 9))
    of_one = [line.asks(ask(name, 32, 9, sender="one")) for name in "abc"]
    of_two = [line.asks(ask(name, 32, 9, sender="two")) for name in "de"]
    order: list[str] = []
    for name in ("z", *"abcde"):
        before = {each for each in (*of_one, *of_two) if line.result(each) == "lease"}
        line.release(name if name == "z" else order[-1])
        granted = [each for each in (*of_one, *of_two) if line.result(each) == "lease" and each not in before]
        order += [next(text.split()[0] for text, number in line.calls.items() if number == each) for each in granted]
        if len(order) == 5:
            break
    assert order == ["a", "d", "b", "e", "c"]


@pytest.mark.covers("R17")
def test_at_the_end_of_its_time_a_waiting_reserve_is_refused_with_no_new_work() -> None:
    line = Line()
    line.asks(ask("a", 40, 9))
    call = line.asks(ask("b", 40, 9, wait_ms=1500))
    assert line.node.core.next_deadline() == 1.5
    line.now = 1.5
    line.take(list(line.node.core.tick(1.5)))
    assert line.result(call) == "NO_BLOCKS" and line.answers[call].error.retryable
    line.release("a")
    assert line.is_clean()


def test_the_line_is_bounded_and_says_so() -> None:
    line = Line(max_waiting_reserves=2)
    line.asks(ask("a", 40, 9))
    calls = [line.asks(ask(name, 40, 9)) for name in "bcd"]
    assert [line.result(each) for each in calls] == ["waits", "waits", "NO_BLOCKS"]
    assert line.node.core.load().waiting == 2


@pytest.mark.covers("H06")
def test_the_same_reserve_twice_waits_once_and_both_calls_hear_of_it() -> None:
    line = Line()
    line.asks(ask("a", 40, 9))
    calls = [line.asks(ask("b", 40, 9)) for _ in range(6)]
    assert [line.result(each) for each in calls] == ["waits"] * 4 + ["BUSY"] * 2
    line.release("a")
    replies = [line.answers[each].lease.lease_id for each in calls[:4]]
    assert len(set(replies)) == 1 and replies[0]


@pytest.mark.covers("H06", "D01")
def test_the_same_reserve_twice_waits_once_even_after_its_first_branch_was_cancelled() -> None:
    line = Line()
    line.asks(ask("a", 40, 9))
    request = ask("b", 40, 9)
    request.more_choices.append(1)
    first = line.asks(request)
    message = pb.RouterMessage(cancel=pb.Cancel(key=key("b").to_proto(), ms_left=60_000))
    line.feed(ev.FromRouter(ROUTER, message))
    again = line.asks(request)
    assert line.node.core.snapshot()["waiting_reserves"] == 1
    of_one = ask("b", 40, 9)
    of_one.key.choice = 1
    assert line.result(line.asks(of_one)) == "CANCELLED", "it stands in line with others"
    line.release("a")
    assert [line.result(each) for each in (first, again)] == ["lease", "lease"]
    release = pb.ReleaseRequest(key=AttemptKey("b", 1, 0).to_proto(), ms_left=60_000)
    for action in line.feed(ev.ReleaseAsked(release)):
        if isinstance(action, ev.RevokeLease):
            line.feed(RevokeDone(action.lease_id))
    assert line.is_clean() and line.result(line.asks(ask("c", 4, 2, wait_ms=0))) == "lease"


@pytest.mark.covers("H06", "D01")
def test_who_asks_for_a_cancelled_branch_again_beside_a_new_one_takes_nobody_s_place_in_the_line() -> None:
    """No right sender does."""
    line = Line()
    line.asks(ask("a", 40, 9))
    requests = [ask("b", 40, 9), ask("b", 40, 9)]
    for choice, request in enumerate(requests, start=1):
        request.more_choices.append(choice)
    first = line.asks(requests[0])
    message = pb.RouterMessage(cancel=pb.Cancel(key=key("b").to_proto(), ms_left=60_000))
    line.feed(ev.FromRouter(ROUTER, message))
    second = line.asks(requests[1])
    assert line.node.core.snapshot()["waiting_reserves"] == 2
    line.release("a")
    assert [line.result(each) for each in (first, second)] == ["lease", "waits"]
    for choice in (1, 2):
        release = pb.ReleaseRequest(key=AttemptKey("b", choice, 0).to_proto(), ms_left=60_000)
        for action in line.feed(ev.ReleaseAsked(release)):
            if isinstance(action, ev.RevokeLease):
                line.feed(RevokeDone(action.lease_id))
        assert line.result(second) == "lease"
    assert line.is_clean()


@pytest.mark.covers("R04", "H06")
@pytest.mark.parametrize("how", ["cancel", "release", "router lost", "newer attempt"])
def test_who_is_not_wanted_any_more_leaves_the_line_and_hears_of_it(how: str) -> None:
    line = Line()
    line.asks(ask("a", 40, 9))
    call, behind = line.asks(ask("b", 40, 9)), line.asks(ask("c", 40, 9, sender="other"))
    match how:
        case "cancel":
            message = pb.RouterMessage(cancel=pb.Cancel(key=key("b").to_proto(), ms_left=60_000))
            line.feed(ev.FromRouter(ROUTER, message))
        case "release":
            line.release("b")
        case "router lost":
            line.feed(ev.RouterLost(ROUTER))
        case _:
            assert line.result(line.asks(ask("b", 40, 9, attempt=1))) == "waits"
    assert line.result(call) == "CANCELLED"
    assert line.result(line.asks(ask("b", 40, 9))) == "CANCELLED", "its fence stands"
    if how != "router lost":
        line.release("a")
        assert line.result(behind) == "lease"


def test_more_branches_than_slots_are_refused_before_anything_is_remembered() -> None:
    line = Line(num_slots=2)
    request = ask("a", 4, 5)
    request.more_choices.extend((1, 2))
    assert line.result(line.asks(request)) == "BUSY" and line.node.core.snapshot()["fences"] == 0


@pytest.mark.covers("Q02", "S01", "D02")
def test_short_of_blocks_the_youngest_ends_with_all_that_it_said_and_the_line_moves_only_then() -> None:
    line = Line(policy="none", num_blocks=16)
    memory = np.zeros((16, BYTES_PER_TOKEN * BLOCK_SIZE), dtype=np.uint8)
    runner, plans = FakeRunner(memory, BLOCK_SIZE, VOCAB_SIZE, 4), deque[Plan]()
    said: dict[str, list[int]] = {}
    errors: list[pb.PDError] = []

    def feed(event: ev.Event) -> None:
        for action in line.feed(event):
            if isinstance(action, ev.RunStep):
                plans.append(action.plan)
            elif isinstance(action, ev.RevokeLease):
                feed(RevokeDone(action.lease_id))
            elif isinstance(action, ev.ToRouter) and action.message.HasField("error"):
                errors.append(action.message.error)
            elif isinstance(action, ev.ToRouter):
                for branch in action.message.tokens.branches:
                    known = said.setdefault(branch.key.request_id, [])
                    known[branch.first_index :] = branch.token_ids

    for name in "ab":
        request = ask(name, 8, 48)
        lease = line.answers[line.asks(request)].lease
        prompt = [(ord(name) + index) % VOCAB_SIZE for index in range(8)]
        blocks = line.node.core._leases[lease.lease_id].blocks.all
        kv = memory[:, : BYTES_PER_TOKEN * BLOCK_SIZE].view("<i4")
        kv[list(blocks[:2])] = np.asarray(prompt).reshape(2, BLOCK_SIZE) + 1
        feed(BlocksLanded(lease.lease_id, (0, 1), 128, "prefill-0"))
        feed(NotifyArrived("link", commit(key(name), lease, prompt, 3, 48)))
    waiting = line.asks(ask("w", 48, 2))
    while not errors:
        assert plans, "nobody gives way"
        assert line.result(waiting) == "waits"
        feed(ev.StepDone(runner.run(plans.popleft())))
    (error,) = errors
    assert (error.code, error.retryable, error.key.request_id) == (pb.PREEMPTED, True, "b")
    assert list(error.completion_token_ids) == said["b"] and len(said["b"]) > 8
    line.release("w")  # without a reserve it would take what a needs
    while plans:
        feed(ev.StepDone(runner.run(plans.popleft())))
    assert len(said["a"]) == 48 and line.node.core.snapshot()["branches"] == 0
