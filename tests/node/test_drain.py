"""The stages of a node's end in any order of events, and the shell that goes through them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from itertools import product
from typing import Any

import grpc
import pytest

from node import events as ev
from node.drain import CORE_LATE_S, DELIVERY_S, Drain, Stage
from node.ending import Ending, Means
from node.roles import RoleName
from proto import baton_pb2 as pb
from proto.baton_pb2_grpc import NodeStub
from tests.node.grpc_node import INCARNATION, serve_node
from tests.node.scripted_core import ScriptedCore

ROLES = frozenset[RoleName](("decode",))
ORDER = (Stage.SERVING, Stage.DRAINING, Stage.DELIVERING, Stage.OVER)
ASKS = (0.0, 1.0, 4.0)  # seconds
LOOKS = tuple(product((False, True), (0, 3)))  # has drained, undelivered
WAITS = (0.6, 2.5)
MOVES = (*(("ask", each) for each in ASKS), *(("look", each) for each in LOOKS), *(("wait", each) for each in WAITS))


class Watched:
    """A Drain, and what a naive reader of its description knows: who asked for what, and what was seen since."""

    def __init__(self) -> None:
        self.drain = Drain("decode", ROLES)
        self.now = 100.0
        self.deadlines: list[float] = []
        self.is_at_once = False
        self.had_drained = False  # at some look since it was asked
        self.drained_at = float("inf")
        self.was_delivered = False

    def ask(self, timeout_s: float) -> None:
        self.deadlines.append(self.now + timeout_s)
        self.is_at_once |= timeout_s == 0
        self.drain.ask(timeout_s, self.now)

    def look(self, has_drained: bool, num_undelivered: int) -> None:
        before = self.drain.stage
        stage = self.drain.look(has_drained, num_undelivered, self.now)
        assert stage is self.drain.stage and ORDER.index(stage) >= ORDER.index(before)
        if before is Stage.SERVING:
            assert stage is Stage.SERVING, "nobody asked"
        if before is Stage.DRAINING:
            is_late = self.now >= min(self.deadlines) + CORE_LATE_S
            assert (stage is not Stage.DRAINING) == (has_drained or is_late)
            if stage is not Stage.DRAINING:
                assert self.drain.was_cut_short == (self.now >= min(self.deadlines))
                self.drained_at = self.now
        if before in (Stage.DRAINING, Stage.DELIVERING) and stage is not Stage.DRAINING:
            assert (stage is Stage.OVER) == (num_undelivered == 0 or self.now >= self.drained_at + DELIVERY_S)

    def check(self) -> None:
        if not self.deadlines:
            assert self.drain.stage is Stage.SERVING
            return
        assert self.drain.stage is not Stage.SERVING
        assert self.drain.deadline == min(self.deadlines), "who has less patience decides"
        if self.is_at_once:
            assert self.drain.stage is Stage.OVER


@pytest.mark.covers("D08")
def test_a_node_drains_then_delivers_then_ends_and_never_later_than_it_was_given() -> None:
    """Every history of four moves, and what comes of it when nothing moves any more."""
    for moves in product(MOVES, repeat=4):
        watched = Watched()
        for kind, value in moves:
            if kind == "wait":
                watched.now += value  # type: ignore[operator]
            elif kind == "ask":
                watched.ask(value)  # type: ignore[arg-type]
            else:
                watched.look(*value)  # type: ignore[misc]
            watched.check()
        if watched.deadlines:
            watched.now = max(watched.now, min(watched.deadlines) + CORE_LATE_S)
            watched.look(False, 1)
            watched.now += DELIVERY_S
            watched.look(False, 1)
            assert watched.drain.stage is Stage.OVER


@pytest.mark.covers("D08")
def test_an_end_without_time_says_that_something_was_given_up() -> None:
    for asks, was_cut_short in (((0.0,), True), ((5.0, 0.0), True)):
        drain = Drain("decode", ROLES)
        for each in asks:
            drain.ask(each, 0.0)
        assert (drain.stage, drain.was_cut_short) == (Stage.OVER, was_cut_short)
    drain = Drain("decode", ROLES)
    drain.ask(5.0, 0.0)
    drain.look(True, 1, 1.0)
    drain.ask(0.0, 1.0)
    assert not drain.was_cut_short, "the core had drained"


class Holder(ScriptedCore):
    """A core with things in it."""

    def snapshot(self) -> Mapping[str, object]:
        return {"attempts": 2, "branches": 3, "local_branches": 4, "leases": 5, "waiting_reserves": 6}


class World:
    """What an Ending reaches, in the order in which it does."""

    def __init__(self) -> None:
        self.done: list[object] = []
        self.num_undelivered = 0
        self.ending = Ending(30.0, "decode", ROLES)
        self.ending.take_up(Holder())
        self.means = Means(self.announce, self.done.append, lambda: self.num_undelivered, lambda: "")

    async def announce(self) -> None:
        assert self.ending.is_draining, "what is announced says so"
        await asyncio.sleep(0)
        self.done.append("announced")

    async def until_done(self, number: int) -> None:
        while len(self.done) < number:  # noqa: ASYNC110 - another task's, which has no event
            await asyncio.sleep(0)


def play(scene: Callable[[World], Coroutine[None, None, None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(60):
            await scene(World())

    asyncio.run(run())


@pytest.mark.covers("D08")
def test_routers_are_told_then_the_core_and_the_process_ends_once_the_last_words_have_arrived() -> None:
    async def scene(world: World) -> None:
        run = asyncio.create_task(world.ending.run(world.means))
        await asyncio.sleep(0)
        assert not world.done and not world.ending.is_draining
        world.num_undelivered = 2
        before = asyncio.get_running_loop().time()
        world.ending.ask("SIGTERM")
        await world.until_done(2)
        first, asked = world.done
        assert first == "announced" and isinstance(asked, ev.DrainAsked)
        assert before + 30 <= asked.deadline <= asyncio.get_running_loop().time() + 30
        world.ending.ask("operator", 5.0)
        await world.until_done(3)
        assert isinstance(world.done[2], ev.DrainAsked) and world.done[2].deadline < asked.deadline - 20
        world.ending.ask("operator", 50.0)
        world.ending.has_drained.set()
        while world.ending.stage is not Stage.DELIVERING:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert not run.done()
        world.num_undelivered = 0
        await run
        assert len(world.done) == 3, "the core is asked again only for less time"

    play(scene)


@pytest.mark.covers("D08")
def test_with_no_time_the_process_ends_at_once_and_the_core_is_not_asked() -> None:
    async def scene(world: World) -> None:
        world.num_undelivered = 1
        world.ending.ask("SIGINT", 0)
        await world.ending.run(world.means)
        assert world.done == []

    play(scene)


@pytest.mark.covers("D08")
def test_who_watches_hears_how_far_it_is_and_the_last_word_before_the_process_ends() -> None:
    async def scene(world: World) -> None:
        world.ending.ask("operator", 70.0)
        watch = world.ending.watch()
        first = await anext(watch)
        assert (first.attempts, first.leases, first.has_ended) == (9, 5, False)
        assert 60_000 < first.ms_left <= 70_000
        run = asyncio.create_task(world.ending.run(world.means))
        world.ending.has_drained.set()
        while not (last := await anext(watch)).has_ended:
            pass  # a second went by
        assert (last.has_ended, last.was_cut_short) == (True, False)
        assert not run.done(), "the last word is still to be taken"
        assert [each async for each in watch] == []
        await run

    play(scene)


def ask_a_node(request: pb.DrainRequest) -> tuple[Stage, list[pb.DrainProgress] | grpc.StatusCode]:
    async def run() -> tuple[Stage, list[pb.DrainProgress] | grpc.StatusCode]:
        async with (
            asyncio.timeout(60),
            serve_node(pb.ROLE_DECODE) as node,
            grpc.aio.insecure_channel(node.address) as channel,
        ):
            call = NodeStub(channel).Drain(request)
            try:
                heard = [await anext(aiter(call))]
            except grpc.aio.AioRpcError as error:
                return node.ending.stage, error.code()
            node.ending.has_drained.set()
            ended = asyncio.create_task(node.ending.run(Means(_nothing, node.events.append, lambda: 0, lambda: "")))
            heard += [each async for each in call]
            await ended
            return node.ending.stage, heard

    return asyncio.run(run())


async def _nothing() -> None:
    pass


@pytest.mark.covers("D08")
def test_an_operators_call_drains_the_process_that_is_meant_and_hears_of_its_end() -> None:
    stage, heard = ask_a_node(pb.DrainRequest(to_incarnation=INCARNATION, timeout_ms=400_000))
    assert stage is Stage.OVER and isinstance(heard, list)
    # At least: another word follows whenever a second has gone by.
    assert len(heard) > 1 and [each.has_ended for each in heard] == [False] * (len(heard) - 1) + [True]
    assert 300_000 < heard[0].ms_left <= 400_000
    _, by_default = ask_a_node(pb.DrainRequest(to_incarnation=INCARNATION))
    assert isinstance(by_default, list) and 15_000 < by_default[0].ms_left <= 25_000


@pytest.mark.covers("C06", "D08")
def test_a_call_that_is_meant_for_an_earlier_process_drains_nothing() -> None:
    answer: Any = ask_a_node(pb.DrainRequest(to_incarnation=INCARNATION + 1))
    assert answer == (Stage.SERVING, grpc.StatusCode.FAILED_PRECONDITION)
