"""A core whose answers the test gives: another implementation of NodeCore."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from node import events as ev
from proto import baton_pb2 as pb

Answer = Callable[[ev.Event, float], Sequence[ev.Action]]


class ScriptedCore:
    """A core whose answers the test gives; writes down each call."""

    def __init__(self, answer: Answer = lambda _event, _now: ()) -> None:
        self.calls: list[tuple[str, object]] = []
        self.times: list[float] = []
        self.deadline: float | None = None
        self.on_due: Sequence[ev.Action] = ()
        self._answer = answer

    def receive(self, event: ev.Event, now: float) -> Sequence[ev.Action]:
        self.calls.append(("receive", event))
        self.times.append(now)
        return self._answer(event, now)

    def tick(self, now: float) -> Sequence[ev.Action]:
        self.times.append(now)
        if self.deadline is None or now < self.deadline:
            return ()
        self.calls.append(("due", self.deadline))
        self.deadline = None
        return self.on_due

    def next_deadline(self) -> float | None:
        return self.deadline

    def snapshot(self) -> Mapping[str, object]:
        return {}

    def load(self) -> pb.LoadReport:
        return pb.LoadReport()
