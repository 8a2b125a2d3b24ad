"""When Python walks over all objects in search of cycles: where nobody waits, if that can be had, and else seldom.

Such a walk stops the process for 10 ms and more where some hundred streams are open, and Python's own rule, so many objects more
than there were, has one begin just when streams come. So nothing walks by itself but over what is young, more often than by
Python's rule and so over less, a fraction of a millisecond each time. What has lived through one of these waits for a full walk.
Python's walk between the two was the longest thing that a busy router did, and found nothing: reference counts free nearly all that
there is, and answers break their own circles (router/answer.py).
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

REST_S: Final = 5.0  # from one full walk to the next, where the process is at rest
LONGEST_S: Final = 120.0  # the same, where it never is, and longer where walks take a ten-thousandth of that: 12 ms
MOST_S: Final = 3600.0  # however long they take: what they would have found grows meanwhile
_BUSY_SHARE: Final = 1e-4  # of the time
LOOK_EVERY_S: Final = 1.0
_YOUNG: Final = 200  # objects more than there were: walks then take a busy router three thousandths of its time
_NEVER: Final = 1 << 30  # walks to one that looks further


@contextmanager
def loading() -> Iterator[None]:
    """No walk while modules are imported, and none ever over what they hold, which stays: torch takes a fifth longer with them."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class FullWalks:
    """Decides when one is due. Pure."""

    def __init__(self, now: float, rest_s: float = REST_S) -> None:
        self._last = now
        self._rest_s = rest_s
        self._busy_s = LONGEST_S

    def is_due(self, now: float, is_at_rest: bool) -> bool:
        """Whether to walk now; who is told so does it, and says with took() how long it was."""
        if now - self._last < (self._rest_s if is_at_rest else self._busy_s):
            return False
        self._last = now
        return True

    def took(self, seconds: float) -> None:
        """So long nobody was served: ten thousand streams make it a quarter of a second."""
        self._busy_s = min(max(LONGEST_S, seconds / _BUSY_SHARE), MOST_S)


async def collect_at_rest(
    is_at_rest: Callable[[], bool], look_every_s: float = LOOK_EVERY_S, rest_s: float = REST_S
) -> None:
    """Walk when it is due, until cancelled; nothing that is here at the beginning is ever walked over.

    Not by the interpreter's walks as it ends either, which take longer than all else then.
    """
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_YOUNG, _NEVER, _NEVER)
    walks = FullWalks(time.monotonic(), rest_s)
    try:
        while True:
            await asyncio.sleep(look_every_s)
            began_at = time.monotonic()
            if walks.is_due(began_at, is_at_rest()):
                gc.collect()
                walks.took(time.monotonic() - began_at)
    finally:
        gc.set_threshold(*thresholds)
