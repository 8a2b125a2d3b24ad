"""Whether an attempt can be taken: it fits this node's model, and there is room, exactly at the boundary, all or nothing (D01).

Under the reserve policy "full" a sequence is admitted only if it can grow to its limit, so that nothing ever has to be preempted:
what it does not take at once is promised (BlockPool.promise), and a promise counts as taken for everybody else. Under the others
growth takes what is there, and admission leaves some room for it (engine/reserve.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.prefix_cache import PrefixCache
from node.identity import NodeLimits
from proto import baton_pb2 as pb


@dataclass(frozen=True, slots=True)
class BlockNeed:
    """Blocks of one attempt: to hold now, and more later."""

    num_full: int  # full blocks of the tokens whose KV will be written: shared by all branches
    num_branches: int  # each has one more block of its own, in which it begins
    num_growth: int  # of each branch, up to the limit; the last sampled token's KV is never written

    @property
    def num_now(self) -> int:
        """Before anything grows."""
        return self.num_full + self.num_branches

    @property
    def num_total(self) -> int:
        """Everything together."""
        return self.num_full + self.num_branches * (1 + self.num_growth)


def block_need(num_tokens: int, max_total_tokens: int, block_size: int, num_branches: int = 1) -> BlockNeed:
    """The need of sequences that start with the KV of `num_tokens` tokens and end with at most `max_total_tokens` tokens."""
    num_full = num_tokens // block_size
    num_total = -(-(max_total_tokens - 1) // block_size)
    return BlockNeed(num_full, num_branches, max(0, num_total - num_full - 1))


@dataclass(frozen=True, slots=True)
class LeasedBlocks:
    """What a granted attempt holds, in the lease's order: full blocks, then the last block of each branch.

    The first `num_held` are shared and hold the right KV already.
    """

    full: tuple[int, ...]
    last: tuple[int, ...]  # by branch
    num_held: int
    num_growth: int  # promised to each branch

    @property
    def all(self) -> tuple[int, ...]:
        """By block index of the lease."""
        return self.full + self.last

    @property
    def held(self) -> tuple[int, ...]:
        """Referenced blocks of the prefix cache: never written."""
        return self.full[: self.num_held]

    @property
    def leased(self) -> tuple[int, ...]:
        """Blocks that the sender writes, and those that decoding begins in."""
        return self.full[self.num_held :] + self.last


def take_blocks(
    pool: BlockPool,
    cache: PrefixCache,
    need: BlockNeed,
    block_keys: Sequence[bytes],
    is_promised: bool,
    has_room: Callable[[int], bool],
) -> LeasedBlocks | None:
    """Lease what the need asks for, leading blocks from the prefix cache; None, and no change, if there is no room.

    `is_promised`: growth is promised as well. `has_room` says whether so many blocks may be taken, promised ones included.
    """
    held = cache.acquire_match(block_keys, len(block_keys))
    num_wanted = (need.num_total if is_promised else need.num_now) - len(held)
    if not has_room(num_wanted):
        pool.free(held)
        return None
    leased = pool.lease(need.num_now - len(held))
    num_growth = need.num_growth if is_promised else 0
    pool.promise(need.num_branches * num_growth)
    num_full = need.num_full - len(held)
    return LeasedBlocks((*held, *leased[:num_full]), tuple(leased[num_full:]), len(held), num_growth)


def return_blocks(pool: BlockPool, blocks: LeasedBlocks) -> None:
    """Give everything back, once no write can touch it."""
    pool.release_lease(blocks.leased)
    pool.free(blocks.held)
    pool.unpromise(len(blocks.last) * blocks.num_growth)


def start_branches(pool: BlockPool, blocks: LeasedBlocks, positions: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Make the lease's blocks those of sequences: by position of a branch that starts, its blocks, one reference each.

    Of each that does not, the last block and the promises are given back. There is at least one position; no write runs.
    """
    idle = [position for position in range(len(blocks.last)) if position not in positions]
    pool.commit_lease([*blocks.full[blocks.num_held :], *(blocks.last[position] for position in positions)])
    for _ in positions[1:]:
        pool.acquire(blocks.full)
    pool.release_lease([blocks.last[position] for position in idle])
    pool.unpromise(len(idle) * blocks.num_growth)
    return {position: (*blocks.full, blocks.last[position]) for position in positions}


def fingerprint_difference(ours: pb.Fingerprint, theirs: pb.Fingerprint) -> str | None:
    """The first field in which a sender's fingerprint differs, with both values, in words (H10); None if they are equal."""
    for field in ours.DESCRIPTOR.fields:
        here, there = getattr(ours, field.name), getattr(theirs, field.name)
        if here != there:
            return f"{field.name} is {here} here and {there} at the sender"
    return None


def request_flaw(request: pb.ReserveRequest, block_size: int, limits: NodeLimits) -> str | None:
    """What in a Reserve no right sender asks for, or this node can never give, in words; None if nothing."""
    if request.max_total_tokens > limits.max_model_len:
        return f"max_total_tokens {request.max_total_tokens} exceeds max_model_len {limits.max_model_len}"
    num_full = request.num_tokens // block_size
    num_keys = len(request.block_keys)  # of a sequence that moves, those of the blocks that are known
    if (
        num_keys > num_full
        or len(set(request.block_keys)) != num_keys
        or (num_keys < num_full and request.more_choices)
    ):
        return f"block_keys are not one each for the {num_full} full blocks of num_tokens {request.num_tokens}"
    return None
