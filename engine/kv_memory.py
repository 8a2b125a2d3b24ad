"""A node's KV memory: one array that transports see as bytes and the runner as numbers.

    bytes    numpy [num_blocks, block_bytes] uint8, in host memory
    tensor   torch [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]      (2: keys, values), on the device

A block, all layers, K and V, is one contiguous span: a handoff moves a block with one copy. On a CPU both are one piece of memory.
A device has its own, and then it is the runner that copies blocks between the two sides: what a chunk computed, and what is about
to move on, to the host, for senders to read, before the step's result is told; what arrived from a peer to the device, before the
first row that may see it. Not here: who owns which block; where the bytes come from (engine/shared_bytes.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.device import CPU
from engine.model_config import ModelConfig
from engine.shared_bytes import SharedBytes
from kernels.interface import BlockCopies
from kernels.torch_reference import TorchBlockCopies
from kernels.upload import upload

TORCH_DTYPES: Final = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})


def kv_block_bytes(config: ModelConfig, block_size: int, dtype: str) -> int:
    """Bytes of one block for dtype "fp32", "bf16" or "fp16"."""
    numbers = config.num_layers * 2 * block_size * config.num_kv_heads * config.head_dim
    return numbers * TORCH_DTYPES[dtype].itemsize


class KvMemory:
    """Owns the memory of all blocks for the life of the process; zeroed. Raises ValueError if there is not so much."""

    def __init__(
        self,
        config: ModelConfig,
        block_size: int,
        num_blocks: int,
        dtype: str,
        device: torch.device = CPU,
        *,
        mirror: bool | None = None,
        copies: BlockCopies | None = None,
    ) -> None:
        """`mirror`: whether the device's side is memory of its own; None: where the device is not a CPU.

        True on a CPU is for tests: it does there what a GPU does. `copies`: the back end's, for the device's side; None: torch's.
        """
        self._copies = TorchBlockCopies() if copies is None else copies
        self.block_size: Final = block_size
        self.num_blocks: Final = num_blocks
        self.block_bytes: Final = kv_block_bytes(config, block_size, dtype)
        self._shared = SharedBytes(num_blocks, self.block_bytes)
        self.bytes: Final[NDArray[np.uint8]] = self._shared.bytes
        shape = (num_blocks, config.num_layers, 2, block_size, config.num_kv_heads, config.head_dim)
        self._host = torch.from_numpy(self.bytes).view(TORCH_DTYPES[dtype]).view(shape)
        self.is_mirrored: Final = device.type != "cpu" if mirror is None else mirror
        try:
            self.tensor: Final = torch.zeros_like(self._host, device=device) if self.is_mirrored else self._host
        except torch.OutOfMemoryError:
            wanted_mib = num_blocks * self.block_bytes >> 20
            raise ValueError(f"--num-blocks {num_blocks}: {wanted_mib} MiB do not fit on {device}") from None

    @property
    def descriptor(self) -> int:
        """The file descriptor by which another process of this host can map the bytes, for reading."""
        return self._shared.descriptor

    def gather(self, block_ids: Sequence[int]) -> Tensor:
        """What these blocks hold on the device behind all that it was given so far: a copy that later steps do not change."""
        return self._copies.gather_blocks(
            self.tensor, upload(torch.tensor(block_ids, dtype=torch.int64), self.tensor.device)
        )

    def to_host(self, block_ids: Sequence[int], gathered: Tensor) -> None:
        """Put what was gathered of these blocks where transports read them."""
        self._host.index_copy_(0, torch.tensor(block_ids, dtype=torch.int64), gathered)

    def to_device(self, block_ids: Iterable[int]) -> None:
        """Copy blocks that arrived to where the rows of later steps see them."""
        if self.is_mirrored:  # gathered first, so that the device is asked for one copy and not for one a block
            index, device = torch.tensor(list(block_ids), dtype=torch.int64), self.tensor.device
            gathered = upload(self._host.index_select(0, index), device)
            self._copies.scatter_blocks(self.tensor, upload(index, device), gathered)
