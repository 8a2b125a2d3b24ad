"""The estimate of a newcomer's wait: never too long for what it has seen, and a queue that is kept short by it stays short."""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.pace import _MEMORY_S, QueuePace


@pytest.mark.covers("A12")
def test_nothing_is_known_before_a_few_dispatches_nor_once_the_queue_was_empty() -> None:
    pace = QueuePace()
    pace.dispatched(100, 0.0)
    assert pace.wait_s(10, 1.0) == 0, "nobody had waited"
    pace.waits(1.0)
    pace.dispatched(100, 1.0)
    assert pace.wait_s(10, 100.0) == 0, "there had been room at once"
    for second in range(2, 9):
        pace.dispatched(1, second)
        assert pace.wait_s(10, second) == 0
    pace.dispatched(1, 9.0)
    assert pace.wait_s(10, 9.0) == pytest.approx(10, rel=0.1)
    assert pace.wait_s(0, 9.0) == 0
    pace.is_empty()
    pace.waits(10.0)
    assert pace.wait_s(10, 50.0) == 0


@pytest.mark.covers("A12")
def test_who_comes_back_takes_the_place_of_one_that_was_dispatched() -> None:
    pace = QueuePace()
    pace.waits(0.0)
    for second in range(1, 31):
        pace.dispatched(2, second)
        pace.came_back()
    assert pace.wait_s(10, 30.0) == pytest.approx(10, rel=0.1)
    for _ in range(100):
        pace.came_back()
    assert pace.wait_s(10, 30.0) == 0


@pytest.mark.covers("A12")
def test_what_fading_left_of_those_who_came_back_makes_no_hours_of_a_slow_queue() -> None:
    """Of two tries a second one in 120 is served, which takes a minute: nobody is to be told more than what is looked at."""
    pace = QueuePace()
    pace.waits(0.0)
    for each in range(20):  # it began well: slots were free
        pace.dispatched(1, each / 2)
    for each in range(20, 2000):
        pace.dispatched(1, each / 2)
        if each % 120:
            pace.came_back()
        assert pace.wait_s(2, each / 2) <= 2 * _MEMORY_S


@pytest.mark.covers("A12")
def test_a_queue_that_stands_still_is_found_slow_only_after_longer_than_it_was_looked_at() -> None:
    pace = QueuePace()
    pace.waits(0.0)
    for second in range(1, 21):
        pace.dispatched(1, second)
    moving = pace.wait_s(10, 20.0)
    assert pace.wait_s(10, 30.0) == moving
    waits = [pace.wait_s(10, 20.0 + second) for second in (30, 60, 120, 240)]
    assert all(earlier < later for earlier, later in pairwise([moving, *waits]))
    assert waits[-1] > 100


@pytest.mark.covers("A12")
@given(st.integers(1, 200), st.floats(0.1, 100), st.integers(4, 12), st.floats(0, 1))
def test_a_queue_that_moves_by_leaps_is_never_thought_slower_than_it_is(
    leap: int, period_s: float, num_leaps: int, phase: float
) -> None:
    pace = QueuePace()
    pace.waits(0.0)
    for number in range(1, num_leaps + 1):
        for _ in range(leap):
            pace.dispatched(1, number * period_s)
    now = (num_leaps + phase) * period_s
    assert pace.wait_s(leap, now) <= max(period_s, 1e-9) * 1.001


@dataclass
class Door:
    """A queue with servers behind it, whose newcomers are turned away if the pace says that they would be late."""

    rng: random.Random
    num_servers: int
    service_s: float
    patience_s: float
    is_even: bool
    pace: QueuePace = field(default_factory=QueuePace)
    line: deque[float] = field(default_factory=deque)  # deadlines
    busy_until: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # of the line, as newcomers find it
    in_time: int = 0
    late: int = 0
    refused: int = 0
    is_ever_refused_at_once: bool = False

    def run(self, rate: float, seconds: float) -> None:
        """Newcomers for so long."""
        now = 0.0
        while now < seconds:
            now += self.rng.expovariate(rate)
            while self.busy_until and self.busy_until[0] <= now:
                self._serve(heapq.heappop(self.busy_until))
            self._arrive(now)

    def _arrive(self, now: float) -> None:
        while self.line and self.line[0] <= now:
            self.line.popleft()
            self.late += 1
            self._look()
        self.lengths.append(len(self.line))
        if self.pace.wait_s(len(self.line), now) > self.patience_s:
            self.refused += 1
            self.is_ever_refused_at_once |= not self.line
            return
        self.line.append(now + self.patience_s)
        self._serve(now)

    def _serve(self, now: float) -> None:
        while self.line and self.line[0] <= now:
            self.line.popleft()
            self.late += 1
        while self.line and len(self.busy_until) < self.num_servers:
            self.line.popleft()
            self.in_time += 1
            spread = 1.0 if self.is_even else self.rng.expovariate(1)
            heapq.heappush(self.busy_until, now + self.service_s * spread)
            self.pace.dispatched(1, now)
        self._look()
        if self.line:
            self.pace.waits(now)

    def _look(self) -> None:
        if not self.line:
            self.pace.is_empty()


@pytest.mark.covers("A12")
@settings(max_examples=25)
@given(st.integers(0, 2**32), st.integers(1, 32), st.floats(2, 8), st.booleans())
def test_under_overload_who_is_let_in_is_served_in_time_and_no_server_is_left_idle(
    seed: int, num_servers: int, overload: float, is_even: bool
) -> None:
    service_s = 2.0
    pace_per_s = num_servers / service_s
    door = Door(random.Random(seed), num_servers, service_s, 12.0 + 40 / pace_per_s, is_even)
    door.run(overload * pace_per_s, 800.0)
    served = door.in_time / (800.0 * pace_per_s)
    settled = door.lengths[len(door.lengths) // 2 :]
    target = door.patience_s * pace_per_s
    assert not door.is_ever_refused_at_once
    assert served > 0.6, "turning away costs no throughput, which is drawn"
    assert max(settled) < 2.5 * target
    assert min(settled) > 0.2 * target, "the queue neither runs dry nor fills up by turns"
    assert door.refused > door.late, "who cannot make it hears so at once"


@pytest.mark.covers("A12")
@settings(max_examples=25)
@given(st.integers(0, 2**32), st.integers(1, 32), st.floats(0.1, 0.5), st.booleans())
def test_without_overload_nobody_is_turned_away(seed: int, num_servers: int, load: float, is_even: bool) -> None:
    door = Door(random.Random(seed), num_servers, 1.0, 30.0, is_even)
    door.run(load * num_servers, 200.0)
    assert (door.refused, door.late) == (0, 0)
