"""Bugs of weights in 8 bits: how they are rounded, in which order their scales lie, whose KV they make."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_INT8: Final = ("tests/kernels/test_int8.py",)

MUTANTS: Final = (
    Mutant(
        "int8-kv-passes-for-that-of-full-weights",
        "A back end has the same name with weights in 8 bits, so nodes that differ in that exchange KV.",
        "kernels/int8_weights.py",
        'INT8_SUFFIX: Final = "-int8"',
        'INT8_SUFFIX: Final = ""',
        _INT8,
    ),
    Mutant(
        "int8-weights-are-cut-off",
        "Weights are rounded towards zero, not to the nearest.",
        "kernels/int8_weights.py",
        "(wide / steps).round_()",
        "(wide / steps).trunc_()",
        _INT8,
    ),
    Mutant(
        "int8-scales-of-a-gate-in-the-file-s-order",
        "A gated linear's scales lie as in the file, while its columns alternate between gate and up.",
        "kernels/cpu_linear.py",
        "_in_panels(rounded.scales, is_gated)",
        "_in_panels(rounded.scales, False)",
        _INT8,
    ),
    Mutant(
        "int8-is-not-told-to-the-engine",
        "A node takes the flag and computes with weights in full.",
        "node/assembly.py",
        "config.kernels, device, config.weight_dtype, split)",
        'config.kernels, device, "auto", split)',
        ("tests/node/test_two_nodes.py",),
    ),
)
