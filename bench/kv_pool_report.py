"""`python -m bench.kv_pool_report STORES.json STEPS.json > FILE.md`: what bench.kv_pool and bench.kv_pool_step found, as text."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from bench.result_files import results_of

_STORES: Final = {"memcpy": "memory", "file": "directory", "redis": "server"}  # what is under a store -> the store
_STORE_HEADINGS: Final = (
    "blocks",
    "memcpy GB/s",
    "memory",
    "keyed",
    "files GB/s",
    "directory",
    "keyed",
    "redis GB/s",
    "server",
    "keyed",
)
_STEP_HEADINGS: Final = (
    "KV pool",
    "p50 ms",
    "ratio",
    "mean ms",
    "ratio",
    "p99 ms",
    "ratio",
    "blocks to save",
    "dropped",
    "written",
)


def markdown(stores: Mapping[str, Any], steps: Mapping[str, Any]) -> str:
    """Of both benchmarks' JSON: commands, machine, a table for writing, one for reading, one for steps."""
    machine, of_stores, of_steps = stores["machine"], stores["settings"], steps["settings"]
    lines = [
        "# The KV pool: stores against what is under them, and a node's steps beside one",
        "",
        f"{stores['date'][:10]}, {machine['cores']} cores of an {machine['cpu_model']}, {machine['memory_bytes'] / 2**30:.0f} GiB.",
        "",
        "## Stores",
        "",
        f"    {stores['command']}",
        "",
        f"A run of {of_stores['run_mib']} MiB written, read back and forgotten; median of {of_stores['rounds']} rounds, in",
        "brackets where eight of ten lie. Ratios are taken within a round: `memory` to `np.copyto`, `directory` to a file of its",
        "own for each block, written and read plainly (page cache: nothing waits for a disk), `server` to pipelined `SET` and",
        "`GET` by the same client. Keyed: with a cluster's secret.",
    ]
    for operation in ("write", "read"):
        lines += ["", f"### {operation}", "", *_head(_STORE_HEADINGS), *_store_rows(stores["cases"], operation)]
    lines += [
        "",
        "## Steps beside a pool",
        "",
        f"    {steps['command']}",
        "",
        f"{of_steps['rounds']} rounds of {of_steps['steps']} steps of each by turns, {of_steps['batch']} sequences at once, each "
        f"{of_steps['prompt_tokens']} tokens and about {of_steps['output_tokens']} more,",
        f"blocks for {of_steps['pool_percent']} % of them: some give way, all are saved.",
        f"`slow` takes {of_steps['slow_ms']} ms for a block. Ratios are to the",
        "steps without a pool in the same round, medians over rounds; a step in which a prompt is computed is a long one.",
        "",
        *_head(_STEP_HEADINGS),
        *map(_step_row, steps["ways"]),
    ]
    return "\n".join(lines) + "\n"


def _head(headings: Sequence[str]) -> tuple[str, str]:
    return f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)


def _store_rows(cases: Sequence[Mapping[str, Any]], operation: str) -> Iterator[str]:
    for case in cases:
        by_way = {way["way"]: way for way in case["ways"] if way["operation"] == operation}
        cells = [f"{case['block_bytes'] >> 10} KiB"]
        for limit, store in _STORES.items():
            cells.append(f"{by_way[limit]['gb_per_s']['p50']:.2f}" if limit in by_way else "")
            for name in (store, f"{store} keyed"):
                cells.append(_spread(by_way[name]["ratio"]) if name in by_way else "")
        yield f"| {' | '.join(cells)} |"


def _spread(ratio: Mapping[str, float]) -> str:
    return f"{ratio['p50']:.2f} ({ratio['p10']:.2f}–{ratio['p90']:.2f})"


def _step_row(way: Mapping[str, Any]) -> str:
    cells = [str(way["way"])]
    for name in ("p50", "mean", "p99"):
        cells += [f"{1000 * way[f'{name}_s']:.2f}", f"{way[f'{name}_ratio']:.2f}"]
    cells += [f"{way[name]:.0f}" for name in ("num_saved", "num_dropped", "num_written")]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    about = "What bench.kv_pool and bench.kv_pool_step found, in this order, as text."
    stores, steps = results_of("bench.kv_pool_report", about, [{"kv_pool"}, {"kv_pool_step"}], sys.argv[1:])
    sys.stdout.write(markdown(stores, steps))
