"""What a node shows of itself: the answers of /state and /metrics, read from the parts when somebody asks.

Not here: HTTP (node/http.py). There is no second copy of any state, so nothing shown can be stale.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

from google.protobuf.json_format import MessageToDict
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from connector.tally import Tally
from engine.sequence import Phase
from node.ending import Ending
from node.events import NodeCore
from node.identity import NodeIdentity
from node.measures import Measures
from node.metrics import CODED_COUNTERS, PLAIN_COUNTERS, Counters
from node.sizes import EngineSizes
from proto import baton_pb2 as pb
from runtime.certificate_watch import CertificateEnd
from runtime.process_metrics import ProcessMetrics
from runtime.version import versions

_CODES: Final = tuple(name for name, code in pb.ErrorCode.items() if code != pb.ERROR_UNSPECIFIED)
_COUNTED_BY_TRANSPORTS: Final = ("kv_bytes_sent", "kv_bytes_received", "links_refused")


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What does not change while the process keeps its role."""

    identity: NodeIdentity
    role: str  # "prefill", "decode", "mixed"
    threads: int
    is_bit_exact: bool  # the start-up probe found a row's bits to depend on its own tokens only
    fingerprint: pb.Fingerprint
    sizes: EngineSizes
    rank_pids: Sequence[int] = ()  # of the other ranks' processes

    @property
    def num_ranks(self) -> int:
        """How many compute together."""
        return 1 + len(self.rank_pids)


@dataclass(frozen=True, slots=True)
class Sources:
    """What is asked anew every time."""

    core: NodeCore
    counters: Counters
    measures: Measures
    transport: Callable[[], Mapping[str, object]]  # its snapshot: `kv_bytes_sent` and `kv_bytes_received` by peer, …
    sessions: Callable[[], object]  # JSON-able
    kv_pool: Callable[[], Mapping[str, object]]  # its snapshot; empty without one
    ending: Ending
    is_listed: Callable[[], bool]  # whether a registry has ever taken the process
    certificate_ends_at: Callable[[], float | None]  # as Credentials has it


class NodeView(Collector):
    """One node, to be looked at from the loop's thread."""

    def __init__(self, facts: NodeFacts, sources: Sources) -> None:
        self._facts = facts
        self._sources = sources
        # What transports of earlier roles have counted: each begins with 0, and a counter may not fall.
        self._past = {name: Tally() for name in _COUNTED_BY_TRANSPORTS}
        self._registry = CollectorRegistry()  # of its own: nothing is global
        self._registry.register(self)
        self._registry.register(ProcessMetrics())

    def show(self, facts: NodeFacts, sources: Sources) -> None:
        """Look at these from now on: the process has taken another role."""
        last = self._sources.transport()
        for name, past in self._past.items():
            for key, number in _counts(last, name).items():
                past.add(key, number)
        self._facts, self._sources = facts, sources

    @property
    def node_id(self) -> str:
        """The node's name."""
        return self._facts.identity.name

    @property
    def is_draining(self) -> bool:
        """Whether it takes no new work."""
        return self._sources.ending.is_draining

    @property
    def is_ready(self) -> bool:
        """Whether routers may know it, and give it work. Who rolls out new nodes waits for it before taking an old one away."""
        return self._sources.is_listed() and not self.is_draining

    def state(self) -> dict[str, object]:
        """The answer of /state, JSON-able."""
        facts, sources = self._facts, self._sources
        load, snapshot, transport = sources.core.load(), sources.core.snapshot(), sources.transport()
        return {
            "node_id": facts.identity.name,
            "role": facts.role,
            "incarnation": f"{facts.identity.incarnation:016x}",  # as text: 64 bits are more than a JSON reader must keep
            "pid": os.getpid(),
            "versions": versions(),
            "stage": sources.ending.stage.value,
            "threads": facts.threads,
            "tp": facts.num_ranks,
            "rank_pids": list(facts.rank_pids),
            "bit_exact": facts.is_bit_exact,
            "fingerprint": MessageToDict(facts.fingerprint, preserving_proto_field_name=True),
            "block_size": facts.sizes.block_size,
            "num_blocks": facts.sizes.num_blocks,
            "max_model_len": facts.sizes.max_model_len,
            "blocks": blocks_by_state(load),
            "running": load.running,
            "waiting": load.waiting,
            "leases": _number(snapshot, "leases"),
            "scheduler": _scheduler_state(cast(Mapping[str, object], snapshot.get("scheduler", {}))),
            "attempts": {name: value for name, value in snapshot.items() if name not in ("leases", "scheduler")},
            "kv_bytes_sent": self._counted(transport, "kv_bytes_sent"),
            "kv_bytes_received": self._counted(transport, "kv_bytes_received"),
            "transport": {name: value for name, value in transport.items() if not name.startswith("kv_bytes_")},
            "kv_pool": sources.kv_pool(),
            "counters": sources.counters.counts() | sources.counters.counts_by_code() | sources.measures.amounts(),
            "sessions": sources.sessions(),
        }

    def metrics(self) -> bytes:
        """The answer of /metrics, Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Every metric family as of now; called by the registry."""
        sources = self._sources
        load = sources.core.load()
        yield GaugeMetricFamily("baton_node_draining", "1 from the wish to end until the end", value=self.is_draining)
        yield GaugeMetricFamily(
            "baton_node_ranks", "Processes that compute together (--tp)", value=self._facts.num_ranks
        )
        role = self._facts.role
        yield GaugeMetricFamily(
            "baton_node_prefills", "1 while its role takes prompts (prefill, mixed), else 0", value=role != "decode"
        )
        yield GaugeMetricFamily(
            "baton_node_decodes", "1 while its role generates (decode, mixed), else 0", value=role != "prefill"
        )
        blocks = GaugeMetricFamily(
            "baton_node_blocks", "KV blocks by state, which add up to the pool", labels=["state"]
        )
        for state, number in blocks_by_state(load).items():
            blocks.add_metric([state], number)
        yield blocks
        yield GaugeMetricFamily("baton_node_sequences_running", "Sequences that hold a slot", value=load.running)
        yield GaugeMetricFamily("baton_node_sequences_waiting", "Sequences that hold nothing yet", value=load.waiting)
        snapshot = sources.core.snapshot()
        leases, waiting = _number(snapshot, "leases"), _number(snapshot, "waiting_reserves")
        yield GaugeMetricFamily("baton_node_leases", "Reservations for other nodes that stand", value=leases)
        yield GaugeMetricFamily("baton_node_reserves_waiting", "Reserve calls that wait for room", value=waiting)
        yield from _scheduler_families(cast(Mapping[str, object], snapshot.get("scheduler", {})))
        counts, by_code = sources.counters.counts(), sources.counters.counts_by_code()
        for name, help_text in PLAIN_COUNTERS.items():
            yield CounterMetricFamily(f"baton_node_{name}", help_text, value=counts[name])
        for name, help_text in CODED_COUNTERS.items():
            # 0 before the first one: a rate needs a beginning.
            yield _family(f"baton_node_{name}", help_text, "code", dict.fromkeys(_CODES, 0) | by_code[name])
        yield from CertificateEnd("node", sources.certificate_ends_at).collect()
        yield from sources.measures.collect()
        yield GaugeMetricFamily(
            "baton_node_kv_pool_staged_blocks",
            "Blocks copied and not written to the KV pool yet",
            value=_number(sources.kv_pool(), "staging_blocks_used"),
        )
        transport = sources.transport()
        moved = CounterMetricFamily(
            "baton_node_transfer_bytes", "KV handed to a link, or landed in place", labels=["peer", "direction"]
        )
        for direction in ("sent", "received"):
            for peer, number in self._counted(transport, f"kv_bytes_{direction}").items():
                moved.add_metric([peer, direction], number)
        yield moved
        refused = self._counted(transport, "links_refused")
        help_text = "Links that other processes tried to open and had no right to, by transport"
        yield _family("baton_node_links_refused", help_text, "transport", refused)

    def _counted(self, transport: Mapping[str, object], name: str) -> dict[str, int]:
        """Since the process began, in whichever role."""
        counts = self._past[name].snapshot()
        for key, number in _counts(transport, name).items():
            counts[key] = counts.get(key, 0) + number
        return dict(sorted(counts.items()))


def _counts(transport: Mapping[str, object], name: str) -> Mapping[str, int]:
    return cast(Mapping[str, int], transport.get(name, {}))


def _scheduler_state(scheduler: Mapping[str, object]) -> dict[str, object]:
    """Numbers only: a sequence's id is an attempt's, and there may be thousands."""
    phases = Counter(cast(Mapping[object, Phase], scheduler.get("phases", {})).values())
    return {
        "sequences": {phase.name.lower(): phases[phase] for phase in Phase},
        "preemptions": _number(scheduler, "num_preempted"),
        "reserve": scheduler.get("reserve", 0.0),
    }


def _number(snapshot: Mapping[str, object], name: str) -> int:
    number = snapshot.get(name)
    return number if isinstance(number, int) else 0  # a role that reserves for nobody has no such entry


def _scheduler_families(scheduler: Mapping[str, object]) -> Iterator[Metric]:
    """What the engine's scheduler says of itself (engine/scheduler.py, snapshot)."""
    sequences = GaugeMetricFamily(
        "baton_node_sequences", "Sequences by phase; finished ones still hold a slot or lend blocks", labels=["phase"]
    )
    phases = Counter(cast(Mapping[object, Phase], scheduler.get("phases", {})).values())
    for phase in Phase:
        sequences.add_metric([phase.name.lower()], phases[phase])
    yield sequences
    yield CounterMetricFamily(
        "baton_node_preemptions",
        "Sequences that gave way because blocks were short",
        value=_number(scheduler, "num_preempted"),
    )
    yield CounterMetricFamily(
        "baton_node_late_tokens",
        "Tokens that nobody was told, because their sequences had ended before they were read",
        value=_number(scheduler, "num_late"),
    )
    yield GaugeMetricFamily(
        "baton_node_reserve",
        "The reserve policy's number: the share of what may still be said (ratio), or blocks per sequence (fixed)",
        value=cast(float, scheduler.get("reserve", 0.0)),
    )


def blocks_by_state(load: pb.LoadReport) -> dict[str, int]:
    """The five counts that add up to the pool."""
    return {
        "free": load.blocks_free,
        "cached": load.blocks_cached,
        "used": load.blocks_used,
        "leased": load.blocks_leased,
        "quarantined": load.blocks_quarantined,
    }


def _family(name: str, help_text: str, label: str, values: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, help_text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family
