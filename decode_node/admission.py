"""Whether an attempt can be taken: it fits this node's model, and there is room, exactly at the boundary, all or nothing (D01).

With the full reserve policy a sequence is admitted only if it can grow to its limit, so that nothing ever has to be preempted:
what it does not take at once is promised (BlockPool.promise), and a promise counts as taken for everybody else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.prefix_cache import PrefixCache
from node.identity import NodeLimits
from proto import baton_pb2 as pb


@dataclass(frozen=True, slots=True)
class BlockNeed:
    """Blocks of one attempt: to hold now, and more later."""

    num_now: int  # prompt, generated and one more token
    num_growth: int  # up to the limit; the last sampled token's KV is never written


def block_need(num_tokens: int, max_total_tokens: int, block_size: int) -> BlockNeed:
    """The need of a sequence that starts with the KV of `num_tokens` tokens and ends with at most `max_total_tokens` tokens."""
    num_now = -(-(num_tokens + 1) // block_size)
    num_total = -(-(max_total_tokens - 1) // block_size)
    return BlockNeed(num_now, max(0, num_total - num_now))


@dataclass(frozen=True, slots=True)
class LeasedBlocks:
    """What a granted attempt holds: the first `num_held` blocks are shared and hold the right KV already."""

    block_ids: tuple[int, ...]
    num_held: int
    num_promised: int

    @property
    def held(self) -> tuple[int, ...]:
        """Referenced blocks of the prefix cache: never written."""
        return self.block_ids[: self.num_held]

    @property
    def leased(self) -> tuple[int, ...]:
        """Blocks that the sender writes, and the one that decoding begins in."""
        return self.block_ids[self.num_held :]


def take_blocks(
    pool: BlockPool, cache: PrefixCache, need: BlockNeed, block_keys: Sequence[bytes]
) -> LeasedBlocks | None:
    """Lease what the need asks for, leading blocks from the prefix cache; None, and no change, if there is no room."""
    held = cache.acquire_match(block_keys, len(block_keys))
    num_new = need.num_now - len(held)
    if num_new + need.num_growth > pool.num_available:
        pool.free(held)
        return None
    leased = pool.lease(num_new)
    pool.promise(need.num_growth)
    return LeasedBlocks((*held, *leased), len(held), need.num_growth)


def return_blocks(pool: BlockPool, blocks: LeasedBlocks) -> None:
    """Give everything back, once no write can touch it."""
    pool.release_lease(blocks.leased)
    pool.free(blocks.held)
    pool.unpromise(blocks.num_promised)


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
    if len(request.block_keys) != num_full or len(set(request.block_keys)) != num_full:
        return f"block_keys are not one each for the {num_full} full blocks of num_tokens {request.num_tokens}"
    return None
