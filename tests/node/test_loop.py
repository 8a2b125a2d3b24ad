"""The shell's promises to its core: tick first, actions in order, timers without traffic, bugs that end the process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import TypeVar

import pytest

from connector.choosing import HostMemory, choose_transports
from connector.transport import BlocksTaken, LeaseRef, RevokeDone
from connector.zmq_options import LOOPBACK
from engine.plan import Done, Launched, Plan, StepResult
from engine.shared_bytes import SharedBytes
from node import events as ev
from node.handoff_client import HandoffClient
from node.inbox import Inbox
from node.loop import NodeLoop, NoKvPool, Outlets
from node.measures import Measures
from node.metrics import Counters
from node.runner_thread import RunnerThread
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey
from tests.node.scripted_core import ScriptedCore

KEY = AttemptKey("r", 0, 0)
ROUTER = ev.RouterId("router", 1)

T = TypeVar("T")


class Recorder:
    """Where actions end: the test's routers and calls."""

    def __init__(self) -> None:
        self.done: list[object] = []
        self.grown = asyncio.Event()

    def send(self, router: ev.RouterId, message: pb.NodeMessage) -> None:
        self._note(("send", router, message))

    def answer_reserve(self, call_id: int, reply: pb.ReserveReply) -> None:
        self._note(("reserve", call_id, reply))

    def answer_renew(self, call_id: int, reply: pb.RenewReply) -> None:
        self._note(("renew", call_id, reply))

    def save(self, action: ev.SaveBlocks) -> None:
        self._note(action)

    def take_out(self, action: ev.TakeOutBlocks) -> None:
        self._note(action)

    def look(self, action: ev.LookInPool) -> None:
        self._note(action)

    def fetch(self, action: ev.FetchBlocks) -> None:
        self._note(action)

    def snapshot(self) -> dict[str, object]:
        return {}

    def _note(self, what: object) -> None:
        self.done.append(what)
        self.grown.set()

    async def wait_for(self, number: int) -> list[object]:
        while len(self.done) < number:
            self.grown.clear()
            await self.grown.wait()
        return self.done


class EchoRunner:
    """Answers each plan with its step id; raises at a step that the test chose."""

    def __init__(self, fails_at: int = -1) -> None:
        self._fails_at = fails_at

    def launch(self, plan: Plan, on_ready: Callable[[], None]) -> Launched:
        if plan.step_id == self._fails_at:
            raise RuntimeError("a bug in the runner")
        return Done(StepResult.of(plan.step_id, ()))


class Shell:
    """A whole shell around a scripted core, with a real transport and a real runner thread."""

    def __init__(self, core: ScriptedCore, tasks: asyncio.TaskGroup) -> None:
        self.inbox = Inbox()
        self.recorder = Recorder()
        self.counters = Counters()
        self.measures = Measures()
        memory = SharedBytes(4, 64)
        self.transport = choose_transports(
            "auto",
            HostMemory(memory.bytes, lambda: memory.descriptor),
            ("n", 1),
            self.inbox.post,
            LOOPBACK,
            is_encrypted=False,
        )
        self.runner = RunnerThread(EchoRunner(), lambda result: self.inbox.post(ev.StepDone(result)))
        self.peers = HandoffClient(self.inbox.post, tasks.create_task)
        self.drained = asyncio.Event()
        ends = (self.runner, self.transport, self.recorder, self.recorder, self.peers, self.recorder)
        outlets = Outlets(*ends, self.counters, self.measures, self.drained)
        self.task = tasks.create_task(NodeLoop("n", core, self.inbox, outlets).run())

    async def stop(self) -> None:
        self.task.cancel()
        await self.peers.close()
        assert await self.runner.stop(60)
        self.transport.stop()


def drive(core: ScriptedCore, test: Callable[[Shell], Coroutine[None, None, T]]) -> T:
    async def run() -> T:
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            shell = Shell(core, tasks)
            try:
                return await test(shell)
            finally:
                await shell.stop()

    return asyncio.run(run())


def to_router(text: str) -> ev.ToRouter:
    return ev.ToRouter(ROUTER, pb.NodeMessage(error=pb.PDError(message=text)))


def sent(recorder: Recorder) -> list[str]:
    return [item[2].error.message for item in recorder.done if isinstance(item, tuple) and item[0] == "send"]


def test_what_is_due_expires_before_an_event_is_received_at_the_same_time() -> None:
    core = ScriptedCore(lambda _event, _now: [to_router("received")])
    core.on_due = [to_router("expired")]

    async def test(shell: Shell) -> None:
        core.deadline = asyncio.get_running_loop().time() - 1  # due already; the event is posted in the same moment
        shell.inbox.post(ev.RouterLost(ROUTER))
        await shell.recorder.wait_for(2)
        assert sent(shell.recorder) == ["expired", "received"]

    drive(core, test)
    assert [name for name, _ in core.calls] == ["due", "receive"]


def test_an_event_in_the_same_turn_finds_expired_what_the_one_before_it_made_due() -> None:
    def answer(_event: ev.Event, now: float) -> Sequence[ev.Action]:
        if sum(name == "receive" for name, _ in core.calls) == 2:
            core.deadline = now
        return [to_router("received")]

    core = ScriptedCore(answer)
    core.on_due = [to_router("expired")]

    async def test(shell: Shell) -> None:
        shell.inbox.post(ev.RouterLost(ROUTER))
        await shell.recorder.wait_for(1)  # the first turn of all ticks in any case
        for _ in range(2):
            shell.inbox.post(ev.RouterLost(ROUTER))
        await shell.recorder.wait_for(4)
        assert sent(shell.recorder) == ["received", "received", "expired", "received"]

    drive(core, test)


def test_what_is_for_the_kv_pool_reaches_it_and_without_one_each_is_answered_with_nothing() -> None:
    asked: list[ev.Action] = [
        ev.SaveBlocks(1, ((b"k", 0),)),
        ev.TakeOutBlocks((b"k",)),
        ev.LookInPool(2, (b"k",)),
        ev.FetchBlocks(3, ((b"k", 1),)),
    ]
    core = ScriptedCore(lambda _event, _now: asked)

    async def test(shell: Shell) -> None:
        shell.inbox.post(ev.RouterLost(ROUTER))
        assert await shell.recorder.wait_for(4) == asked

    drive(core, test)
    answers: list[ev.Event] = []
    pool = NoKvPool(answers.append)
    pool.save(ev.SaveBlocks(1, ((b"k", 0),)))
    pool.take_out(ev.TakeOutBlocks((b"k",)))
    pool.look(ev.LookInPool(2, (b"k",)))
    pool.fetch(ev.FetchBlocks(3, ((b"k", 1),)))
    assert answers == [ev.BlocksStaged(1, 0), ev.PoolLooked(2, 0), ev.BlocksFetched(3, 0, 0.0)]


@pytest.mark.covers("H07")
def test_a_timer_fires_with_no_event_at_all_and_a_later_one_after_it() -> None:
    core = ScriptedCore()
    core.on_due = [to_router("expired")]

    async def test(shell: Shell) -> None:
        loop = asyncio.get_running_loop()
        for number in (1, 2):
            core.deadline = due = loop.time() + 0.02
            shell.inbox.wake()  # as after any event: the shell asks for the deadline again
            await shell.recorder.wait_for(number)
            assert loop.time() >= due

    drive(core, test)
    assert [name for name, _ in core.calls] == ["due", "due"]


def test_time_never_goes_back_for_the_core() -> None:
    core = ScriptedCore(lambda _event, _now: [to_router("received")])

    async def test(shell: Shell) -> None:
        for _ in range(300):
            shell.inbox.post(ev.RouterLost(ROUTER))
        await shell.recorder.wait_for(300)

    drive(core, test)
    assert core.times == sorted(core.times)


def test_events_are_received_in_the_order_of_their_posting_and_actions_performed_in_theirs() -> None:
    core = ScriptedCore(
        lambda event, _now: [to_router(f"{event.router.name}{n}") for n in range(3)]  # type: ignore[union-attr]
    )

    async def test(shell: Shell) -> list[str]:
        for begin in (0, 300):  # more than the loop takes at once, and again when it sleeps
            for number in range(begin, begin + 300):
                shell.inbox.post(ev.RouterLost(ev.RouterId(f"{number}.", 1)))
            await shell.recorder.wait_for(3 * (begin + 300))
        return sent(shell.recorder)

    assert drive(core, test) == [f"{event}.{n}" for event in range(600) for n in range(3)]


def test_results_come_back_in_the_order_of_the_plans() -> None:
    plans = [Plan(step) for step in range(20)]

    def answer(event: ev.Event, _now: float) -> Sequence[ev.Action]:
        if isinstance(event, ev.StepDone):
            return [to_router(str(event.result.step_id))]
        return [ev.RunStep(plan) for plan in plans]

    async def test(shell: Shell) -> list[str]:
        shell.inbox.post(ev.RouterLost(ROUTER))
        await shell.recorder.wait_for(20)
        return sent(shell.recorder)

    assert drive(ScriptedCore(answer), test) == [str(step) for step in range(20)]


@pytest.mark.covers("A10")
def test_what_is_dropped_of_a_link_is_given_back_though_nobody_takes_it() -> None:
    lease = LeaseRef(5, bytes(16))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        there = pb.Endpoint(transport="zmq", address=address, link_secret=bytes(16))

        def answer(event: ev.Event, _now: float) -> Sequence[ev.Action]:
            if isinstance(event, ev.RouterLost):
                write = ev.WriteBlocks("there@1/1", lease, ((0, 3), (1, 2)))
                return [ev.OpenLink("there@1/1", (there,)), write, ev.DropWrites("there@1/1", lease)]
            return [to_router("taken")] if event == BlocksTaken("there@1/1", 5, (0, 1), is_dropped=True) else ()

        async def test(shell: Shell) -> None:
            shell.inbox.post(ev.RouterLost(ROUTER))
            await shell.recorder.wait_for(1)

        drive(ScriptedCore(answer), test)


def test_a_lease_is_admitted_before_its_answer_which_carries_the_endpoints() -> None:
    granted = pb.ReserveReply(lease=pb.Lease(lease_id=5))

    def answer(event: ev.Event, _now: float) -> Sequence[ev.Action]:
        if isinstance(event, RevokeDone):
            return [to_router(f"revoked {event.lease_id}")]
        return [ev.AdmitLease(5, bytes(16), (0, 1)), ev.AnswerReserve(1, granted), ev.RevokeLease(5)]

    async def test(shell: Shell) -> None:
        shell.inbox.post(ev.ReserveAsked(1, pb.ReserveRequest()))
        first, second = await shell.recorder.wait_for(2)
        assert isinstance(first, tuple) and isinstance(second, tuple)
        assert first[:2] == ("reserve", 1)
        assert [each.transport for each in first[2].lease.endpoints] == ["shm", "zmq"]
        assert list(first[2].lease.endpoints) == shell.transport.endpoints()
        assert second[2].error.message == "revoked 5"

    drive(ScriptedCore(answer), test)
    assert not granted.lease.endpoints  # the core's own message stays as it was


def test_a_refusal_is_answered_as_it_is() -> None:
    refusal = pb.ReserveReply(error=pb.PDError(code=pb.BUSY))

    async def test(shell: Shell) -> list[object]:
        shell.inbox.post(ev.ReserveAsked(1, pb.ReserveRequest()))
        return await shell.recorder.wait_for(1)

    core = ScriptedCore(lambda _event, _now: [ev.AnswerReserve(1, refusal)])
    assert drive(core, test) == [("reserve", 1, refusal)]


def test_counts_add_up_and_every_end_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    actions: Sequence[ev.Action] = [ev.Count("stale_refused", 2), ev.Ended(KEY, "committed"), to_router("done")]

    async def test(shell: Shell) -> tuple[int, int]:
        shell.inbox.post(ev.RouterLost(ROUTER))
        await shell.recorder.wait_for(1)
        ended = shell.measures.amounts()["attempts_ended"]
        return shell.counters.counts()["stale_refused"], ended["committed"]

    with caplog.at_level("INFO", logger="node.loop"):
        counts = drive(ScriptedCore(lambda _e, _n: actions), test)
    assert counts == (2, 1)
    (line,) = caplog.messages
    assert line == "attempt_ended request=r choice=0 attempt=0 node=n outcome=committed"


def test_an_exception_of_the_core_ends_the_loop_with_it() -> None:
    def answer(_event: ev.Event, _now: float) -> Sequence[ev.Action]:
        raise LookupError("a bug in the core")

    async def test(shell: Shell) -> None:
        shell.inbox.post(ev.RouterLost(ROUTER))
        await shell.recorder.wait_for(1)

    with pytest.raises(ExceptionGroup) as group:
        drive(ScriptedCore(answer), test)
    assert group.group_contains(LookupError, match="a bug in the core")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_step_that_raises_ends_the_runner_thread_and_says_so() -> None:
    async def run() -> list[int]:
        results: list[int] = []
        runner = RunnerThread(EchoRunner(fails_at=1), lambda result: results.append(result.step_id))
        for step in range(3):
            runner.submit(Plan(step))
        async with asyncio.timeout(60):
            await runner.ended
            assert await runner.stop(60)
        return results

    assert asyncio.run(run()) == [0]
