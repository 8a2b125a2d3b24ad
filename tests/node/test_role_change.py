"""A node that is to take another role: every short history of wishes, looks and waits, and the shell that goes through them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import product

import grpc
import pytest

from node.drain import CORE_LATE_S, DELIVERY_S, ROLE_LATE_S, Answer, Drain, Stage
from node.ending import Ending, Means, NeverDrainedError
from node.roles import RoleName
from proto import baton_pb2 as pb
from proto.baton_pb2_grpc import NodeStub
from tests.node.grpc_node import INCARNATION, serve_node
from tests.node.scripted_core import ScriptedCore
from tests.session.ends import until

ROLES: tuple[RoleName, ...] = ("prefill", "decode")  # what the process can take; it begins as a prefill node
WISHES = (("end", 0.0), ("end", 1.0), ("end", 6.0), ("prefill", 3.0), ("decode", 3.0), ("decode", 0.0), ("mixed", 3.0))
LOOKS = tuple(("look", each) for each in product((False, True), (0, 3)))  # has drained, undelivered
OTHERS = (("wait", 2.5), ("wait", 0.4 + ROLE_LATE_S), ("take up", None))
MOVES = (*WISHES, *LOOKS, *OTHERS)


class Reader:
    """A Drain, and what a naive reader of its description makes of the history: wishes since the last role, what was seen."""

    def __init__(self) -> None:
        self.drain = Drain("prefill", ROLES)
        self.now = 100.0
        self.role: RoleName = "prefill"
        self.next_role: RoleName | None = None
        self.deadlines: list[float] = []  # of what is wished for; none: it serves
        self.is_to_end = False
        self.has_drained = False  # at some look, or its time was over
        self.drained_at = float("inf")

    def move(self, kind: str, value: object) -> None:
        before = self.drain.stage
        match kind, value:
            case "wait", float():
                self.now += value
            case "end", float():
                self._end(value, before)
            case "look", (bool() as has_drained, int() as num_undelivered):
                self._look(before, has_drained, num_undelivered)
            case "take up", _:
                self._take_up(before)
            case _, float():
                self._ask(kind, value, before)  # type: ignore[arg-type]
        self._check()

    def _end(self, timeout_s: float, before: Stage) -> None:
        self.deadlines.append(self.now + timeout_s)
        self.is_to_end, self.next_role = True, None
        self.drain.ask(timeout_s, self.now)
        if timeout_s == 0 or before in (Stage.SWITCHING, Stage.OVER):
            assert self.drain.stage is Stage.OVER, "there is nothing left to wait for"
        else:
            assert self.drain.stage is (Stage.DRAINING if before is Stage.SERVING else before)

    def _ask(self, role: RoleName, timeout_s: float, before: Stage) -> None:
        answer = self.drain.ask_role(role, timeout_s, self.now)
        if self.deadlines:
            assert answer is (Answer.ENDS if self.next_role is None else Answer.CHANGES)
        elif role == self.role:
            assert answer is Answer.HAS_IT
        elif role not in ROLES:
            assert answer is Answer.UNABLE
        else:
            assert answer is Answer.BEGUN and self.drain.stage is Stage.DRAINING
            self.next_role, before = role, Stage.DRAINING
            self.deadlines.append(self.now + timeout_s)
        assert self.drain.stage is before, "a wish that is not granted changes nothing"

    def _look(self, before: Stage, has_drained: bool, num_undelivered: int) -> None:
        stage = self.drain.look(has_drained, num_undelivered, self.now)
        assert stage is self.drain.stage
        if before in (Stage.SERVING, Stage.SWITCHING, Stage.OVER):
            assert stage is before
            return
        if before is Stage.DRAINING:
            late_s = CORE_LATE_S if self.next_role is None else ROLE_LATE_S
            is_late = self.now >= min(self.deadlines) + late_s
            assert self.drain.is_stuck is (is_late and not has_drained and self.next_role is not None)
            if self.drain.is_stuck:
                assert stage is Stage.OVER
                self.is_to_end, self.next_role = True, None
                return
            assert (stage is Stage.DRAINING) == (not has_drained and not is_late)
            if stage is Stage.DRAINING:
                return
            assert self.drain.was_cut_short == (self.now >= min(self.deadlines))
            self.drained_at = self.now
        is_told = num_undelivered == 0 or self.now >= self.drained_at + DELIVERY_S
        after = Stage.OVER if self.next_role is None else Stage.SWITCHING
        assert stage is (after if is_told else Stage.DELIVERING)

    def _take_up(self, before: Stage) -> None:
        if before is not Stage.SWITCHING:
            with pytest.raises(AssertionError):
                self.drain.take_up()
            return
        self.drain.take_up()
        assert self.next_role is not None
        self.role, self.next_role, self.deadlines = self.next_role, None, []

    def _check(self) -> None:
        drain = self.drain
        assert drain.role == self.role
        assert (drain.stage is Stage.SERVING) == (not self.deadlines)
        assert drain.stage is not Stage.SWITCHING or not self.is_to_end, "an end wins"
        if drain.stage is not Stage.SERVING and not drain.is_stuck:
            assert drain.deadline == min(self.deadlines) and drain.next_role == self.next_role

    def finish(self) -> None:
        """Nothing moves any more, and time passes."""
        if not self.deadlines:
            return
        self.now = max(self.now, min(self.deadlines) + ROLE_LATE_S)
        for seconds in (0.0, DELIVERY_S):
            self.now += seconds
            self._look(self.drain.stage, False, 1)
        assert self.drain.stage in (Stage.OVER, Stage.SWITCHING)


@pytest.mark.covers("C11", "D08")
def test_a_role_changes_behind_all_that_was_there_an_end_wins_and_no_wish_is_granted_beside_another() -> None:
    """Every history of four moves, behind the beginning of a change and without it."""
    for beginning in ((), (("decode", 3.0),)):
        for moves in product(MOVES, repeat=4):
            reader = Reader()
            for kind, value in (*beginning, *moves):
                reader.move(kind, value)
            reader.finish()


class World:
    """What an Ending reaches, in the order in which it does."""

    def __init__(self) -> None:
        self.done: list[object] = []
        self.leftover = ""
        self.num_looks = 0
        self.ending = Ending(30.0, "prefill", ROLES)
        self.ending.take_up(ScriptedCore())
        self.means = Means(self.announce, self.done.append, lambda: 0, self.find_leftover)

    def find_leftover(self) -> str:
        self.num_looks += 1
        return self.leftover

    async def announce(self) -> None:
        self.done.append("announced")


async def last_word(watch: AsyncIterator[pb.DrainProgress]) -> pb.DrainProgress:
    """Behind those of how far it is: one more whenever a second has gone by."""
    while not ((word := await anext(watch)).has_changed or word.has_ended):
        pass
    return word


def run(scene: object) -> None:
    async def within() -> None:
        async with asyncio.timeout(60):
            await scene()  # type: ignore[operator]

    asyncio.run(within())


@pytest.mark.covers("C11", "D08")
def test_the_next_role_waits_until_nothing_touches_a_block_and_who_watches_hears_that_it_serves() -> None:
    async def scene() -> None:
        world = World()
        ending = world.ending
        running = asyncio.create_task(ending.run(world.means))
        assert ending.ask_role("decode", 90.0) is Answer.BEGUN
        watch = ending.watch_change()
        assert 80_000 < (await anext(watch)).ms_left <= 90_000
        world.leftover = "1 leased blocks"
        ending.has_drained.set()
        await until(lambda: len(world.done) == 2, within_s=60)
        await until(lambda: world.num_looks > 3, within_s=60)
        assert not running.done()
        world.leftover = ""
        assert await running == "decode"
        assert ending.stage.value == "switching"
        assert ending.take_up(ScriptedCore()) and not ending.has_drained.is_set()
        assert ending.stage.value == "serving"
        again = asyncio.create_task(ending.run(world.means))
        ending.tell_changed()
        last = await anext(watch)
        assert (last.has_changed, last.has_ended, last.was_cut_short) == (True, False, False)
        assert [each async for each in watch] == []
        assert not again.done(), "the next role is served"
        ending.ask("SIGTERM", 0)
        assert await again is None

    run(scene)


@pytest.mark.covers("C11")
def test_who_asks_again_before_the_node_can_be_found_waits_for_a_change_of_his_own() -> None:
    async def scene() -> None:
        world = World()
        ending = world.ending
        watches = []
        for role in ROLES[::-1]:
            assert ending.ask_role(role, 90.0) is Answer.BEGUN
            watches.append(ending.watch_change())
            await anext(watches[-1])
            if len(watches) == 1:
                ending.has_drained.set()
                assert await ending.run(world.means) == role and ending.take_up(ScriptedCore())
        ending.tell_changed()
        assert (await anext(watches[0])).has_changed
        ending.ask("SIGTERM", 0)
        end = asyncio.create_task(ending.run(world.means))
        assert (await last_word(watches[1])).has_ended
        for watch in watches:
            await watch.aclose()  # type: ignore[attr-defined]
        assert await end is None

    run(scene)


@pytest.mark.covers("C11", "D08")
def test_an_end_that_is_asked_for_while_the_roles_switch_is_what_follows() -> None:
    async def scene() -> None:
        world = World()
        ending = world.ending
        ending.ask_role("decode", 90.0)
        watch = ending.watch_change()
        await anext(watch)
        ending.has_drained.set()
        assert await ending.run(world.means) == "decode"
        ending.ask("SIGTERM", 5.0)
        assert not ending.take_up(ScriptedCore())
        end = asyncio.create_task(ending.run(world.means))
        last = await last_word(watch)
        assert (last.has_changed, last.has_ended) == (False, True)
        await watch.aclose()  # type: ignore[attr-defined]
        assert await end is None

    run(scene)


@pytest.mark.covers("C11", "D08")
def test_a_role_that_never_comes_to_rest_is_a_bug_that_names_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.drain.ROLE_LATE_S", 0.1)

    async def scene() -> None:
        world = World()
        world.leftover = "2 quarantined blocks"
        world.ending.has_drained.set()
        world.ending.ask_role("decode", 0.1)
        with pytest.raises(NeverDrainedError, match="2 quarantined blocks is left"):
            await world.ending.run(world.means)

    run(scene)


def ask(request: pb.RoleRequest, *, ends: bool = False) -> tuple[list[pb.DrainProgress], grpc.StatusCode | None, str]:
    """What a decode node answers that switches at once."""

    async def within() -> tuple[list[pb.DrainProgress], grpc.StatusCode | None, str]:
        async with (
            asyncio.timeout(60),
            serve_node(pb.ROLE_DECODE) as node,
            grpc.aio.insecure_channel(node.address) as channel,
        ):
            if ends:
                node.ending.ask("SIGTERM", 20)
            heard: list[pb.DrainProgress] = []
            try:
                async for progress in NodeStub(channel).ChangeRole(request):
                    heard.append(progress)
                    if len(heard) == 1 and not progress.has_changed:
                        node.ending.has_drained.set()
                        await node.ending.run(Means(_nothing, node.events.append, lambda: 0, lambda: ""))
                        node.ending.take_up(ScriptedCore())
                        node.ending.tell_changed()
            except grpc.aio.AioRpcError as error:
                return heard, error.code(), error.details() or ""
            return heard, None, ""

    return asyncio.run(within())


async def _nothing() -> None:
    pass


@pytest.mark.covers("C11", "C06")
def test_an_operators_call_changes_the_role_or_says_why_not() -> None:
    for incarnation in (0, INCARNATION):
        heard, code, _ = ask(pb.RoleRequest(to_incarnation=incarnation, role=pb.ROLE_MIXED, timeout_ms=400_000))
        # At least: another word follows whenever a second has gone by.
        assert code is None and [each.has_changed for each in heard] == [False] * max(1, len(heard) - 1) + [True]
        assert 300_000 < heard[0].ms_left <= 400_000
    at_once, code, _ = ask(pb.RoleRequest(role=pb.ROLE_DECODE))
    assert code is None and [each.has_changed for each in at_once] == [True], "it is a decode node"
    for refused, sentence in _refusals():
        assert refused == ([], grpc.StatusCode.FAILED_PRECONDITION, sentence)
    _, code, sentence = ask(pb.RoleRequest())
    assert code is grpc.StatusCode.INVALID_ARGUMENT and sentence.startswith("role: 0")


def _refusals() -> Iterator[tuple[object, str]]:
    elsewhere = pb.RoleRequest(to_incarnation=INCARNATION + 1, role=pb.ROLE_MIXED)
    yield ask(elsewhere), "ChangeRole is meant for another process"
    yield ask(pb.RoleRequest(role=pb.ROLE_MIXED), ends=True), "the node is to end"
