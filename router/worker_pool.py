"""Which processes of a router with several of them run, and what follows from a death or a signal. Pure.

    STARTING ──up──> UP ──ended──> RESTING ──backoff over──> STARTING        stopping: any ──ended──> ENDED

Until all of them were up once nothing is restarted: what keeps one from starting (a model directory, say) keeps all, and the user
is waiting for the answer. From then on a worker that ends is started again, at once if it had lived for a while; clients of the
others notice nothing. A stop is passed on as it came, to who loads as SIGTERM, and the pool is over when the last worker is; those
that outstay their time are killed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from signal import SIGINT, SIGKILL, SIGTERM


class State(Enum):
    STARTING = auto()
    UP = auto()
    RESTING = auto()  # until its next start
    ENDED = auto()  # for good


@dataclass(frozen=True, slots=True)
class Start:
    """Start this worker."""

    index: int


@dataclass(frozen=True, slots=True)
class Signal:
    """Send this worker's process a signal."""

    index: int
    number: int


@dataclass(frozen=True, slots=True)
class Announce:
    """All of them are up: the router can be used."""


@dataclass(frozen=True, slots=True)
class Exit:
    """It is over, with this exit code."""

    code: int


Action = Start | Signal | Announce | Exit


@dataclass(frozen=True, slots=True)
class PoolTiming:
    """Seconds."""

    stop_s: float = 30.0  # from a stop's signal on, then they are killed
    backoff_min_s: float = 0.1
    backoff_max_s: float = 5.0
    settled_s: float = 10.0  # who lived so long is started again as if it had never failed


@dataclass(slots=True)
class _Worker:
    state: State = State.STARTING
    started_at: float = 0.0
    starts_at: float = 0.0  # while it rests
    backoff_s: float = 0.0


class WorkerPool:
    """The workers 0, 1, …, each at most once at a time."""

    def __init__(self, number: int, timing: PoolTiming) -> None:
        self._timing = timing
        self._workers = [_Worker() for _ in range(number)]
        self._is_announced = False
        self._exit_code: int | None = None  # once it is stopping
        self._kills_at: float | None = None
        self._is_over = False

    @property
    def is_announced(self) -> bool:
        """Whether all of them were up once: who is started now follows one that has ended."""
        return self._is_announced

    def begin(self, now: float) -> list[Action]:
        """Start them all; to be called once."""
        for worker in self._workers:
            worker.started_at, worker.backoff_s = now, self._timing.backoff_min_s
        return [Start(index) for index in range(len(self._workers))]

    def is_up(self, index: int, now: float) -> list[Action]:
        """The worker takes connections."""
        if self._workers[index].state is State.STARTING:
            self._workers[index].state = State.UP
        if not self._is_announced and all(worker.state is State.UP for worker in self._workers):
            self._is_announced = True
            return [Announce()]
        return []

    def ended(self, index: int, code: int, now: float) -> list[Action]:
        """The worker's process has ended, with this exit code."""
        worker = self._workers[index]
        if self._exit_code is None and self._is_announced:
            if now - worker.started_at >= self._timing.settled_s:
                worker.backoff_s = self._timing.backoff_min_s
            worker.state, worker.starts_at = State.RESTING, now + worker.backoff_s
            worker.backoff_s = min(2 * worker.backoff_s, self._timing.backoff_max_s)
            return []
        worker.state = State.ENDED
        if self._exit_code is None:
            return self._stop(SIGKILL, code if code > 0 else 1, now)
        return self._end()

    def stop(self, number: int, now: float) -> list[Action]:
        """A signal has come for all of them."""
        return self._stop(number, 0, now) if self._exit_code is None else []

    def tick(self, now: float) -> list[Action]:
        """Do what is due."""
        actions: list[Action] = []
        if self._kills_at is not None and self._kills_at <= now:
            self._kills_at = None
            actions += self._signal(SIGKILL)
        for index, worker in enumerate(self._workers):
            if worker.state is State.RESTING and worker.starts_at <= now:
                worker.state, worker.started_at = State.STARTING, now
                actions.append(Start(index))
        return actions

    def next_deadline(self) -> float | None:
        """When tick must be called at the latest."""
        due = [worker.starts_at for worker in self._workers if worker.state is State.RESTING]
        return min([*due, *([] if self._kills_at is None else [self._kills_at])], default=None)

    def snapshot(self) -> list[str]:
        """Each worker's state."""
        return [worker.state.name for worker in self._workers]

    def _stop(self, number: int, code: int, now: float) -> list[Action]:
        self._exit_code = code
        self._kills_at = now + self._timing.stop_s
        signals = self._signal(number)
        for worker in self._workers:
            if worker.state is State.RESTING:
                worker.state = State.ENDED
        return [*signals, *self._end()]

    def _signal(self, number: int) -> list[Action]:
        # Who is still loading has nothing to drain, and would end of a SIGINT with a traceback.
        numbers = {State.STARTING: SIGTERM if number == SIGINT else number, State.UP: number}
        states = [worker.state for worker in self._workers]
        return [Signal(index, numbers[state]) for index, state in enumerate(states) if state in numbers]

    def _end(self) -> list[Action]:
        if self._is_over or self._exit_code is None or any(w.state is not State.ENDED for w in self._workers):
            return []
        self._is_over, self._kills_at = True, None
        return [Exit(self._exit_code)]
