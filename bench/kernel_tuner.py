"""`python -m bench.kernels --tune on`: measures tile shapes on this machine's GPU and writes kernels/triton_table.json anew.

    processes, each with a CUDA context of its own    compile all candidates into Triton's cache on disk, for so long at most
    this one                                          times them as graphs, case by case; asks whether bits agree; writes

The processes are forked before this one has a CUDA context, which no child could use. Which candidates there are and which are
kept is decided in kernel_tuning.py.
"""

from __future__ import annotations

import json
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from bench.forked import forked
from bench.graph_clock import CapturedCalls, copies_for
from bench.kernel_cases import AttentionCase, Case, Inputs, LinearCase
from bench.kernel_tuning import (
    DTYPES,
    HEAD_DIMS,
    ITEMSIZES,
    AttentionCandidate,
    Candidate,
    Device,
    LinearCandidate,
    agreed,
    candidates_of,
    ranked_attention,
    ranked_linears,
    served_slot,
    table_text,
    with_measured,
)
from bench.progress import StepProgress
from engine.kv_memory import TORCH_DTYPES
from kernels.interface import AttentionBatch
from kernels.triton_agreement import agreeing_attention, agreeing_shapes
from kernels.triton_graphs import CudaCapture
from kernels.triton_kernels import COMPILER_FAILURES, TritonKernels, first_line
from kernels.triton_tuning import TABLE, AttentionTuning, LinearShapes, LinearTuning, OneShape, Table, read_table

_CUDA: Final = torch.device("cuda")
_ASK_S: Final = 60
_COMPILE_S: Final = 50  # for all; what is not compiled by then is not tried
_LEAST_S: Final = 0.0005  # of one time
_NUM_TIMES: Final = 3
_GROUP_SIZE: Final = 4
_MOST_OPERATIONS: Final = {"bf16": 1 << 40, "fp32": 20 << 30}  # of a case: fp32 is multiplied without tensor cores
# What Triton, torch and the device raise where a candidate does not compile, or does not fit.
_FAILURES: Final = (*COMPILER_FAILURES, RuntimeError, ValueError, LookupError, TypeError, AttributeError, OSError)
_PLAIN: Final = (
    *(LinearCase(rows, 4096, 6144) for rows in (1, 16, 64, 256)),
    *(LinearCase(rows, 4096, 4096) for rows in (1, 64, 128, 512, 2048)),
    *(LinearCase(rows, 14336, 4096) for rows in (1, 64, 512)),
    *(LinearCase(rows, 4096, 128256) for rows in (1, 64)),
    *(LinearCase(rows, 2048, 2048) for rows in (1, 64)),
    LinearCase(1, 14336, 2048),
    LinearCase(1, 576, 1536),
)
_GATED: Final = (
    *(LinearCase(rows, 4096, 14336, is_gated=True) for rows in (1, 16, 64, 256, 512, 2048)),
    *(LinearCase(rows, 2048, 8192, is_gated=True) for rows in (1, 512)),
    *(LinearCase(rows, 2048, 4096, is_gated=True) for rows in (1, 64)),
    *(LinearCase(rows, 2048, 2048, is_gated=True) for rows in (1, 64)),
    LinearCase(1, 576, 1536, is_gated=True),
)
_ATTENTION: Final = (
    *(AttentionCase(batch, length) for batch, length in ((1, 1024), (1, 8192), (8, 8192), (64, 1024))),
    *(AttentionCase(1, length, rows) for length, rows in ((512, 512), (8192, 512), (2048, 2048))),
)


class _Run(NamedTuple):
    """What is measured with."""

    table: Table
    device: Device

    def kernels(self, attention: AttentionTuning | None = None, linear: LinearTuning | None = None) -> TritonKernels:
        """A back end with one shape, of which it is not asked whether it agrees with others."""
        return TritonKernels(OneShape(self.table, attention, linear), self.device.capability)

    def multiply(self, shape: LinearTuning, x: Tensor, weight: Tensor, *, is_gated: bool) -> Tensor:
        """One product."""
        kernels = self.kernels(linear=shape)
        return (kernels.pack_gate_up if is_gated else kernels.pack_linear)(weight)(x)

    def attend(self, tuning: AttentionTuning, kv: Tensor, batch: AttentionBatch, queries: Tensor) -> Tensor:
        """One layer."""
        return self.kernels(tuning).step_attention(kv, batch, queries.shape[1]).attend(0, queries)

    def agreeing(self, dtype: str, is_gated: bool, shapes: LinearShapes) -> LinearShapes:
        """Those of a list that give a row the same bits."""
        multiply = partial(self.multiply, is_gated=is_gated)
        return agreeing_shapes(shapes, multiply, TORCH_DTYPES[dtype], _CUDA, is_gated=is_gated)


def tune(console: Console) -> dict[str, Any] | None:
    """Measure and write the table; all times, JSON-able. None where there is no GPU. Call it before this process uses CUDA."""
    device = _device()
    if device is None:
        return None
    run = _Run(read_table(), device)
    candidates = candidates_of(run.table, device)
    compiled = list(_compiled(run, candidates, console))
    with torch.inference_mode():
        times = _timed(run, compiled, console)
        attention, linear = _chosen(run, times, console)
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    TABLE.write_text(table_text(with_measured(table, device.name, attention, linear)) + "\n", encoding="utf-8")
    console.print(f"written: {TABLE}")
    told = []
    for candidate, seconds in times.items():
        names = [case.name for case in cases_for(*run, candidate)]
        told.append({"candidate": candidate._asdict(), "seconds": dict(zip(names, seconds, strict=True))})
    return {"tuned": device._asdict(), "times": told}


def _device() -> Device | None:
    """Asked by another process, for this one must not use CUDA yet."""
    for _, said in forked(_found_device, 1, 1, _ASK_S):
        found = json.loads(said)
        return found and Device(tuple(found[0]), *found[1:])
    return None


def _found_device(_: int) -> str:
    """In a process of its own."""
    if not torch.cuda.is_available():
        return "null"
    import triton

    index = torch.cuda.current_device()
    shared_bytes = triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]
    num_processors = torch.cuda.get_device_properties(index).multi_processor_count
    return json.dumps(Device(torch.cuda.get_device_capability(), num_processors, shared_bytes))


def _compiled(run: _Run, candidates: list[Candidate], console: Console) -> Iterator[Candidate]:
    """Those that compile in time and run."""
    num_processes, num_ended = len(os.sched_getaffinity(0)), 0
    console.print(f"{len(candidates)} candidates for sm_{run.device.name}, compiled by {num_processes} processes")
    why: Counter[str] = Counter()
    with StepProgress(console, "candidates compiled", len(candidates)) as progress:
        ended = forked(lambda index: _compile(run, candidates[index]), len(candidates), num_processes, _COMPILE_S)
        for index, failure in ended:
            num_ended += 1
            progress.advance(_name(candidates[index]))
            if failure:
                why[failure] += 1
            else:
                yield candidates[index]
    if num_ended < len(candidates):
        console.print(
            f"{len(candidates) - num_ended} have not ended within {_COMPILE_S} s, or broke their process, and are not tried"
        )
    for failure, count in why.most_common(5):
        console.print(f"{count} do not run: {failure}")


def _compile(run: _Run, candidate: Candidate) -> str:
    """In a process of its own: run it once, small, as it will be timed and as it will be asked whether it agrees.

    "", or why it does not run.
    """
    dtype = TORCH_DTYPES[candidate.dtype]
    try:
        with torch.inference_mode():
            if isinstance(candidate, LinearCandidate):
                # Triton compiles multiples of 16 and others apart.
                cases: list[Case] = [LinearCase(17, depth, 384, candidate.is_gated) for depth in (1024, 1000)]
            else:
                rows = 1 if candidate.is_split else 256
                cases = [AttentionCase(1, 1200, rows, _GROUP_SIZE, 1, candidate.head_dim)]
            for case in cases:
                case.drawn(dtype, _CUDA, 1).ours(_kernels(run, candidate))[0]()
            torch.cuda.synchronize()
    except _FAILURES as error:
        torch.cuda.synchronize()  # raises where the context is broken: then this process is of no use any more, and ends
        return f"{type(error).__name__}: {first_line(error)[:100]}"
    return ""


def _kernels(run: _Run, candidate: Candidate) -> TritonKernels:
    if isinstance(candidate, LinearCandidate):
        return run.kernels(linear=candidate.shape)
    return run.kernels(candidate.tuning)


def _name(candidate: Candidate) -> str:
    if isinstance(candidate, LinearCandidate):
        kind = "gated" if candidate.is_gated else "linear"
        return f"{candidate.dtype} {kind} {candidate.shape.rows} x {candidate.shape.columns}"
    return f"{candidate.dtype} head_dim {candidate.head_dim}, {'decode' if candidate.is_split else 'chunk'}"


def cases_for(table: Table, device: Device, candidate: Candidate) -> list[Case]:
    """What a candidate is timed with: what it would serve."""
    if isinstance(candidate, AttentionCandidate):
        found: Iterable[Case] = (
            replace(case, head_dim=candidate.head_dim)
            for case in _ATTENTION
            if (case.num_rows == 1) == candidate.is_split
        )
    else:
        shapes = table.linear(table.device(device.capability), candidate.dtype, is_gated=candidate.is_gated)
        found = (
            case
            for case in (_GATED if candidate.is_gated else _PLAIN)
            if served_slot(shapes, case.num_rows, case.out_features, device) == candidate.slot
        )
    return [case for case in found if case.num_operations <= _MOST_OPERATIONS[candidate.dtype]]


def _timed(run: _Run, candidates: list[Candidate], console: Console) -> dict[Candidate, list[float]]:
    """Seconds of each candidate's cases; those that failed once are left out. Each case's numbers are drawn once."""
    by_case: dict[tuple[str, Case], list[Candidate]] = {}
    for candidate in candidates:
        for case in cases_for(*run, candidate):
            by_case.setdefault((candidate.dtype, case), []).append(candidate)
    times: dict[Candidate, list[float]] = {}
    failed: set[Candidate] = set()
    l2_bytes = torch.cuda.get_device_properties(_CUDA).L2_cache_size
    with StepProgress(console, "cases timed", len(by_case)) as progress:
        for (dtype, case), tried in by_case.items():
            num_copies = copies_for(case.copied_bytes(ITEMSIZES[dtype]), l2_bytes)
            inputs = case.drawn(TORCH_DTYPES[dtype], _CUDA, num_copies)
            for candidate in tried:
                try:
                    times.setdefault(candidate, []).append(_seconds(run, candidate, inputs))
                except _FAILURES as error:
                    failed.add(candidate)
                    console.print(f"{case.name}: {_name(candidate)}: {first_line(error)[:100]}")
            del inputs
            torch.cuda.empty_cache()  # the graphs' memory, too
            progress.advance(f"{dtype} {case.name}")
    return {candidate: found for candidate, found in times.items() if candidate not in failed}


def _seconds(run: _Run, candidate: Candidate, inputs: Inputs) -> float:
    calls = CapturedCalls(inputs.ours(_kernels(run, candidate)), CudaCapture(), _LEAST_S)
    return statistics.median(calls.seconds() for _ in range(_NUM_TIMES))


def _chosen(
    run: _Run, times: dict[Candidate, list[float]], console: Console
) -> tuple[dict[tuple[str, int], AttentionTuning], dict[tuple[str, bool], LinearShapes]]:
    """What the table shall say: the fastest whose bits agree; what it says already where nothing was timed."""
    place = run.table.device(run.device.capability)
    attention: dict[tuple[str, int], AttentionTuning] = {}
    linear: dict[tuple[str, bool], LinearShapes] = {}
    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            agrees: Callable[[AttentionTuning], bool] = partial(_agrees, run, TORCH_DTYPES[dtype], head_dim)
            own = run.table.attention(place, dtype, head_dim)
            ranked = ranked_attention(dtype, head_dim, times)
            attention[dtype, head_dim] = next(filter(agrees, ranked), own)
            console.print(f"{dtype}, head_dim {head_dim}: {attention[dtype, head_dim]}")
        for is_gated in (False, True):
            ranked_shapes = ranked_linears(
                run.table.linear(place, dtype, is_gated=is_gated), dtype, times, is_gated=is_gated
            )
            linear[dtype, is_gated] = agreed(ranked_shapes, partial(run.agreeing, dtype, is_gated))
            for shape in linear[dtype, is_gated]:
                console.print(f"{dtype}, {'gated' if is_gated else 'plain'}: {shape}")
    return attention, linear


def _agrees(run: _Run, dtype: torch.dtype, head_dim: int, tuning: AttentionTuning) -> bool:
    found = agreeing_attention(tuning, run.attend, dtype, _CUDA, head_dim, _GROUP_SIZE)
    return found == tuning
