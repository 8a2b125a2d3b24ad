"""What it costs the router's core to place a request, by policy and number of nodes: no sockets, no text, thread time.

A decision is all that `Submitted` costs the core with nobody waiting: the request's branch, both roles' candidates, the choice,
the Dispatch. Half of the nodes prefill and half decode; requests are let live so that loads differ. Nodes' caches are empty, but
for `cache_aware, shared`: there every node that prefills holds the first quarter of each prompt.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from proto import baton_pb2 as pb
from proto.block_key import block_keys, fingerprint_bytes, seed_key
from router.core import RouterCore
from router.entrance import RouterCoreConfig
from router.events import FromNode, GenerationRequest, NodeListed, NodeRef, Sampling, SessionUp, Submitted, ToNode
from router.placement import CACHE_AWARE, POLICIES, Placement

_SHARED: Final = f"{CACHE_AWARE}, shared"
PLACEMENT_POLICIES: Final = (*POLICIES, CACHE_AWARE, _SHARED)
_LIVE: Final = 24  # requests under way: fewer than one prefill node may have
_PROMPT_TOKENS: Final = 512
_SHARED_TOKENS: Final = 128
_UNKNOWN: Final = {each.name: getattr(pb.Fingerprint(), each.name) for each in pb.Fingerprint.DESCRIPTOR.fields}
_FINGERPRINT: Final[dict[str, Any]] = _UNKNOWN | {"architecture": "fake", "block_size": 16, "weights": "w"}
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
        by_cache = policy in (CACHE_AWARE, _SHARED)
        if by_cache:
            from router.cache_index import CacheIndex
            from router.cache_map import CacheMap

            caches = CacheMap(CacheIndex(64 << 20, 1))
        policies = (CACHE_AWARE, "least_loaded") if by_cache else (policy, policy)
        self._core = RouterCore(RouterCoreConfig(), Placement(*policies, seed=1), caches)
        self._num_shared = _SHARED_TOKENS if policy == _SHARED else 0
        self._now = 0.0
        self._live: deque[tuple[str, NodeRef]] = deque()
        self._num_asked = 0
        for index in range(number):
            role = pb.ROLE_MIXED if number == 1 else (pb.ROLE_PREFILL, pb.ROLE_DECODE)[index % 2]
            entry = as_listed(f"node-{index}", role)
            self._core.receive(NodeListed(entry), 0.0)
            self._core.receive(SessionUp(NodeRef(entry.node.name, 1)), 0.0)
        if self._num_shared:
            self._tell_all(number)

    def _tell_all(self, number: int) -> None:
        """Every node that prefills says that it holds the beginning of all prompts."""
        keys = block_keys(
            seed_key(fingerprint_bytes(_FINGERPRINT)), _prompt(0, self._num_shared)[: self._num_shared], 16
        )
        news = pb.NodeMessage(cache=pb.CacheNews(taken=1, stored=b"".join(key[:8] for key in keys)))
        asked = set[NodeRef]()
        while len(asked) < max(number // 2, 1):
            self._now += 0.01
            for action in self._core.tick(self._now):
                if isinstance(action, ToNode) and action.message.HasField("cache"):
                    asked.add(action.node)
                    self._core.receive(FromNode(action.node, news), self._now)

    def decide(self, decisions: int) -> float:
        """Microseconds of a decision, on average over so many."""
        spent_ns = 0
        for _ in range(decisions):
            request_id = f"r{self._num_asked}"
            self._num_asked += 1
            submitted = Submitted(_request(request_id, _prompt(self._num_asked, self._num_shared)))
            started_ns = time.thread_time_ns()
            actions = self._core.receive(submitted, self._now)
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
        self._core.receive(FromNode(decode, message), self._now)


def _prompt(number: int, num_shared: int) -> tuple[int, ...]:
    return tuple((index if index < num_shared else number + index) % 256 for index in range(_PROMPT_TOKENS))


def _request(request_id: str, prompt: tuple[int, ...]) -> GenerationRequest:
    return GenerationRequest(request_id, prompt, 1, Sampling(0.0, 2, ()), deadline=1e9)


def as_listed(name: str, role: pb.Role.ValueType) -> pb.NodeEntry:
    """A node as the registry has it."""
    return pb.NodeEntry(
        node=pb.PeerId(name=name, incarnation=1),
        role=role,
        grpc_address=f"{name}:1",
        http_address=f"{name}:2",
        fingerprint=pb.Fingerprint(**_FINGERPRINT),
        num_blocks=1 << 20,
        max_num_seqs=256,
        max_model_len=1 << 16,
    )
