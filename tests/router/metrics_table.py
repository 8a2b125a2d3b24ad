"""The table of docs/metrics.md, from what the registry itself says. `make docs` writes it anew."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

from prometheus_client.metrics_core import Metric

from router.metrics import CORE_COUNTERS, HISTOGRAMS, RouterMetrics

PAGE: Final = Path(__file__).resolve().parent.parent.parent / "docs" / "metrics.md"
HEADING: Final = "## Router\n"
TABLE_HEAD: Final = "\n| name | kind | labels | what it says |\n|---|---|---|---|\n"
BOUNDS_HEAD: Final = "\nUpper bounds of the histograms, in seconds:\n\n| name | bounds |\n|---|---|\n"
_NODE: Final = {"role": "decode", "session": "up", "takes_work": True, "prefilling": 0, "branches": 0}


def used_metrics() -> list[Metric]:
    """Every metric of a router, each with a value at least, so that its labels show."""

    def snapshot() -> dict[str, Any]:
        circuits = {"d": "closed"}
        return {
            "queued": 0,
            "live_requests": 0,
            "nodes": {"d@1": _NODE},
            "circuits": circuits,
            "degraded": [],
            "ready": True,
            "completion_tokens": 1,
            "caches": {},
        }

    metrics = RouterMetrics(snapshot)
    for name in CORE_COUNTERS:
        metrics.count(name, "x")
    for name in HISTOGRAMS:
        metrics.observe(name, 1.0)
    metrics.request_parted({"prefill": 1.0}, {"admit": 1.0})
    metrics.choice_finished("stop", None)
    metrics.request_ended("stop", 1.0, 1)
    metrics.turned_away("no_key")
    metrics.show_certificates(lambda: 1.0)
    metrics.client_asked("x")
    metrics.client_used("x", "prompt", 1)
    return metrics.families()


def table() -> str:
    """The text below HEADING."""
    rows = []
    for family in used_metrics():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = dict.fromkeys(label for sample in family.samples for label in sample.labels if label != "le")
        rows.append(f"| `{name}` | {family.type} | {', '.join(labels)} | {family.documentation} |\n")
    return TABLE_HEAD + "".join(sorted(rows)) + BOUNDS_HEAD + "".join(sorted(map(_bounds, _histograms())))


def _histograms() -> list[Metric]:
    return [family for family in used_metrics() if family.type == "histogram"]


def _bounds(family: Metric) -> str:
    """A histogram's upper bounds, all of which its samples name."""
    bounds = dict.fromkeys(sample.labels["le"] for sample in family.samples if "le" in sample.labels)
    return f"| `{family.name}` | {', '.join(bounds)} |\n"


def main() -> int:
    """Write the table into the page."""
    head, heading, _ = PAGE.read_text(encoding="utf-8").partition(HEADING)
    if not heading:
        sys.stderr.write(f"{PAGE} has no line {HEADING!r}\n")
        return 2
    PAGE.write_text(head + heading + table(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
