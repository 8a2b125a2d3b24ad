"""The pool of worker processes against random deaths and signals: one process of each at a time, and an end when asked for."""

from __future__ import annotations

import random
from signal import SIGINT, SIGKILL, SIGTERM

import pytest

from router.worker_metrics import merged
from router.worker_pool import Action, Announce, Exit, PoolTiming, Signal, Start, WorkerPool

TIMING = PoolTiming(stop_s=5.0, backoff_min_s=0.1, backoff_max_s=1.0, settled_s=3.0)


class World:
    """Processes as a kernel would run them; checks the rules at every step."""

    def __init__(self, number: int) -> None:
        self.pool = WorkerPool(number, TIMING)
        self.number = number
        self.now = 0.0
        self.running: set[int] = set()
        self.starts: list[tuple[float, int]] = []
        self.signals: list[tuple[int, int]] = []
        self.announced = 0
        self.exit: int | None = None
        self.take(self.pool.begin(self.now))

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            assert self.exit is None, "nothing follows the end"
            match action:
                case Start(index):
                    assert index not in self.running, "a worker runs once"
                    self.running.add(index)
                    self.starts.append((self.now, index))
                case Signal(index, number):
                    assert index in self.running, "nobody is there to be signalled"
                    self.signals.append((index, number))
                case Announce():
                    self.announced += 1
                case Exit(code):
                    assert not self.running
                    self.exit = code
        deadline = self.pool.next_deadline()
        assert deadline is None or deadline > self.now or self.exit is not None, "what is due has been done"

    @property
    def has_ended(self) -> bool:
        return self.exit is not None

    def up(self, index: int) -> None:
        self.take(self.pool.is_up(index, self.now))

    def end(self, index: int, code: int) -> None:
        self.running.discard(index)
        self.take(self.pool.ended(index, code, self.now))

    def stop(self, number: int) -> None:
        self.take(self.pool.stop(number, self.now))

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while (due := self.pool.next_deadline()) is not None and due <= end:
            self.now = max(self.now, due)
            self.take(self.pool.tick(self.now))
        self.now = end

    def all_up(self) -> None:
        for index in range(self.number):
            self.up(index)


@pytest.mark.parametrize("seed", range(300))
def test_whatever_happens_a_stop_ends_it_and_until_then_every_worker_comes_back(seed: int) -> None:
    rng = random.Random(seed)
    world = World(rng.randint(1, 4))
    world.all_up()
    assert world.announced == 1
    for _ in range(rng.randint(0, 30)):
        match rng.randrange(3):
            case 0 if world.running:
                world.end(rng.choice(sorted(world.running)), rng.choice([0, 1, -9]))
            case 1:
                world.pass_time(rng.choice([0.05, 0.5, 4.0]))
            case _:
                world.up(rng.randrange(world.number))
        assert world.exit is None
    if rng.random() < 0.5:
        world.pass_time(TIMING.backoff_max_s)
        assert world.running == set(range(world.number)), "who died is there again"
    asked = set(world.running)
    world.stop(SIGTERM)
    world.stop(SIGINT)
    assert world.signals == [(index, SIGTERM) for index in sorted(asked)], "passed on once, as it came"
    for index in sorted(asked):
        if rng.random() < 0.7:
            world.end(index, 0)
    outstaying = set(world.running)
    world.pass_time(TIMING.stop_s)
    assert {index for index, number in world.signals if number == SIGKILL} == outstaying
    for index in sorted(outstaying):
        world.end(index, -9)
    assert world.exit == 0 and world.announced == 1


def test_a_ctrl_c_reaches_who_loads_as_what_ends_it_without_a_word() -> None:
    world = World(2)
    world.up(0)
    world.stop(SIGINT)
    assert world.signals == [(0, SIGINT), (1, SIGTERM)]


@pytest.mark.parametrize(("code", "expected"), [(2, 2), (1, 1), (-9, 1), (0, 1)])
def test_who_cannot_start_ends_all_with_its_code(code: int, expected: int) -> None:
    world = World(3)
    world.up(0)
    world.end(1, code)
    assert world.signals == [(0, SIGKILL), (2, SIGKILL)]
    assert not world.has_ended
    world.end(0, -9)
    world.end(2, -9)
    assert world.exit == expected and not world.announced


def test_who_dies_again_and_again_is_started_ever_more_rarely_until_it_has_lived_a_while() -> None:
    world = World(2)
    world.all_up()
    for _ in range(6):
        world.end(0, 1)
        world.pass_time(TIMING.backoff_max_s)
    gaps = [round(at - i * TIMING.backoff_max_s, 3) for i, (at, _) in enumerate(world.starts[2:])]
    assert gaps == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    world.up(0)
    world.pass_time(TIMING.settled_s)
    world.end(0, 1)
    ended_at = world.now
    world.pass_time(TIMING.backoff_max_s)
    at, index = world.starts[-1]
    assert at - ended_at == pytest.approx(0.1) and index == 0


def test_samples_of_all_workers_are_told_apart_by_a_label() -> None:
    texts = {
        1: '# HELP a all of it\n# TYPE a counter\na{x="{1} 2"} 3.0\na{x="b"} 1.0\n# HELP g now\n# TYPE g gauge\ng 5.0\n',
        0: "# HELP a all of it\n# TYPE a counter\n# HELP g now\n# TYPE g gauge\ng 4.0\n",
    }
    assert merged(texts).splitlines() == [
        "# HELP a all of it",
        "# TYPE a counter",
        'a{worker="1",x="{1} 2"} 3.0',
        'a{worker="1",x="b"} 1.0',
        "# HELP g now",
        "# TYPE g gauge",
        'g{worker="0"} 4.0',
        'g{worker="1"} 5.0',
    ]
