"""What a run of the load generator found: figures for a JSON file, a table and histograms for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench.completions import Record
from bench.distribution import Summary, histogram, summarize
from bench.goodput import Goodput, Slo, goodput_of

_BAR_WIDTH: Final = 40
_NUM_BINS: Final = 12
NO_LIMITS: Final = Slo()
LAG_WARNING_S: Final = 0.05  # at p99: above it arrivals were not what was asked for


@dataclass(frozen=True, slots=True)
class Report:
    """Figures of one run; durations of requests that were answered completely."""

    duration_s: float  # first arrival to last end
    num_requests: int
    num_ok: int
    num_uncounted: int  # answered, but without a count of tokens: they have no TPOT
    num_wrong_length: int  # answered, but with another number of tokens than asked for
    errors: dict[str, int]  # by status and code
    goodput: Goodput
    arrivals_per_s: (
        float | None
    )  # of the requests sent, from the first one's instant to the last one's; None: all at once
    requests_per_s: float  # answered
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    ttft_s: Summary | None
    tpot_s: Summary | None
    itl_s: Summary | None
    end_to_end_s: Summary | None
    connect_s: Summary | None
    arrival_lag_s: Summary | None  # of all requests

    @property
    def is_late(self) -> bool:
        """Whether the generator could not keep up."""
        return self.arrival_lag_s is not None and self.arrival_lag_s.p99 > LAG_WARNING_S


def report_of(records: Sequence[Record], slo: Slo = NO_LIMITS) -> Report:
    """Reduce what became of each request; without limits goodput counts what was answered."""
    good = [record for record in records if record.is_ok]
    first_s = min((record.arrival_s for record in records), default=0.0)
    last_s = max((record.arrival_s + record.lag_s + record.end_s for record in records), default=0.0)
    duration_s = last_s - first_s
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    return Report(
        duration_s=duration_s,
        num_requests=len(records),
        num_ok=len(good),
        num_uncounted=sum(record.output_tokens is None for record in good),
        num_wrong_length=sum(record.output_tokens not in (None, record.output_tokens_asked) for record in good),
        errors=dict(Counter(record.kind for record in records if not record.is_ok)),
        goodput=goodput_of(records, slo, duration_s),
        arrivals_per_s=_arrivals_per_s(records),
        requests_per_s=len(good) * per_s,
        output_tokens_per_s=sum(record.output_tokens or 0 for record in good) * per_s,
        prompt_tokens_per_s=sum(record.prompt_tokens or 0 for record in good) * per_s,
        ttft_s=summarize([each for record in good if (each := record.ttft_s) is not None]),
        tpot_s=summarize([each for record in good if (each := record.tpot_s) is not None]),
        itl_s=summarize(list(chain.from_iterable(record.itl_s for record in good))),
        end_to_end_s=summarize([record.end_s for record in good]),
        connect_s=summarize([record.connect_s for record in good if record.connect_s is not None]),
        arrival_lag_s=summarize([record.lag_s for record in records]),
    )


def _arrivals_per_s(records: Sequence[Record]) -> float | None:
    instants = [record.arrival_s for record in records]
    seconds = max(instants) - min(instants) if instants else 0.0
    return (len(instants) - 1) / seconds if seconds > 0 else None


def to_json(report: Report, records: Sequence[Record], facts: dict[str, Any]) -> dict[str, Any]:
    """`facts`, the figures, and every request's own."""
    requests = [asdict(record) | {"ttft_s": record.ttft_s, "tpot_s": record.tpot_s} for record in records]
    return {**facts, **asdict(report), "requests": requests}


def show(console: Console, report: Report, records: Sequence[Record]) -> None:
    """Print figures, histograms and what went wrong."""
    table = Table(title=None, box=None, pad_edge=False)
    for heading in ("milliseconds", "count", "mean", "p50", "p90", "p99", "max"):
        table.add_column(heading, justify="left" if heading == "milliseconds" else "right", no_wrap=True)
    rows = {
        "TTFT": report.ttft_s,
        "TPOT": report.tpot_s,
        "ITL": report.itl_s,
        "end to end": report.end_to_end_s,
        "connect": report.connect_s,
        "arrival lag": report.arrival_lag_s,
    }
    for name, summary in rows.items():
        if summary is not None:
            in_ms = (summary.mean, summary.p50, summary.p90, summary.p99, summary.max)
            table.add_row(name, str(summary.count), *(f"{1000 * value:.2f}" for value in in_ms))
    console.print(table)
    say = console.print
    say(
        f"{report.num_ok} of {report.num_requests} requests in {report.duration_s:.2f} s: "
        f"{report.requests_per_s:.2f} requests/s, {report.output_tokens_per_s:.1f} output tokens/s, "
        f"{report.prompt_tokens_per_s:.1f} prompt tokens/s"
    )
    _show_histogram(console, "TTFT", [each for record in records if (each := record.ttft_s) is not None])
    _show_histogram(console, "TPOT", [each for record in records if (each := record.tpot_s) is not None])
    for status, number in sorted(report.errors.items()):
        example = next(record.error for record in records if record.kind == status)
        say(f"error {status}: {number} requests, one of them: {example}")
    for warning in length_warnings(report):
        say(f"warning: {warning}")
    if report.arrival_lag_s is not None and report.is_late:
        say(
            f"warning: this generator was late (p99 {1000 * report.arrival_lag_s.p99:.0f} ms): arrivals were not what was "
            "asked for, and the times are too good; it needs a faster machine, or one of its own"
        )


def length_warnings(report: Report) -> list[str]:
    """What makes TPOT and tokens/s something else than they seem."""
    warnings = []
    if report.num_uncounted:
        warnings.append(
            f"{report.num_uncounted} answers tell no number of tokens: TPOT and tokens/s are without them, "
            "and they meet no limit on TPOT; --return-token-ids on has some servers' tokens counted"
        )
    if report.num_wrong_length:
        warnings.append(f"{report.num_wrong_length} answers have another number of tokens than was asked for")
    return warnings


def _show_histogram(console: Console, name: str, values: Sequence[float]) -> None:
    bins = histogram(values, _NUM_BINS)
    if not bins:
        return
    most = max(each.count for each in bins)
    console.print(f"{name}, milliseconds:")
    for each in bins:
        bar = "#" * -(-each.count * _BAR_WIDTH // most)
        console.print(f"{1000 * each.low:10.2f} .. {1000 * each.high:10.2f} {each.count:6} {bar}".rstrip())
