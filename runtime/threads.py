"""Threads that a process must not outlive in silence, and that must not keep it alive."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread


def started_thread(name: str, work: Callable[[], None]) -> Future[None]:
    """Run `work` in a daemon thread; the future resolves when it has ended, whyever.

    An exception in it is a bug and goes on to threading.excepthook, which writes its traceback.
    """
    ended: Future[None] = Future()
    ended.set_running_or_notify_cancel()  # from now on nobody can cancel it

    def run() -> None:
        try:
            work()
        finally:
            ended.set_result(None)

    Thread(target=run, name=name, daemon=True).start()
    return ended
