"""Timelines of the simulated routers' requests: their parts, held against what the router itself saw, whatever was done to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from router import events as rev
from router.timeline import PREFILL, QUEUE, Leg, Record
from router.timelines import Timelines

_DRIFT: Final = 1.12  # a host's clock runs at 1 ± 0.05
_SLACK_S: Final = 1e-4


class CheckedTimelines:
    """What router/shell.py tells its timelines, and what must hold of each that has ended."""

    def __init__(self) -> None:
        self._timelines = Timelines(256)

    def begin(self, request: rev.GenerationRequest, now: float) -> None:
        """A request has come."""
        self._timelines.begin(
            Record(request.request_id, None, len(request.prompt_token_ids), request.num_choices, now, now)
        )

    def take(self, actions: Sequence[rev.Action], now: float) -> None:
        """What the core asks for."""
        for action in actions:
            match action:
                case rev.Noted():
                    self._timelines.noted(action, now)
                case rev.Timed(timing):
                    self._timelines.timed(timing)
                case rev.Emitted(request_id, _, token_ids, choice):
                    self._timelines.emitted(request_id, choice, len(token_ids), now)
                case rev.Finished(request_id, reason, _, choice):
                    self._timelines.finished(request_id, choice, reason, now)
                    self._check(request_id)

    def _check(self, request_id: str) -> None:
        record = self._timelines.find(request_id)
        for track in () if record is None else record.tracks:
            for leg in (track.to_first, track.to_second):
                if leg is not None and leg.seconds is not None:
                    self._check_leg(request_id, leg, leg.seconds)

    def _check_leg(self, request_id: str, leg: Leg, seconds: float) -> None:
        parts = leg.parts()
        assert min(parts.values(), default=0.0) >= 0, f"{request_id}: {parts}"
        assert abs(sum(parts.values()) - seconds) < _SLACK_S, f"{request_id}: {parts} are not {seconds} s"
        if leg.is_dispatched and leg.attempt is not None:
            told = sum(leg.attempt.parts.get(name, 0.0) for name in (QUEUE, PREFILL))
            bound = leg.last_stretch * _DRIFT + _SLACK_S
            assert told <= bound, f"{request_id}: a node was busy with it for {told} s of {leg.last_stretch}"
