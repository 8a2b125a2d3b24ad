"""One fault in the middle of streams on real processes, and what it takes until each of them goes on.

    router, prefill-0, decode-0, decode-1     streams on both decode nodes; the fault hits decode-0
            prefill-1                         asleep until prefill-0 is to die: its cache is cold

Five ways: killed, stopped or cut off, its streams are prefilled again, the prompt out of the prefill node's cache (`kill`,
`stop`, `cut`); killed together with that prefill node (`recompute`); told to go, it hands its KV over and nothing is prefilled
(`move`). Which way was gone is not assumed: counters of the surviving processes say so (`complaints`).
"""

from __future__ import annotations

import asyncio
import math
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import uvloop

from bench.fleet import BOUND_S, Fleet, wait_until
from bench.http_exchange import Server
from bench.namespaces import Network
from bench.streams import StreamRun, Watched
from runtime.process import run_async

BLOCK_SIZE: Final = 16
NAMES: Final = ("router", "prefill-0", "prefill-1", "decode-0", "decode-1")
VICTIM: Final = "decode-0"
DRAIN_BOUND_S: Final = 120.0
WAYS: Final = {
    "kill": "SIGKILL of a decode node; the prefill node has the prompts cached",
    "stop": "SIGSTOP of it: silence",
    "cut": "nothing passes between it and the router (needs root)",
    "recompute": "SIGKILL of it and of the prefill node; the other one has nothing cached",
    "move": "SIGTERM of it: it hands its sequences over, KV and all",
}
_ASLEEP: Final = "prefill-1"
_LOST: Final = f"session_lost node={VICTIM} "
_LOOK_S: Final = 0.002  # between two looks at the router's log
_ENDED: Final = re.compile(r"attempt_ended request=(\S+) choice=\d+ attempt=([1-9]\d*) ")


@dataclass(frozen=True, slots=True)
class Streams:
    """The load."""

    number: int
    prompt_tokens: int
    max_tokens: int
    fault_after: int  # tokens that each stream has said when the fault comes
    seed: int

    @property
    def blocks_each(self) -> int:
        """Of a sequence at its longest."""
        return -(-(self.prompt_tokens + self.max_tokens) // BLOCK_SIZE)

    def flags(self, dtype: str) -> dict[str, tuple[str, ...]]:
        """Of the fleet's processes: every sequence has room on either decode node, and every prompt in the prefill node's cache."""
        sizes = {
            "--block-size": BLOCK_SIZE,
            "--num-blocks": self.num_blocks,
            "--max-num-seqs": self.number + 2,
            "--max-model-len": self.prompt_tokens + self.max_tokens,
            "--dtype": dtype,
        }
        node = tuple(str(word) for pair in sizes.items() for word in pair)
        # The nodes that die here die of us, not of a request; and the second prefill node's cache is to be what is cold.
        router = ("--max-nodes-lost", "100", "--breaker-failures", "1000", "--local-prefill-max-tokens", "0")
        return {name: router if name == "router" else node for name in NAMES}

    @property
    def num_blocks(self) -> int:
        """Of each node's pool."""
        return (self.number + 2) * self.blocks_each

    def draw(self, model: str, way: str, number: int) -> list[dict[str, Any]]:
        """The requests of one run: every second is greedy, the others sampled with a seed; no two runs share a prompt."""
        rng = random.Random(f"{self.seed} {way} {number}")
        return [
            {
                "model": model,
                "prompt": [rng.randrange(256) for _ in range(self.prompt_tokens)],
                "max_tokens": self.max_tokens,
                "temperature": float(index // 2 % 2),  # neighbours are placed on different nodes
                "seed": rng.getrandbits(53),
                "ignore_eos": True,
            }
            for index in range(self.number)
        ]


@dataclass(slots=True)
class Played:
    """One run of one way."""

    way: str
    fault_at: float  # by time.monotonic
    found_s: (
        float  # from the fault until the router's session with the node was broken or lost; 0 where the node told it
    )
    prefill_s: float  # that runners took for steps from the fault on which computed prompts
    prefill_tokens: int  # computed from the fault on
    retries: int
    bodies: list[dict[str, Any]] = field(repr=False)
    streams: list[StreamRun] = field(repr=False)
    hit: list[int]  # indices of the streams that were on the victim
    num_different: int = 0  # of those whose tokens are not the fault-free ones

    def next_token_s(self, index: int) -> float:
        """From the fault until a stream that was hit went on; of a move the pause alone, since it goes on until then."""
        before, after = self._pause(index)
        return after - (before if self.way == "move" else self.fault_at)

    def _pause(self, index: int) -> tuple[float, float]:
        """Of a stream that was hit: it began by when the fault was found, or with a move some time after it."""
        found_at = self.fault_at + (math.inf if self.way == "move" else self.found_s + 0.01)
        return self.streams[index].longest_pause(self.fault_at, found_at)

    @property
    def target_s(self) -> float:
        """What the design allows until the last stream goes on."""
        return self.found_s + self.prefill_s + 0.05

    def complaints(self) -> list[str]:
        """What went wrong, and whether the way was the one that was meant."""
        found = [f"stream {i}: {run.error}" for i, run in enumerate(self.streams) if run.error]
        if not self.hit:
            return [*found, "no stream was on the node"]
        told = [self.streams[i].tokens_before(self._pause(i)[0]) for i in self.hit]
        prompts = [self.streams[i].prompt_tokens for i in self.hit]
        if self.way == "move":
            if self.retries or self.prefill_tokens:
                found.append(
                    f"{self.retries} retries and {self.prefill_tokens} tokens prefilled where KV should have moved"
                )
        elif self.retries < len(self.hit):
            found.append(f"{self.retries} retries of {len(self.hit)} streams")
        elif self.way == "recompute":
            if self.prefill_tokens < sum(told) + sum(prompts):
                found.append(
                    f"{self.prefill_tokens} tokens prefilled, less than {sum(told) + sum(prompts)}: a cache helped"
                )
        elif not sum(told) <= self.prefill_tokens < sum(told) + sum(prompts):
            found.append(
                f"{self.prefill_tokens} tokens prefilled where {sum(told)} said ones were to be, and no whole prompt"
            )
        return found


def play(fleet: Fleet, network: Network | None, way: str, streams: Streams, bodies: list[dict[str, Any]]) -> Played:
    """Run the streams through one fault on a ready fleet, which is left as the fault leaves it."""
    return run_async(_play(fleet, network, way, streams, bodies), uvloop.new_event_loop)


def fault_free(fleet: Fleet, bodies: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The tokens that each request gets where nothing happens."""

    async def run() -> list[StreamRun]:
        watched = Watched(Server.parse(fleet.url), bodies)
        await watched.start(0)
        return await watched.finish()

    runs = run_async(run(), uvloop.new_event_loop)
    assert all(not each.error for each in runs), [each.error for each in runs]
    return [each.token_ids for each in runs]


async def _play(
    fleet: Fleet, network: Network | None, way: str, streams: Streams, bodies: list[dict[str, Any]]
) -> Played:
    _put_to_sleep(fleet)
    prefill = _ASLEEP if way == "recompute" else "prefill-0"  # who computes what is to be computed again
    watched = Watched(Server.parse(fleet.url), bodies)
    await watched.start(streams.fault_after)
    if way == "recompute":
        fleet.thaw(_ASLEEP)
        await asyncio.to_thread(wait_until, f"{_ASLEEP} is awake", lambda: _is_up(fleet, _ASLEEP))
    before = await asyncio.to_thread(_Counted.of, fleet, prefill)  # the loop goes on taking tokens
    lost = None if way == "move" else asyncio.create_task(_lost_at(fleet, len(fleet.log_text("router"))))
    fault_at = await asyncio.to_thread(_hit, fleet, network, way)
    runs = await watched.finish()
    after = _Counted.of(fleet, prefill)
    lost_at = fault_at if lost is None else await asyncio.wait_for(lost, BOUND_S)
    return Played(
        way=way,
        fault_at=fault_at,
        found_s=lost_at - fault_at,
        prefill_s=after.step_s - before.step_s,
        prefill_tokens=after.prefill_tokens - before.prefill_tokens,
        retries=after.retries - before.retries,
        bodies=bodies,
        streams=runs,
        hit=_hit_streams(fleet, prefill, runs),
    )


def _put_to_sleep(fleet: Fleet) -> None:
    """Stop the second prefill node, and wait until nobody sends it anything."""
    fleet.freeze(_ASLEEP)
    wait_until(f"{_ASLEEP} is missed", lambda: not _is_up(fleet, _ASLEEP))


def _is_up(fleet: Fleet, node: str) -> bool:
    return fleet.metric("node_up", f'node="{node}"') == 1


def _hit(fleet: Fleet, network: Network | None, way: str) -> float:
    """Let it happen; the instant before it, by time.monotonic."""
    match way:
        case "kill":
            return fleet.kill(VICTIM)
        case "recompute":
            fleet.kill("prefill-0")  # nobody misses it: every prompt is handed over
            return fleet.kill(VICTIM)
        case "stop":
            return fleet.freeze(VICTIM)
        case "cut":
            assert network is not None
            at = time.monotonic()
            network.cut("router", VICTIM)
            return at
        case "move":
            at = fleet.terminate(VICTIM)
            code = fleet.wait_for_end(VICTIM, DRAIN_BOUND_S)
            assert code == 0, f"the node that was told to go ended with {code}"
            return at
    raise ValueError(way)


@dataclass(frozen=True, slots=True)
class _Counted:
    """What the processes that survive have counted up to now."""

    prefill_tokens: int  # computed as prompts, by whoever of them
    step_s: float  # of the prefill node's runner
    retries: int

    @classmethod
    def of(cls, fleet: Fleet, prefill: str) -> _Counted:
        states = [fleet.state(node) for node in (prefill, "decode-1")]
        tokens = sum(state["counters"]["tokens_computed"].get("prefill", 0) for state in states)
        return cls(tokens, fleet.node_metric(prefill, "step_seconds_sum"), int(fleet.metric("retries_total")))


async def _lost_at(fleet: Fleet, said_before: int) -> float:
    """The instant, by time.monotonic, when the router's log says that the session with the victim is lost."""
    while _LOST not in fleet.log_text("router")[said_before:]:  # noqa: ASYNC110 - another process writes it
        await asyncio.sleep(_LOOK_S)
    return time.monotonic()


def _hit_streams(fleet: Fleet, prefill: str, runs: Sequence[StreamRun]) -> list[int]:
    """Those that had a second attempt, by the survivors' logs."""
    again = {request for node in (prefill, "decode-1") for request, _ in _ENDED.findall(fleet.log_text(node))}
    return [index for index, run in enumerate(runs) if run.request_id in again]


def model_name(model: Path) -> str:
    """As requests name it."""
    return model.absolute().name
