"""`python -m bench.prefix_model`: the loads of bench.prefix over a model of many prefill nodes, in modelled time.

The router's placement, its index and what nodes tell it are the product's own, as are a node's block pool and prefix
cache. A node computes one prompt after the other at `--tokens-per-s`, and nothing else takes time. So figures are the
same on any machine, however busy, and are of placement alone. What a real cluster makes of it: bench.prefix.
"""

from __future__ import annotations

import heapq
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from bench.distribution import summarize
from bench.frame import Bench, check_files, whole_numbers
from bench.prefix_load import Ask, Chats, chat_asks, fresh_tokens, trace_asks
from bench.progress import StepProgress
from bench.trace import TRACE_BLOCK
from engine.block_pool import BlockPool
from engine.prefix_cache import PrefixCache
from node.cache_feed import CacheFeed
from node.events import RouterId
from proto import baton_pb2 as pb
from proto.block_key import block_keys, fingerprint_bytes, seed_key
from router.cache_index import CacheIndex
from router.cache_map import CacheMap
from router.entrance import RouterCoreConfig
from router.events import GenerationRequest, NodeRef, Sampling
from router.node_state import Node, Session
from router.placement import CACHE_AWARE, Imbalance, Placement, Prompt
from router.ranking import Among, Candidate, Ranking
from router.requests import LiveBranch
from router.retry import Tries
from runtime.config import knob, load

PROG: Final = "python -m bench.prefix_model"
BLOCK: Final = 16
_VOCAB: Final = 32_000
_ROUTER: Final = RouterId("router", 1)
_FINGERPRINT: Final = pb.Fingerprint(architecture="model", block_size=BLOCK)


@dataclass(frozen=True, slots=True)
class PrefixModelConfig:
    """One run."""

    trace: Path | None = knob(None, "trace in Mooncake's format; none: chats only", metavar="FILE")
    scale: int = knob(32, "the trace's lengths are divided by it; 512 must be a multiple", low=1, high=TRACE_BLOCK)
    requests: int = knob(4000, "requests of the trace, from its beginning", low=1, high=1_000_000)
    talks: int = knob(400, "conversations", low=1, high=100_000)
    turns: int = knob(10, "turns of each", low=1, high=1000)
    nodes: int = knob(8, "prefill nodes", low=1, high=4096)
    blocks: str = knob("2000,8000", f"blocks of {BLOCK} tokens on each of them", metavar="N,…")
    uses: str = knob(
        "50,80", "% of all nodes' time that computing every prompt from its beginning would take", metavar="N,…"
    )
    tokens_per_s: float = knob(10_000.0, "what a node computes", low=1)
    policies: str = knob("round_robin,least_loaded,cache_aware", "ways to place", metavar="NAME,…")
    imbalances: str = knob("8192", "--cache-imbalance-tokens, each of them for cache_aware", metavar="N,…")
    samples: str = knob(
        "1", "1 in so many blocks is in the router's index, powers of two, each of them for cache_aware", metavar="N,…"
    )
    seed: int = knob(0, "of the conversations", low=0, high=(1 << 63) - 1)
    output: Path | None = knob(None, "JSON file for all figures", metavar="FILE")

    def __post_init__(self) -> None:
        check_files(self.output)
        for name in ("blocks", "uses", "samples"):
            whole_numbers(f"--{name}", getattr(self, name))


@dataclass(frozen=True, slots=True)
class Figures:
    """One way under one load; times in seconds of the model."""

    load: str
    use: float  # % of the nodes' time, if nothing were cached
    blocks: int
    policy: str
    imbalance: int
    sample: int  # 1 in so many blocks is in the index
    hit_rate: float  # of prompt tokens, how many were not computed
    recomputed: float  # of prompt tokens, how many were computed though some node had computed them before
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float


@dataclass(slots=True, eq=False)
class _Server:
    """A prefill node."""

    node: Node
    pool: BlockPool
    feed: CacheFeed
    queue: deque[tuple[Ask, int]] = field(default_factory=deque)  # with the tokens that the router counts for it
    queued_tokens: int = 0
    held: list[int] = field(default_factory=list)  # blocks of who is computed


class Model:
    """One router and its prefill nodes."""

    def __init__(
        self, config: PrefixModelConfig, policy: str, num_blocks: int, imbalance: int, sample: int = 1
    ) -> None:
        self._config = config
        self._placement = Placement(policy, seed=config.seed, imbalance=Imbalance(imbalance))
        self._map = CacheMap(CacheIndex(64 << 20, sample=sample)) if policy == CACHE_AWARE else None
        fields = {each.name: getattr(_FINGERPRINT, each.name) for each in _FINGERPRINT.DESCRIPTOR.fields}
        self._seed = seed_key(fingerprint_bytes(fields))
        self._servers: dict[NodeRef, _Server] = {}
        self._ranking = Ranking(b"model", lambda ref: Candidate(ref, b"model", (self._servers[ref].queued_tokens, 0.0)))
        self._decode = Ranking(b"model", lambda ref: Candidate(ref, b"model", (0.0, 0.0)))
        for number in range(config.nodes):
            ref = NodeRef(f"prefill-{number}", 1)
            entry = pb.NodeEntry(role=pb.ROLE_PREFILL, fingerprint=_FINGERPRINT)
            pool = BlockPool(num_blocks, BLOCK)
            node = Node(ref, entry, b"model", Session.UP)
            self._servers[ref] = _Server(node, pool, CacheFeed(pool))
            self._ranking.put(ref, True)
        self._decode.put(NodeRef("decode", 1), True)
        if self._map is not None:
            for ref, server in self._servers.items():
                self._map.look(ref, server.node, 0.0)
        self.computed = 0
        self.ttfts: list[float] = []

    def play(self, asks: Sequence[Ask]) -> None:
        """All requests, to the last first token."""
        ends: list[tuple[float, str, NodeRef]] = []
        for number, ask in enumerate(asks):
            while ends and ends[0][0] <= ask.at_s:
                self._end(*heapq.heappop(ends), ends)
            self._follow(ask.at_s)
            server = self._place(number, ask)
            if len(server.queue) == 1:
                self._begin(server, ask.at_s, ends)
        while ends:
            self._end(*heapq.heappop(ends), ends)

    def _place(self, number: int, ask: Ask) -> _Server:
        request = GenerationRequest(str(number), ask.prompt, 0, Sampling(0.0, 1, ()), 1e9)
        branch = LiveBranch(request, 0, number, Tries(RouterCoreConfig()), ask.at_s)
        prompt = self._map.prompt(branch) if self._map is not None else Prompt(len(ask.prompt), {})
        pair = self._placement.choose(Among([self._ranking]), Among([self._decode]), prompt=prompt)
        assert pair is not None, "nobody is excluded"
        server = self._servers[pair.prefill]
        num_tokens = len(ask.prompt) - prompt.cached.get(pair.prefill, 0)
        server.queue.append((ask, num_tokens))
        server.queued_tokens += num_tokens
        self._ranking.put(server.node.ref, True)
        return server

    def _begin(self, server: _Server, now: float, ends: list[tuple[float, str, NodeRef]]) -> None:
        """Compute the first in line: what its prefix cache lacks."""
        ask, _ = server.queue[0]
        keys = block_keys(self._seed, ask.prompt, BLOCK)
        held = PrefixCache(server.pool).acquire_match(keys, (len(ask.prompt) - 1) // BLOCK)
        num_tokens = len(ask.prompt) - BLOCK * len(held)
        server.held = held + server.pool.allocate(-(-len(ask.prompt) // BLOCK) - len(held))
        self.computed += num_tokens
        heapq.heappush(ends, (now + num_tokens / self._config.tokens_per_s, server.node.ref.name, server.node.ref))

    def _end(self, now: float, _: str, ref: NodeRef, ends: list[tuple[float, str, NodeRef]]) -> None:
        server = self._servers[ref]
        ask, num_tokens = server.queue.popleft()
        server.queued_tokens -= num_tokens
        self._ranking.put(server.node.ref, True)
        self.ttfts.append(now - ask.at_s)
        keys = block_keys(self._seed, ask.prompt, BLOCK)
        server.pool.publish(dict(zip(server.held, keys, strict=False)))
        server.pool.free(server.held)
        if server.queue:
            self._begin(server, now, ends)

    def _follow(self, now: float) -> None:
        """Questions and answers, as they are paced; on the way they take no time."""
        if self._map is None:
            return
        while (due := self._map.next_deadline()) is not None and due <= now:
            for ref, ask in self._map.questions(due):
                self._servers[ref].feed.ask(_ROUTER, ask)
            for ref, server in self._servers.items():
                for action in server.feed.tell():
                    self._map.take(ref, action.message.cache, due)
        for ref, server in self._servers.items():
            for action in server.feed.tell():
                self._map.take(ref, action.message.cache, now)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the model; 0, 2 for what the user can mend, 130 after Ctrl-C."""
    config = load(PrefixModelConfig, PROG, "Model ways to place prompts that share beginnings.", argv)
    return Bench(PROG, measure, show, lambda figures: {"figures": [asdict(each) for each in figures]}).run(config, argv)


def measure(config: PrefixModelConfig, console: Console) -> list[Figures]:
    """Every way under every load. ValueError: the trace is none, or no node has room for a prompt."""
    chats = Chats(config.talks, config.turns, 256, 256, 1, 1.0)
    loads = {"chat": chat_asks(chats, _VOCAB, config.seed)}
    if config.trace is not None:
        lines = config.trace.read_text(encoding="utf-8").splitlines()[: config.requests]
        loads["trace"] = trace_asks(lines, config.scale, 1.0, 8192, _VOCAB)
    ways = [
        (policy, imbalance, sample)
        for policy in config.policies.split(",")
        for imbalance in (_numbers(config.imbalances) if policy == CACHE_AWARE else [0])
        for sample in (_numbers(config.samples) if policy == CACHE_AWARE else [0])
    ]
    uses, sizes = _numbers(config.uses), _numbers(config.blocks)
    longest = max(-(-len(ask.prompt) // BLOCK) for drawn in loads.values() for ask in drawn)
    if min(sizes) < longest:
        raise ValueError(f"--blocks {min(sizes)}: the longest prompt takes {longest}")
    figures: list[Figures] = []
    with StepProgress(console, "runs", len(loads) * len(ways) * len(uses) * len(sizes)) as progress:
        for kind, drawn in loads.items():
            num_tokens = sum(len(ask.prompt) for ask in drawn)
            num_fresh = fresh_tokens(drawn, BLOCK)
            for use in uses:
                busy_s = num_tokens / config.tokens_per_s / config.nodes
                slower = busy_s / (use / 100) / drawn[-1].at_s
                asks = [Ask(ask.at_s * slower, ask.prompt, ask.max_tokens) for ask in drawn]
                for num_blocks in sizes:
                    for policy, imbalance, sample in ways:
                        model = Model(config, policy, num_blocks, imbalance, sample)
                        model.play(asks)
                        times = summarize(model.ttfts)
                        assert times is not None, "there are requests"
                        hit_rate, again = 1 - model.computed / num_tokens, (model.computed - num_fresh) / num_tokens
                        shown = (times.p50, times.p90, times.p99)
                        way = (policy, imbalance, sample)
                        figures.append(Figures(kind, use, num_blocks, *way, hit_rate, again, *shown))
                        progress.advance(f"{kind}, {policy}")
    return figures


def _numbers(text: str) -> list[int]:
    """ValueError: they are none."""
    return [int(part) for part in text.split(",")]


def show(console: Console, figures: Sequence[Figures]) -> None:
    """The table."""
    table = Table()
    for column in ("load", "use", "blocks", "way", "hit rate", "recomputed", "TTFT p50, ms", "p90", "p99"):
        table.add_column(column, justify="left" if column in ("load", "way") else "right")
    for each in figures:
        way = f"{each.policy} {each.imbalance} 1/{each.sample}" if each.imbalance else each.policy
        times = [f"{1000 * value:.0f}" for value in (each.ttft_p50_s, each.ttft_p90_s, each.ttft_p99_s)]
        shares = (f"{each.hit_rate:.1%}", f"{each.recomputed:.1%}")
        table.add_row(each.load, f"{each.use:.0f} %", str(each.blocks), way, *shares, *times)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
