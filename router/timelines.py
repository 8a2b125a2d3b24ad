"""The newest requests' timelines, bounded, and what the core says to them. Pure.

A request's record is here from its beginning and while it lives, which bounds their number elsewhere, and afterwards until others
that have ended need its place. What is said of a request that is not here is dropped: a timeline is for looking at, nothing depends
on it. No token, no text, no key is ever in one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from proto import baton_pb2 as pb
from router.events import Noted
from router.timeline import Attempt, Record, Track

BEGUN: Final = 512  # requests that began to answer last: times of "now" are theirs
_WEIGHT_PER_REQUEST: Final = 4  # choices and happenings that a request has room for, on average


class Timelines:
    """Records by request id, oldest first."""

    def __init__(self, max_requests: int) -> None:
        """`max_requests`: that are kept behind their ends, fewer where they have many choices; 0: none, nor while they live."""
        self._bound = max_requests * _WEIGHT_PER_REQUEST
        self._max_requests = max_requests
        self._records: dict[str, Record] = {}
        self._ended: dict[str, Record] = {}  # those of them that have, in this order
        self._begun: deque[Record] = deque(maxlen=BEGUN)
        self._by_client: dict[str, str] = {}  # the client's own name -> the newest request of that name
        self._weight = 0  # of those that have ended

    def __len__(self) -> int:
        return len(self._records)

    def newest(self) -> Iterator[Record]:
        """All that are kept, the newest first."""
        return reversed(self._records.values())

    @property
    def begun(self) -> Sequence[Record]:
        """Those that had their first token last, in this order, kept or not; no more than BEGUN."""
        return self._begun

    def find(self, name: str) -> Record | None:
        """By the router's id, as it is or as clients see it (`cmpl-…`), or else the newest of that name by clients' own."""
        record = self._records.get(name) or self._records.get(name.rpartition("-")[2])
        return record or self._records.get(self._by_client.get(name, ""))

    def begin(self, record: Record) -> None:
        """A request was handed to the core."""
        if record.weight > self._bound:
            return
        self._records[record.request_id] = record
        if record.client_id is not None:
            self._by_client[record.client_id] = record.request_id

    def _forget(self, record: Record) -> None:
        del self._records[record.request_id], self._ended[record.request_id]
        self._weight -= record.weight
        if record.client_id is not None and self._by_client.get(record.client_id) == record.request_id:
            del self._by_client[record.client_id]

    # ---------------------------------------------------------------- what the core says

    def noted(self, note: Noted, now: float) -> None:
        """Something has happened to a choice."""
        found = self._find(note.request_id, note.choice)
        if found is None:
            return
        record, track = found
        record.note(note.what, now, note.choice, note.attempt, note.nodes, note.code)
        match note.what:
            case "dispatched":
                track.begin(Attempt(note.attempt, note.code, note.nodes[0], note.nodes[1], now))
            case "move_begun":
                track.move(Attempt(note.attempt, "move", note.nodes[0], note.nodes[1], now))
            case "moved":
                track.moved(note.attempt, now)
            case "move_off":
                track.move_off(now)
            case "failed":
                track.fail(note.code, now)

    def timed(self, timing: pb.Timing) -> None:
        """A node has told parts of an attempt's time."""
        if (record := self._records.get(timing.key.request_id)) is not None:
            record.timed(timing)

    def emitted(self, request_id: str, choice: int, num_tokens: int, now: float) -> bool:
        """Tokens of a choice leave the core; whether nothing more is to be known of such."""
        found = self._find(request_id, choice)
        if found is None:
            return True
        record, track = found
        is_first = not track.num_tokens
        if is_first and not any(each.num_tokens for each in record.tracks):
            self._begun.append(record)
        is_over = track.emitted(num_tokens, now)
        if is_first:
            record.note("first_token", now, choice, -1 if track.current is None else track.current.number)
        return is_over

    def written(self, request_id: str, choice: int, num_tokens: int, now: float) -> None:
        """The first so many tokens of a choice were handed to its client's connection, one or two."""
        if (found := self._find(request_id, choice)) is not None:
            found[1].written(num_tokens, now)

    def finished(self, request_id: str, choice: int, reason: str, now: float) -> None:
        """A choice has its end."""
        if (found := self._find(request_id, choice)) is not None:
            record, track = found
            track.finish(reason, now)
            record.note("finished", now, choice, code=reason)

    def ended(self, request_id: str, outcome: str, num_tokens: int, now: float) -> Record | None:
        """The request has its end; its record, if it is here."""
        record = self._records.get(request_id)
        if record is not None:
            for track in record.tracks:
                if track.finish_reason is None:
                    track.finish(outcome, now)
            record.note("ended", now, code=outcome)
            record.outcome, record.ended_at, record.num_completion_tokens = outcome, now, num_tokens
            self._ended[request_id] = record
            self._weight += record.weight
            while len(self._ended) > self._max_requests or self._weight > self._bound:
                self._forget(next(iter(self._ended.values())))
        return record

    def _find(self, request_id: str, choice: int) -> tuple[Record, Track] | None:
        record = self._records.get(request_id)
        return None if record is None or choice >= len(record.tracks) else (record, record.tracks[choice])
