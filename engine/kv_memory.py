"""A node's KV memory: one array that transports see as bytes and the runner as numbers.

    bytes    numpy [num_blocks, block_bytes] uint8, in host memory
    tensor   torch [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]      (2: keys, values), on the device

A block, all layers, K and V, is one contiguous span: a handoff moves a block with one copy. On a CPU both are one piece of memory.
A device has its own, and then it is the runner that copies blocks between the two sides: what a chunk computed, and what is about
to move on, to the host, for senders to read, before the step's result is told; what arrived from a peer to the device, before the
first row that may see it. Where the device can read and write the host's side by itself (page-locked: cudaHostRegister) it does, in
order with its steps, and no thread copies; else blocks are gathered, and go through memory in between.

Where a node has several ranks (engine/split.py) all of them have the host memory mapped, and each writes its own heads into it: a
block has one layout, whatever the number of ranks, and who sends or reads one does not know of them. On devices each has a side
for its own heads. Not here: who owns which block; where the bytes come from (engine/shared_bytes.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.device import CPU, begin_copy, lock_pages, wait_for
from engine.model_config import ModelConfig
from engine.shared_bytes import SharedBytes, mapped_bytes
from engine.split import Split
from kernels.cpu_copies import find_copier
from kernels.interface import BlockCopies
from kernels.torch_reference import TorchBlockCopies
from kernels.upload import upload

TORCH_DTYPES: Final = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})
Mirror = bool | Literal["direct"] | None  # see KvSides
_PORTION_BYTES: Final = 64 << 20  # of KV that goes between the two sides at once


def kv_block_bytes(config: ModelConfig, block_size: int, dtype: str) -> int:
    """Bytes of one block for dtype "fp32", "bf16" or "fp16"."""
    numbers = config.num_layers * 2 * block_size * config.num_kv_heads * config.head_dim
    return numbers * TORCH_DTYPES[dtype].itemsize


class KvSides:
    """KV of blocks where transports see it and where rows do: all heads' or one rank's part of them (engine/split.py)."""

    def __init__(
        self,
        host: Tensor,
        device: torch.device = CPU,
        *,
        mirror: Mirror = None,
        copies: BlockCopies | None = None,
    ) -> None:
        """`host`: [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]; the last two dimensions may be a part.

        `mirror`: whether the device's side is memory of its own; "direct": which it copies to and from the host's by itself;
        None: where the device is not a CPU, by itself where it can. True and "direct" on a CPU are for tests: it does there
        what a GPU does. `copies`: the back end's, for the device's side; None: torch's.
        Raises ValueError if the device has not so much.
        """
        self._copies = TorchBlockCopies() if copies is None else copies
        self._host = host
        self.num_blocks: Final[int] = host.shape[0]
        self.block_size: Final[int] = host.shape[3]
        self.is_mirrored: Final = device.type != "cpu" if mirror is None else bool(mirror)
        try:
            self.tensor: Final = torch.zeros(host.shape, dtype=host.dtype, device=device) if self.is_mirrored else host
        except torch.OutOfMemoryError:
            wanted_mib = host.numel() * host.dtype.itemsize >> 20
            raise ValueError(f"--num-blocks {self.num_blocks}: {wanted_mib} MiB do not fit on {device}") from None
        self.is_direct: Final = lock_pages(self, host, device) if mirror is None else mirror == "direct"

    def part(
        self,
        split: Split,
        device: torch.device = CPU,
        *,
        mirror: Mirror = None,
        copies: BlockCopies | None = None,
    ) -> KvSides:
        """A rank's heads of the same blocks, in the same host memory; the arguments as above."""
        heads = split.part(self._host.shape[4])
        return KvSides(self._host[..., heads, :], device, mirror=mirror, copies=copies)

    def gather(self, block_ids: Sequence[int]) -> Tensor:
        """What these blocks hold on the device behind all that it was given so far: a copy that later steps do not change."""
        return self._copies.gather_blocks(
            self.tensor, upload(torch.tensor(block_ids, dtype=torch.int64), self.tensor.device)
        )

    def begin_to_host(self, block_ids: Sequence[int]) -> Tensor | None:
        """Begin to bring what these blocks hold on the device, behind all that it was given so far, to where transports read it.

        None: it is there when the device has come so far. Else it is a copy that later steps do not change, for `to_host`.
        """
        if not self.is_direct:
            return self.gather(block_ids)
        for first, end in runs(block_ids):
            begin_copy(self._host[first:end], self.tensor[first:end])
        return None

    def to_host(self, block_ids: Sequence[int], gathered: Tensor) -> None:
        """Put what was gathered of these blocks where transports read them."""
        self._host.index_copy_(0, torch.tensor(block_ids, dtype=torch.int64), gathered)

    def to_device(self, block_ids: Sequence[int]) -> None:
        """Copy blocks that arrived to where the rows of later steps see them."""
        if self.is_direct:
            for first, end in runs(block_ids):
                begin_copy(self.tensor[first:end], self._host[first:end])
            return
        for some in self._portions(block_ids) if self.is_mirrored else ():
            # Gathered first, so that the device is asked for one copy and not for one a block.
            index, device = torch.tensor(some, dtype=torch.int64), self.tensor.device
            gathered = upload(self._host.index_select(0, index), device)
            self._copies.scatter_blocks(self.tensor, upload(index, device), gathered)

    def from_device(self, block_ids: Sequence[int]) -> None:
        """Put these blocks, as they are behind all that the device was given so far, where transports read them; waits for it."""
        for some in self._portions(block_ids) if self.is_mirrored else ():
            gathered = self.begin_to_host(some)
            if gathered is not None:
                self.to_host(some, gathered.cpu())
        if self.is_direct:
            wait_for(self.tensor.device)

    def _portions(self, block_ids: Sequence[int]) -> Iterator[Sequence[int]]:
        """A handed-over prompt may be gigabytes: so much of it lies beside the pool at once, page-locked and on the device."""
        size = max(1, _PORTION_BYTES // (self._host[0].numel() * self._host.element_size()))
        return (block_ids[begin : begin + size] for begin in range(0, len(block_ids), size))


class KvMemory(KvSides):
    """Owns the memory of all blocks for the life of the process; zeroed. Raises ValueError if there is not so much."""

    def __init__(
        self,
        config: ModelConfig,
        block_size: int,
        num_blocks: int,
        dtype: str,
        device: torch.device = CPU,
        *,
        mirror: Mirror = None,
        copies: BlockCopies | None = None,
    ) -> None:
        """See KvSides."""
        self.block_bytes: Final = kv_block_bytes(config, block_size, dtype)
        self._shared = SharedBytes(num_blocks, self.block_bytes)
        self.bytes: Final[NDArray[np.uint8]] = self._shared.bytes
        self.copier: Final = find_copier()  # by which bytes get into it best; None: nothing was compiled
        host = _as_numbers(self.bytes, config, block_size, dtype)
        super().__init__(host, device, mirror=mirror, copies=copies)

    @property
    def descriptor(self) -> int:
        """The file descriptor by which another process of this host can map the bytes, for reading."""
        return self._shared.descriptor

    @property
    def writers_descriptor(self) -> int:
        """The one by which this node's other ranks map them; see SharedBytes."""
        return self._shared.writers_descriptor


def runs(block_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The same blocks as pieces of the pool, [first, end) each: neighbours in both go together."""
    ends = [at for at in range(1, len(block_ids)) if block_ids[at] != block_ids[at - 1] + 1]
    for begin, end in zip([0, *ends], [*ends, len(block_ids)], strict=True):
        if begin < end:
            yield block_ids[begin], block_ids[end - 1] + 1


def mapped_kv(descriptor: int, config: ModelConfig, block_size: int, num_blocks: int, dtype: str) -> KvSides:
    """The blocks of the process that this descriptor is from, for a rank to take its part of. Raises ValueError."""
    data = mapped_bytes(descriptor, num_blocks, kv_block_bytes(config, block_size, dtype))
    return KvSides(_as_numbers(data, config, block_size, dtype))


def _as_numbers(data: NDArray[np.uint8], config: ModelConfig, block_size: int, dtype: str) -> Tensor:
    shape = (len(data), config.num_layers, 2, block_size, config.num_kv_heads, config.head_dim)
    return torch.from_numpy(data).view(TORCH_DTYPES[dtype]).view(shape)
