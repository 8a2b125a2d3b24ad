"""A decode node's leases against the naive model: at random with many branches, and every reachable state of two attempts."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from node import events as ev
from proto.attempt_key import AttemptKey
from tests.copied import Copier
from tests.cores.lease_world import PROMPTS, LeaseWorld
from tests.cores.nodes import ROUTER
from tests.thorough import examples, only_thorough

OTHER_ROUTER = ev.RouterId("other", 8)
ROUTERS = {"r": ROUTER, "s": OTHER_ROUTER, "t": ROUTER}
NUM_TRIES = 5  # nobody finishes in some draws, but not in so many
HAPPENED: Counter[str] = Counter()

requests = st.sampled_from(sorted(PROMPTS))
choices = st.sampled_from([(0,), (0, 1), (0, 1, 2), (1,), (2, 0)])
attempts = st.integers(0, 3)
rarely = st.sampled_from([False, False, False, True])


class LeaseMachine(RuleBasedStateMachine):
    """Right peers and the races between them, repeated and late messages, and a few wrong secrets; room is short."""

    @initialize(num_blocks=st.integers(4, 16), max_tokens=st.integers(2, 9))
    def start(self, num_blocks: int, max_tokens: int) -> None:
        self.world = LeaseWorld(num_blocks, max_tokens)
        self.asked: list[tuple[AttemptKey, ...]] = []

    def some_lease(self, data: st.DataObject) -> int:
        """Mostly one that is not over."""
        living, every = list(self.world.model.leases), list(self.world.granted)
        return data.draw(st.sampled_from(7 * living + every))

    @rule(request=requests, choices=choices, attempt=attempts)
    def reserve(self, request: str, choices: tuple[int, ...], attempt: int) -> None:
        keys = tuple(AttemptKey(request, choice, attempt) for choice in choices)
        self.asked.append(keys)
        self.world.reserve(keys, ROUTERS[request])

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def repeat_a_reserve(self, data: st.DataObject) -> None:
        keys = data.draw(st.sampled_from(self.asked))
        self.world.reserve(keys, ROUTERS[keys[0].request_id])

    @precondition(lambda self: self.world.granted)
    @rule(data=st.data(), everything=st.booleans(), indices=st.sets(st.integers(0, 4), min_size=1))
    def land(self, data: st.DataObject, everything: bool, indices: set[int]) -> None:
        self.world.land(self.some_lease(data), range(8) if everything else indices)

    @precondition(lambda self: self.world.granted)
    @rule(data=st.data(), is_bad=rarely)
    def refuse_write(self, data: st.DataObject, is_bad: bool) -> None:
        if is_bad:
            self.world.refuse_write(self.some_lease(data))

    @precondition(lambda self: self.world.granted)
    @rule(data=st.data(), is_right=st.sampled_from([True, True, False]))
    def renew(self, data: st.DataObject, is_right: bool) -> None:
        self.world.renew(self.some_lease(data), is_right)

    @precondition(lambda self: self.world.granted)
    @rule(data=st.data(), land_first=st.booleans())
    def commit(self, data: st.DataObject, land_first: bool) -> None:
        lease_id = self.some_lease(data)
        if land_first:
            self.world.land(lease_id, range(8))
        keys = self.world.keys_of[lease_id]
        chosen = data.draw(st.lists(st.sampled_from([key.choice for key in keys]), min_size=1, unique=True))
        self.world.commit(lease_id, keys, chosen)

    @rule(request=requests, choices=choices, attempt=attempts, num_started=st.integers(1, 3))
    def hand_over(self, request: str, choices: tuple[int, ...], attempt: int, num_started: int) -> None:
        """A handoff without a hitch, if there is room, so that running branches are common."""
        keys, before = tuple(AttemptKey(request, choice, attempt) for choice in choices), set(self.world.granted)
        self.world.reserve(keys, ROUTERS[request])
        for lease_id in self.world.granted.keys() - before:
            self.world.land(lease_id, range(8))
            self.world.commit(lease_id, keys, choices[:num_started])
            if lease_id in self.world.unquiet:
                self.world.quiet(lease_id)

    @precondition(lambda self: self.world.unquiet)
    @rule(data=st.data())
    def quiet(self, data: st.DataObject) -> None:
        self.world.quiet(data.draw(st.sampled_from(self.world.unquiet)))

    @rule(request=requests, choice=st.integers(0, 2), attempt=attempts, is_sent=rarely)
    def cancel(self, request: str, choice: int, attempt: int, is_sent: bool) -> None:
        if is_sent:
            self.world.cancel(AttemptKey(request, choice, attempt), ROUTERS[request])

    @rule(request=requests, choices=choices, attempt=attempts, is_sent=rarely)
    def release(self, request: str, choices: tuple[int, ...], attempt: int, is_sent: bool) -> None:
        if is_sent:
            self.world.release([AttemptKey(request, choice, attempt) for choice in choices])

    @rule(router=st.sampled_from([ROUTER, OTHER_ROUTER]), is_lost=rarely)
    def lose_router(self, router: ev.RouterId, is_lost: bool) -> None:
        if is_lost:
            self.world.lose_router(router)

    @precondition(lambda self: self.world.plans)
    @rule()
    def step(self) -> None:
        self.world.step()

    @rule(seconds=st.sampled_from([0.5, 3.0, 9.5, 10.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.world.wait(self.world.now + seconds)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.end()
            HAPPENED.update(self.world.happened)


@pytest.mark.covers("S13", "H05", "H06", "H07", "H08", "D02", "D05", "R04", "R17", "C09")
def test_leases_of_several_branches_do_what_the_naive_model_does_and_leave_nothing_behind() -> None:
    HAPPENED.clear()
    limits = settings(deadline=None, max_examples=examples(150, 3), stateful_step_count=50)
    wanted = ("granted", "the same lease again", "refused", "BUSY", "NO_BLOCKS", "committed", "started", "finished")
    for _ in range(NUM_TRIES):
        run_state_machine_as_test(LeaseMachine, settings=limits)
        if all(HAPPENED[what] for what in wanted):
            break
    assert all(HAPPENED[what] for what in wanted), HAPPENED


# ---------------------------------------------------------------- every state of two attempts

Move = Callable[[LeaseWorld], None]


def moves(world: LeaseWorld, keys_asked: list[tuple[AttemptKey, ...]], with_time: bool) -> Iterator[Move]:
    """Everything that can come next: each message once more, in any order, at any time."""
    for keys in keys_asked:
        yield lambda w, keys=keys: w.reserve(keys, ROUTER)  # type: ignore[misc]
        yield lambda w, keys=keys: w.release(keys)  # type: ignore[misc]
        for key in keys:
            yield lambda w, key=key: w.cancel(key, ROUTER)  # type: ignore[misc]
    for lease_id in world.model.leases:
        chosen = [key.choice for key in world.keys_of[lease_id]]
        yield lambda w, lease_id=lease_id: w.land(lease_id, range(8))  # type: ignore[misc]
        yield lambda w, lease_id=lease_id: w.refuse_write(lease_id)  # type: ignore[misc]
        yield lambda w, lease_id=lease_id, chosen=chosen: w.commit(lease_id, w.keys_of[lease_id], chosen)  # type: ignore[misc]
        if len(chosen) > 1:
            yield lambda w, lease_id=lease_id: w.commit(lease_id, w.keys_of[lease_id], [1])  # type: ignore[misc]
    for lease_id in world.unquiet:
        yield lambda w, lease_id=lease_id: w.quiet(lease_id)  # type: ignore[misc]
    if with_time and any(lease.is_open for lease in world.model.leases.values()):
        yield lambda w: w.wait(min(lease.expires_at for lease in w.model.leases.values() if lease.is_open))
    yield lambda w: w.lose_router(ROUTER)


@pytest.mark.covers("R04", "H05", "H06", "H08", "D05", "S13")
@pytest.mark.parametrize(
    ("choices_of_attempts", "with_time"),
    [(((0,), (0,)), True), (((0, 1),), True), pytest.param(((0, 1), (1,)), False, marks=only_thorough)],
    ids=["one branch, two attempts", "two branches", "two branches, one retried"],
)
def test_in_every_reachable_state_of_two_attempts_floors_leases_and_answers_are_the_models(
    choices_of_attempts: tuple[tuple[int, ...], ...], with_time: bool
) -> None:
    """Reserve, Cancel, Release, writes, Commit and expiry come in every order, repeated or never."""
    asked = [tuple(AttemptKey("r", choice, k) for choice in chosen) for k, chosen in enumerate(choices_of_attempts)]
    start = LeaseWorld()
    seen, queue = {start.model.key(start.now)}, deque([start])
    copier = Copier()
    while queue:
        world = queue.popleft()
        for move in moves(world, asked, with_time):
            after = copier.copied(world)
            move(after)  # compares core and model
            key = (*after.model.key(after.now), tuple(map(after.place, after.unquiet)))
            if key not in seen:
                seen.add(key)
                queue.append(after)
    assert len(seen) > 30, "the exploration ended early"
