"""How large a node's engine is: the knobs and the model together. Pure.

Not here: the knobs (node/config.py), the memory itself (engine).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from node.config import NodeConfig

DEFAULT_MAX_MODEL_LEN: Final = 4096  # tokens; a pool for longer ones should be asked for
POOL_SHARE: Final = 0.25  # of the free memory, for a pool that nobody sized: several nodes may share the machine


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """What the engine of one node is built with."""

    block_size: int  # tokens
    num_blocks: int
    max_model_len: int  # tokens


def engine_sizes(
    config: NodeConfig, max_position_embeddings: int, bytes_per_block: int, free_memory_bytes: int
) -> EngineSizes:
    """Work out the defaults. ValueError, one sentence with flag, value and bound: the sizes do not fit together."""
    max_model_len = config.max_model_len
    if max_model_len is None:
        max_model_len = min(max_position_embeddings, DEFAULT_MAX_MODEL_LEN)
    elif max_model_len > max_position_embeddings:
        raise ValueError(f"--max-model-len {max_model_len}: the model was made for {max_position_embeddings} positions")
    blocks_per_sequence = -(-max_model_len // config.block_size)
    num_blocks = config.num_blocks
    if num_blocks is None:
        most = int(free_memory_bytes * POOL_SHARE) // bytes_per_block
        num_blocks = min(config.max_num_seqs * blocks_per_sequence, most)
    if num_blocks < blocks_per_sequence:
        was_given = "" if config.num_blocks else " (a quarter of the free memory)"
        raise ValueError(
            f"--num-blocks {num_blocks}{was_given}: {num_blocks * config.block_size} tokens cannot hold one sequence of "
            f"max_model_len {max_model_len}, which needs {blocks_per_sequence} blocks"
        )
    return EngineSizes(config.block_size, num_blocks, max_model_len)
