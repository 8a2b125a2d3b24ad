"""`python -m bench.engine_report RUN.json … > bench/results/engine.md`: what runs of bench.engine found, side by side, as text.

One run for each number of threads and each back end; one model. A cell is empty where a run has not that case.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.result_files import results_of

Run = Mapping[str, Any]

DECODE_TARGET: Final = 1.15  # design, section 10: batches 1 to 8
CHUNK_TARGET: Final = 1 / 0.7
_LINEARS: Final = ("qkv", "attention out", "gate and up", "down")
_SMALL: Final = ("norm", "rotate and write")
# As parts of a step are told: what is measured -> what the table says.
_PARTS: Final = (
    ("sampler", ("sampler",)),
    ("head", ("head",)),
    ("linears of layers", _LINEARS),
    ("attend", ("attend",)),
    ("norm, rotate and write", _SMALL),
    ("rest", ("rest",)),
)
_DEVICE_PARTS: Final = (
    ("launch", ("launch",)),
    ("device", ("device",)),
    ("of it sampler", ("sampler",)),
    ("rest", ("rest",)),
)


_OF_A_CPU: Final = (
    "the head in full among them, though a step of few rows reads the head in 8 bits where that decides (docs/engine.md).",
)
_OF_A_DEVICE: Final = (
    "read once. A step is launched before the one before it is read, as on a node; `alone`: read first. A chunk brings its",
    "KV to the host, too. Host (`launch`) and device work at the same time, `rest` is what a step takes beyond the longer.",
)


def target_of(case: str) -> float | None:
    """How many times its limit a step may take; None: nothing is asked."""
    if case.startswith("chunk"):
        return CHUNK_TARGET
    return DECODE_TARGET if case.startswith(("decode 1 ", "decode 8 ")) else None


def markdown(runs: Sequence[Run]) -> str:
    """Of each run's JSON: commands, machine, ratios by case, and, of those that tell them, the parts of a step."""
    settings = runs[0]["settings"]
    lines = [
        f"# Engine steps against the machine's limits: {Path(settings['model'] or settings['shape']).name}",
        "",
        *(f"    {run['command']}" for run in runs),
        "",
        f"{', '.join(sorted({run['date'][:10] for run in runs}))}, {_place(runs)}. "
        "`limit` = max(bytes / R, operations / F), measured beside each step",
        f"{_how(runs)} (R {_median_rates(runs, 'bytes_per_s', 1e9)} GB/s, F {_median_rates(runs, 'operations_per_s', 1e9)} "
        f"GFLOP/s); temperature {settings['temperature']:g}, sampler included. The bytes are those of all weights,",
        *(_OF_A_DEVICE if any(map(_is_on_device, runs)) else _OF_A_CPU),
        "A ratio is the median of the rounds' own ratios; beside it the best round's, and the step in milliseconds.",
        "",
        *_ratios(runs),
        "",
        *_verdict(runs),
    ]
    for run in runs:
        if any("attend" in case["parts_s"] for case in run["cases"]) or _is_on_device(run):
            lines += ["", f"Where the time goes, {_name(run)}, milliseconds of one step:", "", *_parts(run)]
    return "\n".join(lines) + "\n"


def _is_on_device(run: Run) -> bool:
    return bool(run["settings"].get("device", "cpu") != "cpu")


def _place(runs: Sequence[Run]) -> str:
    """What they were measured on."""
    machine = runs[0]["machine"]
    devices = [f"{run['device']} (torch {run['torch']}, Triton {run['triton']})" for run in runs if _is_on_device(run)]
    host = f"{machine['cores']} cores of an {machine['cpu_model']}"
    return f"{' and '.join(dict.fromkeys(devices))}, host {host}" if devices else host


def _how(runs: Sequence[Run]) -> str:
    return "by torch's sum and product there" if any(map(_is_on_device, runs)) else "with as many threads"


def _name(run: Run) -> str:
    settings = run["settings"]
    if _is_on_device(run):
        return f"{run['device']}, {str(run['kernels']).partition('-')[0]}"
    threads = f"{settings['threads']} thread{'s' if settings['threads'] > 1 else ''}"
    kernels = "" if settings["kernels"] == "cpu" else f"{settings['kernels']}, "
    return f"{kernels}{'' if settings['weight_dtype'] == 'auto' else 'int8, '}{threads}"


def _median_rates(runs: Sequence[Run], name: str, unit: float) -> str:
    return " / ".join(f"{run[name] / unit:.0f}" for run in runs)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _ratios(runs: Sequence[Run]) -> Iterator[str]:
    headings = ["case", "by", "target"]
    for run in runs:
        headings += [_name(run), "best", "ms", *(["alone, ms"] if _is_on_device(run) else [])]
    yield _row(headings)
    yield "|" + "---|" * len(headings)
    by_run = [{case["case"]: case for case in run["cases"]} for run in runs]
    for case in dict.fromkeys(name for cases in by_run for name in cases):
        target = target_of(case)
        first = next(cases[case] for cases in by_run if case in cases)
        cells = [case, first["limit_is"], "" if target is None else f"{target:.2f}"]
        for run, cases in zip(runs, by_run, strict=True):
            found = cases.get(case)
            width = 4 if _is_on_device(run) else 3
            cells += [""] * width if found is None else _figures(found)[:width]
        yield _row(cells)


def _figures(case: Mapping[str, Any]) -> list[str]:
    times = (case["step_s"], case.get("alone_s", case["step_s"]))
    return [f"{case['ratio']:.2f}", f"{case['best_ratio']:.2f}", *(f"{1000 * seconds:.2f}" for seconds in times)]


def _verdict(runs: Sequence[Run]) -> Iterator[str]:
    """Which cases meet their targets, run by run."""
    for run in runs:
        asked = [(case, target) for case in run["cases"] if (target := target_of(case["case"])) is not None]
        met = [case["case"] for case, target in asked if case["ratio"] <= target]
        missed = [f"{case['case']} ({case['ratio']:.2f})" for case, target in asked if case["ratio"] > target]
        yield f"- {_name(run)}: met by {', '.join(met) or 'none'}; missed by {', '.join(missed) or 'none'}."


def _parts(run: Run) -> Iterator[str]:
    parts_told = _DEVICE_PARTS if _is_on_device(run) else _PARTS
    names = [name for name, _ in parts_told]
    yield _row(["case", *names])
    yield "|" + "---|" * (len(names) + 1)
    for case in run["cases"]:
        sums = (sum(case["parts_s"].get(part, 0.0) for part in parts) for _, parts in parts_told)
        yield _row([case["case"], *(f"{1000 * seconds:.2f}" for seconds in sums)])


def main(argv: Sequence[str]) -> int:
    """Print the text of the files that these arguments name."""
    about = "What runs of bench.engine found, side by side, as text."
    runs = results_of("bench.engine_report", about, [{"engine"}], argv, has_more=True)
    sys.stdout.write(markdown(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
