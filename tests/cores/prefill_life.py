"""A prefill core under random calls, checked after each against a model of what must hold: for attempts of several branches."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from connector.transport import Answered, BlocksTaken, LinkClosed
from engine.block_pool import BlockPool
from engine.fake_runner import BYTES_PER_TOKEN, FakeRunner, expected_tokens
from engine.plan import Plan
from engine.scheduler import Scheduler, SchedulerConfig
from node import events as ev
from node.identity import NodeLimits
from node.sampling import to_sampling_params
from prefill_node.core import PrefillCore
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey, BranchKey, attempt_key
from tests.cores.nodes import BLOCK_SIZE, DECODE, FINGERPRINT, MAX_MODEL_LEN, PREFILL, SEED, VOCAB_SIZE

ROUTERS = (ev.RouterId("router-a", 1), ev.RouterId("router-b", 2))
NUM_REQUESTS = 4
EVENTS = {
    "dispatch": 6,
    "cancel": 3,
    "step": 14,
    "answer_reserve": 8,
    "answer_renew": 2,
    "take_blocks": 12,
    "answer_commit": 6,
    "cut_link": 1,
    "lose_router": 1,
    "wait": 2,
}


@dataclass
class Attempt:
    """What was dispatched together, and what the node has done with it."""

    dispatch: pb.Dispatch
    keys: tuple[AttemptKey, ...]
    router: ev.RouterId
    open: set[AttemptKey]  # neither cancelled, nor finished, nor failed
    lease: pb.Lease | None = None
    link_id: str = ""
    written: list[int] = field(default_factory=list)  # block indices, in order
    num_unread: int = 0
    is_committed: bool = False  # Commit sent
    is_released: bool = False
    told: set[AttemptKey] = field(default_factory=set)  # whose first token the router has
    outcomes: dict[AttemptKey, str] = field(default_factory=dict)  # of branches that the router heard the end of
    num_ended: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.dispatch.prompt_token_ids)

    def first_token(self, key: AttemptKey) -> int:
        branch = next(each for each in self.dispatch.branches if each.choice == key.choice)
        sampling = to_sampling_params(self.dispatch.sampling, branch.seed)
        return expected_tokens(self.dispatch.prompt_token_ids, (), sampling, 1, VOCAB_SIZE)[0]


class Life:
    """One node from its first Dispatch to its last."""

    events = EVENTS
    reads_kv_pool = False

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.happened: Counter[str] = Counter()
        self.now = 0.0
        num_blocks, self.num_slots = self.random.randint(16, 40), self.random.randint(1, 4)
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(SchedulerConfig(self.num_slots, 8, MAX_MODEL_LEN), self.pool, SEED)
        self.runner_memory = np.zeros((num_blocks, BYTES_PER_TOKEN * BLOCK_SIZE), dtype=np.uint8)
        self.runner = FakeRunner(self.runner_memory, BLOCK_SIZE, VOCAB_SIZE, self.num_slots)
        bounds = (self.random.choice((3, 16)), self.random.choice((8, 64)))
        limits = NodeLimits(MAX_MODEL_LEN, VOCAB_SIZE, *bounds, lease_life_s=1.0, reads_kv_pool=self.reads_kv_pool)
        self.core = PrefillCore(PREFILL, limits, self.scheduler, self.pool, FINGERPRINT, SEED)
        self.plans: deque[Plan] = deque()
        self.attempts: dict[AttemptKey, Attempt] = {}  # by first branch, until Ended
        self.asked: dict[AttemptKey, Attempt] = {}  # Reserve not answered
        self.by_lease: dict[int, Attempt] = {}
        self.links: dict[str, deque[tuple[Attempt, int]]] = {}  # open or closing: what is queued there
        self.newest: dict[BranchKey, int] = {}
        self.num_leases = 0

    def live(self, num_events: int) -> None:
        """Everything in random order; then all ends by itself."""
        for _ in range(num_events):
            event = self.random.choices(list(self.events), list(self.events.values()))[0]
            self.happened[event] += getattr(self, event)()
        for router in ROUTERS:
            self.lose_router(router)
        while self.step() or self.answer_reserve() or self.take_blocks() or self.answer_commit() or self.answer_pool():
            pass
        while (at := self.core.next_deadline()) is not None:
            self.now = at
            self.take(self.core.tick(at))
            for link_id in [link_id for link_id, queue in self.links.items() if queue]:
                self.close_link(link_id)
        snapshot, counts = self.core.snapshot(), self.pool.counts()
        assert not (self.attempts or self.asked)
        assert (snapshot["attempts"], snapshot["reserves_unanswered"], snapshot["fences"]) == (0, 0, 0)
        assert (counts.used, self.pool.num_promised, self.scheduler.num_free_slots) == (0, 0, self.num_slots)
        for attempt in self.by_lease.values():
            assert attempt.is_committed or attempt.is_released, "a lease that nobody commits or releases"
        self.newest.clear()
        self.dispatch()
        assert self.attempts, "something of an attempt was not forgotten"

    # ------------------------------------------------------------ events: each says whether it could happen

    def dispatch(self) -> bool:
        request_id = f"r{self.random.randrange(NUM_REQUESTS)}"
        choices = self.random.sample(range(5), self.random.choice((1, 2, 3, 5)))
        newest = max(self.newest.get(BranchKey(request_id, choice), -1) for choice in choices)
        number = max(0, newest + self.random.choice((0, 1, 1, 1)))
        prompt = self.draw_head() + [self.random.randrange(VOCAB_SIZE) for _ in range(self.random.randint(1, 9))]
        stops = self.random.sample(range(VOCAB_SIZE), self.random.choice((0, 0, 8, 24)))
        dispatch = pb.Dispatch(
            request_id=request_id,
            attempt=number,
            branches=[pb.Branch(choice=choice, seed=self.random.getrandbits(32)) for choice in choices],
            prompt_token_ids=prompt,
            sampling=pb.Sampling(temperature=1, max_tokens=self.random.choice((1, 5, 9)), stop_token_ids=stops),
            target=pb.Target(node=DECODE.to_proto(), grpc_address="decode-0:1"),
            ms_left=self.random.choice((700, 60_000)),
        )
        keys = tuple(AttemptKey(request_id, choice, number) for choice in choices)
        router = self.random.choice(ROUTERS)
        actions = list(self.core.receive(ev.FromRouter(router, pb.RouterMessage(dispatch=dispatch)), self.now))
        if any(isinstance(action, ev.Count) and action.name == "stale_refused" for action in actions):
            assert all(isinstance(action, ev.Count | ev.RunStep) for action in actions)
            self.happened["stale"] += 1
        elif self.is_refused(actions, keys):
            self.happened["busy"] += 1
            return True
        else:
            assert all(number > self.newest.get(key.branch, -1) for key in keys)
            for key in keys:
                self.newest[key.branch] = number
            older = [a for a in self.attempts.values() if any(o.branch in {k.branch for k in keys} for o in a.open)]
            for attempt in older:
                attempt.open = {key for key in attempt.open if key.branch not in {k.branch for k in keys}}
                self.happened["partly replaced"] += bool(attempt.open)
            self.attempts[keys[0]] = Attempt(dispatch, keys, router, set(keys))
        self.take(actions)
        return True

    def draw_head(self) -> list[int]:
        """What a prompt begins with."""
        return [7] * self.random.choice((0, 4, 8))

    def answer_pool(self) -> bool:
        """The KV pool answers; here is none."""
        return False

    def is_refused(self, actions: Sequence[ev.Action], keys: tuple[AttemptKey, ...]) -> bool:
        errors = [a.message.error for a in actions if isinstance(a, ev.ToRouter) and a.message.error.code == pb.BUSY]
        assert not errors or [attempt_key(error.key) for error in errors] == list(keys)
        assert len(errors) == sum(isinstance(a, ev.Ended) and a.outcome == "BUSY" for a in actions)
        return bool(errors)

    def cancel(self) -> bool:
        if not self.newest:
            return False
        branch = self.random.choice(list(self.newest))
        key = AttemptKey(*branch, self.newest[branch] + self.random.choice((-1, 0, 0, 0, 1)))
        if key.attempt < 0:
            return False
        self.newest[branch] = max(self.newest[branch], key.attempt)
        for attempt in self.attempts.values():
            ended = {each for each in attempt.open if each.branch == branch and each.attempt <= key.attempt}
            attempt.open -= ended
            self.happened["cancelled among others"] += bool(ended and attempt.open)
        self.feed(ev.FromRouter(ROUTERS[0], pb.RouterMessage(cancel=pb.Cancel(key=key.to_proto(), ms_left=60_000))))
        return True

    def step(self) -> bool:
        if not self.plans:
            return False
        self.feed(ev.StepDone(self.runner.run(self.plans.popleft())))
        return True

    def answer_reserve(self) -> bool:
        if not self.asked:
            return False
        key = self.random.choice(list(self.asked))
        attempt = self.asked.pop(key)
        kind = self.random.random()
        reply: pb.ReserveReply | None = None
        if kind < 0.15:
            reply = pb.ReserveReply(error=pb.PDError(code=pb.NO_BLOCKS, message="PD Error", retryable=True))
        elif kind < 0.9:
            self.num_leases += 1
            num_full = attempt.num_tokens // BLOCK_SIZE
            num_blocks = num_full + len(attempt.keys) - (kind < 0.2)
            endpoint = pb.Endpoint(transport="memory", address="decode-0")
            lease = pb.Lease(
                lease_id=self.num_leases,
                secret=bytes(16),
                num_blocks=num_blocks,
                num_blocks_held=self.random.randint(0, num_full),
                life_ms=1000,
                endpoints=[endpoint],
            )
            reply = pb.ReserveReply(lease=lease)
            self.by_lease[lease.lease_id] = attempt
            attempt.lease = lease
        self.feed(ev.ReserveAnswered(key, reply))
        return True

    def answer_renew(self) -> bool:
        if not self.attempts:
            return False
        life_ms = self.random.choice((0, 1000, 1000, 1000))
        reply = None if self.random.random() < 0.2 else pb.RenewReply(life_ms=life_ms)
        self.feed(ev.RenewAnswered(self.random.choice(list(self.attempts)), reply))
        return True

    def take_blocks(self) -> bool:
        links = [link_id for link_id, queue in self.links.items() if queue]
        if not links:
            return False
        link_id = self.random.choice(links)
        queue = self.links[link_id]
        attempt, index = queue.popleft()
        indices = [index]
        while queue and queue[0][0] is attempt and self.random.random() < 0.5:
            indices.append(queue.popleft()[1])
        attempt.num_unread -= len(indices)
        assert attempt.lease is not None
        self.feed(BlocksTaken(link_id, attempt.lease.lease_id, tuple(indices)))
        return True

    def answer_commit(self) -> bool:
        waiting = [a for a in self.attempts.values() if a.is_committed and a.num_unread == 0]
        if not waiting:
            return False
        attempt = self.random.choice(waiting)
        error = pb.PDError(code=pb.CHECKSUM, message="PD Error") if self.random.random() < 0.3 else None
        assert attempt.lease is not None
        answer = pb.CommitAnswer(key=attempt.keys[0].to_proto(), lease_id=attempt.lease.lease_id, error=error)
        self.feed(Answered(attempt.link_id, pb.DataMessage(answer=answer).SerializeToString()))
        return attempt.keys[0] not in self.attempts

    def cut_link(self) -> bool:
        if not self.links:
            return False
        self.close_link(self.random.choice(list(self.links)))
        return True

    def close_link(self, link_id: str) -> None:
        for attempt, _ in self.links.pop(link_id):
            attempt.num_unread -= 1
        self.feed(LinkClosed(link_id, "cut"))

    def lose_router(self, router: ev.RouterId | None = None) -> bool:
        router = router or self.random.choice(ROUTERS)
        for attempt in self.attempts.values():
            if attempt.router == router:
                attempt.open.clear()
        self.feed(ev.RouterLost(router))
        return True

    def wait(self) -> bool:
        """Floors stand for ten seconds at least: never so long."""
        self.now += self.random.choice((0.0, 0.01, 0.02, 0.2, 0.4))
        self.take(self.core.tick(self.now))
        return True

    # ------------------------------------------------------------ what comes of it

    def feed(self, event: ev.Event) -> None:
        self.take(list(self.core.receive(event, self.now)))

    def take(self, actions: Sequence[ev.Action]) -> None:
        for action in actions:
            match action:
                case ev.RunStep(plan):
                    self.plans.append(plan)
                case ev.SendReserve(key, _, request):
                    attempt = self.asked[key] = self.attempts[key]
                    assert [request.key.choice, *request.more_choices] == [each.choice for each in attempt.keys]
                case ev.SendRelease(_, release):
                    self.released(release)
                case ev.OpenLink(link_id):
                    self.links[link_id] = deque()
                case ev.CloseLink(link_id):
                    self.happened["stuck"] += 1
                case ev.WriteBlocks(link_id, ref, blocks):
                    self.written(self.by_lease[ref.lease_id], link_id, [index for index, _ in blocks])
                case ev.NotifyLink(link_id, message):
                    self.committed(message.commit, link_id)
                case ev.ToRouter(router, message):
                    self.hear(router, message)
                case ev.Ended(key, outcome):
                    self.ended(key, outcome)
                case ev.Count(name):
                    self.happened[name] += 1
                case ev.LookInPool() | ev.FetchBlocks():
                    self.ask_pool(action)
        self.check()

    def ask_pool(self, action: ev.LookInPool | ev.FetchBlocks) -> None:
        """Something is asked of the KV pool."""
        raise AssertionError(f"{action} of a KV pool that is not there")

    def released(self, release: pb.ReleaseRequest) -> None:
        choices = [release.key.choice, *release.more_choices]
        lead = attempt_key(release.key)
        known = [a for a in (*self.attempts.values(), *self.by_lease.values()) if a.keys[0] == lead]
        for attempt in known:
            assert choices == [key.choice for key in attempt.keys] and not attempt.is_committed
            attempt.is_released = True

    def written(self, attempt: Attempt, link_id: str, indices: list[int]) -> None:
        assert attempt.lease is not None and not attempt.is_committed
        attempt.link_id = link_id
        attempt.written += indices
        attempt.num_unread += len(indices)
        num_all = attempt.num_tokens // BLOCK_SIZE + (len(attempt.keys) if attempt.num_tokens % BLOCK_SIZE else 0)
        first = attempt.lease.num_blocks_held
        assert attempt.written == list(range(first, first + len(attempt.written))) and attempt.written[-1] < num_all
        self.links[link_id] += [(attempt, index) for index in indices]

    def committed(self, commit: pb.Commit, link_id: str) -> None:
        attempt = self.by_lease[commit.lease_id]
        num_tokens = attempt.num_tokens
        num_all = num_tokens // BLOCK_SIZE + (len(attempt.keys) if num_tokens % BLOCK_SIZE else 0)
        assert attempt.lease is not None and len(attempt.written) == num_all - attempt.lease.num_blocks_held
        assert attempt_key(commit.key) == attempt.keys[0] and not attempt.is_committed
        attempt.is_committed = True
        assert {started.branch.choice for started in commit.branches} == {key.choice for key in attempt.open}
        for started in commit.branches:
            key = attempt.keys[0]._replace(choice=started.branch.choice)
            assert list(started.branch.generated_token_ids) == [attempt.first_token(key)] and key in attempt.told
        self.happened["committed"] += 1
        self.happened["committed in part"] += 0 < len(commit.branches) < len(attempt.keys)
        attempt.link_id = link_id

    def hear(self, router: ev.RouterId, message: pb.NodeMessage) -> None:
        if message.HasField("error"):
            key = attempt_key(message.error.key)
            attempt = self.attempt_of(key)
            known = [attempt.first_token(key)] if key in attempt.told else []
            assert list(message.error.completion_token_ids) == known
            assert attempt.router == router and key in attempt.open, f"{key} has failed, but was over"
            assert message.error.commit_unanswered <= attempt.is_committed
            attempt.open.discard(key)
            attempt.outcomes[key] = pb.ErrorCode.Name(message.error.code)
            return
        for tokens in message.tokens.branches:
            key = attempt_key(tokens.key)
            attempt = self.attempt_of(key)
            assert attempt.router == router and key in attempt.open and key not in attempt.told
            assert list(tokens.token_ids) == [attempt.first_token(key)] and tokens.first_index == 0
            attempt.told.add(key)
            if tokens.finish:
                attempt.open.discard(key)
                attempt.outcomes[key] = "finished"

    def ended(self, key: AttemptKey, outcome: str) -> None:
        attempt = self.attempt_of(key)
        attempt.open.discard(key)
        assert outcome == attempt.outcomes.get(key, "cancelled") or (outcome == "committed" and attempt.is_committed)
        self.happened[f"ended {outcome}"] += 1
        assert attempt.num_unread == 0, "blocks are dropped while a link reads them"
        attempt.num_ended += 1
        if attempt.num_ended == len(attempt.keys):
            del self.attempts[attempt.keys[0]]

    def attempt_of(self, key: AttemptKey) -> Attempt:
        return next(attempt for attempt in self.attempts.values() if key in attempt.keys)

    def check(self) -> None:
        """What must hold between any two events."""
        snapshot, counts = self.core.snapshot(), self.pool.counts()
        assert snapshot["attempts"] == len(self.attempts) and snapshot["reserves_unanswered"] == len(self.asked)
        total = counts.free + counts.cached + counts.used + counts.leased + counts.quarantined
        assert total == self.pool.num_blocks and counts.leased == snapshot["blocks_of_fetches"]
        branches = [key.branch for attempt in self.attempts.values() for key in attempt.open]
        assert len({*branches}) == len(branches), "two attempts of one branch"
        for attempt in self.attempts.values():
            if not attempt.open and not attempt.is_committed:
                assert attempt.num_unread > 0, f"{attempt.keys} lives, and nobody wants it"
