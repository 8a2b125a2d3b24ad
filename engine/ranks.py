"""How the ranks of one node exchange activations: torch.distributed, gloo on CPUs, NCCL on CUDA devices.

Nothing is added up on the way: what a rank has computed is copied to the others, byte for byte (engine/split.py says why).
Not here: what the ranks compute (engine/model.py), when (engine/lockstep.py), their processes (node/ranks.py).
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor

from engine.split import Split

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Ranks wait for each other for what differs in their speed, never for work: what takes longer is one that hangs.
PATIENCE: Final = timedelta(seconds=60)


class Ranks(Protocol):
    """The ranks of a node, seen by one of them; each calls the same in the same order, and waits for the others."""

    def gathered(self, columns: Tensor) -> Tensor:
        """All ranks' columns, [num_rows, width] each, side by side in the ranks' order: [num_rows, size * width].

        RuntimeError: a rank has gone, or hangs.
        """

    def meet(self) -> None:
        """Wait until every rank has come so far. Raises as `gathered`."""


class GroupOfRanks:
    """Ranks over a process group of torch.distributed."""

    def __init__(self, group: Any, split: Split, device: torch.device) -> None:
        self._group = group
        self._size = split.size
        self._nothing = torch.zeros((1, 1), device=device)

    def gathered(self, columns: Tensor) -> Tensor:
        """See Ranks."""
        num_rows, width = columns.shape
        parts = columns.new_empty((self._size * num_rows, width))
        # As bytes: they are only copied, and every library copies those.
        self._group._allgather_base(parts.view(torch.uint8), columns.contiguous().view(torch.uint8)).wait()
        return parts.view(self._size, num_rows, width).transpose(0, 1).reshape(num_rows, self._size * width)

    def meet(self) -> None:
        """See Ranks."""
        self.gathered(self._nothing).cpu()


def meeting_store(path: str, size: int) -> Store:
    """By which the processes of `size` ranks find each other: in a file that all can open."""
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    return FileStore(path, size)


def join_ranks(split: Split, store: Store, device: torch.device) -> GroupOfRanks:
    """Meet the other ranks by a store that all have; on a CPU through sockets of the loopback interface.

    RuntimeError: somebody does not come. On CUDA it is the same code over NCCL, and has never run.
    """
    store.set_timeout(PATIENCE)
    # Imported where they are needed: a node of one rank does without, and NCCL's is there where torch is built for CUDA.
    if device.type == "cuda":
        from torch.distributed import ProcessGroupNCCL

        of_nccl = ProcessGroupNCCL.Options()
        of_nccl._timeout = PATIENCE
        return GroupOfRanks(ProcessGroupNCCL(store, split.rank, split.size, of_nccl), split, device)
    from torch.distributed import ProcessGroupGloo

    of_gloo: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    of_gloo._timeout = PATIENCE
    of_gloo._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return GroupOfRanks(ProcessGroupGloo(store, split.rank, split.size, of_gloo), split, device)
