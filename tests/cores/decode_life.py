"""A decode core under random calls, checked after each against a model of what must hold: for attempts of several branches."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random

import numpy as np

from connector.transport import BlocksLanded, NotifyArrived, RevokeDone, WriteRefused
from decode_node.core import DecodeCore
from engine.block_pool import BlockPool
from engine.fake_runner import BYTES_PER_TOKEN, FakeRunner
from engine.plan import Plan
from engine.reserve import ReserveConfig
from engine.scheduler import Scheduler, SchedulerConfig
from node import events as ev
from node.identity import NodeLimits
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey, BranchKey, attempt_key
from proto.block_key import block_keys
from tests.cores.nodes import BLOCK_SIZE, DECODE, FINGERPRINT, MAX_MODEL_LEN, PREFILL, SEED, VOCAB_SIZE

ROUTERS = (ev.RouterId("router-a", 1), ev.RouterId("router-b", 2))
NUM_REQUESTS = 3
EVENTS = {
    "reserve": 8,
    "repeat": 2,
    "cancel": 5,
    "release": 2,
    "renew": 1,
    "land": 8,
    "spoil": 1,
    "commit": 9,
    "revoke_done": 9,
    "step": 12,
    "lose_router": 1,
    "wait": 2,
}


@dataclass
class Granted:
    """A lease as its sender knows it, until its writes are quiet."""

    lease: pb.Lease
    keys: tuple[AttemptKey, ...]
    prompt: list[int]
    max_tokens: int
    num_growth: int  # blocks promised
    is_revoked: bool = False
    started: tuple[AttemptKey, ...] = ()  # once a right Commit was taken


@dataclass
class Life:
    """One node from its first Reserve to its last."""

    seed: int
    happened: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.now = 0.0
        self.num_slots = self.random.randint(2, 20)
        num_blocks = self.random.randint(16, 120)
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        reserve = ReserveConfig("full")
        config = SchedulerConfig(self.num_slots, 32, MAX_MODEL_LEN, reserve=reserve, resumes_preempted=False)
        self.scheduler = Scheduler(config, self.pool, SEED)
        memory = np.zeros((num_blocks, BYTES_PER_TOKEN * BLOCK_SIZE), dtype=np.uint8)
        self.runner = FakeRunner(memory, BLOCK_SIZE, VOCAB_SIZE, self.num_slots)
        limits = NodeLimits(MAX_MODEL_LEN, VOCAB_SIZE, max_fences=self.random.choice((8, 64, 64, 64)), lease_life_s=1.0)
        serial = count(1)
        draw = lambda: (next(serial), self.random.randbytes(16))  # noqa: E731
        self.core = DecodeCore(DECODE, limits, self.scheduler, self.pool, FINGERPRINT, SEED, draw)
        self.max_fences = limits.max_fences
        self.plans: deque[Plan] = deque()
        self.granted: dict[int, Granted] = {}  # by lease id, until quiet
        self.revoking: list[int] = []
        self.asked: list[tuple[pb.ReserveRequest, list[int]]] = []
        self.floors: dict[BranchKey, int] = {}
        self.refused: set[AttemptKey] = set()
        self.leased: dict[AttemptKey, int] = {}  # -> lease id
        self.running: dict[AttemptKey, int] = {}  # -> tokens that the router was told of
        self.router_of: dict[AttemptKey, ev.RouterId] = {}
        self.answers: list[ev.AnswerReserve] = []

    def live(self, num_events: int) -> None:
        """Everything in random order; then all ends by itself."""
        for _ in range(num_events):
            event = self.random.choices(list(EVENTS), list(EVENTS.values()))[0]
            self.happened[event] += getattr(self, event)()
            assert self.core.snapshot()["fences"] == len(self.floors) <= self.max_fences
        for router in ROUTERS:
            self.feed(ev.RouterLost(router))
        while self.revoke_done() or self.step():
            pass
        while (at := self.core.next_deadline()) is not None:
            self.now = at
            self.take(self.core.tick(at))
        snapshot, counts = self.core.snapshot(), self.pool.counts()
        assert not (self.granted or self.leased or self.running)
        assert (snapshot["leases"], snapshot["leases_by_state"], snapshot["branches"], snapshot["fences"]) == (
            0,
            {},
            0,
            0,
        )
        assert (counts.used, counts.leased, counts.quarantined, self.pool.num_promised) == (0, 0, 0, 0)
        assert self.scheduler.num_free_slots == self.num_slots

    # ------------------------------------------------------------ events: each says whether it could happen

    def reserve(self) -> bool:
        request_id = f"r{self.random.randrange(NUM_REQUESTS)}"
        choices = self.random.sample(range(6), self.random.choice((1, 1, 2, 3, 4, 6)))
        newest = max((self.floors.get(BranchKey(request_id, choice), 0) for choice in choices), default=0)
        key = AttemptKey(request_id, choices[0], max(0, newest + self.random.choice((-1, 0, 0, 0, 1))))
        prompt = [7] * self.random.choice((0, 4, 8)) + [
            self.random.randrange(VOCAB_SIZE) for _ in range(self.random.randint(1, 9))
        ]
        router = self.random.choice(ROUTERS)
        self.ask(
            pb.ReserveRequest(
                key=key.to_proto(),
                to_incarnation=DECODE.incarnation,
                sender=PREFILL.to_proto(),
                router=pb.PeerId(name=router.name, incarnation=router.incarnation),
                num_tokens=len(prompt),
                max_total_tokens=len(prompt) + self.random.randint(2, 12),
                block_keys=block_keys(SEED, prompt, BLOCK_SIZE),
                fingerprint=FINGERPRINT,
                ms_left=self.random.choice((500, 60_000)),
                more_choices=choices[1:],
            ),
            prompt,
        )
        return True

    def repeat(self) -> bool:
        """A Reserve that arrives twice, or late."""
        if not self.asked:
            return False
        self.ask(*self.random.choice(self.asked[-6:]))
        return True

    def cancel(self) -> bool:
        key = self.some_key()
        message = pb.RouterMessage(cancel=pb.Cancel(key=key.to_proto(), ms_left=60_000))
        self.raise_floor(key)
        self.feed(ev.FromRouter(self.random.choice(ROUTERS), message))
        assert not [k for k in (*self.leased, *self.running) if k.branch == key.branch and k.attempt <= key.attempt]
        return True

    def release(self) -> bool:
        """Of a whole lease, as senders do it, or of any branches: of what is committed it changes nothing."""
        if self.granted and self.random.random() < 0.8:
            keys: Sequence[AttemptKey] = self.random.choice(list(self.granted.values())).keys
        else:
            keys = (self.some_key(),)
        more = [key.choice for key in keys[1:]]
        running = set(self.running)
        for key in keys:
            if key not in self.running and not self.is_committed(key):
                self.raise_floor(key)
        self.feed(ev.ReleaseAsked(pb.ReleaseRequest(key=keys[0].to_proto(), more_choices=more, ms_left=60_000)))
        for key in keys:
            assert key not in self.leased or self.is_committed(key)
            assert key not in running or key in self.running
        return True

    def renew(self) -> bool:
        if not self.granted:
            return False
        granted = self.random.choice(list(self.granted.values()))
        request = pb.RenewRequest(
            key=granted.keys[0].to_proto(), lease_id=granted.lease.lease_id, secret=granted.lease.secret
        )
        self.feed(ev.RenewAsked(1, request))
        return True

    def land(self) -> bool:
        open_ones = [each for each in self.granted.values() if not each.is_revoked]
        if not open_ones:
            return False
        granted = self.random.choice(open_ones)
        indices = list(range(granted.lease.num_blocks_held, granted.lease.num_blocks))
        if self.random.random() < 0.2:
            indices = self.random.sample(indices, self.random.randint(0, len(indices)))
        if indices:
            self.feed(BlocksLanded(granted.lease.lease_id, tuple(indices), 1, PREFILL.name))
        return True

    def spoil(self) -> bool:
        """A write that is refused, of any lease that there ever was."""
        lease_id = self.random.choice([*self.granted, 1])
        self.feed(WriteRefused(lease_id, self.random.choice((pb.CHECKSUM, pb.TRANSFER_FAILED)), "bad"))
        return True

    def commit(self) -> bool:
        if not self.granted:
            return False
        granted = self.random.choice(list(self.granted.values()))
        chosen = self.random.sample(granted.keys, self.random.randint(1, len(granted.keys)))
        if self.random.random() < 0.7:
            chosen = list(granted.keys)
        message = pb.Commit(
            key=granted.keys[0].to_proto(),
            lease_id=granted.lease.lease_id,
            secret=granted.lease.secret,
            prompt_token_ids=granted.prompt,
            branches=[
                pb.StartedBranch(branch=pb.Branch(choice=key.choice, seed=key.choice, generated_token_ids=[1]))
                for key in chosen
            ],
            sampling=pb.Sampling(temperature=1, max_tokens=granted.max_tokens, stop_token_ids=[3]),
            ms_left=self.random.choice((500, 60_000)),
        )
        if self.random.random() < 0.05:
            message.branches.add().branch.choice = 6  # nobody reserved for it
            self.feed(NotifyArrived("link", pb.DataMessage(commit=message).SerializeToString()))
            return True
        open_before = {key for key, lease_id in self.leased.items() if lease_id == granted.lease.lease_id}
        was_committed = bool(granted.started)
        actions = self.feed(NotifyArrived("link", pb.DataMessage(commit=message).SerializeToString()))
        is_refused = any(isinstance(action, ev.AnswerCommit) for action in actions)
        if not (is_refused or was_committed):
            granted.started = tuple(key for key in chosen if key in open_before)
            assert granted.started and {*self.leased} >= {*granted.started}
            assert not {*self.leased} & ({*granted.keys} - {*chosen})
        return True

    def revoke_done(self) -> bool:
        if not self.revoking:
            return False
        lease_id = self.revoking.pop(self.random.randrange(len(self.revoking)))
        granted = self.granted.pop(lease_id)
        starting = [key for key in granted.started if key in self.leased]
        for key in starting:
            del self.leased[key]
            self.running[key] = 0
        actions = self.feed(RevokeDone(lease_id))
        answers = [action for action in actions if isinstance(action, ev.AnswerCommit)]
        assert len(answers) == (1 if starting else 0) and not any(a.message.answer.HasField("error") for a in answers)
        assert all(self.running[key] == 1 for key in starting), "a branch that starts repeats the sender's token"
        self.happened["started with others"] += len(starting) > 1
        self.happened["started without all"] += 0 < len(starting) < len(granted.keys)
        return True

    def step(self) -> bool:
        if not self.plans:
            return False
        self.feed(ev.StepDone(self.runner.run(self.plans.popleft())))
        return True

    def lose_router(self) -> bool:
        router = self.random.choice(ROUTERS)
        self.feed(ev.RouterLost(router))
        assert router not in {self.router_of[key] for key in (*self.leased, *self.running)}
        return True

    def wait(self) -> bool:
        """Floors stand for ten seconds at least: never so long."""
        self.now += self.random.choice((0.0, 0.01, 0.02, 0.05, 0.4))
        self.take(self.core.tick(self.now))
        return True

    # ------------------------------------------------------------ what comes of it

    def ask(self, request: pb.ReserveRequest, prompt: list[int]) -> None:
        self.asked.append((request, prompt))
        lead = attempt_key(request.key)
        keys = (lead, *(lead._replace(choice=choice) for choice in request.more_choices))
        admitted = [key for key in keys if key.attempt >= self.floors.get(key.branch, 0)]
        num_new = sum(key.branch not in self.floors for key in admitted)
        has_fences = not num_new or len(self.floors) + num_new <= self.max_fences
        has_fences &= len(keys) <= self.num_slots  # more branches than slots are refused before anything is remembered
        # What ended stays in the engine until the last step launched with it is read.
        is_known = any(key in self.leased or key in self.running or self.scheduler.knows(key) for key in keys)
        held = {key: self.leased.get(key) for key in keys}
        if admitted and has_fences and not is_known:
            for key in admitted:
                self.floors[key.branch] = key.attempt
                self.refused -= {older for older in self.refused if older.branch == key.branch}
        actions = list(self.core.receive(ev.ReserveAsked(1, request), self.now))
        reply = next(action.reply for action in actions if isinstance(action, ev.AnswerReserve))
        if reply.HasField("lease") and reply.lease.lease_id not in self.granted:
            assert has_fences and not is_known and admitted
            self.grant(reply.lease, request, keys, prompt, admitted)
        elif reply.HasField("lease"):
            assert is_known and self.granted[reply.lease.lease_id].keys == keys
            self.happened["the same lease"] += 1
        elif is_known or not admitted:
            was_refused = any(key in self.refused and self.floors[key.branch] == key.attempt + 1 for key in keys)
            assert reply.error.code == (pb.BUSY if was_refused and not is_known else pb.CANCELLED)
        else:
            assert reply.error.code == pb.BUSY or (reply.error.code == pb.NO_BLOCKS and has_fences)
            self.happened[pb.ErrorCode.Name(reply.error.code)] += 1
            for key in admitted if has_fences else ():
                self.raise_floor(key)
                self.refused.add(key)
        self.take(actions)
        assert not is_known or held == {key: self.leased.get(key) for key in keys}

    def grant(
        self,
        lease: pb.Lease,
        request: pb.ReserveRequest,
        keys: tuple[AttemptKey, ...],
        prompt: list[int],
        admitted: list[AttemptKey],
    ) -> None:
        num_full = len(prompt) // BLOCK_SIZE
        assert lease.num_blocks == num_full + len(keys)
        num_last = -(-(request.max_total_tokens - 1) // BLOCK_SIZE)
        num_growth = len(keys) * max(0, num_last - num_full - 1)
        max_tokens = request.max_total_tokens - len(prompt)
        self.granted[lease.lease_id] = Granted(lease, keys, prompt, max_tokens, num_growth)
        for key in admitted:
            self.leased[key] = lease.lease_id
            self.router_of[key] = ev.RouterId(request.router.name, request.router.incarnation)
        self.happened["granted to several"] += len(keys) > 1
        self.happened["granted to some"] += len(admitted) < len(keys)

    def feed(self, event: ev.Event) -> list[ev.Action]:
        actions = list(self.core.receive(event, self.now))
        self.take(actions)
        return actions

    def take(self, actions: Sequence[ev.Action]) -> None:
        ended: set[AttemptKey] = set()
        for action in actions:
            match action:
                case ev.Ended(key):
                    assert (key in self.leased) != (key in self.running), f"{key} ended twice, or never began"
                    self.leased.pop(key, None)
                    if self.running.pop(key, None) is not None:
                        ended.add(key)
                    self.raise_floor(key)
                case ev.RevokeLease(lease_id):
                    assert not self.granted[lease_id].is_revoked
                    self.granted[lease_id].is_revoked = True
                    self.revoking.append(lease_id)
                case ev.ToRouter(_, message):
                    self.hear(message, ended)
                case ev.RunStep(plan):
                    self.plans.append(plan)
        self.check()

    def hear(self, message: pb.NodeMessage, ended: set[AttemptKey]) -> None:
        if message.HasField("error"):
            return
        assert message.tokens.from_receiver
        for tokens in message.tokens.branches:
            key = attempt_key(tokens.key)
            assert key in self.running or (key in ended and tokens.finish), f"tokens of {key}, which does not run"
            if key in self.running:
                assert tokens.first_index == self.running[key]
                self.running[key] += len(tokens.token_ids)

    def check(self) -> None:
        """What must hold between any two events."""
        snapshot, counts = self.core.snapshot(), self.pool.counts()
        assert snapshot["leases"] == len({*self.leased.values()})
        assert snapshot["branches"] == len(self.running)
        branches = [key.branch for key in (*self.leased, *self.running)]
        assert len({*branches}) == len(branches), "two attempts of one branch"
        num_leased = sum(each.lease.num_blocks - each.lease.num_blocks_held for each in self.granted.values())
        assert counts.leased + counts.quarantined == snapshot["blocks_of_leases"] == num_leased
        scheduler = snapshot["scheduler"]
        assert isinstance(scheduler, dict)
        assert scheduler["num_reserved_slots"] == sum(len(each.keys) for each in self.granted.values())
        promised = self.pool.num_promised - sum(each.num_growth for each in self.granted.values())
        assert promised >= 0 and (promised == 0 or self.running), "promises of nobody"
        assert (
            counts.used == 0 or any(scheduler["slots"]) or any(e.lease.num_blocks_held for e in self.granted.values())
        )
        for key in (*self.leased, *self.running):
            assert self.floors[key.branch] == key.attempt, f"{key} is below the floor"

    # ------------------------------------------------------------ the model

    def raise_floor(self, key: AttemptKey) -> None:
        if key.branch in self.floors or len(self.floors) < self.max_fences:
            self.floors[key.branch] = max(self.floors.get(key.branch, 0), key.attempt + 1)

    def is_committed(self, key: AttemptKey) -> bool:
        return key in self.leased and key in self.granted[self.leased[key]].started

    def some_key(self) -> AttemptKey:
        """A branch's newest attempt, or one near it."""
        branch = BranchKey(f"r{self.random.randrange(NUM_REQUESTS)}", self.random.randrange(6))
        if (keys := [*self.leased, *self.running]) and self.random.random() < 0.7:
            branch = self.random.choice(keys).branch
        attempt = self.floors.get(branch, 0) + self.random.choice((-1, 0, 0, 0, 1))
        return AttemptKey(*branch, max(0, attempt))
