"""A decode core with its engine beside the naive model of its leases: every event goes to both, and both must say the same."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

import numpy as np

from connector.transport import BlocksLanded, NotifyArrived, RevokeDone, WriteRefused
from engine.block_pool import BlockPool
from engine.fake_runner import BYTES_PER_TOKEN, FakeRunner, expected_tokens
from engine.plan import Plan, SamplingParams
from node import events as ev
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey
from tests.cores.naive_leases import LIFE_S, Code, NaiveLease, NaiveLeases
from tests.cores.nodes import BLOCK_SIZE, VOCAB_SIZE, Decode, commit, only, reserve_request

PROMPTS = {
    "r": [1, 2, 3, 4, 5, 6, 7, 8, 9],
    "s": [1, 2, 3, 4, 5, 6, 7],
    "t": [3] * 8,
}  # r and s begin alike; t has no tail
NUM_BLOCKS = 16
NUM_SLOTS = 4
TIMEOUT_S = 40.0  # of every request
GREEDY = SamplingParams(0.0, seed=1)


class LeaseWorld:
    """Every method is one event, and compares what core and model make of it."""

    def __init__(self, num_blocks: int = NUM_BLOCKS, max_tokens: int = 6) -> None:
        """Others hold all but `num_blocks` of the pool's blocks."""
        self.now = 0.0
        self.max_tokens = max_tokens
        self.decode = Decode(num_blocks=NUM_BLOCKS, num_slots=NUM_SLOTS)
        self.num_taken = len(self.decode.pool.allocate(NUM_BLOCKS - num_blocks))
        self.model = NaiveLeases()
        self.memory = np.zeros((NUM_BLOCKS, BYTES_PER_TOKEN * BLOCK_SIZE), dtype=np.uint8)
        self.runner = FakeRunner(self.memory, BLOCK_SIZE, VOCAB_SIZE, NUM_SLOTS)
        self.plans: deque[Plan] = deque()
        self.granted: dict[int, pb.Lease] = {}  # every lease that there ever was
        self.keys_of: dict[int, tuple[AttemptKey, ...]] = {}  # what each was granted for
        self.blocks: dict[int, tuple[int, ...]] = {}  # what the transport may write of it
        self.unquiet: list[int] = []  # leases whose revocation the transport has not answered
        self.tokens: dict[AttemptKey, list[int]] = {}  # of each attempt that ran here
        self.happened: Counter[str] = Counter()

    # ------------------------------------------------------------ events

    def reserve(self, keys: tuple[AttemptKey, ...], router: ev.RouterId) -> None:
        prompt, deadline = PROMPTS[keys[0].request_id], self.now + TIMEOUT_S
        request = reserve_request(keys[0], prompt, self.max_tokens, ms_left=int(TIMEOUT_S * 1000))
        request.more_choices.extend(key.choice for key in keys[1:])
        request.router.CopyFrom(pb.PeerId(name=router.name, incarnation=router.incarnation))
        self._begin()
        num_running = len(self.model.running)
        self.model.lingering = {key for key in keys if self.decode.scheduler.knows(key)}
        right = self.model.reserve(keys, deadline, self.now)
        room = self._room(request, len(keys))
        actions = self._feed(ev.ReserveAsked(1, request))
        reply = only(actions, ev.AnswerReserve).reply
        if len(self.model.running) < num_running:  # an older attempt was stopped, and its room may be free at once
            self._note("older attempt stopped")
            room = reply.error.code or (
                reply.lease.num_blocks_held,
                reply.lease.num_blocks - reply.lease.num_blocks_held,
            )
            assert reply.HasField("lease") or room in (pb.BUSY, pb.NO_BLOCKS)
        if isinstance(right, NaiveLease):
            self._note("the same lease again")
            assert reply.lease == self.granted[right.lease_id]
        elif isinstance(right, int):
            self._note("refused")
            assert reply.error.code == right
        elif isinstance(room, int):
            self._note(pb.ErrorCode.Name(room))
            assert reply.error.code == room
            self.model.no_room(right, deadline, self.now)
        else:
            self._note("granted")
            self._take_lease(reply.lease, keys, right, router, deadline, room)
            admitted = only(actions, ev.AdmitLease)
            assert admitted.lease_id == reply.lease.lease_id and admitted.secret == reply.lease.secret
            missing = self.model.leases[reply.lease.lease_id].missing
            assert {index for index, block_id in enumerate(admitted.block_ids) if block_id >= 0} == missing
            self.blocks[reply.lease.lease_id] = admitted.block_ids
        self._compare(actions, 0)

    def land(self, lease_id: int, indices: Iterable[int]) -> None:
        """The transport puts right KV into these blocks of the lease that are still missing."""
        lease = self.model.leases.get(lease_id)
        indices = tuple(sorted(set(indices) & lease.missing)) if lease is not None else (0,)
        if lease is not None and lease.is_open:
            for index in indices:
                self._write(lease, index)
        self._begin()
        self.model.landed(lease_id, indices, self.now)
        self._note("landed")
        self._compare(self._feed(BlocksLanded(lease_id, indices, 64, "prefill-0")), 0)

    def refuse_write(self, lease_id: int) -> None:
        self._begin()
        self.model.bad_write(lease_id, pb.CHECKSUM, self.now)
        self._note("bad write")
        self._compare(self._feed(WriteRefused(lease_id, pb.CHECKSUM, "")), 0)

    def renew(self, lease_id: int, is_right: bool = True) -> None:
        lease = self.granted[lease_id]
        secret = lease.secret if is_right else b"x" * 16
        request = pb.RenewRequest(key=pb.AttemptKey(), lease_id=lease_id, secret=secret)
        self._begin()
        is_renewed = is_right and self.model.renew(lease_id, self.now)
        self._note("renewed" if is_renewed else "not renewed")
        actions = self._feed(ev.RenewAsked(2, request))
        assert only(actions, ev.AnswerRenew).reply.life_ms == (LIFE_S * 1000 if is_renewed else 0)
        self._compare(actions, 0)

    def commit(self, lease_id: int, keys: Sequence[AttemptKey], choices: Sequence[int]) -> None:
        """A right Commit of these choices, for a lease that was granted for `keys`."""
        prompt = PROMPTS[keys[0].request_id]
        message = pb.DataMessage.FromString(
            commit(keys[0], self.granted[lease_id], prompt, self._right_tokens(keys[0])[0], self.max_tokens)
        )
        started = message.commit.branches.pop()
        for choice in choices:
            started.branch.choice = choice
            message.commit.branches.append(started)
        self._begin()
        refusal = self.model.commit(lease_id, choices, self.now)
        self._note("committed" if refusal is None else f"commit refused {pb.ErrorCode.Name(refusal)}")
        if refusal is not None:
            self.model.refused.append(refusal)
        self._compare(self._feed(NotifyArrived("link", message.SerializeToString())), 0)

    def quiet(self, lease_id: int) -> None:
        """The transport says that no write runs any more."""
        self.unquiet.remove(lease_id)
        self._begin()
        starting = self.model.quiet(lease_id, self.now)
        actions = self._feed(RevokeDone(lease_id))
        told = [tokens for each in actions if isinstance(each, ev.ToRouter) for tokens in each.message.tokens.branches]
        assert [(tokens.key, list(tokens.token_ids), tokens.first_index) for tokens in told] == [
            (key.to_proto(), self._right_tokens(key)[:1], 0) for key in starting
        ]
        self.tokens |= {key: self._right_tokens(key)[:1] for key in starting}
        self._note("started" if starting else "quiet")
        self._compare(actions, int(bool(starting)))

    def cancel(self, key: AttemptKey, router: ev.RouterId) -> None:
        self._begin()
        self.model.cancel(key, self.now + TIMEOUT_S, self.now)
        message = pb.RouterMessage(cancel=pb.Cancel(key=key.to_proto(), ms_left=int(TIMEOUT_S * 1000)))
        self._note("cancel")
        self._compare(self._feed(ev.FromRouter(router, message)), 0)

    def release(self, keys: Sequence[AttemptKey]) -> None:
        more = [key.choice for key in keys[1:]]
        request = pb.ReleaseRequest(key=keys[0].to_proto(), more_choices=more, ms_left=int(TIMEOUT_S * 1000))
        self._begin()
        self.model.release(keys, self.now + TIMEOUT_S, self.now)
        self._note("release")
        self._compare(self._feed(ev.ReleaseAsked(request)), 0)

    def lose_router(self, router: ev.RouterId) -> None:
        self._begin()
        self.model.router_lost(router, self.now)
        self._note("router lost")
        self._compare(self._feed(ev.RouterLost(router)), 0)

    def step(self) -> None:
        """The runner finishes its oldest step."""
        plan = self.plans.popleft()
        self._begin()
        actions = self._feed(ev.StepDone(self.runner.run(plan)))
        for batch in [each.message.tokens for each in actions if isinstance(each, ev.ToRouter)]:
            for tokens in batch.branches:
                key = next(key for key in self.model.running if key.to_proto() == tokens.key)
                assert tokens.first_index == len(self.tokens[key])
                self.tokens[key] += tokens.token_ids
                assert self.tokens[key] == self._right_tokens(key)[: len(self.tokens[key])], "wrong KV"
                assert (tokens.finish == pb.FINISH_LENGTH) == (len(self.tokens[key]) == self.max_tokens)
                if tokens.finish:
                    self.model.stop(key, self.now)
                    self._note("finished")
        self._compare(actions, 0)

    def wait(self, until: float) -> None:
        """Only time passes; the core is woken when it asked to be, and no sooner."""
        while (due := self.decode.core.next_deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            self._begin()
            late = self.model.tick(self.now)
            actions = self._take(self.decode.core.tick(self.now))
            errors = [each.message.error for each in actions if isinstance(each, ev.ToRouter)]
            assert [error.key for error in errors] == [key.to_proto() for key in late]
            self._compare(actions, 0)
        self.now = max(self.now, until)

    def place(self, lease_id: int) -> int:
        """Of a lease among those that are not forgotten: ids differ from path to path, places do not."""
        return list(self.model.leases).index(lease_id)

    # ------------------------------------------------------------ both sides

    def _begin(self) -> None:
        self.model.begin_event()

    def _note(self, what: str) -> None:
        self.happened[what] += 1

    def _feed(self, event: ev.Event) -> list[ev.Action]:
        return self._take(self.decode.core.receive(event, self.now))

    def _take(self, actions: Iterable[ev.Action]) -> list[ev.Action]:
        taken = list(actions)
        self.plans += [action.plan for action in taken if isinstance(action, ev.RunStep)]
        self.unquiet += [action.lease_id for action in taken if isinstance(action, ev.RevokeLease)]
        return taken

    def _room(self, request: pb.ReserveRequest, num_branches: int) -> Code | tuple[int, int]:
        """Why there is no room, or how many leading blocks are found in the cache, and how many others are needed at once.

        Looked up before the core is asked: a lease of an older attempt that ends gives nothing back at once.
        """
        pool: BlockPool = self.decode.pool
        if self.decode.scheduler.num_free_slots < num_branches:
            return pb.BUSY
        room, num_held = pool.num_available, 0
        for key in request.block_keys:
            block_id = pool.find(key)
            if block_id is None or (pool.is_cached(block_id) and room == 0):
                break
            room -= pool.is_cached(block_id)
            num_held += 1
        num_full = request.num_tokens // BLOCK_SIZE
        num_at_limit = -(-(request.max_total_tokens - 1) // BLOCK_SIZE)
        num_growing = num_branches * max(num_at_limit - num_full, 1)
        return (
            (num_held, num_full - num_held + num_branches)
            if num_full - num_held + num_growing <= room
            else pb.NO_BLOCKS
        )

    def _take_lease(
        self,
        lease: pb.Lease,
        keys: tuple[AttemptKey, ...],
        admitted: tuple[AttemptKey, ...],
        router: ev.RouterId,
        deadline: float,
        room: tuple[int, int],
    ) -> None:
        num_held, num_own = room
        num_full, num_tail = divmod(len(PROMPTS[keys[0].request_id]), BLOCK_SIZE)
        assert (lease.num_blocks_held, lease.num_blocks) == (num_held, num_full + len(keys))
        missing = set(range(num_held, num_full + (len(keys) if num_tail else 0)))
        self.granted[lease.lease_id], self.keys_of[lease.lease_id] = lease, keys
        self.model.leases[lease.lease_id] = NaiveLease(
            lease_id=lease.lease_id,
            keys=keys,
            router=router,
            open=set(admitted),
            missing=missing,
            num_own=num_own,
            expires_at=self.now + LIFE_S,
            deadline=deadline,
            state="RESERVED" if missing else "FILLED",
        )

    def _write(self, lease: NaiveLease, index: int) -> None:
        prompt = PROMPTS[lease.keys[0].request_id]
        start = min(index, len(prompt) // BLOCK_SIZE) * BLOCK_SIZE
        kv = self.memory.view("<i4")[self.blocks[lease.lease_id][index]]
        tokens = prompt[start : start + BLOCK_SIZE]
        kv[: len(tokens)] = np.asarray(tokens, dtype=np.int32) + 1

    def _right_tokens(self, key: AttemptKey) -> list[int]:
        return expected_tokens(PROMPTS[key.request_id], (), GREEDY, self.max_tokens, VOCAB_SIZE)

    def _compare(self, actions: list[ev.Action], num_acks: int) -> None:
        """What core and model say of this event, and what they hold behind it."""
        model, pool, scheduler = self.model, self.decode.pool, self.decode.scheduler
        assert sorted(a.lease_id for a in actions if isinstance(a, ev.RevokeLease)) == sorted(model.revoked)
        answers = [a.message.answer for a in actions if isinstance(a, ev.AnswerCommit)]
        assert sorted(each.error.code for each in answers if each.HasField("error")) == sorted(model.refused)
        assert sum(not each.HasField("error") for each in answers) == num_acks
        assert sorted(a.key for a in actions if isinstance(a, ev.Ended)) == sorted(model.ended)
        state = self.decode.core.snapshot()
        leases = model.leases.values()
        assert state["leases_by_state"] == dict(Counter(lease.state for lease in leases))
        assert state["leases"] == sum(bool(lease.open) for lease in leases)
        assert state["branches"] == len(model.running)
        assert state["fences"] == len(model.floors.floors)
        counts = pool.counts()
        assert counts.leased == sum(lease.num_own for lease in leases if lease.is_open or lease.state == "COMMITTED")
        assert counts.quarantined == sum(lease.num_own for lease in leases if lease.state == "QUARANTINED")
        assert counts.free + counts.cached + counts.used + counts.leased + counts.quarantined == pool.num_blocks
        assert 0 <= pool.num_promised <= counts.free + counts.cached
        held = sum(len(lease.keys) for lease in leases if lease.state != "RELEASED")
        assert scheduler.snapshot()["num_reserved_slots"] == held

    def end(self) -> None:
        """Everything ends, and nothing is left."""
        self.wait(self.now + TIMEOUT_S + 1)
        while self.unquiet:
            self.quiet(self.unquiet[0])
        while self.plans:
            self.step()
        self.wait(self.now + 200.0)
        assert not self.model.leases and not self.model.running and not self.model.floors.floors
        counts = self.decode.pool.counts()
        assert (counts.used, counts.leased, counts.quarantined, self.decode.pool.num_promised) == (
            self.num_taken,
            0,
            0,
            0,
        )
        assert self.decode.scheduler.num_free_slots == NUM_SLOTS
        assert self.decode.core.next_deadline() is None
