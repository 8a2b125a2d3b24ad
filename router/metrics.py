"""The router's Prometheus metrics, in a registry of their own.

What is counted by cause is shown as 0 before it first happens: a rate needs a beginning, and who watches the increase of a counter
that begins with 1 never hears of the first.

Counters are raised by the shell; gauges are read from the core when somebody scrapes, so nothing has to be kept in step. What names
clients is in a registry by itself: only who has shown a key is shown it (gate.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from proto import baton_pb2 as pb
from router.events import RESCHEDULED
from router.node_gauges import node_families, node_text
from router.retry import COST, Cost
from router.waiting import KINDS
from runtime.certificate_watch import CertificateEnd
from runtime.http_protocol import REASONS
from runtime.process_metrics import ProcessMetrics

# Counters of the core (events.Count): name -> (help, name of its label).
CORE_COUNTERS: Final[Mapping[str, tuple[str, str | None]]] = {
    "dispatches": (
        "Dispatch messages: one attempt each, which may be of several choices of a request; by how the prompt is computed: "
        "handoff, mixed, local_short, local_absent (no prefill node)",
        "kind",
    ),
    "cached_tokens": (
        "tokens of prompts that the node chosen holds already, as far as the router knew: placement by cache, else 0",
        None,
    ),
    "pooled_tokens": (
        "tokens of prompts that the node chosen was expected to fetch from the KV pool: placement by cache, else 0",
        None,
    ),
    "retries": ("attempts that followed a failure, a preemption or a lost node, by PD Error code", "code"),
    "nodes_lost": ("sessions with nodes that were lost, and what ran there with them", None),
    "moves": ("moves between decode nodes: begun, done, off (came to nothing), no_room (nobody could take it)", "what"),
    "circuits_opened": ("nodes left alone for a while because request after request failed there", None),
    "pd_errors": ("PD Errors of current attempts, by code", "code"),
    "repeated_batches": ("token batches that repeated known tokens, such as a receiver's first", None),
    "stale_messages": ("messages of attempts that no longer count, by kind", "kind"),
}
_PD_ERRORS: Final = tuple(name for name, code in pb.ErrorCode.items() if code != pb.ERROR_UNSPECIFIED)
_KINDS_OF_TOKENS: Final = ("prompt", "completion")
_ENDS_OF_CHOICES: Final = ("stop", "length", RESCHEDULED)
# What a client is told whose request is refused before the core hears of it (api.py).
_REFUSALS: Final = (
    *("invalid_value", "context_length_exceeded", "model_not_found", "body_too_large", "timeout"),
    *("too_many_bodies", "foreign_page"),
    *("NO_NODES", "SHUTTING_DOWN"),
)
# Counter -> the values of its label that are known beforehand.
KNOWN_LABELS: Final[Mapping[str, tuple[str, ...]]] = {
    "dispatches": KINDS,
    "retries": tuple(
        name for name in _PD_ERRORS if COST.get(pb.ErrorCode.Value(name), Cost.NOTHING) is not Cost.NOTHING
    ),
    "moves": ("begun", "done", "off", "no_room"),
    "pd_errors": _PD_ERRORS,
    "stale_messages": ("tokens", "error", "wants_move", "cache", "unknown", "oversized"),
    "requests": (
        *(*_ENDS_OF_CHOICES, "mixed", "aborted", *_PD_ERRORS),
        *("OVERLOADED", "LATE", "NO_NODES", "SHUTTING_DOWN", "context_length_exceeded"),
    ),
    "choices": _ENDS_OF_CHOICES,
    "tokens": _KINDS_OF_TOKENS,
    "turned_away": ("no_key", "unknown_key", "requests_limit", "tokens_limit", "tls", *REASONS, *_REFUSALS),
}
_ROLES: Final = ("prefill", "decode", "mixed")
MOST_GONE_CLIENTS: Final = 1024  # who have no key any more, and are shown yet
# What is known of nodes' prefix caches, where placement asks for it: name -> help.
CACHE_GAUGES: Final[Mapping[str, str]] = {
    "nodes": "nodes whose prefix caches are followed",
    "nodes_whole": "of them, those of which everything is known",
    "pools": "KV pools of which something is known",
    "keys": "blocks in the index, each once however many nodes hold it",
    "bytes": "memory that the index takes",
    "share": "of all blocks, how many the index takes up: 1, or at its bound 1/2, 1/4, …",
}
# Counters of a shared registry's reader (runtime/redis_reader.py): name -> help.
REGISTRY_COUNTERS: Final[Mapping[str, str]] = {
    "failed_reads": "times that the registry in Redis could not be read; nodes stay listed meanwhile",
    "skipped_values": "values found in Redis that no node has written, at each look",
}
_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_SECONDS_OF_PARTS: Final = (0.0005, 0.001, 0.0025, *_SECONDS)
_SECONDS_PER_TOKEN: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)

# Histograms: name -> (name to the world, help, upper bounds in seconds).
HISTOGRAMS: Final[Mapping[str, tuple[str, str, tuple[float, ...]]]] = {
    "first_token": ("time_to_first_token_seconds", "from a request's arrival to its first token", _SECONDS),
    "output_token": (
        "time_per_output_token_seconds",
        "between the tokens of a choice, on average, once it has finished; of choices with two tokens at least",
        _SECONDS_PER_TOKEN,
    ),
    "request": (
        "request_seconds",
        "from a request's arrival to its end; who is turned away at once has none",
        _SECONDS,
    ),
    "queue": (
        "queue_seconds",
        "from when a choice began to wait for room to its dispatch, once for each choice and attempt",
        _SECONDS,
    ),
}


# Histograms by part, in seconds: name -> help. One duration for each part of each request that has come so far.
PARTS: Final[Mapping[str, str]] = {
    "time_to_first_token_part_seconds": (
        "what a request's time to first token is made of, by part: route (until it is queued), queue (for room, then at the "
        "node), retry (attempts in vain), prefill, return (the way to the node and back)"
    ),
    "second_token_part_seconds": (
        "what the time from there to the second token is made of, by part: reserve_wait (for a lease, the token being there), "
        "transfer (the way from node to node), admit, first_step; others where a retry lies between"
    ),
}


M = TypeVar("M", Counter, Histogram)


class _Labelled(dict[str, M]):
    """A metric with one label, by the label's value: found without prometheus_client's lock and its joining of names."""

    def __init__(self, metric: M, known: Iterable[str] = ()) -> None:
        """`known`: labels that are shown from the beginning."""
        super().__init__()
        self._metric: M = metric
        for label in known:
            self[label]  # makes it

    def __missing__(self, label: str) -> M:
        found: M = self._metric.labels(label)
        self[label] = found
        return found


class RouterMetrics:
    """Everything that /metrics shows."""

    def __init__(self, figures: Callable[[], Mapping[str, Any]]) -> None:
        """`figures` are the core's, with whether the router is `ready`, and all `completion_tokens` until now."""
        self._registry = registry = CollectorRegistry()
        self._of_clients = CollectorRegistry()

        def counter(name: str, text: str) -> Counter:
            return Counter(f"baton_router_{name}", text, registry=registry)

        def counters(name: str, text: str, label: str) -> _Labelled[Counter]:
            return _Labelled(Counter(f"baton_router_{name}", text, [label], registry=registry), KNOWN_LABELS[name])

        self._core = {
            name: counters(name, text, label) if label else counter(name, text)
            for name, (text, label) in CORE_COUNTERS.items()
        }
        self._of_registry = {name: counter(f"registry_{name}", text) for name, text in REGISTRY_COUNTERS.items()}
        text = (
            "requests that ended (one per prompt), by outcome: the finish reason of its choices, or mixed; aborted; "
            "the code of its error"
        )
        self._ends = counters("requests", text, "outcome")
        self._choices = counters("choices", "choices that finished, by finish reason", "finish_reason")
        text = "tokens, by kind: prompt (of requests that ended, where a node was asked to compute it), completion (as they come)"
        self._tokens = counters("tokens", text, "kind")
        text = (
            "requests and connections refused before any node heard of them, by why: no_key, unknown_key; requests_limit and "
            "tokens_limit of a key; connections, head, slow, pipelined, malformed (bounds of HTTP); tls (a handshake that "
            "failed); else the code that the client was told: " + ", ".join(_REFUSALS) + "; "
            "who finds the queue full is among the requests that ended"
        )
        self._turned_away = counters("turned_away", text, "reason")
        text = "connections to the registry's port that were refused: no call came over them, for want of a certificate or of TLS"
        self._refused_grpc = counter("refused_grpc", text)
        text = "requests of those who have keys; shown to who shows a key"
        self._client_requests = Counter("baton_router_client_requests", text, ["client"], registry=self._of_clients)
        text = "tokens of those who have keys, by kind: prompt, completion; shown to who shows a key"
        self._client_tokens = Counter("baton_router_client_tokens", text, ["client", "kind"], registry=self._of_clients)
        self._clients: dict[str, None] = {}  # that are counted there, the longest unheard first
        self._histograms = {
            name: Histogram(f"baton_router_{shown}", text, buckets=bounds, registry=registry)
            for name, (shown, text, bounds) in HISTOGRAMS.items()
        }
        self._parts = {
            name: _Labelled(
                Histogram(f"baton_router_{name}", text, ["part"], buckets=_SECONDS_OF_PARTS, registry=registry)
            )
            for name, text in PARTS.items()
        }
        self._num_generated = 0  # completion tokens that are counted
        self._gauges = _CoreGauges(figures)
        registry.register(self._gauges)
        registry.register(ProcessMetrics())

    def count(self, name: str, label: str, amount: int = 1) -> None:
        """Raise a counter of the core."""
        counter = self._core[name]
        (counter[label] if isinstance(counter, _Labelled) else counter).inc(amount)

    def count_registry(self, name: str, number: int) -> None:
        """Raise one of REGISTRY_COUNTERS."""
        self._of_registry[name].inc(number)

    def observe(self, name: str, seconds: float) -> None:
        """Add to one of HISTOGRAMS."""
        self._histograms[name].observe(seconds)

    def choice_finished(self, reason: str, seconds_per_token: float | None) -> None:
        """One of a request's choices has its end."""
        self._choices[reason].inc()
        if seconds_per_token is not None:
            self.observe("output_token", seconds_per_token)

    def request_ended(self, outcome: str, seconds: float | None, prompt_tokens: int) -> None:
        """A request ended: with a finish reason, a failure's code, or "aborted"; `prompt_tokens`: that nodes were asked for.

        `seconds`: None where it was turned away at once, or a rush of refusals would make the router look fast.
        """
        self._ends[outcome].inc()
        if seconds is not None:
            self.observe("request", seconds)
        self._tokens["prompt"].inc(prompt_tokens)

    def request_parted(self, to_first: Mapping[str, float], to_second: Mapping[str, float]) -> None:
        """Where a request's time went, in seconds by part, to its first token and from there to its second."""
        for name, parts in zip(PARTS, (to_first, to_second), strict=True):
            for part, seconds in parts.items():
                self._parts[name][part].observe(seconds)

    def turned_away(self, reason: str) -> None:
        """Somebody was refused before any node heard of it."""
        self._turned_away[reason].inc()

    def show_certificates(self, ends_at: Callable[[], float | None]) -> None:
        """Say from now on when this host's end."""
        self._registry.register(CertificateEnd("router", ends_at))

    def refused_grpc(self, number: int = 1) -> None:
        """Connections to the registry were refused."""
        self._refused_grpc.inc(number)

    def client_asked(self, client: str) -> None:
        """A request on somebody's account."""
        self._note(client)
        self._client_requests.labels(client).inc()

    def client_used(self, client: str, kind: str, num_tokens: int) -> None:
        """Tokens on somebody's account; kind: prompt, completion."""
        self._note(client)
        self._client_tokens.labels(client, kind).inc(num_tokens)

    def _note(self, client: str) -> None:
        if self._clients.pop(client, self) is self:
            self._client_requests.labels(client)
            for kind in _KINDS_OF_TOKENS:
                self._client_tokens.labels(client, kind)
        self._clients[client] = None

    def clients_are(self, names: Set[str]) -> None:
        """Who has keys from now on. Of the others so many are shown yet, and no more: names may come and go for years."""
        gone = [client for client in self._clients if client not in names]
        for client in gone[:-MOST_GONE_CLIENTS]:
            del self._clients[client]
            self._client_requests.remove(client)
            for kind in _KINDS_OF_TOKENS:
                self._client_tokens.remove(client, kind)

    def families(self) -> list[Metric]:
        """Every metric as it is now, with its help."""
        state = self._look()
        return [*self._registry.collect(), *node_families(state), *self._of_clients.collect()]

    def render(self, *, names_clients: bool = False) -> bytes:
        """The text format."""
        state = self._look()
        text = generate_latest(self._registry) + node_text(state).encode()
        return text + generate_latest(self._of_clients) if names_clients else text

    def _look(self) -> Mapping[str, Any]:
        state = self._gauges.look()
        self._tokens["completion"].inc(state["completion_tokens"] - self._num_generated)
        self._num_generated = state["completion_tokens"]
        return state


class _CoreGauges(Collector):
    """What the core held at the last look."""

    def __init__(self, figures: Callable[[], Mapping[str, Any]]) -> None:
        self._figures = figures
        self._state: Mapping[str, Any] = {}

    def look(self) -> Mapping[str, Any]:
        """Read the core."""
        self._state = self._figures()
        return self._state

    def collect(self) -> Iterable[Metric]:
        """All but what there is of each node."""
        state = self._state
        yield GaugeMetricFamily(
            "baton_router_queued_requests", "choices of requests that wait for room", state["queued"]
        )
        yield GaugeMetricFamily("baton_router_live_requests", "requests not ended", state["live_requests"])
        text = "1 while requests can be served, else 0: as /ready says"
        yield GaugeMetricFamily("baton_router_ready", text, float(state["ready"]))
        text = "nodes that can take work, had they room, by role: prefill, decode, mixed"
        ready = GaugeMetricFamily("baton_router_nodes_ready", text, labels=["role"])
        for role in _ROLES:
            number = sum(node["takes_work"] and node["role"] == role for node in state["nodes"].values())
            ready.add_metric([role], float(number))
        yield ready
        yield GaugeMetricFamily(
            "baton_router_degraded",
            "1 while requests are served without a prefill node: decode nodes compute prompts themselves",
            float(bool(state["degraded"])),
        )
        caches = state["caches"]
        for name, text in CACHE_GAUGES.items():
            yield GaugeMetricFamily(f"baton_router_cache_index_{name}", text, float(caches.get(name, 0)))
        text = "blocks that found no room in the index, since the start"
        yield CounterMetricFamily("baton_router_cache_index_dropped", text, float(caches.get("dropped", 0)))

    def describe(self) -> Iterable[Metric]:
        """Nothing to collide with: the registry is ours."""
        return []
