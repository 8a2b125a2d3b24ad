"""How a completion ends whose grammar takes too long, or lets nothing follow: without a token, and without harm to others."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.binding import Binding
from engine.block_pool import BlockPool
from engine.grammars import Constraint, Grammars
from engine.kv_memory import KvMemory
from engine.local_engine import LocalEngine
from engine.model import Model
from engine.plan import Grammar, SamplingParams
from engine.runner import TorchRunner
from engine.saving import SaveRules
from engine.scheduler import Scheduler, SchedulerConfig
from tests.engine_torch.conftest import VOCAB_SIZE
from tests.engine_torch.test_grammars import BLOCK_SIZE, ENDS, KEY_SEED, completions, grammars, model, spec_of

__all__ = ["grammars", "model"]  # fixtures


class StallsAfter:
    """Follows grammars, until a completion has so many tokens."""

    def __init__(self, grammars: Grammars, num_tokens: int) -> None:
        self._grammars = grammars
        self._num_tokens = num_tokens

    def constraint(self, grammar: Grammar, generated_token_ids: Iterable[int] = ()) -> Binding:
        token_ids = [*generated_token_ids]
        return Stalling(self._grammars.constraint(grammar, token_ids), self._num_tokens - len(token_ids))


class Stalling:
    def __init__(self, constraint: Constraint, num_left: int) -> None:
        self._constraint = constraint
        self._num_left = num_left

    @property
    def is_stalled(self) -> bool:
        return self._num_left <= 0

    def allowed(self) -> NDArray[np.bool_] | None:
        return np.zeros(VOCAB_SIZE, np.bool_) if self.is_stalled else self._constraint.allowed()

    def add(self, token_id: int) -> None:
        self._num_left -= 1
        self._constraint.add(token_id)

    def close(self) -> None:
        self._num_left = 0


@pytest.mark.covers("A14")
def test_a_completion_whose_grammar_stalls_ends_with_what_it_has_and_no_other(model: Model, grammars: Grammars) -> None:
    bound = spec_of("bound", SamplingParams(1.0, 9, grammar=Grammar("regex", "[a-f]{20}", False, tuple(ENDS))))
    free = spec_of("free", SamplingParams(1.0, 3), max_tokens=30)
    ends: dict[object, str] = {}
    said, other = completions(model, StallsAfter(grammars, 7), bound, free, ends=ends)
    whole, alone = completions(model, grammars, bound, free)
    assert (said, other) == (whole[:7], alone)
    assert ends["bound"] == "stalled"


@pytest.mark.covers("A14")
def test_a_grammar_that_lets_nothing_follow_ends_its_completion_and_breaks_nobodys_blocks(
    model: Model, grammars: Grammars
) -> None:
    pool = BlockPool(64, BLOCK_SIZE)
    scheduler = Scheduler(SchedulerConfig(4, 64, 256, saves=SaveRules(takes_out_broken=True)), pool, KEY_SEED)
    memory = KvMemory(model.config, BLOCK_SIZE, 64, model.dtype)
    engine = LocalEngine(scheduler, TorchRunner(model, memory, 4, 256, grammars=grammars))
    free = spec_of("free", SamplingParams(0.0, 3))
    list(engine.run([free]))
    assert free.block_keys and all(pool.find(key) is not None for key in free.block_keys)
    dead_end = Grammar("regex", r"a[\uD800-\uDFFF]", False, tuple(ENDS))  # half a surrogate pair is no text
    bound = spec_of("bound", SamplingParams(0.0, 9, grammar=dead_end))
    assert [each.finish for each in engine.run([bound])][-1] == "barred"
    assert all(pool.find(key) is not None for key in free.block_keys), "nothing was wrong with them"
    assert not scheduler.take_broken()
