"""Who is let in: a queue that moves, how long a newcomer would wait in it, and who is turned away because of that."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from proto import baton_pb2 as pb
from router.entrance import RouterCoreConfig
from tests.router.core_world import CoreWorld
from tests.router.live_router import LiveRouter, live_router, until
from tests.router.scripted_nodes import ScriptedAttempt, replying
from tests.router.test_api import play
from tests.router.tiny_model import write_model_text


def world_with_a_queue(num_waiting: int, **config: bool) -> CoreWorld:
    """One request in prefill, and so many that wait; ten have been served before, one a second."""
    world = CoreWorld.with_nodes("p1", "d1", max_inflight_prefills=1, **config)
    for number in range(num_waiting + 11):
        world.submit(f"r{number}")
    for number in range(10):
        world.pass_time(1.0)
        serve(world, f"r{number}")
    return world


def serve(world: CoreWorld, request_id: str) -> None:
    """The request that is in prefill ends; the next one is dispatched."""
    world.tokens_from("p1", request_id, 0, (5,), pb.FINISH_LENGTH)
    assert world.has_ended(request_id)


@pytest.mark.covers("A12", "R17")
def test_who_cannot_be_served_in_time_is_turned_away_at_once_and_told_when_to_come_back() -> None:
    world = world_with_a_queue(20)
    world.submit("late", timeout_s=15.0)
    failure = world.failure("late")
    assert (failure.status, failure.code) == (503, "LATE")
    assert "deadline is in 15.0 s" in failure.message
    assert failure.retry_after_s == pytest.approx(5, abs=1)
    world.submit("hasty", timeout_s=0.001)
    world.submit("patient", timeout_s=25.0)
    assert world.failure("hasty").retry_after_s == pytest.approx(20, abs=2)
    assert not world.has_ended("patient")
    for number in range(10, 31):
        world.pass_time(1.0)
        serve(world, f"r{number}")
    assert [name for name, _ in world.dispatches("patient")] == ["p1"], "which had been right"
    world.submit("next", timeout_s=0.5)
    assert not world.has_ended("next"), "nobody waits"


@pytest.mark.covers("A12")
def test_without_the_knob_nobody_is_turned_away_for_being_late() -> None:
    world = world_with_a_queue(20, refuses_late=False)
    world.submit("late", timeout_s=1.0)
    assert not world.has_ended("late")
    world.pass_time(1.0)
    assert world.failure("late").code == "DEADLINE"


@pytest.mark.covers("A12")
def test_a_queue_that_has_not_moved_yet_turns_nobody_away() -> None:
    world = CoreWorld.with_nodes("p1", "d1", max_inflight_prefills=1)
    for number in range(100):
        world.submit(f"r{number}")
    world.pass_time(60.0)
    world.submit("hasty", timeout_s=1.0)
    assert not world.has_ended("hasty")


@pytest.mark.covers("A12", "R19")
def test_requests_that_are_refused_again_and_again_do_not_make_the_queue_look_fast() -> None:
    world = world_with_a_queue(20)
    for number in range(10, 20):  # each takes ten seconds, of which it is dispatched every two and refused
        for attempt in range(5):
            world.pass_time(2.0)
            world.error_from("d1", f"r{number}", pb.NO_BLOCKS, attempt)
        world.pass_time(2.0)
        world.tokens_from("p1", f"r{number}", 0, (5,), pb.FINISH_LENGTH, attempt=5)
        assert world.has_ended(f"r{number}")
    world.submit("late", timeout_s=60.0)
    assert world.failure("late").code == "LATE"


@pytest.mark.covers("A12")
def test_when_the_nodes_come_back_the_queue_is_fast_again_at_once() -> None:
    world = world_with_a_queue(20)
    world.pass_time(120.0)
    world.submit("late", timeout_s=100.0)
    assert world.failure("late").code == "LATE"
    for number in range(10, 31):
        serve(world, f"r{number}")
    for number in range(10):
        world.submit(f"again{number}", timeout_s=1.0)
        assert not world.has_ended(f"again{number}")


@pytest.mark.covers("A06", "A12")
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_would_wait_in_vain_hears_so_while_others_wait_on(tmp_path: Path, stream: bool) -> None:
    is_released = asyncio.Event()
    num_served = 0

    async def script(attempt: ScriptedAttempt) -> None:
        nonlocal num_served
        num_served += 1
        await (asyncio.sleep(0.05) if num_served <= 12 else is_released.wait())
        await replying(b"x")(attempt)

    async def scenario(router: LiveRouter) -> None:
        patient = [asyncio.create_task(router.post()) for _ in range(40)]
        await until(lambda: num_served > 12)
        late = await router.post(timeout_s=0.5, stream=stream)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "LATE")
        assert 1 <= int(late.headers["Retry-After"]) <= 60
        assert len(router.pair.prefill.dispatches) == num_served == 13
        is_released.set()
        assert {(await each).status_code for each in patient} == {200}

    play(write_model_text(tmp_path), scenario, script, core_config=RouterCoreConfig(max_inflight_prefills=1))


@pytest.mark.covers("A04")
def test_a_balancer_sends_on_what_the_router_lets_wait_for_a_node_to_come_back(tmp_path: Path) -> None:
    async def run() -> None:
        core_config = RouterCoreConfig(no_nodes_grace_s=2.0)
        async with live_router(write_model_text(tmp_path), core_config=core_config) as router:
            for page, is_there in (("/ready?accepting=1", "accepting"), ("/ready", "ready")):
                answer = await router.client.get(page)
                assert (answer.status_code, answer.json()[is_there]) == (200, True)
            router.shell.on_unlisted(router.pair.decode.peer)
            waiting = asyncio.create_task(router.post())
            assert (await router.client.get("/ready")).status_code == 503
            answer = await router.client.get("/ready?accepting=1")
            told = answer.json()
            assert (answer.status_code, told["accepting"], told["ready"]) == (200, True, False)
            assert told["missing"] == ["no decode node can take work"]
            assert (await waiting).json()["error"]["code"] == "NO_NODES"  # at the end of the grace
            answer = await router.client.get("/ready?accepting=1")
            assert (answer.status_code, answer.json()["accepting"]) == (503, False)

    asyncio.run(run())
