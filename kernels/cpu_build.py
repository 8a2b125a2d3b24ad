"""Compiles the C++ of kernels/cpu into one library per kind of CPU, and finds the one that suits this machine.

    python -m kernels.cpu_build            for every CPU of this architecture: an image is built on one and run on others
    python -m kernels.cpu_build --here     what `make setup` runs: what this CPU runs best, and what is next to it
    python -m kernels.cpu_build --usable   what `make test` runs: all that this CPU can run, whose bits tests compare

Both say in one line what they did, and fail never. A library is named after its variant and a hash of its sources and flags, so
that a stale one is never loaded. A node compiles nothing (start within 10 s).
Without C++ compiler, or on other architectures, there is no library, and the node runs, and says that it runs, on numba or torch.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

SOURCE_DIR: Final = Path(__file__).resolve().parent / "cpu"
BUILD_DIR: Final = SOURCE_DIR / "built"
COMPILERS: Final = ("g++", "c++", "clang++")
# No contraction: a product and a sum are one rounding only where the source says so, with any compiler.
FLAGS: Final = "-std=c++17 -O3 -ffp-contract=off -fno-math-errno -fopenmp -shared -fPIC -Wno-psabi".split()
_COMPILE_LIMIT_S: Final = 300.0
_MAKE: Final = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part", "Features")  # the last three: of ARM
# What oneDNN chooses its products by, and kernels of some years spell alike: others are there or not as the kernel knows them.
_MULTIPLIERS: Final = frozenset(
    "sse4_1 avx avx2 fma avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16 avx512_fp16".split()
) | {"amx_tile", "amx_int8", "amx_bf16", "amx_fp16"}


class Variant(NamedTuple):
    """One compilation, and what a CPU must have to run it."""

    name: str
    flags: tuple[str, ...]
    cpu_flags: frozenset[str]  # as /proc/cpuinfo spells them


_V3: Final = frozenset({"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm"})
_V4: Final = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BF16: Final = _V4 | {"avx512_bf16", "avx512vbmi"}
_BF16_FLAGS: Final = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vbmi", "-mprefer-vector-width=512")
_AMX: Final = Variant("amx", (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16"), _BF16 | {"amx_tile", "amx_bf16"})
_AVX512_BF16: Final = Variant("avx512bf16", _BF16_FLAGS, _BF16)
_AVX512: Final = Variant("avx512", ("-march=x86-64-v4", "-mprefer-vector-width=512"), _V4)
_AVX2: Final = Variant("avx2", ("-march=x86-64-v3",), _V3)
# Best first.
X86_VARIANTS: Final = (_AMX, _AVX512_BF16, _AVX512, _AVX2)
# Intel's dot product of bf16 pairs takes longer than what it replaces: a chunk of 256 in 0.6 of its time without (docs/engine.md).
_INTEL_VARIANTS: Final = (_AMX, _AVX512, _AVX512_BF16, _AVX2)


class BuildError(RuntimeError):
    """The library cannot be compiled; the message is one sentence."""


def variants() -> tuple[Variant, ...]:
    """What is built on this architecture, best first."""
    return X86_VARIANTS if platform.machine() in ("x86_64", "AMD64") else ()


def library_path(variant: Variant) -> Path:
    """Where this variant of the sources as they are now belongs."""
    digest = hashlib.sha256(" ".join((*FLAGS, *variant.flags)).encode())
    for path in sorted(SOURCE_DIR.glob("*.[ch]*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return BUILD_DIR / f"baton-{variant.name}-{digest.hexdigest()[:16]}.so"


def bits_name(variant: Variant) -> str:
    """What tells results of this variant of the sources as they are now from those of others."""
    digest = library_path(variant).stem.rpartition("-")[2]
    return f"{variant.name}-{digest[:8]}"


def usable_variants() -> tuple[Variant, ...]:
    """What this CPU can run, best first, built or not."""
    return variants_for(Path("/proc/cpuinfo").read_text(encoding="utf-8")) if variants() else ()


def variants_for(cpuinfo: str) -> tuple[Variant, ...]:
    """What the CPU that has this /proc/cpuinfo can run, best first."""
    is_intel, found = _first_cpu(cpuinfo).get("vendor_id") == "GenuineIntel", cpu_flags(cpuinfo)
    return tuple(each for each in (_INTEL_VARIANTS if is_intel else X86_VARIANTS) if each.cpu_flags <= found)


def compiled_variant() -> Variant | None:
    """The best that this CPU can run of those whose library is there, for the sources as they are now."""
    return next((each for each in usable_variants() if library_path(each).exists()), None)


def is_left_uncompiled() -> bool:
    """Whether this machine could compile what its CPU runs best, and has not since the sources or flags last changed."""
    return usable_variants()[:1] not in ((), (compiled_variant(),)) and any(map(shutil.which, COMPILERS))


def cpu_flags(cpuinfo: str) -> frozenset[str]:
    """The flags that /proc/cpuinfo gives its first CPU."""
    return frozenset(_first_cpu(cpuinfo).get("flags", "").split())


def cpu_kind(cpuinfo: str) -> str:
    """8 hex digits that tell CPUs on which a library may choose unlike products: their make, and what they can multiply with."""
    said = _first_cpu(cpuinfo)
    make = [said.get(name, "") for name in _MAKE]
    flags = sorted(_MULTIPLIERS.intersection(cpu_flags(cpuinfo)))
    return hashlib.sha256("\n".join([*make, *flags]).encode()).hexdigest()[:8]


def _first_cpu(cpuinfo: str) -> dict[str, str]:
    said: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        said.setdefault(name.strip(), value.strip())
    return said


def build(variant: Variant) -> Path:
    """Compile unless it is there already; remove what older sources left. Raises BuildError."""
    path = library_path(variant)
    if path.exists():
        return path
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler on the PATH (looked for {', '.join(COMPILERS)})")
    BUILD_DIR.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=BUILD_DIR
    ) as folder:  # moved when whole: an interrupted build leaves no half library
        made = Path(folder) / path.name
        command = [compiler, *FLAGS, *variant.flags, str(SOURCE_DIR / "library.cpp"), "-o", str(made)]
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_COMPILE_LIMIT_S)
        if result.returncode:
            reason = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr[:200])
            raise BuildError(f"{compiler} does not compile the {variant.name} kernels: {reason.strip()}")
        made.rename(path)
    for stale in BUILD_DIR.glob(f"baton-{variant.name}-*.so"):
        if stale != path:
            stale.unlink()
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Build; a machine that cannot still has a working Baton, so that is no failure."""
    parser = argparse.ArgumentParser(prog="python -m kernels.cpu_build", description="Compile the kernels for CPUs.")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--here", action="store_true", help="only the best two for this CPU, not for every CPU")
    which.add_argument("--usable", action="store_true", help="only what this CPU can run")
    asked = parser.parse_args(arguments)
    # Two: a process may be refused the best one's instructions, as tiles are to one whose stack for signals is small.
    wanted = usable_variants()[:2] if asked.here else usable_variants() if asked.usable else variants()
    missing = [each for each in wanted if not library_path(each).exists()]
    if missing and any(map(shutil.which, COMPILERS)):
        libraries = "a library, half a minute" if len(missing) == 1 else f"{len(missing)} libraries, half a minute each"
        sys.stdout.write(f"kernels: compiling {libraries}\n")
        sys.stdout.flush()
    failures: dict[str, None] = {}  # each once: a compiler that is missing is so for all
    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        for building in [compilers.submit(build, variant) for variant in wanted]:
            try:  # one that fails leaves the others
                building.result()
            except (BuildError, OSError, subprocess.TimeoutExpired) as error:
                failures[str(error)] = None
    for failure in failures:
        sys.stdout.write(f"kernels: {failure}\n")
    built = [each.name for each in usable_variants() if library_path(each).exists()]
    if built:
        sys.stdout.write(f"kernels: built for {', '.join(built)}\n")
    else:
        sys.stdout.write(
            "kernels: none that this CPU runs; nodes here will compute on numba or torch, several times slower\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
