"""What every process's /metrics says beside its own: what it takes of the machine (`process_…`), and which release it runs.

Names and meanings of `process_…` are Prometheus' own
(https://prometheus.io/docs/instrumenting/writing_clientlibs/#process-metrics), so that boards which everybody has show them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.version import versions

BUILD_INFO: Final = "baton_build_info"


class ProcessMetrics(Collector):
    """This process, read from /proc when somebody asks; of other ranks' processes (`--tp`) nothing."""

    def __init__(self) -> None:
        self._process = ProcessCollector(registry=None)

    def collect(self) -> Iterator[Metric]:
        """As of now."""
        yield from self._process.collect()
        known = {"baton": "", "python": "", "torch": ""} | versions()
        text = "1, with the releases of Baton, Python and torch that run here as labels"
        family = GaugeMetricFamily(BUILD_INFO, text, labels=["version", "python", "torch"])
        family.add_metric([known["baton"], known["python"], known["torch"]], 1)
        yield family

    def describe(self) -> Iterable[Metric]:
        """Nothing to collide with: each registry is its owner's."""
        return []
