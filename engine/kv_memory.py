"""A node's KV memory: one array that transports see as bytes and the runner as numbers.

    bytes    numpy [num_blocks, block_bytes] uint8
    tensor   torch [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]      (2: keys, values)

A block, all layers, K and V, is one contiguous span: a handoff moves a block with one copy. Not here: who owns which block; where
the bytes come from (engine/shared_bytes.py).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from engine.model_config import ModelConfig
from engine.shared_bytes import SharedBytes

TORCH_DTYPES: Final = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})


def kv_block_bytes(config: ModelConfig, block_size: int, dtype: str) -> int:
    """Bytes of one block for dtype "fp32", "bf16" or "fp16"."""
    numbers = config.num_layers * 2 * block_size * config.num_kv_heads * config.head_dim
    return numbers * TORCH_DTYPES[dtype].itemsize


class KvMemory:
    """Owns the memory of all blocks for the life of the process; zeroed. Raises ValueError if there is not so much."""

    def __init__(self, config: ModelConfig, block_size: int, num_blocks: int, dtype: str) -> None:
        self.block_size: Final = block_size
        self.num_blocks: Final = num_blocks
        self.block_bytes: Final = kv_block_bytes(config, block_size, dtype)
        self._shared = SharedBytes(num_blocks, self.block_bytes)
        self.bytes: Final[NDArray[np.uint8]] = self._shared.bytes
        shape = (num_blocks, config.num_layers, 2, block_size, config.num_kv_heads, config.head_dim)
        self.tensor: Final = torch.from_numpy(self.bytes).view(TORCH_DTYPES[dtype]).view(shape)

    @property
    def descriptor(self) -> int:
        """The file descriptor by which another process of this host can map the bytes, for reading."""
        return self._shared.descriptor
