"""Decode nodes that hand running sequences to each other, with a router that knows little else: what it hears must be one stream.

Everything that could happen next is a step; whoever drives the world chooses. Calls between nodes, links and their answers can be
lost. Each node computes its prompts itself (a Dispatch to itself), so that nothing but moves crosses between them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, NamedTuple

from connector.memory_transport import MemoryHub, MemoryTransport
from connector.transport import ReceiverEvent, SenderEvent
from engine.fake_runner import expected_tokens
from engine.plan import Plan
from engine.sequence import Phase
from node import events as ev
from node.identity import NodeIdentity
from node.sampling import to_sampling_params
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey, BranchKey, attempt_key
from tests.cores.copied_blocks import CopiedBlocks
from tests.cores.mixed import Mixed
from tests.cores.nodes import ROUTER, VOCAB_SIZE, Decode
from tests.cores.pair import NewMachine, fake_machine


class Step(NamedTuple):
    """Something that can happen next."""

    name: str
    do: Callable[[], None]


@dataclass
class Stream:
    """What the router knows of one branch."""

    dispatch: pb.Dispatch
    choice: int
    holder: str
    attempt: int = 0  # whose tokens count
    highest: int = 0  # given out
    targets: dict[int, str] = field(default_factory=dict)  # by attempt
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    end: str = ""  # finished, cancelled, or the name of an error's code
    is_unsure: bool = False  # the holder does not know whether the target has it

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.dispatch.request_id, self.choice, self.attempt)

    def right_answer(self) -> list[int]:
        """Every token, and no more."""
        seed = next(each.seed for each in self.dispatch.branches if each.choice == self.choice)
        sampling = self.dispatch.sampling
        prompt = list(self.dispatch.prompt_token_ids)
        token_ids = expected_tokens(prompt, (), to_sampling_params(sampling, seed), sampling.max_tokens, VOCAB_SIZE)
        stops = [index for index, token_id in enumerate(token_ids) if token_id in sampling.stop_token_ids]
        return token_ids[: stops[0] + 1] if stops else token_ids


class MovingNode:
    """One decode core, its runner and its transport."""

    def __init__(self, parts: Decode | Mixed, hub: MemoryHub, new_machine: NewMachine) -> None:
        self.name, self.identity = parts.identity.name, parts.identity
        self.core, self.pool, self.scheduler = parts.core, parts.pool, parts.scheduler
        self.memory, self.runner = new_machine(parts.num_blocks, parts.num_slots)
        self.inbox: deque[SenderEvent | ReceiverEvent] = deque()
        self.transport = MemoryTransport(self.memory, self.name, hub, self.inbox.append)
        self.plans: deque[Plan] = deque()
        self.is_drained = False
        self.to_router: deque[pb.NodeMessage] = deque()


class MovingWorld:
    """The nodes, what is under way between them, and the router."""

    def __init__(self, *parts: Decode | Mixed, new_machine: NewMachine = fake_machine) -> None:
        self.hub = MemoryHub()
        self.nodes = {each.identity.name: MovingNode(each, self.hub, new_machine) for each in parts}
        self.now = 0.0
        self.streams: dict[BranchKey, Stream] = {}
        self.calls: list[tuple[str, Callable[[], None], Callable[[], None]]] = []  # name, if it arrives, if it is lost
        self.happened: Counter[str] = Counter()
        self.kv_pool = CopiedBlocks()
        self._random = Random(len(parts))
        self.has_target: Callable[[Stream], bool] = lambda stream: True

    # ------------------------------------------------------------ what a test does

    def start(self, name: str, dispatch: pb.Dispatch) -> None:
        """The router dispatches to a node that computes the prompt itself."""
        node = self.nodes[name]
        dispatch.ms_left = dispatch.ms_left or 60_000
        dispatch.target.CopyFrom(self.target(name))
        for branch in dispatch.branches:
            self.streams[BranchKey(dispatch.request_id, branch.choice)] = Stream(dispatch, branch.choice, name)
        self.feed(node, ev.FromRouter(ROUTER, pb.RouterMessage(dispatch=dispatch)))

    def target(self, name: str) -> pb.Target:
        return pb.Target(node=self.nodes[name].identity.to_proto(), grpc_address=f"{name}:1")

    def drain(self, name: str, deadline: float = 30.0) -> None:
        self.feed(self.nodes[name], ev.DrainAsked(deadline))

    def has_drained(self, name: str) -> bool:
        """Whether the node has said that it may end."""
        return self.nodes[name].is_drained

    def cancel(self, stream: Stream) -> None:
        """The client is gone: the router ends every attempt, wherever it may be."""
        stream.end = stream.end or "cancelled"
        for name in {stream.holder, *stream.targets.values()}:
            self.send_cancel(name, stream.key._replace(attempt=stream.highest))

    def send_cancel(self, name: str, key: AttemptKey) -> None:
        message = pb.RouterMessage(cancel=pb.Cancel(key=key.to_proto(), ms_left=60_000))
        self.feed(self.nodes[name], ev.FromRouter(ROUTER, message))

    def lose_router(self) -> None:
        """Each node hears that the router is gone."""
        for stream in self.streams.values():
            stream.end = stream.end or "cancelled"
        for node in self.nodes.values():
            self.feed(node, ev.RouterLost(ROUTER))

    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds
        for node in self.nodes.values():
            self.perform(node, list(node.core.tick(self.now)))

    def run(self) -> None:
        """Everything that can happen without time passing, nodes in turn."""
        while self.do_something():
            self.check()

    def do_something(self, random: Random | None = None) -> bool:
        """A step of the world, of each kind now and then; what a runner does takes longer than a message."""
        random, steps = random or self._random, self.steps()
        quick = [step for step in steps if step.name != "step"]
        if steps:
            random.choice(quick if quick and random.random() < 0.9 else steps).do()
        return bool(steps)

    def run_out(self) -> None:
        """Everything, and all timers."""
        self.run()
        while (
            at := min(filter(None, (n.core.next_deadline() for n in self.nodes.values())), default=None)
        ) is not None:
            self.wait(max(0.0, at - self.now))
            self.run()

    # ------------------------------------------------------------ what can happen next

    def steps(self) -> list[Step]:
        steps = [Step(f"call {name}", self.arrives(index)) for index, (name, _, _) in enumerate(self.calls)]
        for node in self.nodes.values():
            if node.to_router:
                steps.append(Step("hear", lambda node=node: self.hear(node, node.to_router.popleft())))  # type: ignore[misc]
            if node.inbox:
                steps.append(Step("inbox", lambda node=node: self.feed(node, node.inbox.popleft())))  # type: ignore[misc]
            if node.plans:
                steps.append(Step("step", lambda node=node: self.step(node)))  # type: ignore[misc]
        steps += [Step("copy", lambda at=at: self.kv_pool.copy(at)) for at in range(len(self.kv_pool.waiting))]  # type: ignore[misc]
        steps += [Step("hub", lambda at=at: self.hub.step(at)) for at in range(self.hub.pending())]  # type: ignore[misc]
        return steps

    def arrives(self, index: int) -> Callable[[], None]:
        return lambda: self.calls.pop(index)[1]()

    def lose_call(self, index: int) -> None:
        name, _, if_lost = self.calls.pop(index)
        self.happened[f"lost {name}"] += 1
        if_lost()

    def step(self, node: MovingNode) -> None:
        self.feed(node, ev.StepDone(node.runner.run(node.plans.popleft())))

    def feed(self, node: MovingNode, event: ev.Event) -> None:
        self.perform(node, list(node.core.receive(event, self.now)))

    def perform(self, node: MovingNode, actions: list[ev.Action]) -> None:
        for action in actions:
            match action:
                case ev.ToRouter(_, message):
                    node.to_router.append(pb.NodeMessage.FromString(message.SerializeToString()))
                    for tokens in message.tokens.branches:
                        for each in tokens.logprobs:  # whoever kept a part of what is gone keeps all of it in memory
                            each.logprob = 1.0
                case ev.RunStep(plan):
                    node.plans.append(plan)
                case ev.SendReserve(key, address, request):
                    self.reserve(node, key, self.nodes[address.partition(":")[0]], request)
                case ev.SendRenew(key, address, renewal):
                    self.renew(node, key, self.nodes[address.partition(":")[0]], renewal)
                case ev.SendRelease(address, release):
                    self.release(self.nodes[address.partition(":")[0]], release)
                case ev.OpenLink(link_id, endpoints):
                    node.transport.open(link_id, endpoints[0])
                case ev.WriteBlocks(link_id, lease, blocks):
                    self.happened["blocks written"] += len(blocks)
                    node.transport.write(link_id, lease, blocks)
                case ev.NotifyLink(link_id, message):
                    node.transport.notify(link_id, message.SerializeToString())
                case ev.DropWrites(link_id, lease):
                    node.transport.drop(link_id, lease)
                case ev.CloseLink(link_id):
                    node.transport.close(link_id)
                case ev.AdmitLease(lease_id, secret, block_ids):
                    node.transport.admit(lease_id, secret, block_ids)
                case ev.RevokeLease(lease_id):
                    node.transport.revoke(lease_id)
                case ev.AnswerCommit(reply_to, message):
                    node.transport.answer(reply_to, message.SerializeToString())
                case ev.SaveBlocks():
                    self.kv_pool.save(action, node.memory, partial(self.feed, node))
                case ev.Count(name, amount):
                    self.happened[name] += amount
                case ev.Ended(_, outcome):
                    self.happened[f"ended {outcome}"] += 1
                case ev.Drained():
                    assert not node.is_drained, "said twice"
                    node.is_drained = True
                    assert node.core.snapshot()["branches"] == 0
                case _:
                    raise AssertionError(action)

    # ------------------------------------------------------------ calls between nodes

    def reserve(self, node: MovingNode, key: AttemptKey, target: MovingNode, request: pb.ReserveRequest) -> None:
        def lost() -> None:
            self.feed(node, ev.ReserveAnswered(key, None))

        def arrives() -> None:
            actions = list(target.core.receive(ev.ReserveAsked(0, request), self.now))
            answers = [action.reply for action in actions if isinstance(action, ev.AnswerReserve)]
            self.perform(target, [action for action in actions if not isinstance(action, ev.AnswerReserve)])
            assert len(answers) == 1, "a move never waits in line"
            reply = pb.ReserveReply.FromString(answers[0].SerializeToString())
            if reply.HasField("lease"):
                reply.lease.endpoints.append(target.transport.endpoint())
            self.calls.append(("reserve's answer", lambda: self.feed(node, ev.ReserveAnswered(key, reply)), lost))

        self.calls.append(("reserve", arrives, lost))

    def renew(self, node: MovingNode, key: AttemptKey, target: MovingNode, request: pb.RenewRequest) -> None:
        def lost() -> None:
            self.feed(node, ev.RenewAnswered(key, None))

        def arrives() -> None:
            actions = list(target.core.receive(ev.RenewAsked(0, request), self.now))
            (reply,) = (action.reply for action in actions if isinstance(action, ev.AnswerRenew))
            self.perform(target, [action for action in actions if not isinstance(action, ev.AnswerRenew)])
            self.feed(node, ev.RenewAnswered(key, reply))

        self.calls.append(("renew", arrives, lost))

    def release(self, target: MovingNode, request: pb.ReleaseRequest) -> None:
        self.calls.append(("release", lambda: self.feed(target, ev.ReleaseAsked(request)), lambda: None))

    # ------------------------------------------------------------ the router

    def hear(self, node: MovingNode, message: pb.NodeMessage) -> None:
        match message.WhichOneof("kind"):
            case "tokens":
                for tokens in message.tokens.branches:
                    self.hear_tokens(node, tokens)
            case "wants_move":
                self.wants_move(node, message.wants_move)
            case "error":
                self.hear_error(node, message.error)

    def hear_tokens(self, node: MovingNode, tokens: pb.BranchTokens) -> None:
        key = attempt_key(tokens.key)
        stream = self.streams[key.branch]
        if key.attempt > stream.attempt and stream.targets.get(key.attempt) == node.name:
            old, stream.holder, stream.attempt = stream.holder, node.name, key.attempt
            self.happened["moved"] += 1
            self.send_cancel(old, key._replace(attempt=key.attempt - 1))
        if stream.end:
            if not tokens.finish:
                self.send_cancel(node.name, key)
            return
        if key.attempt != stream.attempt:
            return
        index = tokens.first_index
        assert index <= len(stream.token_ids), "a gap"
        known = stream.token_ids[index:]
        assert list(tokens.token_ids)[: len(known)] == known[: len(tokens.token_ids)], "two nodes say different tokens"
        stream.token_ids += list(tokens.token_ids)[len(known) :]
        told = list(tokens.logprobs)
        assert told[: len(known)] == stream.logprobs[index : index + len(told)], "two nodes say different logprobs"
        stream.logprobs += told[len(known) :]
        if tokens.finish:
            stream.end = "finished"

    def wants_move(self, node: MovingNode, wants: pb.WantsMove) -> None:
        key = attempt_key(wants.key)
        stream = self.streams[key.branch]
        if stream.end or key.attempt != stream.attempt or stream.holder != node.name:
            return
        self.happened[f"wants {pb.MoveReason.Name(wants.reason)}"] += 1
        others = [name for name, each in self.nodes.items() if name != node.name and not each.is_drained]
        move = pb.Move(key=wants.key, retry_after_ms=50)
        if others and self.has_target(stream):
            stream.highest += 1
            stream.targets[stream.highest] = others[stream.highest % len(others)]
            move.next_attempt = stream.highest
            move.target.CopyFrom(self.target(stream.targets[stream.highest]))
        self.feed(node, ev.FromRouter(ROUTER, pb.RouterMessage(move=move)))

    def hear_error(self, node: MovingNode, error: pb.PDError) -> None:
        key = attempt_key(error.key)
        stream = self.streams[key.branch]
        if stream.end or key.attempt != stream.attempt or node.name != stream.holder:
            return
        ids = list(error.completion_token_ids)
        assert ids == stream.token_ids, "an error says every token, behind the last batch"
        if error.commit_unanswered:
            stream.is_unsure = True
        else:
            stream.end = pb.ErrorCode.Name(error.code)

    # ------------------------------------------------------------ what must hold

    def check(self) -> None:
        """At most one node computes a branch, and every pool adds up."""
        runs: Counter[BranchKey] = Counter()
        for node in self.nodes.values():
            counts = node.pool.counts()
            total = counts.free + counts.cached + counts.used + counts.leased + counts.quarantined
            assert total == node.pool.num_blocks
            snapshot = node.scheduler.snapshot()
            phases = snapshot["phases"]
            assert isinstance(phases, dict)
            runs.update(key.branch for key, phase in phases.items() if phase is Phase.RUNNING_DECODE)
        assert all(number == 1 for number in runs.values()), f"two nodes compute {runs}"

    def check_end(self) -> None:
        """Every stream is right as far as it goes, and nothing is left anywhere."""
        for stream in self.streams.values():
            right = stream.right_answer()
            assert stream.token_ids == right[: len(stream.token_ids)]
            assert stream.end or stream.is_unsure, f"{stream.key} hangs"
            if stream.end == "finished":
                assert stream.token_ids == right
                assert not stream.logprobs or len(stream.logprobs) == len(right)
        assert not self.kv_pool.waiting
        for node in self.nodes.values():
            counts = node.pool.counts()
            assert (counts.used, counts.leased, counts.quarantined, node.pool.num_promised) == (0, 0, 0, 0), node.name
            assert node.scheduler.num_free_slots == node.scheduler.num_slots
            snapshot = node.core.snapshot()
            assert (snapshot["branches"], snapshot["leases"], snapshot["branches_moving"]) == (0, 0, {})
        fates = [self.happened[f"moves_{fate}"] for fate in ("done", "refused", "failed")]
        # Of one whose Cancel overtook an answer that is lost nothing is known while the link stands.
        num_unknown = self.happened["moves_begun"] - sum(fates)
        assert 0 <= num_unknown <= self.happened["answer lost"], "each move comes to one end"
        if not (self.happened["cut"] or self.happened["answer lost"]):
            assert self.happened["moves_done"] >= self.happened["moved"], "also where a Cancel overtook the answer"


def decode_nodes(number: int, **sizes: Any) -> list[Decode]:
    """So many of equal size."""
    return [Decode(identity=NodeIdentity(f"decode-{at}", 5 + at), **sizes) for at in range(number)]


def dispatch_of(name: str, prompt: list[int], num_branches: int = 1, **sampling: Any) -> pb.Dispatch:
    """A prompt with so many choices."""
    return pb.Dispatch(
        request_id=name,
        branches=[pb.Branch(choice=choice, seed=11 + choice) for choice in range(num_branches)],
        prompt_token_ids=prompt,
        sampling=pb.Sampling(**sampling),
    )
