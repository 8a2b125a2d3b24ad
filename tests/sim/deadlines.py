"""When each end of a session is due, asked again only of ends that something was done to."""

from __future__ import annotations

from runtime.session_end import SessionEnd


class Deadlines:
    """Of all ends of one process."""

    def __init__(self) -> None:
        self._at: dict[SessionEnd, float] = {}
        self._changed: dict[SessionEnd, None] = {}
        self._first: float | None = None

    def changed(self, end: SessionEnd) -> None:
        """Something was done to it."""
        self._changed[end] = None

    def first(self) -> float | None:
        """When the next one is due."""
        if self._changed:
            for end in self._changed:
                if (at := end.next_deadline()) is None:
                    self._at.pop(end, None)
                else:
                    self._at[end] = at
            self._changed.clear()
            self._first = min(self._at.values(), default=None)
        return self._first

    def due(self, now: float) -> list[SessionEnd]:
        """Those that must be ticked now."""
        first = self.first()
        return [] if first is None or first > now else [end for end, at in self._at.items() if at <= now]
