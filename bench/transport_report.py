"""What bench/transport.py found: rates, and ratios to what the machine itself can do, round by round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench.distribution import percentile

# What each transport is measured against, and what of it docs/design.md, section 10, asks for.
BASELINE: Final = {
    "libzmq": "tcp",
    "asked memcpy": "memcpy",
    "NIXL": "memcpy",
    "Mooncake": "tcp",
    "zmq": "tcp",
    "zmq+checksum": "tcp",
    "shm": "memcpy",
    "shm+checksum": "memcpy",
    "nixl": "NIXL",
    "nixl+checksum": "NIXL",
}
TARGET: Final = {"zmq": 0.8, "shm": 0.8}
TARGET_FROM_BYTES: Final = 256 << 20  # of a transfer: shorter ones are bounded by who wakes whom (docs/transports.md)
# What the machine can do, and what bounds a transport that is made as ours are: libzmq without us, a copy that is asked for.
REFERENCES: Final = ("tcp", "memcpy", "libzmq", "asked memcpy")
NIXL_ALONE: Final = "NIXL"  # a reference, too, where it is installed
MOONCAKE_ALONE: Final = "Mooncake"  # and this one, where its environment is named


@dataclass(frozen=True, slots=True)
class Sample:
    """One transfer."""

    way: str
    round_index: int
    seconds: float
    cpu_s: float  # of both processes together
    is_ok: bool = True  # for bench/progress.py: a transfer that fails ends the run


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle, and where eight of ten values lie."""

    p10: float
    p50: float
    p90: float


@dataclass(frozen=True, slots=True)
class WayReport:
    """One way at one size; `ratio` is of the rates of one round."""

    way: str
    num_rounds: int
    gb_per_s: Spread
    cpu_s_per_gb: Spread
    ratio: Spread | None  # to `baseline`
    baseline: str | None


@dataclass(frozen=True, slots=True)
class CaseReport:
    """One size of blocks and of transfers; a GB is 10^9 bytes."""

    block_bytes: int
    transfer_bytes: int
    ways: tuple[WayReport, ...]


def spread_of(values: Sequence[float]) -> Spread:
    """Of at least one value."""
    ordered = sorted(values)
    return Spread(*(percentile(ordered, percent) for percent in (10, 50, 90)))


def report_of(block_bytes: int, transfer_bytes: int, samples: Sequence[Sample]) -> CaseReport:
    """Reduce the transfers of one case; rates are compared within a round, so that what slows the machine slows both."""
    gigabytes = transfer_bytes / 1e9
    seconds = {(sample.way, sample.round_index): sample.seconds for sample in samples}
    ways: list[WayReport] = []
    for way in dict.fromkeys(sample.way for sample in samples):
        own = [sample for sample in samples if sample.way == way]
        baseline = BASELINE.get(way)
        ratios = [
            seconds[baseline, sample.round_index] / sample.seconds
            for sample in own
            if baseline is not None and (baseline, sample.round_index) in seconds
        ]
        ways.append(
            WayReport(
                way=way,
                num_rounds=len(own),
                gb_per_s=spread_of([gigabytes / sample.seconds for sample in own]),
                cpu_s_per_gb=spread_of([sample.cpu_s / gigabytes for sample in own]),
                ratio=spread_of(ratios) if ratios else None,
                baseline=baseline if ratios else None,
            )
        )
    return CaseReport(block_bytes, transfer_bytes, tuple(ways))


def to_json(cases: Sequence[CaseReport], samples: Sequence[Sequence[Sample]], facts: dict[str, Any]) -> dict[str, Any]:
    """The result file: `facts` (command, machine, date, settings), the figures, and each way's transfers, round by round."""
    content = [asdict(case) | {"transfers": _by_way(own)} for case, own in zip(cases, samples, strict=True)]
    return {**facts, "targets": TARGET, "target_from_bytes": TARGET_FROM_BYTES, "cases": content}


def _by_way(samples: Sequence[Sample]) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {}
    for sample in sorted(samples, key=lambda each: each.round_index):
        numbers = found.setdefault(sample.way, {"seconds": [], "cpu_s": []})
        numbers["seconds"].append(round(sample.seconds, 6))
        numbers["cpu_s"].append(round(sample.cpu_s, 6))
    return found


def show(console: Console, cases: Sequence[CaseReport]) -> None:
    """Print a table per case: medians, and where eight of ten rounds lie."""
    for case in cases:
        console.print(f"blocks of {size(case.block_bytes)}, {size(case.transfer_bytes)} a transfer:")
        table = Table(title=None, box=None, pad_edge=False)
        for heading in ("way", "GB/s", "p10 .. p90", "of", "ratio", "p10 .. p90", "target", "CPU s/GB"):
            table.add_column(heading, justify="left" if heading in ("way", "of") else "right", no_wrap=True)
        for each in case.ways:
            rate = each.gb_per_s
            cells = [
                each.way,
                f"{rate.p50:.2f}",
                f"{rate.p10:.2f} .. {rate.p90:.2f}",
                *_ratio_cells(each, case.transfer_bytes),
            ]
            table.add_row(*cells, f"{each.cpu_s_per_gb.p50:.3f}")
        console.print(table)


def _ratio_cells(report: WayReport, transfer_bytes: int) -> tuple[str, str, str, str]:
    """Baseline, ratio, its spread, and what is asked of it."""
    ratio = report.ratio
    target = TARGET.get(report.way) if transfer_bytes >= TARGET_FROM_BYTES else None
    if ratio is None or report.baseline is None:
        return "", "", "", ""
    verdict = "" if target is None else f"{target:.2f} {'met' if ratio.p50 >= target else 'missed'}"
    return report.baseline, f"{ratio.p50:.2f}", f"{ratio.p10:.2f} .. {ratio.p90:.2f}", verdict


def size(num_bytes: int) -> str:
    """In MiB, or KiB where that is a whole number and MiB is not."""
    return f"{num_bytes >> 20} MiB" if num_bytes % (1 << 20) == 0 else f"{num_bytes >> 10} KiB"
