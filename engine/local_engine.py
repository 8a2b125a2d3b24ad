"""One engine alone: a scheduler and a runner in a plain loop, no cluster around them.

The oracle of the equality tests and the subject of the engine benchmarks. Steps overlap as in a node: the next step is
planned before the results of the previous one are read. Not here: arrivals over time, deadlines, aborts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator

from engine.plan import Plan, Runner
from engine.scheduler import Scheduler
from engine.sequence import Progress, SequenceSpec

STEPS_AHEAD = 2  # plans made before the oldest one's results are read, as deep as a node's queue


class LocalEngine:
    """Runs sequences to their ends."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self._scheduler = scheduler
        self._runner = runner

    def generate(self, specs: Iterable[SequenceSpec]) -> dict[Hashable, list[int]]:
        """The new tokens of every sequence, a stop token included. Raises what run() raises."""
        specs = list(specs)
        token_ids: dict[Hashable, list[int]] = {spec.sequence_id: [] for spec in specs}
        for progress in self.run(specs):
            if progress.token_id is not None:
                token_ids[progress.sequence_id].append(progress.token_id)
        return token_ids

    def run(self, specs: Iterable[SequenceSpec]) -> Iterator[Progress]:
        """Whatever every sequence's steps gave, as it comes.

        ValueError: a sequence that can never run (nothing ran then). RuntimeError: blocks or slots that somebody outside
        holds keep sequences from running. Blocks of lending sequences are the caller's to release.
        """
        unfinished: set[Hashable] = set()
        for spec in specs:
            try:
                self._scheduler.submit(spec)
            except ValueError:
                for sequence_id in unfinished:
                    self._scheduler.abort(sequence_id)
                raise
            unfinished.add(spec.sequence_id)
        launched: deque[Plan] = deque()
        while unfinished or launched:
            while len(launched) < STEPS_AHEAD and (plan := self._scheduler.plan()) is not None:
                launched.append(plan)
            if not launched:
                raise RuntimeError(
                    f"{len(unfinished)} sequences cannot run: the pool or the slots are held from outside"
                )
            for progress in self._scheduler.complete(self._runner.run(launched.popleft())):
                if progress.finish is not None:
                    unfinished.remove(progress.sequence_id)
                yield progress
