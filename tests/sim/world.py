"""A whole cluster in one thread: the production cores, fake runners, in-memory KV, and a network that a seed decides about.

Nothing here knows the protocol: it carries what cores say to whom they say it, in every order that a real network could give,
and loses what a real network could lose. What is ordered stays ordered: each direction of a session, each link, each runner.
RPCs and everything between channels are not.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from functools import partial

import numpy as np

from connector.memory_transport import MemoryHub, MemoryTransport
from connector.transport import ReceiverEvent, SenderEvent
from decode_node.core import DecodeCore
from engine.block_pool import BlockPool
from engine.fake_runner import BYTES_PER_TOKEN, FakeRunner, expected_tokens
from engine.plan import SamplingParams
from engine.scheduler import Scheduler, SchedulerConfig
from node import events as ev
from node.identity import NodeIdentity, NodeLimits
from prefill_node.core import PrefillCore
from proto import baton_pb2 as pb
from proto.block_key import seed_key
from router import events as rev
from router.core import RouterCore
from router.entrance import RouterCoreConfig
from router.placement import Placement
from router.seeds import branch_seed
from tests.sim.parts import Client, Rpc, SimNode, Sizes

BLOCK_SIZE = 4
VOCAB_SIZE = 11
ROUTER = ev.RouterId("router", 77)
FINGERPRINT = pb.Fingerprint(
    architecture="fake", num_layers=1, dtype="i4", block_size=BLOCK_SIZE, weights="w", kernels="f"
)
KEY_SEED = seed_key(FINGERPRINT.SerializeToString(deterministic=True))


class World:
    """Run it with step() until is_quiet(); every step checks the invariants."""

    def __init__(self, seed: int, sizes: Sizes) -> None:
        self.rng = random.Random(seed)
        self.sizes = sizes
        self.now = 1000.0
        self.counters: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.clients: dict[tuple[str, int], Client] = {}  # by request and choice
        self.rpcs: list[Rpc] = []
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.calls: dict[int, Callable[[pb.ReserveReply | pb.RenewReply], None]] = {}
        self.hub = MemoryHub()
        self.router = RouterCore(RouterCoreConfig(), Placement("round_robin", "least_loaded"))
        self.nodes: dict[str, SimNode] = {}
        for index in range(sizes.num_prefill):
            self._add_node(f"prefill-{index}", pb.ROLE_PREFILL)
        for index in range(sizes.num_decode):
            self._add_node(f"decode-{index}", pb.ROLE_DECODE)

    def _add_node(self, name: str, role: pb.Role.ValueType) -> None:
        sizes = self.sizes
        identity = NodeIdentity(name, self.rng.getrandbits(63) + 1)
        pool = BlockPool(sizes.num_blocks, BLOCK_SIZE)
        config = SchedulerConfig(sizes.num_slots, sizes.max_batched_tokens, sizes.max_model_len)
        scheduler = Scheduler(config, pool, KEY_SEED)
        memory = np.zeros((sizes.num_blocks, BYTES_PER_TOKEN * BLOCK_SIZE), dtype=np.uint8)
        inbox: deque[SenderEvent | ReceiverEvent] = deque()
        transport = MemoryTransport(memory, name, self.hub, inbox.append)
        limits = NodeLimits(max_model_len=sizes.max_model_len, vocab_size=VOCAB_SIZE)
        core: PrefillCore | DecodeCore
        if role == pb.ROLE_PREFILL:
            core = PrefillCore(identity, limits, scheduler, pool, FINGERPRINT, KEY_SEED)
        else:
            core = DecodeCore(identity, limits, scheduler, pool, FINGERPRINT, KEY_SEED, self._draw)
        runner = FakeRunner(memory, BLOCK_SIZE, VOCAB_SIZE, sizes.num_slots)
        node = SimNode(identity, role, core, pool, scheduler, runner, transport, inbox=inbox)
        self.nodes[name] = node
        entry = pb.NodeEntry(
            node=identity.to_proto(),
            role=role,
            grpc_address=name,
            http_address=f"{name}:80",
            fingerprint=FINGERPRINT,
            num_blocks=sizes.num_blocks,
            max_num_seqs=sizes.num_slots,
            max_model_len=sizes.max_model_len,
        )
        self._feed_router(rev.NodeListed(entry))
        self._feed_router(rev.SessionUp(node.ref))

    def _draw(self) -> tuple[int, bytes]:
        return self.rng.getrandbits(63) + 1, self.rng.randbytes(16)

    # ------------------------------------------------------------ clients

    def submit(
        self, prompt: tuple[int, ...], max_tokens: int, temperature: float, stop: tuple[int, ...], num_choices: int = 1
    ) -> None:
        """Send a request of a new client; the right answers are computed here and now."""
        request_id, seed = f"r{len(self.clients)}", self.rng.getrandbits(53)
        for choice in range(num_choices):
            sampling = SamplingParams(temperature, seed=branch_seed(seed, choice))
            tokens = expected_tokens(prompt, (), sampling, max_tokens, VOCAB_SIZE)
            stops = [i for i, token in enumerate(tokens) if token in stop]
            expected = tuple(tokens[: stops[0] + 1] if stops else tokens)
            self.clients[request_id, choice] = Client(expected, "stop" if stops else "length")
        request = rev.GenerationRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            seed=seed,
            sampling=rev.Sampling(temperature, max_tokens, stop),
            deadline=self.now + 600,
            num_choices=num_choices,
        )
        self._feed_router(rev.Submitted(request))

    def _open_choices(self, request_id: str) -> list[Client]:
        return [client for (name, _), client in self.clients.items() if name == request_id and client.end is None]

    def abort(self, request_id: str) -> None:
        """The client goes away."""
        for client in self._open_choices(request_id):
            client.end = "aborted"
        self.faults["abort"] += 1
        self._feed_router(rev.Aborted(request_id))

    def stop(self, request_id: str, choice: int) -> None:
        """A stop string is found somewhere in what has arrived of a choice."""
        client = self.clients[request_id, choice]
        num_tokens = self.rng.randint(1, len(client.received))
        client.expected, client.expected_reason = tuple(client.received[:num_tokens]), "stop"
        self.faults["stop string"] += 1
        self._feed_router(rev.Stopped(request_id, choice, num_tokens))

    @property
    def open_requests(self) -> list[str]:
        """Requests with a choice that has no end."""
        return list(dict.fromkeys(name for (name, _), client in self.clients.items() if client.end is None))

    # ------------------------------------------------------------ one step of the world

    def step(self) -> bool:
        """Let one thing happen; False if nothing can but the passing of time."""
        self.now += self.rng.expovariate(1000)
        self._fire_timers()
        choices = self._choices()
        if choices:
            self.rng.choice(choices)()
        self.check()
        return bool(choices)

    def pass_time(self) -> bool:
        """Jump to the next instant at which something is due; False if nothing ever is."""
        deadlines = [core.next_deadline() for core in (self.router, *(node.core for node in self.nodes.values()))]
        due = [at for at in deadlines if at is not None] + [at for at, _ in self.timers]
        if not due:
            return False
        self.now = max(self.now, min(due))
        self._fire_timers()
        self.check()
        return True

    def run(self) -> None:
        """Until nothing is under way and no timer is set."""
        while self.step() or self.pass_time():
            pass

    def _choices(self) -> list[Callable[[], None]]:
        choices: list[Callable[[], None]] = []
        for node in self.nodes.values():
            if node.plans:
                choices.append(partial(self._finish_step, node))
            if node.inbox:
                choices.append(partial(self._take_inbox, node))
            if node.to_router:
                choices.append(partial(self._take_up, node))
            if node.from_router:
                choices.append(partial(self._take_down, node))
        choices += [partial(self._carry, index) for index in range(len(self.rpcs))]
        choices += [partial(self._move_bytes, index) for index in range(self.hub.pending())]
        if self.rng.random() < self.sizes.p_abort and (open_requests := self.open_requests):
            choices.append(lambda: self.abort(self.rng.choice(open_requests)))
        if self.rng.random() < self.sizes.p_stop:
            begun = [key for key, client in self.clients.items() if client.end is None and client.received]
            choices += [partial(self.stop, *self.rng.choice(begun))] if begun else []
        return choices

    def _fire_timers(self) -> None:
        for _, fire in sorted((t for t in self.timers if t[0] <= self.now), key=lambda t: t[0]):
            fire()
        self.timers = [t for t in self.timers if t[0] > self.now]
        self._perform_router(self.router.tick(self.now))
        for node in self.nodes.values():
            self._perform(node, node.core.tick(self.now))

    def _finish_step(self, node: SimNode) -> None:
        self._feed(node, ev.StepDone(node.runner.run(node.plans.popleft())))

    def _take_inbox(self, node: SimNode) -> None:
        self._feed(node, node.inbox.popleft())

    def _take_up(self, node: SimNode) -> None:
        self._feed_router(rev.FromNode(node.ref, node.to_router.popleft()))

    def _take_down(self, node: SimNode) -> None:
        self._feed(node, ev.FromRouter(ROUTER, node.from_router.popleft()))

    def _carry(self, index: int) -> None:
        rpc = self.rpcs.pop(index)
        if self.rng.random() < self.sizes.p_lose_rpc:
            self.faults["lost rpc"] += 1
            self.timers.append((self.now + rpc.timeout_s, rpc.on_lost))
        else:
            rpc.deliver()

    def _move_bytes(self, index: int) -> None:
        for link in self.hub.links():
            if self.rng.random() < self.sizes.p_flip and self.hub.flip(link, self.rng.randrange(1 << 20)):
                self.faults["flipped bit"] += 1
            if self.rng.random() < self.sizes.p_lose_answer and self.hub.drop_answer(link):
                self.faults["lost commit ack"] += 1
            if self.rng.random() < self.sizes.p_cut_link and self.hub.cut(link, self.rng.randrange(4)):
                self.faults["cut link"] += 1
        if index < self.hub.pending():
            self.hub.step(index)

    # ------------------------------------------------------------ what the shells do

    def _feed(self, node: SimNode, event: ev.Event) -> None:
        self._perform(node, node.core.receive(event, self.now))

    def _feed_router(self, event: rev.Event) -> None:
        self._perform_router(self.router.receive(event, self.now))

    def _perform_router(self, actions: list[rev.Action]) -> None:
        for action in actions:
            match action:
                case rev.ToNode(ref, message):
                    self.nodes[ref.name].from_router.append(message)
                case rev.Emitted(request_id, first_index, token_ids, choice):
                    client = self.clients[request_id, choice]
                    assert client.end is None, f"{request_id}/{choice}: tokens behind the end"
                    assert first_index == len(client.received), f"{request_id}/{choice}: gap or repeat at {first_index}"
                    client.received += token_ids
                    right = client.expected[: len(client.received)]
                    assert tuple(client.received) == right, f"{request_id}/{choice}: wrong token"
                case rev.Finished(request_id, _, _, choice):
                    client = self.clients[request_id, choice]
                    assert client.end is None, f"{request_id}/{choice}: a second end"
                    client.end = action
                    self.counters["router:Finished"] += 1
                case rev.Failed(request_id):
                    clients = self._open_choices(request_id)
                    assert clients, f"{request_id}: a second end"
                    for client in clients:
                        client.end = action
                    self.counters["router:Failed"] += 1
                case rev.Count(name, label):
                    self.counters[f"router:{name}:{label}"] += 1
                case rev.Dial() | rev.HangUp():
                    pass  # sessions are up for good in this world

    def _perform(self, node: SimNode, actions: list[ev.Action]) -> None:
        for action in actions:
            match action:
                case ev.ToRouter(_, message):
                    node.to_router.append(message)
                case ev.RunStep(plan):
                    self.counters["plans with several branches"] += any(start.branch_seeds for start in plan.starts)
                    node.plans.append(plan)
                case ev.SendReserve(key, address, request, timeout_s):
                    self._send_reserve(node, self.nodes[address], ev.ReserveAnswered(key, None), request, timeout_s)
                case ev.SendRenew(key, address, request, timeout_s):
                    self._send_renew(node, self.nodes[address], ev.RenewAnswered(key, None), request, timeout_s)
                case ev.SendRelease(address, request):
                    deliver = partial(self._feed, self.nodes[address], ev.ReleaseAsked(request))
                    self.rpcs.append(Rpc(deliver, _nothing, 0.0))
                case ev.AnswerReserve(call_id, reply):
                    if reply.WhichOneof("result") == "lease":
                        reply.lease.endpoints.append(node.transport.endpoint())
                    self.calls.pop(call_id)(reply)
                case ev.AnswerRenew(call_id, answer):
                    self.calls.pop(call_id)(answer)
                case ev.OpenLink(link_id, endpoints):
                    node.transport.open(link_id, endpoints[0])
                case ev.WriteBlocks(link_id, lease, blocks):
                    node.transport.write(link_id, lease, blocks)
                case ev.NotifyLink(link_id, message):
                    node.transport.notify(link_id, message.SerializeToString())
                case ev.CloseLink(link_id):
                    node.transport.close(link_id)
                case ev.AdmitLease(lease_id, secret, block_ids):
                    node.transport.admit(lease_id, secret, block_ids)
                case ev.RevokeLease(lease_id):
                    node.transport.revoke(lease_id)
                case ev.AnswerCommit(reply_to, message):
                    node.transport.answer(reply_to, message.SerializeToString())
                case ev.Count(name, amount):
                    self.counters[f"{node.identity.name}:{name}"] += amount
                case ev.Ended(_, outcome):
                    self.counters[f"{node.identity.name}:ended:{outcome}"] += 1

    def _send_reserve(
        self, node: SimNode, target: SimNode, lost: ev.ReserveAnswered, request: pb.ReserveRequest, timeout_s: float
    ) -> None:
        on_lost = partial(self._feed, node, lost)

        def arrive(is_repeat: bool = False) -> None:
            call_id = self.rng.getrandbits(64)
            self.calls[call_id] = _ignore if is_repeat else answered
            self._feed(target, ev.ReserveAsked(call_id, request))
            if not is_repeat and self.rng.random() < self.sizes.p_repeat_reserve:
                self.faults["repeated reserve"] += 1
                self.rpcs.append(Rpc(partial(arrive, is_repeat=True), _nothing, 0.0))

        def answered(reply: pb.ReserveReply | pb.RenewReply) -> None:
            assert isinstance(reply, pb.ReserveReply)
            self.rpcs.append(Rpc(partial(self._feed, node, ev.ReserveAnswered(lost.key, reply)), on_lost, timeout_s))

        self.rpcs.append(Rpc(arrive, on_lost, timeout_s))

    def _send_renew(
        self, node: SimNode, target: SimNode, lost: ev.RenewAnswered, request: pb.RenewRequest, timeout_s: float
    ) -> None:
        on_lost = partial(self._feed, node, lost)

        def arrive() -> None:
            call_id = self.rng.getrandbits(64)
            self.calls[call_id] = answered
            self._feed(target, ev.RenewAsked(call_id, request))

        def answered(reply: pb.ReserveReply | pb.RenewReply) -> None:
            assert isinstance(reply, pb.RenewReply)
            self.rpcs.append(Rpc(partial(self._feed, node, ev.RenewAnswered(lost.key, reply)), on_lost, timeout_s))

        self.rpcs.append(Rpc(arrive, on_lost, timeout_s))

    # ------------------------------------------------------------ invariants

    def check(self) -> None:
        """What must hold after every event (design, section 9)."""
        for node in self.nodes.values():
            counts = node.pool.counts()
            total = counts.free + counts.cached + counts.used + counts.leased + counts.quarantined
            assert total == node.pool.num_blocks, f"{node.identity.name}: {counts} do not add up"
            assert 0 <= node.pool.num_promised <= counts.free + counts.cached
            leased = node.core.snapshot().get("blocks_of_leases", 0)
            assert counts.leased + counts.quarantined == leased, f"{node.identity.name}: leased blocks without a lease"
            assert len(node.plans) <= 2, "the runner's queue is two deep"

    def check_idle(self) -> None:
        """What must hold when every request has ended and every timer has fired: nothing is held anywhere."""
        assert not self.open_requests, f"never ended: {self.open_requests}"
        state = self.router.snapshot()
        assert state["requests"] == {} and state["queued"] == 0 and state["timers"] == 0, state
        nodes = state["nodes"]
        assert isinstance(nodes, dict)
        for name, held in nodes.items():
            assert (held["prefilling"], held["attempts"], held["prefill_tokens"], held["branches"]) == (0, 0, 0, 0), (
                f"{name}: {held}"
            )
        for node in self.nodes.values():
            counts = node.pool.counts()
            assert (counts.used, counts.leased, counts.quarantined) == (0, 0, 0), f"{node.identity.name}: {counts}"
            assert node.pool.num_promised == 0
            assert node.scheduler.num_free_slots == self.sizes.num_slots
            core = node.core.snapshot()
            held_by_core = {
                k: core[k] for k in core.keys() & {"attempts", "reserves_unanswered", "leases", "branches", "fences"}
            }
            assert not any(held_by_core.values()), f"{node.identity.name}: {held_by_core}"


def _nothing() -> None:
    """What the caller of a one-way message sees of its loss."""


def _ignore(reply: pb.ReserveReply | pb.RenewReply) -> None:
    """The answer to a repeat: nobody waits for it."""
