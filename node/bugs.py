"""Lets a node's process die of a bug, wherever it arises: in a task, in a callback, on a thread.

Not here: what is started, and how it is stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any


class ThreadEnded(RuntimeError):
    """A thread died of an exception, which it has written to stderr itself."""


def keep(
    tasks: asyncio.TaskGroup,
    started: AsyncExitStack,
    end: asyncio.Future[None],
    error: Exception | None = None,
) -> None:
    """Let the process die when `end` comes: of its exception, or of `error`."""

    async def watch() -> None:
        await asyncio.shield(end)
        if error is not None:
            raise error

    started.callback(tasks.create_task(watch()).cancel)


def dying_of(bug: asyncio.Future[None]) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """An exception handler for the loop: what a callback or a watched task raises becomes `bug`.

    What asyncio reports without one of these two (a connection that broke in an odd way, a result that nobody fetched) is logged:
    a peer must not be able to end the process with it.
    """

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        error = context.get("exception")
        if error is not None and ("handle" in context or "task" in context) and not bug.done():
            bug.set_exception(error)

    return handle
