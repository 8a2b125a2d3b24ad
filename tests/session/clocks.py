"""Time for an end that has no clock: a loop that is never late."""

from __future__ import annotations

from runtime.session_end import SessionEnd
from runtime.session_events import Output


def tick_on_time(end: SessionEnd, until: float) -> list[Output]:
    """Tick at each instant that the end asks for, up to and including `until`; all that came of it."""
    outputs: list[Output] = []
    while (deadline := end.next_deadline()) is not None and deadline <= until:
        outputs += end.tick(deadline)
    return outputs
