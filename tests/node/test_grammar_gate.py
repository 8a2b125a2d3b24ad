"""Grammars in front of a node's inbox: compiled before anything is computed, refused in words, and never waited for too long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NoReturn

import pytest

from engine.byte_tokenizer import END_OF_TEXT
from engine.grammars import Grammars
from engine.make_model import make_model
from engine.model_sizes import ModelSize
from engine.plan import Grammar
from node import grammar_gate, grammar_threads
from node.bugs import ThreadEnded, keep
from node.events import Event, FromRouter, RouterId, RouterLost
from node.grammar_gate import GrammarGate
from node.grammar_threads import Flaw, GrammarThreads
from proto import baton_pb2 as pb

ROUTER = RouterId("router", 1)
GOOD, BAD = "[a-f]{9}", "[a-f"
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose grammar compiles is not sent away, however long this process stands still."""
    monkeypatch.setattr(grammar_gate, "RESERVE_WAITS_S", PATIENCE_S)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "m"
    make_model(ModelSize(32, 1, 2, 1, 16, 48, 256), "fp32", 0, path)
    return path


class Slow(Grammars):
    """Compiles when it is let."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, 260)
        self.go = threading.Event()

    def check(self, grammar: Grammar, generated_token_ids: Iterable[int] = ()) -> None:
        self.go.wait(PATIENCE_S)
        super().check(grammar, generated_token_ids)


def dispatch(request_id: str, regex: str | None, generated: bytes = b"") -> FromRouter:
    grammar = None if regex is None else pb.Grammar(kind=pb.Grammar.REGEX, text=regex, end_token_ids=[END_OF_TEXT])
    branch = pb.Branch(generated_token_ids=generated)
    asked = pb.Dispatch(request_id=request_id, branches=[branch], sampling=pb.Sampling(grammar=grammar))
    return FromRouter(ROUTER, pb.RouterMessage(dispatch=asked))


def reserve(asked: FromRouter, ms_left: int = 1) -> pb.ReserveRequest:
    """A lease for what a Dispatch asks."""
    return pb.ReserveRequest(grammar=asked.message.dispatch.sampling.grammar, ms_left=ms_left)


def cancel(request_id: str) -> FromRouter:
    return FromRouter(ROUTER, pb.RouterMessage(cancel=pb.Cancel(key=pb.AttemptKey(request_id=request_id))))


class Bed:
    """A gate, and what came through it."""

    def __init__(self, grammars: Grammars, check_s: float = PATIENCE_S, wait_s: float = PATIENCE_S) -> None:
        self.threads = GrammarThreads(grammars, check_s, wait_s)
        self.gate = GrammarGate(self._let_in, self.threads)
        self.let_in: list[Event] = []
        self.refused: list[tuple[FromRouter, Flaw]] = []
        self._changed = asyncio.Event()

    def send(self, *events: FromRouter | RouterLost) -> None:
        for event in events:
            self.gate.post_from_router(event, self._refuse)

    async def until(self, num_let_in: int, num_refused: int = 0) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while (len(self.let_in), len(self.refused)) != (num_let_in, num_refused):
                self._changed.clear()
                await self._changed.wait()

    def _let_in(self, event: Event) -> None:
        self.let_in.append(event)
        self._changed.set()

    def _refuse(self, event: FromRouter, flaw: Flaw) -> None:
        self.refused.append((event, flaw))
        self._changed.set()


def play(bed_of: Callable[[], Bed], scenario: Callable[[Bed], Awaitable[None]]) -> None:
    async def run() -> None:
        bed = bed_of()
        try:
            await scenario(bed)
        finally:
            await bed.gate.close()
            await bed.threads.stop(PATIENCE_S)

    asyncio.run(run())


@pytest.mark.covers("A14")
def test_who_asks_for_a_grammar_waits_for_it_and_others_overtake(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(directory)

    async def scenario(bed: Bed) -> None:
        bound, free = dispatch("bound", GOOD), dispatch("free", None)
        bed.send(bound, cancel("bound"), free, cancel("other"))
        assert bed.let_in == [free, cancel("other")]
        # A lease is given to nobody whose first step would wait for it.
        with monkeypatch.context() as patch:
            patch.setattr(grammar_gate, "RESERVE_WAITS_S", 0.5)
            flaw = await bed.gate.flaw(reserve(bound))
        assert flaw is not None and flaw.code == pb.BUSY
        slow.go.set()
        await bed.until(4)
        assert bed.let_in[2:] == [bound, cancel("bound")]
        again = dispatch("again", GOOD, b"abc")  # a retry, that knows some tokens
        bed.send(again)
        await bed.until(5)
        assert await bed.gate.flaw(reserve(bound)) is None

    play(lambda: Bed(slow), scenario)


@pytest.mark.covers("A14", "R17")
def test_a_deadline_is_no_later_for_what_waited_for_its_grammar(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(directory)

    async def scenario(bed: Bed) -> None:
        bound, late = dispatch("bound", GOOD), dispatch("late", GOOD)
        bound.message.dispatch.ms_left, late.message.dispatch.ms_left = 600_000, 100
        bed.send(bound, late)
        with monkeypatch.context() as patch:
            patch.setattr(grammar_gate, "RESERVE_WAITS_S", 0.3)
            lease = reserve(bound, 600_000)
            assert await bed.gate.flaw(lease) is not None
        slow.go.set()
        await bed.until(2)
        assert 0 < bound.message.dispatch.ms_left <= lease.ms_left <= 600_000 - 299
        assert late.message.dispatch.ms_left == 1, "and its core ends it at once"

    play(lambda: Bed(slow), scenario)


@pytest.mark.covers("A14")
def test_what_cannot_be_followed_is_refused_in_words_and_never_reaches_the_core(directory: Path) -> None:
    async def scenario(bed: Bed) -> None:
        bad, beyond = dispatch("bad", BAD), dispatch("beyond", GOOD, b"abz")
        bed.send(bad, beyond)
        await bed.until(0, 2)
        told = {event.message.dispatch.request_id: flaw for event, flaw in bed.refused}
        assert {flaw.code for flaw in told.values()} == {pb.INVALID}
        assert "Unclosed" in told["bad"].reason
        assert "not the beginning" in told["beyond"].reason
        flaw = await bed.gate.flaw(reserve(bad))
        assert flaw is not None
        assert flaw.code == pb.INVALID

    play(lambda: Bed(Grammars(directory, 260)), scenario)


@pytest.mark.covers("A14")
def test_a_lost_routers_requests_are_forgotten(directory: Path) -> None:
    slow = Slow(directory)

    async def scenario(bed: Bed) -> None:
        new = dispatch("new", GOOD)
        bed.send(dispatch("lost", GOOD), RouterLost(ROUTER), new)
        slow.go.set()
        await bed.until(2)
        assert bed.let_in == [RouterLost(ROUTER), new]

    play(lambda: Bed(slow), scenario)


@pytest.mark.covers("A14")
def test_a_compilation_that_hangs_is_given_up_and_who_waits_for_its_thread_goes_elsewhere(directory: Path) -> None:
    slow = Slow(directory)

    async def scenario(bed: Bed) -> None:
        bed.send(*[dispatch(f"r{index}", GOOD) for index in range(3)])  # two threads
        await bed.until(0, 3)
        assert {flaw.code for _, flaw in bed.refused} == {pb.BUSY}, "nothing says that the grammar is to blame"
        bed.send(dispatch("free", None))
        assert len(bed.let_in) == 1  # those without a grammar notice nothing
        slow.go.set()
        bed.threads._check_s = bed.threads._wait_s = PATIENCE_S
        bed.send(dispatch("later", GOOD))
        await bed.until(2, 3)

    play(lambda: Bed(slow, check_s=1.0, wait_s=1.5), scenario)


@pytest.mark.covers("A14", "R02")
def test_a_completion_that_has_begun_goes_on_elsewhere_where_its_grammar_compiles_too_slowly(directory: Path) -> None:
    """Another node has compiled it in time: its client must not hear that nobody can."""
    slow = Slow(directory)

    async def scenario(bed: Bed) -> None:
        bed.send(dispatch("r", GOOD, b"ab"))
        await bed.until(0, 1)
        assert bed.refused[0][1].code == pb.BUSY
        slow.go.set()

    play(lambda: Bed(slow, check_s=0.5), scenario)


@pytest.mark.covers("A14")
def test_a_lease_that_waits_for_its_grammar_at_a_gate_that_closes_is_refused(directory: Path) -> None:
    """Of a call that nobody answers its sender hears when its time is over."""
    slow = Slow(directory)

    async def scenario(bed: Bed) -> None:
        asked = dispatch("r", GOOD).message.dispatch.sampling.grammar
        waiting = asyncio.create_task(bed.gate.flaw(pb.ReserveRequest(grammar=asked, ms_left=1)))
        await asyncio.sleep(0)
        await bed.gate.close()
        flaw = await waiting
        assert flaw is not None and flaw.code == pb.BUSY
        slow.go.set()

    play(lambda: Bed(slow), scenario)


def test_a_cancel_behind_a_dispatch_that_cannot_be_let_in_is_heard(directory: Path) -> None:
    """It may be of a newer attempt, which has no Dispatch here."""

    async def scenario(bed: Bed) -> None:
        bed.send(dispatch("r", BAD), cancel("r"))
        await bed.until(1, 1)
        assert bed.let_in == [cancel("r")]

    play(lambda: Bed(Grammars(directory, 260)), scenario)


@pytest.mark.covers("A14")
def test_a_node_that_cannot_says_why(tmp_path: Path) -> None:
    async def scenario(bed: Bed) -> None:
        bed.send(dispatch("r", GOOD))
        await bed.until(0, 1)
        assert bed.refused[0][1] == (
            pb.INVALID,
            "this node's model directory has no tokenizer.json that can be read",
        )

    play(lambda: Bed(Grammars(tmp_path, 260)), scenario)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_a_thread_that_compiles_ends_the_process() -> None:
    """With both threads gone, each grammar was told for ever that others are being compiled."""

    class Broken:
        def open(self) -> None: ...
        def check(self, grammar: Grammar, generated_token_ids: Sequence[int] = ()) -> None:
            raise MemoryError

    async def scene() -> None:
        async with asyncio.TaskGroup() as tasks, AsyncExitStack() as started:
            threads = GrammarThreads(
                Broken(),
                watch=lambda end: keep(tasks, started, asyncio.wrap_future(end), ThreadEnded("it has ended")),
            )
            started.push_async_callback(threads.stop)
            await threads.flaw(Grammar("regex", "a", False, (1,)))

    before = {*threading.enumerate()}
    with pytest.raises(ExceptionGroup, match="TaskGroup") as died:
        asyncio.run(scene())
    assert [str(error) for error in died.value.exceptions] == ["it has ended"]
    for thread in {*threading.enumerate()} - before:  # the exception that it ends of is this test's
        thread.join()


def test_where_no_thread_can_be_started_a_grammar_is_busy_and_the_next_one_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The node ended of it, and the next one that was sent the request."""

    def no_thread(name: str, work: Callable[[], None]) -> NoReturn:
        raise RuntimeError("can't start new thread")

    class Fine:
        def open(self) -> None: ...
        def check(self, grammar: Grammar, generated_token_ids: Sequence[int] = ()) -> None: ...

    async def scene() -> None:
        threads, grammar = GrammarThreads(Fine()), Grammar("regex", "a", False, (1,))
        with monkeypatch.context() as full:
            full.setattr(grammar_threads, "started_thread", no_thread)
            flaw = await threads.flaw(grammar)
            assert flaw is not None and flaw.code == pb.BUSY
        assert await threads.flaw(grammar) is None
        await threads.stop()

    asyncio.run(scene())
