"""Numbers of the dtype and fp32, in Triton: widening, rounding and products that mean the same on a device and in the interpreter.

Triton's interpreter (3.7.1, and 3.9.0) keeps bf16 as integers: arithmetic adds bit patterns, and a cast from fp32 cuts off instead
of rounding to nearest even. So nothing here computes in the dtype, and where IS_INTERPRETED casts are written out in bits.
"""

import triton
import triton.language as tl

# What triton.jit goes by, too, when it meets the functions below.
IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def widened(numbers):
    """fp32 of what was loaded."""
    if IS_INTERPRETED and numbers.dtype == tl.bfloat16:
        bits = numbers.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True)
    return numbers.to(tl.float32)


@triton.jit
def narrowed(numbers, dtype: tl.constexpr):
    """fp32 rounded to the dtype, to nearest even; what is not a number stays none."""
    if IS_INTERPRETED and dtype == tl.bfloat16:
        bits = numbers.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        high = tl.where(numbers == numbers, nearest, 0x7FC0)
        return high.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return numbers.to(dtype)


@triton.jit
def rounded(numbers, dtype: tl.constexpr):
    """fp32 that the dtype holds."""
    return widened(narrowed(numbers, dtype))


@triton.jit
def multiply(left, right, total):
    """total + left @ right of two tiles of the dtype; products and sums are fp32, never tf32.

    The interpreter's dot is numpy's, whose order of summation depends on where in the tile a row is: there, plain sums.
    """
    if IS_INTERPRETED:
        return total + tl.sum(widened(left)[:, :, None] * widened(right)[None, :, :], 1)
    return tl.dot(left, right, total, input_precision="ieee")
