"""A router and nodes of all three roles in one thread, over a network that loses nothing and orders nothing but its channels.

What a hostile network does to the same cores is the simulation's subject (tests/sim); here it is who works with whom, in pools so
small that sequences give way all the time.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from connector.memory_transport import MemoryHub, MemoryTransport
from connector.transport import ReceiverEvent, SenderEvent
from decode_node.core import DecodeCore
from engine.block_pool import BlockPool
from engine.fake_runner import BYTES_PER_TOKEN, FakeRunner, expected_tokens
from engine.plan import Plan
from engine.reserve import ReserveConfig
from engine.saving import SaveRules
from engine.scheduler import Scheduler, SchedulerConfig
from node import events as ev
from node.identity import NodeIdentity, NodeLimits
from node.sampling import to_sampling_params
from prefill_node.core import PrefillCore
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey
from router import events as rev
from router.core import RouterCore
from router.entrance import RouterCoreConfig
from router.placement import Placement
from router.seeds import branch_seed
from tests.cores.copied_blocks import CopiedBlocks
from tests.cores.mixed import Mixed
from tests.cores.nodes import BLOCK_SIZE, FINGERPRINT, MAX_MODEL_LEN, ROUTER, SEED, VOCAB_SIZE

NUM_BLOCKS = 18
NUM_SLOTS = 6
ROLES = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE, "local": pb.ROLE_DECODE, "mixed": pb.ROLE_MIXED}


@dataclass
class WorldNode:
    """One node and what its shell would do."""

    identity: NodeIdentity
    core: ev.NodeCore
    pool: BlockPool
    scheduler: Scheduler
    runner: FakeRunner
    memory: NDArray[np.uint8]
    transport: MemoryTransport
    inbox: deque[SenderEvent | ReceiverEvent]
    plans: deque[Plan] = field(default_factory=deque)
    to_router: deque[pb.NodeMessage] = field(default_factory=deque)
    from_router: deque[pb.RouterMessage] = field(default_factory=deque)


@dataclass
class Client:
    """Who waits for one choice, and the right answer."""

    expected: tuple[int, ...]
    received: list[int] = field(default_factory=list)
    end: rev.Finished | rev.Failed | str | None = None


class MixedWorld:
    """Run it with `step` until nothing is open."""

    def __init__(self, seed: int, *names: str) -> None:
        """Nodes by name: `<role>-<number>`; a "local" one decodes, and computes prompts where it is asked to."""
        self.random = random.Random(seed)
        self.now = 0.0
        self.happened: Counter[str] = Counter()
        self.clients: dict[tuple[str, int], Client] = {}
        self.calls: dict[int, Callable[[pb.ReserveReply | pb.RenewReply], None]] = {}
        self.on_the_way: list[Callable[[], None]] = []  # handoff calls and their answers, in no order
        self.hub = MemoryHub()
        self.kv_pool = CopiedBlocks()
        self.router = RouterCore(RouterCoreConfig(local_prefill_max_tokens=12), Placement())
        self.nodes = {name: self._make(name) for name in names}
        for name, node in self.nodes.items():
            entry = pb.NodeEntry(
                node=node.identity.to_proto(),
                role=ROLES[name.split("-")[0]],
                grpc_address=name,
                http_address=f"{name}:80",
                fingerprint=FINGERPRINT,
                num_blocks=NUM_BLOCKS,
                max_num_seqs=NUM_SLOTS,
                max_model_len=MAX_MODEL_LEN,
                local_prefill=name.startswith("local"),
            )
            self._tell_router(rev.NodeListed(entry))
            self._tell_router(rev.SessionUp(rev.NodeRef(name, node.identity.incarnation)))

    def _make(self, name: str) -> WorldNode:
        identity = NodeIdentity(name, self.random.getrandbits(63) + 1)
        draw = lambda: (self.random.getrandbits(63) + 1, self.random.randbytes(16))  # noqa: E731
        inbox: deque[SenderEvent | ReceiverEvent] = deque()
        saves = SaveRules(of_preempted=self.random.random() < 0.7, of_finished=self.random.random() < 0.4)
        if name.startswith("mixed"):
            node = Mixed(NUM_BLOCKS, NUM_SLOTS, policy="none", identity=identity, draw=draw, saves=saves)
            transport = MemoryTransport(node.memory, name, self.hub, inbox.append)
            return WorldNode(identity, node.core, node.pool, node.scheduler, node.runner, node.memory, transport, inbox)
        pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        reserve = ReserveConfig("none")
        sizes = (NUM_SLOTS, 12, MAX_MODEL_LEN, 5)
        config = SchedulerConfig(*sizes, reserve=reserve, resumes_preempted=False, saves=saves)
        scheduler = Scheduler(config, pool, SEED)
        memory = np.zeros((NUM_BLOCKS, BYTES_PER_TOKEN * BLOCK_SIZE), dtype=np.uint8)
        limits = NodeLimits(MAX_MODEL_LEN, VOCAB_SIZE)
        core: ev.NodeCore
        if name.startswith("prefill"):
            core = PrefillCore(identity, limits, scheduler, pool, FINGERPRINT, SEED)
        else:
            core = DecodeCore(identity, limits, scheduler, pool, FINGERPRINT, SEED, draw)
        runner = FakeRunner(memory, BLOCK_SIZE, VOCAB_SIZE, NUM_SLOTS)
        transport = MemoryTransport(memory, name, self.hub, inbox.append)
        return WorldNode(identity, core, pool, scheduler, runner, memory, transport, inbox)

    # ------------------------------------------------------------ clients

    def submit(self, prompt: Sequence[int], max_tokens: int, num_choices: int, **sampling: float) -> None:
        """A new client's request."""
        request_id, seed = f"r{len(self.clients)}", self.random.getrandbits(53)
        message = pb.Sampling(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
        for choice in range(num_choices):
            params = to_sampling_params(message, branch_seed(seed, choice))
            self.clients[request_id, choice] = Client(
                tuple(expected_tokens(prompt, (), params, max_tokens, VOCAB_SIZE))
            )
        asked = rev.Sampling(max_tokens=max_tokens, stop_token_ids=(), **sampling)  # type: ignore[arg-type]
        request = rev.GenerationRequest(
            request_id=request_id,
            prompt_token_ids=tuple(prompt),
            seed=seed,
            sampling=asked,
            deadline=self.now + 600,
            num_choices=num_choices,
        )
        self._tell_router(rev.Submitted(request))

    def abort(self, request_id: str) -> None:
        """A client goes away."""
        for (name, _), client in self.clients.items():
            if name == request_id and client.end is None:
                client.end = "aborted"
        self._tell_router(rev.Aborted(request_id))

    @property
    def open_requests(self) -> list[str]:
        """Those with a choice that has no end."""
        return list(dict.fromkeys(name for (name, _), client in self.clients.items() if client.end is None))

    # ------------------------------------------------------------ what happens

    def step(self) -> bool:
        """Let one thing happen, or the time come of the next that is due; False if nothing ever will."""
        choices: list[Callable[[], None]] = [*map(self._carrying, range(len(self.on_the_way)))]
        choices += [partial(self.hub.step, index) for index in range(self.hub.pending())]
        choices += [partial(self.kv_pool.copy, index) for index in range(len(self.kv_pool.waiting))]
        for node in self.nodes.values():
            if node.plans:
                choices.append(partial(self._run_plan, node))
            if node.inbox:
                choices.append(partial(self._take_inbox, node))
            if node.to_router:
                choices.append(partial(self._take_up, node))
            if node.from_router:
                choices.append(partial(self._take_down, node))
        instants = [self.router.next_deadline(), *(node.core.next_deadline() for node in self.nodes.values())]
        due = [at for at in instants if at is not None]
        if not choices and not due:
            return False
        self.now = self.now + self.random.expovariate(1000) if choices else max(self.now, min(due))
        self._perform_router(self.router.tick(self.now))
        for node in self.nodes.values():
            self._perform(node, node.core.tick(self.now))
        if choices:
            self.random.choice(choices)()
        self._check()
        return True

    def _carrying(self, index: int) -> Callable[[], None]:
        return lambda: self.on_the_way.pop(index)()

    def _run_plan(self, node: WorldNode) -> None:
        self._feed(node, ev.StepDone(node.runner.run(node.plans.popleft())))

    def _take_inbox(self, node: WorldNode) -> None:
        self._feed(node, node.inbox.popleft())

    def _take_up(self, node: WorldNode) -> None:
        ref = rev.NodeRef(node.identity.name, node.identity.incarnation)
        self._tell_router(rev.FromNode(ref, node.to_router.popleft()))

    def _take_down(self, node: WorldNode) -> None:
        self._feed(node, ev.FromRouter(ROUTER, node.from_router.popleft()))

    def _feed(self, node: WorldNode, event: ev.Event) -> None:
        self._perform(node, node.core.receive(event, self.now))

    def _tell_router(self, event: rev.Event) -> None:
        self._perform_router(self.router.receive(event, self.now))

    # ------------------------------------------------------------ what is done about it

    def _perform_router(self, actions: Sequence[rev.Action]) -> None:
        for action in actions:
            match action:
                case rev.ToNode(ref, message):
                    if message.HasField("dispatch"):
                        roles = (ref.name.split("-")[0], message.dispatch.target.node.name.split("-")[0])
                        is_local = ref.name == message.dispatch.target.node.name
                        self.happened["local" if is_local else "{} to {}".format(*roles)] += 1
                    self.nodes[ref.name].from_router.append(message)
                case rev.Emitted(request_id, first_index, token_ids, choice):
                    client = self.clients[request_id, choice]
                    assert client.end is None and first_index == len(client.received), "a gap, a repeat, or too late"
                    client.received += token_ids
                    assert tuple(client.received) == client.expected[: len(client.received)], "a wrong token"
                case rev.Count("dispatches", kind):
                    self.happened[kind] += 1
                case rev.Finished(request_id, _, _, choice):
                    assert self.clients[request_id, choice].end is None, "a second end"
                    self.clients[request_id, choice].end = action
                case rev.Failed():
                    raise AssertionError(action)
                case _:
                    pass

    def _perform(self, node: WorldNode, actions: Sequence[ev.Action]) -> None:
        transport = node.transport
        for action in actions:
            match action:
                case ev.ToRouter(_, message):
                    node.to_router.append(message)
                case ev.RunStep(plan):
                    node.plans.append(plan)
                case ev.SendReserve(key, address, request):
                    assert address != node.identity.name, "a node reserves at itself"
                    answered = partial(self._answer_reserve, node, key)
                    self._call(self.nodes[address], answered, partial(_reserve_asked, request))
                case ev.SendRenew(key, address, request):
                    renewed = partial(self._answer_renew, node, key)
                    self._call(self.nodes[address], renewed, partial(_renew_asked, request))
                case ev.SendRelease(address, request):
                    self.on_the_way.append(partial(self._feed, self.nodes[address], ev.ReleaseAsked(request)))
                case ev.AnswerReserve(call_id, reply):
                    if reply.WhichOneof("result") == "lease":
                        reply.lease.endpoints.append(transport.endpoint())
                    self.on_the_way.append(partial(self.calls.pop(call_id), reply))
                case ev.AnswerRenew(call_id, answer):
                    self.on_the_way.append(partial(self.calls.pop(call_id), answer))
                case ev.OpenLink(link_id, endpoints):
                    transport.open(link_id, endpoints[0])
                case ev.WriteBlocks(link_id, lease, blocks):
                    transport.write(link_id, lease, blocks)
                case ev.NotifyLink(link_id, message):
                    transport.notify(link_id, message.SerializeToString())
                case ev.DropWrites(link_id, lease):
                    transport.drop(link_id, lease)
                case ev.CloseLink(link_id):
                    transport.close(link_id)
                case ev.AdmitLease(lease_id, secret, block_ids):
                    transport.admit(lease_id, secret, block_ids)
                case ev.RevokeLease(lease_id):
                    transport.revoke(lease_id)
                case ev.AnswerCommit(reply_to, message):
                    transport.answer(reply_to, message.SerializeToString())
                case ev.SaveBlocks():
                    self.kv_pool.save(action, node.memory, partial(self._feed, node))
                case ev.Count(name, amount):
                    self.happened[name] += amount
                case ev.Ended(_, outcome):
                    self.happened[f"ended:{outcome}"] += 1

    def _call(
        self,
        target: WorldNode,
        answered: Callable[[pb.ReserveReply | pb.RenewReply], None],
        event: Callable[[int], ev.Event],
    ) -> None:
        call_id = self.random.getrandbits(63)
        self.calls[call_id] = answered
        self.on_the_way.append(partial(self._feed, target, event(call_id)))

    def _answer_reserve(self, node: WorldNode, key: AttemptKey, reply: pb.ReserveReply | pb.RenewReply) -> None:
        assert isinstance(reply, pb.ReserveReply)
        self._feed(node, ev.ReserveAnswered(key, reply))

    def _answer_renew(self, node: WorldNode, key: AttemptKey, reply: pb.ReserveReply | pb.RenewReply) -> None:
        assert isinstance(reply, pb.RenewReply)
        self._feed(node, ev.RenewAnswered(key, reply))

    # ------------------------------------------------------------ what must hold

    def _check(self) -> None:
        for node in self.nodes.values():
            counts = node.pool.counts()
            total = counts.free + counts.cached + counts.used + counts.leased + counts.quarantined
            assert total == node.pool.num_blocks
            assert counts.leased + counts.quarantined == node.core.snapshot().get("blocks_of_leases", 0)
            assert len(node.plans) <= 2, "the runner's queue is two deep"

    def check_idle(self) -> None:
        """Nothing is held anywhere when all requests have ended and all timers have fired."""
        assert not self.kv_pool.waiting
        state = self.router.snapshot()
        assert (state["requests"], state["queued"], state["timers"]) == ({}, 0, 0)
        for name, node in self.nodes.items():
            counts, core = node.pool.counts(), node.core.snapshot()
            assert (counts.used, counts.leased, counts.quarantined) == (0, 0, 0), name
            assert (node.pool.num_promised, node.scheduler.num_free_slots) == (0, NUM_SLOTS), name
            held = (
                "attempts",
                "reserves_unanswered",
                "leases",
                "branches",
                "waiting_reserves",
                "local_branches",
                "fences",
            )
            assert not any(core[each] for each in held if each in core), (name, core)


def _reserve_asked(request: pb.ReserveRequest, call_id: int) -> ev.ReserveAsked:
    return ev.ReserveAsked(call_id, request)


def _renew_asked(request: pb.RenewRequest, call_id: int) -> ev.RenewAsked:
    return ev.RenewAsked(call_id, request)
