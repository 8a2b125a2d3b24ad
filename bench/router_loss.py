"""How long the router's core holds its loop up when nodes join, and when a decode node is lost with 256 streams.

No sockets, no text, thread time.

A turn is one call of receive or tick: what others' tokens wait for. The loss takes the streams back; turns that are due at once
place them elsewhere, as attempts that go on from the token log. Half of the nodes prefill and half decode; prefill nodes are chosen
by cache, which is what costs most, and hold nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from bench.router_placement import as_listed
from proto import baton_pb2 as pb
from router.cache_index import CacheIndex
from router.cache_map import CacheMap
from router.core import RouterCore
from router.entrance import RouterCoreConfig
from router.events import (
    Action,
    FromNode,
    GenerationRequest,
    NodeListed,
    NodeRef,
    Sampling,
    SessionLost,
    SessionUp,
    Submitted,
    ToNode,
)
from router.placement import CACHE_AWARE, Placement

NUM_STREAMS: Final = 256
FEWEST_NODES: Final = 4  # one is lost
_PROMPT_TOKENS: Final = 512
_SAMPLES: Final = 5
_NOW: Final = 1.0


@dataclass(frozen=True, slots=True)
class LossCost:
    """One loss among so many nodes; milliseconds, medians of a few samples."""

    nodes: int
    streams: int
    join_us: float  # of each node that joined while the streams ran
    first_turn_ms: float  # it hears of the loss
    longest_turn_ms: float  # of those behind it
    all_turns_ms: float
    turns: int


def loss_costs(numbers: Sequence[int], advance: Callable[[str], None]) -> list[LossCost]:
    """With every number of nodes that is large enough."""
    found = []
    for number in numbers:
        if number >= FEWEST_NODES:
            joins, samples = zip(*(_turns(number) for _ in range(_SAMPLES)), strict=True)
            found.append(
                LossCost(
                    nodes=number,
                    streams=NUM_STREAMS,
                    join_us=statistics.median(joins),
                    first_turn_ms=statistics.median(turns[0] for turns in samples),
                    longest_turn_ms=statistics.median(max(turns[1:]) for turns in samples),
                    all_turns_ms=statistics.median(map(sum, samples)),
                    turns=len(samples[0]),
                )
            )
        advance(f"a decode node is lost, {number} nodes")
    return found


def _turns(number: int) -> tuple[float, list[float]]:
    """Microseconds of a node's joining, and milliseconds of each turn, that of the loss first."""
    config = RouterCoreConfig(max_inflight_prefills=NUM_STREAMS)
    core = RouterCore(config, Placement(CACHE_AWARE, "least_loaded", seed=1), CacheMap(CacheIndex(64 << 20, 1)))
    entries = [as_listed(f"node-{index}", (pb.ROLE_PREFILL, pb.ROLE_DECODE)[index % 2]) for index in range(number)]
    lost = NodeRef(entries[1].node.name, 1)
    for entry in entries[:2]:
        _join(core, entry)
    for stream in range(NUM_STREAMS):
        _begin(core, f"r{stream}", lost)
    began_ns = time.thread_time_ns()
    for entry in entries[2:]:
        _join(core, entry)
    join_us = (time.thread_time_ns() - began_ns) / 1e3 / len(entries[2:])
    spent: list[float] = []

    def turn(act: Callable[[], list[Action]]) -> int:
        """Attempts that it placed."""
        began_ns = time.thread_time_ns()
        actions = act()
        spent.append((time.thread_time_ns() - began_ns) / 1e6)
        return sum(isinstance(each, ToNode) and each.message.HasField("dispatch") for each in actions)

    num_placed = turn(lambda: core.receive(SessionLost(lost), _NOW))
    while num_placed < NUM_STREAMS:
        num_placed += turn(lambda: core.tick(_NOW))
    return join_us, spent


def _join(core: RouterCore, entry: pb.NodeEntry) -> None:
    core.receive(NodeListed(entry), _NOW)
    core.receive(SessionUp(NodeRef(entry.node.name, entry.node.incarnation)), _NOW)


def _begin(core: RouterCore, request_id: str, decode: NodeRef) -> None:
    """A stream that has said a token."""
    prompt = tuple((index * 7 + len(request_id)) % 256 for index in range(_PROMPT_TOKENS))
    core.receive(Submitted(GenerationRequest(request_id, prompt, 1, Sampling(0.0, 100, ()), deadline=1e9)), _NOW)
    tokens = pb.BranchTokens(key=pb.AttemptKey(request_id=request_id), token_ids=[1], first_index=0)
    batch = pb.TokenBatch(branches=[tokens], from_receiver=True)
    core.receive(FromNode(decode, pb.NodeMessage(tokens=batch)), _NOW)
