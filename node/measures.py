"""What a node measures: durations as histograms, amounts by label, in Prometheus' terms.

Not here: when something began and ended (node/watch.py), and what the core counts itself (node/metrics.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from threading import Lock
from typing import Final

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, Metric

from connector.kv_store import STORE_COUNTERS
from proto import baton_pb2 as pb
from runtime.http_protocol import REASONS

# Upper bounds in seconds: from a step of a tiny model to a request's deadline, about 2.5 times apart.
BUCKETS_S: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
DURATIONS: Final[Mapping[str, str]] = {
    "queue_seconds": "From an attempt's Dispatch to the plan of its first chunk, by when its blocks are asked for",
    "reserve_seconds": "From sending Reserve to its answer, or to the end of the wait for one",
    "transfer_seconds": "From an attempt's first write to the answer to its Commit",
    "step_seconds": "What one step kept the runner busy",
    "kv_pool_stage_seconds": "From asking to save blocks to their being copied to the staging buffer, or dropped",
    "kv_pool_write_seconds": "What one call of the KV pool's store took that writes a batch of blocks",
    "kv_pool_look_seconds": "From asking what the KV pool has of a prompt to the answer",
    "kv_pool_fetch_seconds": "What reading one run of blocks from the KV pool took, waiting for a thread left out",
}
# name -> (what each unit of it is, its label)
AMOUNTS: Final[Mapping[str, tuple[str, str]]] = {
    "attempts_ended": ("Attempts that ended here, by outcome", "outcome"),
    "tokens_computed": ("Token positions that finished steps have computed", "phase"),
    "transfer_failures": ("Attempts that failed after their lease was granted, by the sender's PD Error code", "code"),
    "kv_pool_saves": ("Blocks that were to be stored in the KV pool, by what became of them", "outcome"),
    "kv_pool_looks": ("Questions what the KV pool has of a prompt, by their answer", "outcome"),
    "kv_pool_reads": ("Blocks that were to be read from the KV pool, by what became of them", "outcome"),
    "kv_pool_circuit_opened": ("Times that the KV pool was left alone because it kept failing", "side"),
    "kv_pool_removed": ("What this process removed from the KV pool's store", "what"),
    "refused_http": ("Connections and requests to the node's pages that were refused, by why", "reason"),
}
_ENDS_NO_ATTEMPT: Final = (pb.ERROR_UNSPECIFIED, pb.NODE_LOST, pb.CANCELLED)  # here: it is "cancelled"
_KNOWN_LABELS: Final[Mapping[str, tuple[str, ...]]] = {  # shown as 0 before the first one: a rate needs a beginning
    "attempts_ended": (
        *("committed", "finished", "moved", "cancelled", "released", "expired", "router_lost"),
        *(pb.ErrorCode.Name(code) for code in pb.ErrorCode.values() if code not in _ENDS_NO_ATTEMPT),
    ),
    "tokens_computed": ("prefill", "decode"),
    "transfer_failures": tuple(pb.ErrorCode.Name(code) for code in (pb.TRANSFER_FAILED, pb.LEASE_EXPIRED, pb.CHECKSUM)),
    "kv_pool_saves": ("written", "present", "full", "failed", "refused"),
    "kv_pool_looks": ("found", "nothing", "failed", "late", "refused"),
    "kv_pool_reads": ("read", "absent", "corrupt", "failed", "late", "refused"),
    "kv_pool_circuit_opened": ("read", "write"),
    "kv_pool_removed": tuple(STORE_COUNTERS),
    "refused_http": ("tls", *REASONS),
}


class Measures:
    """Since the process began. Any thread may measure."""

    def __init__(self) -> None:
        self._lock = Lock()  # of the amounts; a histogram has its own
        self._durations = {
            name: Histogram(f"baton_node_{name}", text, buckets=BUCKETS_S, registry=None)
            for name, text in DURATIONS.items()
        }
        self._amounts = {name: Counter(dict.fromkeys(_KNOWN_LABELS[name], 0)) for name in AMOUNTS}

    def observe(self, name: str, seconds: float) -> None:
        """One more duration of the name; KeyError: there is none, which is a bug."""
        self._durations[name].observe(seconds)

    def add(self, name: str, label: str, amount: int = 1) -> None:
        """Raise an amount; KeyError: there is none of that name, which is a bug."""
        with self._lock:
            self._amounts[name][label] += amount

    def amounts(self) -> dict[str, dict[str, int]]:
        """Every amount by name, then by label."""
        with self._lock:
            return {name: dict(amounts) for name, amounts in self._amounts.items()}

    def collect(self) -> Iterator[Metric]:
        """Every metric family as of now."""
        for histogram in self._durations.values():
            yield from histogram.collect()
        amounts = self.amounts()
        for name, (text, label) in AMOUNTS.items():
            family = CounterMetricFamily(f"baton_node_{name}", text, labels=[label])
            for value, number in amounts[name].items():
                family.add_metric([value], number)
            yield family
