"""What it costs the router's core to place a request, by policy and number of nodes: no sockets, no text, thread time.

A decision is all that `Submitted` costs the core with nobody waiting: the request's branch, both roles' candidates, the choice,
the Dispatch. Half of the nodes prefill and half decode; requests are let live so that loads differ.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from proto import baton_pb2 as pb
from router.core import RouterCore
from router.entrance import RouterCoreConfig
from router.events import FromNode, GenerationRequest, NodeListed, NodeRef, Sampling, SessionUp, Submitted, ToNode
from router.placement import CACHE_AWARE, POLICIES, Placement

PLACEMENT_POLICIES: Final = (*POLICIES, CACHE_AWARE)
_LIVE: Final = 24  # requests under way: fewer than one prefill node may have
_PROMPT_TOKENS: Final = 512
_SAMPLES: Final = 5


@dataclass(frozen=True, slots=True)
class PlacementCost:
    """One policy (of prefill nodes) with so many nodes; microseconds of a decision, the median of a few samples, and the best."""

    policy: str
    nodes: int
    decision_us: float
    best_us: float


def placement_costs(
    policies: Sequence[str], numbers: Sequence[int], decisions: int, advance: Callable[[str], None]
) -> list[PlacementCost]:
    """Every policy with every number of nodes."""
    found = []
    for number in numbers:
        for policy in policies:
            one = _Requests(policy, number)
            one.decide(min(decisions, 50))
            samples = [one.decide(max(decisions // _SAMPLES, 1)) for _ in range(_SAMPLES)]
            found.append(PlacementCost(policy, number, statistics.median(samples), min(samples)))
            advance(f"placement, {policy}, {number} nodes")
    return found


class _Requests:
    """Requests that come and go at a core with this many nodes."""

    def __init__(self, policy: str, number: int) -> None:
        caches = None
        if policy == CACHE_AWARE:
            from router.cache_index import CacheIndex
            from router.cache_map import CacheMap

            caches = CacheMap(CacheIndex(64 << 20, 1))
        of_decode = "least_loaded" if policy == CACHE_AWARE else policy
        self._core = RouterCore(RouterCoreConfig(), Placement(policy, of_decode, seed=1), caches)
        self._live: deque[tuple[str, NodeRef]] = deque()
        self._num_asked = 0
        for index in range(number):
            role = pb.ROLE_MIXED if number == 1 else (pb.ROLE_PREFILL, pb.ROLE_DECODE)[index % 2]
            entry = _entry(f"node-{index}", role)
            self._core.receive(NodeListed(entry), 0.0)
            self._core.receive(SessionUp(NodeRef(entry.node.name, 1)), 0.0)

    def decide(self, decisions: int) -> float:
        """Microseconds of a decision, on average over so many."""
        spent_ns = 0
        for _ in range(decisions):
            request_id = f"r{self._num_asked}"
            self._num_asked += 1
            submitted = Submitted(_request(request_id, self._num_asked))
            started_ns = time.thread_time_ns()
            actions = self._core.receive(submitted, 0.0)
            spent_ns += time.thread_time_ns() - started_ns
            (target,) = [
                action.message.dispatch.target.node
                for action in actions
                if isinstance(action, ToNode) and action.message.HasField("dispatch")
            ]
            self._live.append((request_id, NodeRef(target.name, target.incarnation)))
            if len(self._live) > _LIVE:
                self._finish(*self._live.popleft())
        return spent_ns / decisions / 1000

    def _finish(self, request_id: str, decode: NodeRef) -> None:
        tokens = pb.BranchTokens(
            key=pb.AttemptKey(request_id=request_id), token_ids=[1, 2], finish=pb.FINISH_LENGTH, first_index=0
        )
        message = pb.NodeMessage(tokens=pb.TokenBatch(branches=[tokens], from_receiver=True))
        self._core.receive(FromNode(decode, message), 0.0)


def _request(request_id: str, number: int) -> GenerationRequest:
    prompt = tuple((number + index) % 256 for index in range(_PROMPT_TOKENS))
    return GenerationRequest(request_id, prompt, 1, Sampling(0.0, 2, ()), deadline=1e9)


def _entry(name: str, role: pb.Role.ValueType) -> pb.NodeEntry:
    return pb.NodeEntry(
        node=pb.PeerId(name=name, incarnation=1),
        role=role,
        grpc_address=f"{name}:1",
        http_address=f"{name}:2",
        fingerprint=pb.Fingerprint(architecture="fake", block_size=16, weights="w"),
        num_blocks=1 << 20,
        max_num_seqs=256,
        max_model_len=1 << 16,
    )
