"""The ranks of a node as threads of this process: real models, real gloo, one KV memory; processes are tests/node's business."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from torch.distributed import HashStore  # type: ignore[attr-defined]

from engine.device import CPU
from engine.kv_memory import KvMemory
from engine.lockstep import PipedFollowers, follow
from engine.model import Model, load_model
from engine.ranks import join_ranks
from engine.runner import TorchRunner
from engine.split import Split
from kernels.choice import WeightDtype

T = TypeVar("T")


class RankThreads:
    """Models that have joined, each with a thread to compute on."""

    def __init__(self, models: Sequence[Model], threads: ThreadPoolExecutor) -> None:
        self.models = models
        self._threads = threads

    def each(self, work: Callable[[Model], T]) -> list[T]:
        """Have every rank do this at once; what each gave."""
        return list(self._threads.map(work, self.models))

    @contextmanager
    def runner(self, memory: KvMemory, num_slots: int, max_model_len: int, *, mirror: bool) -> Iterator[TorchRunner]:
        """Rank 0's runner, with the others following; they have ended in good order behind it."""
        sides = [memory.part(model.split, mirror=mirror) for model in self.models]
        with ExitStack() as opened:
            pipes = [
                [os.fdopen(end, mode) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True)] for _ in sides[1:]
            ]
            ends = []
            for model, kv, (read_end, write_end) in zip(self.models[1:], sides[1:], pipes, strict=True):
                opened.enter_context(read_end)
                assert model.ranks is not None
                ends.append(self._threads.submit(follow, model, kv, read_end, model.ranks))
                opened.callback(ends[-1].result, 30)
                opened.enter_context(write_end)
            ranks = self.models[0].ranks
            assert ranks is not None
            followers = PipedFollowers([write_end for _, write_end in pipes], ranks)
            yield TorchRunner(self.models[0], sides[0], num_slots, max_model_len, followers=followers)


@contextmanager
def rank_threads(
    model_dir: Path, dtype: str, kernels: str, size: int, weight_dtype: WeightDtype = "auto"
) -> Iterator[RankThreads]:
    """So many ranks of one model."""
    splits = [Split(rank, size) for rank in range(size)]
    models = [load_model(model_dir, dtype, kernels, weight_dtype=weight_dtype, split=split) for split in splits]
    store = HashStore()
    with ThreadPoolExecutor(size) as threads:
        groups = threads.map(lambda split: join_ranks(split, store, CPU), splits)
        yield RankThreads([model.joins(group) for model, group in zip(models, groups, strict=True)], threads)
