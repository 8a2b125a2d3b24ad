"""A prefill and a decode core with their engines, joined by a network that does everything at once: for what they say together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from connector.memory_transport import MemoryHub, MemoryTransport
from connector.transport import ReceiverEvent, SenderEvent
from engine.fake_runner import BYTES_PER_TOKEN, FakeRunner
from engine.plan import Plan, Runner
from node import events as ev
from proto import baton_pb2 as pb
from tests.cores.nodes import BLOCK_SIZE, DECODE, ROUTER, VOCAB_SIZE, Decode, Prefill

# Of so many blocks and slots: the memory that a transport sees, and the runner.
NewMachine = Callable[[int, int], tuple[NDArray[np.uint8], Runner]]


def fake_machine(num_blocks: int, num_slots: int) -> tuple[NDArray[np.uint8], Runner]:
    """What computes where the model does not matter."""
    memory = np.zeros((num_blocks, BYTES_PER_TOKEN * BLOCK_SIZE), dtype=np.uint8)
    return memory, FakeRunner(memory, BLOCK_SIZE, VOCAB_SIZE, num_slots)


class Node:
    """One core, its runner and its transport."""

    def __init__(self, name: str, parts: Prefill | Decode, hub: MemoryHub, new_machine: NewMachine) -> None:
        self.core = parts.core
        self.pool = parts.pool
        memory, self.runner = new_machine(parts.num_blocks, parts.num_slots)
        self.inbox: deque[SenderEvent | ReceiverEvent] = deque()
        self.transport = MemoryTransport(memory, name, hub, self.inbox.append)
        self.plans: deque[Plan] = deque()
        self.sent: list[pb.NodeMessage] = []


@dataclass
class Heard:
    """What a router hears of one attempt."""

    of_sender: list[pb.BranchTokens] = field(default_factory=list)
    of_receiver: list[pb.BranchTokens] = field(default_factory=list)
    errors: list[pb.PDError] = field(default_factory=list)

    def of_choice(self, choice: int) -> Heard:
        """What it hears of one of the attempt's branches."""
        return Heard(
            [batch for batch in self.of_sender if batch.key.choice == choice],
            [batch for batch in self.of_receiver if batch.key.choice == choice],
            [error for error in self.errors if error.key.choice == choice],
        )

    def by_index(self) -> dict[int, tuple[int, pb.TokenLogprobs | None]]:
        """Each token with its logprobs; whoever says a token twice says the same."""
        tokens: dict[int, tuple[int, pb.TokenLogprobs | None]] = {}
        for batch in (*self.of_sender, *self.of_receiver):
            logprobs: Sequence[pb.TokenLogprobs | None] = batch.logprobs or [None] * len(batch.token_ids)
            for index, token in enumerate(zip(batch.token_ids, logprobs, strict=True), batch.first_index):
                assert tokens.setdefault(index, token) == token
        return tokens


class Pair:
    """Both nodes; nothing is ever lost or late."""

    def __init__(self, new_machine: NewMachine = fake_machine) -> None:
        self.hub = MemoryHub()
        self.prefill = Node("prefill-0", Prefill(num_blocks=32), self.hub, new_machine)
        self.decode = Node("decode-0", Decode(num_blocks=32), self.hub, new_machine)

    def complete(self, dispatch: pb.Dispatch) -> Heard:
        """Run one attempt to its end."""
        dispatch.target.CopyFrom(pb.Target(node=DECODE.to_proto(), grpc_address="decode-0:1"))
        dispatch.ms_left = 60_000
        nodes = (self.prefill, self.decode)
        for node in nodes:
            node.sent.clear()
        self._feed(self.prefill, ev.FromRouter(ROUTER, pb.RouterMessage(dispatch=dispatch)))
        while any(node.plans or node.inbox for node in nodes) or self.hub.pending():
            self.hub.run()
            for node in nodes:
                if node.inbox:
                    self._feed(node, node.inbox.popleft())
                elif node.plans:
                    self._feed(node, ev.StepDone(node.runner.run(node.plans.popleft())))
        heard = Heard()
        for message in (*self.prefill.sent, *self.decode.sent):
            batches = heard.of_receiver if message.tokens.from_receiver else heard.of_sender
            batches += message.tokens.branches
            if message.HasField("error"):
                heard.errors.append(message.error)
        return heard

    def _feed(self, node: Node, event: ev.Event) -> None:
        for action in node.core.receive(event, 0.0):
            self._perform(node, action)

    def _perform(self, node: Node, action: ev.Action) -> None:
        match action:
            case ev.ToRouter(_, message):
                node.sent.append(pb.NodeMessage.FromString(message.SerializeToString()))
            case ev.RunStep(plan):
                node.plans.append(plan)
            case ev.SendReserve(key, _, request):
                for answer in self.decode.core.receive(ev.ReserveAsked(0, request), 0.0):
                    if isinstance(answer, ev.AnswerReserve):
                        answer.reply.lease.endpoints.append(self.decode.transport.endpoint())
                        self._feed(node, ev.ReserveAnswered(key, answer.reply))
                    else:
                        self._perform(self.decode, answer)
            case ev.SendRelease(_, release):
                self._feed(self.decode, ev.ReleaseAsked(release))
            case ev.OpenLink(link_id, endpoints):
                node.transport.open(link_id, endpoints[0])
            case ev.WriteBlocks(link_id, lease, blocks):
                node.transport.write(link_id, lease, blocks)
            case ev.DropWrites(link_id, lease):
                node.transport.drop(link_id, lease)
            case ev.NotifyLink(link_id, message):
                node.transport.notify(link_id, message.SerializeToString())
            case ev.AdmitLease(lease_id, secret, block_ids):
                node.transport.admit(lease_id, secret, block_ids)
            case ev.RevokeLease(lease_id):
                node.transport.revoke(lease_id)
            case ev.AnswerCommit(reply_to, message):
                node.transport.answer(reply_to, message.SerializeToString())
            case ev.Ended():
                pass
            case _:
                raise AssertionError(action)
