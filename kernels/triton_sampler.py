"""A step's draws, in Triton: the token of each row where its logits are, in one launch, or two where anybody is drawn by chance.

    a row:         ──slice──┬──slice──┬──slice──     a program each: the best of its tokens, and which one
                            ▼
    the program of the row that arrives last         the best of those, and which one

    greatest_of_rows     by logit: that is who wins at temperature 0; the greatest logit is what scores are taken from
    winners_of_rows      by score: (logit - greatest) / temperature + Gumbel noise, of rows whose temperature is not 0

The same numbers in the same order as engine/device_sampler.py: the difference is rounded to fp32, all that follows to fp64. fp64's
tl.log is __nv_log of CUDA's libdevice, as log is in torch's own kernels; but torch lets the compiler contract what is in it, which
may change the last bit. At temperature 0 no logarithm is taken, nor a difference: of fp32 numbers only equals have none.
The best of a row is one of its numbers, so neither slices nor who is last have any say in it. Of equals the lowest id wins.

Which program is last: each counts itself in `arrived`, behind what it has stored. The counters are 0 at first and again at the end.
"""

import triton
import triton.language as tl

from kernels.triton_numbers import widened

# SplitMix64, as in engine/sampler.py.
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)
NO_ID = tl.constexpr((1 << 31) - 1)


@triton.jit(do_not_specialize=["broken"])
def greatest_of_rows(
    logits,  # [num_rows, VOCAB_SIZE]
    slots,  # [num_rows] int64
    broken,  # what is drawn where the greatest is not finite
    drawn,  # [num_rows] int64: out
    last,  # [num_slots] int64: out, at the rows' slots what is drawn, 0 where that is `broken`
    greatest,  # [num_rows] fp64: out
    bests,  # [num_rows, num_slices] fp64: the slices' own
    ids,  # [num_rows, num_slices] int32
    arrived,  # [num_rows] int32, all 0
    VOCAB_SIZE: tl.constexpr,
    SLICE: tl.constexpr,
    SLICES: tl.constexpr,
):
    """The greatest logit of each row, and the row's token if that is who wins. Grid: (num_slices, num_rows)."""
    row = tl.program_id(1).to(tl.int64)
    token_ids = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
    values = _logits(logits, row, token_ids, VOCAB_SIZE)
    if _is_last(values.to(tl.float64), token_ids, row, bests, ids, arrived):
        best, best_id = _best_of_row(row, bests, ids, SLICES)
        tl.store(greatest + row, best)
        is_broken = (best == float("inf")) | (best == float("-inf"))
        tl.store(drawn + row, tl.where(is_broken, broken, best_id).to(tl.int64))
        tl.store(last + tl.load(slots + row), tl.where(is_broken, 0, best_id).to(tl.int64))


@triton.jit
def winners_of_rows(
    logits,  # as above, as are all of these names
    temperatures,  # [num_rows] fp64
    streams,  # [num_rows] int64, the 64 bits of where a row's noise begins
    slots,
    drawn,
    last,
    greatest,
    bests,
    ids,
    arrived,
    VOCAB_SIZE: tl.constexpr,
    SLICE: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Draw by chance in the rows that have a temperature and are not broken. Grid: (num_slices, num_rows)."""
    row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperatures + row)
    most = tl.load(greatest + row)
    if (temperature > 0) & (most < float("inf")) & (most > float("-inf")):
        token_ids = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
        below = _logits(logits, row, token_ids, VOCAB_SIZE) - most.to(tl.float32)
        stream = tl.load(streams + row).to(tl.uint64, bitcast=True)
        scores = below.to(tl.float64) / temperature + _noise(stream, token_ids)
        if _is_last(scores, token_ids, row, bests, ids, arrived):
            _, best_id = _best_of_row(row, bests, ids, SLICES)
            tl.store(drawn + row, best_id.to(tl.int64))
            tl.store(last + tl.load(slots + row), best_id.to(tl.int64))


@triton.jit
def _logits(logits, row, token_ids, VOCAB_SIZE: tl.constexpr):
    """In fp32; infinite where there is no number, which breaks the row, and the least there is past the end of the vocabulary."""
    is_there = token_ids < VOCAB_SIZE
    values = widened(tl.load(logits + row * VOCAB_SIZE + token_ids, mask=is_there))
    # A reduction may or may not pass on what is no number.
    values = tl.where(values == values, values, float("inf"))
    return tl.where(is_there, values, float("-inf"))


@triton.jit
def _noise(stream, token_ids):
    """Standard Gumbel noise in fp64."""
    state = stream + (token_ids.to(tl.uint64) + 1) * GOLDEN
    state = (state ^ (state >> 30)) * MIX_1
    state = (state ^ (state >> 27)) * MIX_2
    state = state ^ (state >> 31)
    uniform = ((state >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2 ** -52
    return -tl.log(-tl.log(uniform))


@triton.jit
def _is_last(values, token_ids, row, bests, ids, arrived):
    """Store the best of a slice and its lowest id; whether all other slices of the row have stored theirs, by now."""
    best = tl.max(values, 0)
    place = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(bests + place, best)
    tl.store(ids + place, tl.min(tl.where(values == best, token_ids, NO_ID), 0))
    tl.debug_barrier()  # whichever threads have stored, it is done when one of them counts
    is_last = tl.atomic_add(arrived + row, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1
    if is_last:
        tl.store(arrived + row, 0)  # for the next launch
    return is_last


@triton.jit
def _best_of_row(row, bests, ids, SLICES: tl.constexpr):
    """The best of its slices, and the lowest id that has it. Read past the first cache, which other programs do not write to."""
    num_slices = tl.num_programs(0)
    slices = tl.arange(0, SLICES)
    is_there = slices < num_slices
    places = row * num_slices + slices
    found = tl.load(bests + places, mask=is_there, other=float("-inf"), cache_modifier=".cg")
    found_ids = tl.load(ids + places, mask=is_there, other=NO_ID, cache_modifier=".cg")
    best = tl.max(found, 0)
    return best, tl.min(tl.where(found == best, found_ids, NO_ID), 0)
