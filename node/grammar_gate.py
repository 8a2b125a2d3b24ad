"""In front of a node's inbox: a Dispatch with a grammar goes in once that is compiled, and goes back if it never can be.

So the core and the runner never wait for a grammar, and a bad one costs no step. A receiver compiles it before it answers
Reserve, for the same reason. Not here: what waits (held.py), and how grammars are compiled (grammar_threads.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from node.events import Event, FromRouter, RouterLost
from node.grammar_threads import Flaw, GrammarThreads
from node.held import HeldDispatches
from node.sampling import to_grammar
from proto import baton_pb2 as pb

MAX_HELD: Final = 256
RESERVE_WAITS_S: Final = 1.0

T = TypeVar("T")

Refuse = Callable[[FromRouter, Flaw], None]


class GrammarGate:
    """Between the routers' sessions and the inbox of one incarnation."""

    def __init__(self, post: Callable[[Event], None], threads: GrammarThreads) -> None:
        self._post = post
        self._threads = threads
        self._held = HeldDispatches()
        self._tasks: set[asyncio.Task[Any]] = set()

    def post(self, event: Event) -> None:
        """Let an event in that is of no router."""
        self._post(event)

    def post_from_router(self, event: FromRouter | RouterLost, refuse: Refuse) -> None:
        """Let an event in, now or later; `refuse` is called, later, with a Dispatch that never can be."""
        match event:
            case FromRouter(_, message) if message.WhichOneof("kind") == "dispatch":
                if not message.dispatch.sampling.HasField("grammar"):
                    self._post(event)
                else:
                    self._hold(event, refuse)
            case FromRouter() if self._held.defers(event):
                pass
            case RouterLost(router):
                self._held.forget(router)
                self._post(event)
            case _:
                self._post(event)

    async def flaw(self, request: pb.ReserveRequest) -> Flaw | None:
        """What is wrong with the grammar of a lease that is asked for; None: it is compiled, so that no step waits for that.

        The sender has compiled it, and waits for an answer no longer than a call may take: where that is too short it is to
        ask again, which costs it nothing.
        """
        since = time.monotonic()
        compiling = self._keep(self._threads.flaw(to_grammar(request.grammar)))
        done, _ = await asyncio.wait({compiling}, timeout=RESERVE_WAITS_S)
        _take_off(request, since)
        if compiling.cancelled():  # by `close`; not answered, the call would keep its sender until its time is over
            return Flaw(pb.BUSY, "the node takes another role, or is to end")
        return compiling.result() if done else Flaw(pb.BUSY, "its grammar is being compiled")

    async def close(self) -> None:
        """Let nobody in any more."""
        for task in [*self._tasks]:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _hold(self, event: FromRouter, refuse: Refuse) -> None:
        number, since = self._held.hold(event), time.monotonic()

        async def compile_it() -> None:
            dispatch = event.message.dispatch
            generated = tuple(dispatch.branches[0].generated_token_ids)
            flaw: Flaw | None = Flaw(pb.BUSY, f"{MAX_HELD} requests wait for their grammars")
            if len(self._held) <= MAX_HELD:
                flaw = await self._threads.flaw(to_grammar(dispatch.sampling.grammar), generated)
            released = self._held.release(number)
            _take_off(dispatch, since)
            if flaw is None:
                for each in released:
                    self._post(each)
            elif released:
                refuse(event, flaw)
                for each in released[1:]:
                    if (
                        each.message.WhichOneof("kind") == "cancel"
                    ):  # perhaps of a newer attempt, which is let in already
                        self._post(each)

        self._keep(compile_it())

    def _keep(self, work: Coroutine[None, None, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _take_off(message: pb.Dispatch | pb.ReserveRequest, since: float) -> None:
    """The time that it has waited here: its request's deadline is no later for that. `since`: by time.monotonic."""
    message.ms_left = max(1, message.ms_left - round(1000 * (time.monotonic() - since)))
