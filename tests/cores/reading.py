"""A prefill core that reads the KV pool, driven by a test: which says what the pool answers, and when."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from engine.plan import NO_TOKEN, Plan, SlotResult, StepResult
from node import events as ev
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey
from proto.block_key import block_keys
from tests.cores.nodes import BLOCK_SIZE, SEED, Prefill

STEP_S: Final = 0.1  # of 8 tokens: 80 tokens a second, a block in 50 ms


def prompt_of(num_blocks: int, first: int = 1) -> list[int]:
    """So many full blocks, and a token."""
    return [first] * BLOCK_SIZE * num_blocks + [2]


def keys_of(prompt: list[int]) -> list[bytes]:
    return block_keys(SEED, prompt, BLOCK_SIZE)


@dataclass
class Reading:
    """The core, its clock, and what it asks for."""

    num_blocks: int = 64
    prefill: Prefill = field(init=False)
    now: float = 0.0
    plans: list[Plan] = field(default_factory=list)
    looks: list[ev.LookInPool] = field(default_factory=list)
    fetches: list[ev.FetchBlocks] = field(default_factory=list)
    counts: list[str] = field(default_factory=list)
    errors: list[pb.PDError] = field(default_factory=list)
    ended: list[ev.Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prefill = Prefill(self.num_blocks, reads_kv_pool=True)

    def take(self, actions: list[ev.Action]) -> None:
        for action in actions:
            match action:
                case ev.RunStep(plan):
                    self.plans.append(plan)
                case ev.LookInPool():
                    self.looks.append(action)
                case ev.FetchBlocks():
                    self.fetches.append(action)
                case ev.Count(name):
                    self.counts.append(name)
                case ev.ToRouter(_, message) if message.HasField("error"):
                    self.errors.append(message.error)
                case ev.Ended() | ev.Drained():
                    self.ended.append(action)

    def feed(self, event: ev.Event) -> None:
        self.take(list(self.prefill.core.tick(self.now)))
        self.take(list(self.prefill.core.receive(event, self.now)))

    def dispatch(
        self, key: AttemptKey, prompt: list[int], ms_left: int = 60_000, generated: list[int] | None = None
    ) -> None:
        completion = generated or []
        asked = self.prefill.dispatch(key, prompt, len(completion) + 1, self.now, ms_left, generated=completion)
        self.take(asked)

    def look_says(self, num_blocks: int) -> None:
        self.feed(ev.PoolLooked(self.looks.pop(0).look_id, num_blocks))

    def fetch_brings(self, num_blocks: int, seconds: float = 0.0) -> None:
        self.feed(ev.BlocksFetched(self.fetches.pop(0).fetch_id, num_blocks, seconds))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.take(list(self.prefill.core.tick(self.now)))

    def step(self) -> list[tuple[int, int]]:
        """Run the oldest plan; where its chunks began, and their lengths."""
        plan = self.plans.pop(0)
        self.now += STEP_S
        rows = [SlotResult(c.slot, c.generation, 7 if c.samples else NO_TOKEN) for c in plan.chunks]
        self.feed(ev.StepDone(StepResult.of(plan.step_id, rows)))
        return [(chunk.start, len(chunk.token_ids)) for chunk in plan.chunks]

    def run(self) -> int:
        """Run all there is; how many prompt positions were computed."""
        num_tokens = 0
        while self.plans:
            num_tokens += sum(length for _, length in self.step())
        return num_tokens

    def warm_up(self, fetch_s: float = 0.001) -> None:
        """Both speeds are known: a block is computed in 50 ms, and fetched in `fetch_s`."""
        self.dispatch(AttemptKey("speed", 0, 0), [30] * 6 * BLOCK_SIZE)
        self.look_says(0)
        self.run()
        self.dispatch(AttemptKey("speed", 0, 1), [31] * 6 * BLOCK_SIZE)
        self.look_says(4)
        self.fetch_brings(4, 4 * fetch_s)
        self.run()
        self.counts.clear()
        self.errors.clear()
        self.ended.clear()

    @property
    def snapshot(self) -> dict[str, object]:
        return dict(self.prefill.core.snapshot())

    def assert_empty(self) -> None:
        """Nobody holds anything, and nothing is under way."""
        counts, snapshot = self.prefill.pool.counts(), self.snapshot
        assert (counts.used, counts.leased, counts.quarantined, self.prefill.pool.num_promised) == (0, 0, 0, 0)
        names = ("attempts", "waiting_for_kv", "kv_looks", "kv_fetches", "references_of_fetches")
        assert [snapshot[name] for name in names] == [0] * len(names)
