"""Whole KV blocks in and out of a device's pool, in Triton: what a transport sends lies together, what it receives is spread out.

A block is one contiguous span, all layers (engine/kv_memory.py), so both are copies of whole words, whatever the dtype.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_words"])
def copy_blocks(
    pool,  # [num_blocks, num_words]
    block_ids,  # [num_chosen] int64
    together,  # [num_chosen, num_words]
    num_words,
    WORDS: tl.constexpr,
    IS_GATHER: tl.constexpr,
):
    """From the pool to `together`, or back. Grid: (num_chosen, words of a block by WORDS)."""
    index = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    is_there = words < num_words
    block = pool + tl.load(block_ids + index) * num_words + words
    beside = together + index * num_words + words
    if IS_GATHER:
        tl.store(beside, tl.load(block, mask=is_there), mask=is_there)
    else:
        tl.store(block, tl.load(beside, mask=is_there), mask=is_there)
