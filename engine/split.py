"""Which part of a model each rank of a node computes, where a node has several (`--tp`). Pure.

Every linear is cut by its columns: a rank has whole columns of each, and whole heads, so that each number of an activation is
one sum over all of its row, taken by one rank in the order in which a node of one rank takes it. What the next linear needs of
the other ranks' columns is gathered (engine/ranks.py). So a row's bits, and its KV's, do not depend on how many ranks there are.

Megatron-LM (Shoeybi et al., 2019, https://arxiv.org/abs/1909.08053) cuts every second linear by its rows instead and adds the
ranks' partial sums up: two sums a layer go around, not four gathers, and the order of each sum, and with it its bits, depends on
the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from engine.config_values import ModelError
from engine.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Split:
    """One of `size` ranks."""

    rank: int
    size: int

    def width(self, count: int) -> int:
        """How many of `count` heads, or columns, a rank has; where they do not divide, the last ranks have fewer, or none."""
        return -(-count // self.size)

    def part(self, count: int) -> slice:
        """Which of `count` it has: the ranks' parts lie one behind the other, in the ranks' order."""
        width = self.width(count)
        return slice(min(self.rank * width, count), min((self.rank + 1) * width, count))


WHOLE: Final = Split(0, 1)


def check_split(config: ModelConfig, size: int) -> None:
    """Raise ModelError, naming the setting of config.json, where a model cannot be cut for so many ranks."""
    counts = {
        "num_key_value_heads": config.num_kv_heads,  # and with them the query heads that read them
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
    }
    for name, count in counts.items():
        if count % size:
            raise ModelError(f"--tp {size}: the model's {name} {count} cannot be cut into {size} equal parts")
