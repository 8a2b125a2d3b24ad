"""The knobs of the router process.

Not here: what follows from the model directory (text.py); limits that the nodes announce (nodes.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from router.limits import MAX_CHOICES_PER_PROMPT
from runtime.config import knob
from runtime.knobs import is_unicode
from runtime.redis_address import DEFAULT_NAMESPACE, EMBEDDED, registry_problem
from runtime.tracing import endpoint_problem


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """What the router is told when it starts."""

    model: Path = knob(
        help="model directory in Hugging Face layout: tokenizer, chat template, stop tokens", metavar="DIR"
    )
    served_model_name: str | None = knob(None, "name that clients ask for; none: the directory's name", metavar="NAME")

    tool_parser: Literal["auto", "hermes", "llama", "mistral"] = knob(
        "auto",
        "how the model writes tool calls; auto: as its chat template says",
    )
    reasoning_parser: Literal["auto", "think", "none"] = knob(
        "auto",
        "whether a chat's thoughts, <think>…</think>, are told apart, as reasoning_content; auto: where the chat template knows of "
        "them; none: they are content",
    )

    host: str = knob("127.0.0.1", "address to listen on; loopback because without --api-keys nobody is asked for one")
    port: int = knob(8000, "HTTP port; 0 takes a free one", low=0, high=65535)
    registry: str = knob(
        EMBEDDED,
        "where nodes announce themselves; embedded: here, at the registry port; or a Redis, redis://HOST:PORT/DB (rediss: "
        "over TLS), that several routers share; a password is better off in the variable, where ps does not show it",
        metavar="URL",
    )
    registry_port: int = knob(0, "gRPC port of the embedded registry; 0 takes a free one", low=0, high=65535)
    registry_host: str | None = knob(
        None,
        "address that the embedded registry listens on: whoever reaches it can announce a node, but for --tls-dir; none: as --host",
        metavar="ADDRESS",
    )
    registry_namespace: str | None = knob(
        None, f"this cluster's name in Redis, which may hold several; none: {DEFAULT_NAMESPACE}", metavar="NAME"
    )
    workers: int = knob(
        1,
        "processes that serve behind the port, each a router of its own over the same nodes; for more streams than one core can "
        "take; one that dies is started again",
        low=1,
        high=64,
    )
    tls_dir: Path | None = knob(
        None,
        "this host's certificates, as `baton certs make` makes them: HTTP becomes HTTPS, and every connection to nodes is "
        "encrypted and made with members of the cluster only; equal on all processes of a cluster",
        metavar="DIR",
    )
    api_keys: Path | None = knob(
        None,
        "file of the keys that clients must show, one a line, behind each name= requests_per_minute= tokens_per_minute= if "
        "wanted; read again when it changes; none: nobody is asked",
        metavar="FILE",
    )
    metrics_need_key: bool = knob(
        False, "with --api-keys: /metrics wants a key, too; /health and /ready never do, probes have none"
    )
    ready_file: Path | None = knob(
        None, "JSON file to write once the router listens: url, registry, pid", metavar="FILE"
    )
    parent_pid: int = knob(0, "die when the process with this id dies; 0: never (a launcher gives its own)", low=0)

    launcher: str | None = knob(
        None,
        "where the launcher that has started this router can be asked to kill a node (the dashboard's button); `baton up` sets "
        "the variable, since what stands behind the slash is secret",
        metavar="HOST:PORT/TOKEN",
    )

    max_queue: int = knob(
        1024, "requests (each choice of n is one) that wait for room; one more is answered 429", low=1, high=1 << 20
    )
    refuse_late: Literal["on", "off"] = knob(
        "on",
        "answer 503 at once to who would still wait for room at its deadline, by how fast the queue has moved lately",
    )
    max_inflight_prefills: int = knob(
        32, "requests in prefill per prefill node; more would only wait there instead of here", low=1, high=4096
    )
    request_timeout_s: float = knob(600.0, "seconds from a request's arrival to its end", low=0.1, high=86_400)
    preempt_retry_count: int = knob(
        3,
        "attempts that failures may cost a choice after its first; a preemption costs a 32nd of one. Then it ends with "
        "finish_reason pd_reschedule and what it has",
        low=0,
        high=100,
    )
    preempt_retry_exclude_decode: bool = knob(
        True, "a decode node that failed a choice, or gave it up, gets it again only where no other can take it"
    )
    max_nodes_lost: int = knob(
        2,
        "nodes whose processes may die while a choice is on them; then it ends as if its retries were spent, since it may be "
        "what kills them; a node that is silent or cut off does not count",
        low=1,
        high=100,
    )
    max_moves: int = knob(
        8, "times that a choice may go from decode node to decode node, KV and all, before it stays", low=0, high=1000
    )
    no_nodes_grace_s: float = knob(
        10.0,
        "seconds that requests wait when the last node of a role has gone, or the last that is long enough, for one to come back; "
        "then they are answered 503 at once, but for streams that have begun; so long, too, streams whose model's nodes have gone "
        "wait for them beside another model's",
        low=0.0,
        high=3600,
    )
    breaker_failures: int = knob(
        5,
        "requests in a row that a node fails before it gets no more for a second, and twice as long each time that it "
        "fails again",
        low=1,
        high=1000,
    )
    local_prefill_max_tokens: int = knob(
        32,
        "tokens of short prompts that a decode node computes itself, at most so many at once, instead of a handoff; 0: none",
        low=0,
        high=1 << 20,
    )
    placement_prefill: Literal["cache_aware", "least_loaded", "power_of_two", "random", "round_robin"] = knob(
        "cache_aware",
        "how a prefill node is chosen; least_loaded counts prompt tokens, since prompts differ a hundredfold; cache_aware "
        "reckons with what a node's prefix cache and KV pool hold of the prompt, and with how fast it computes",
    )
    cache_imbalance_tokens: int = knob(
        8192,
        "of cache_aware: tokens by which a node's queue may be longer than the shortest before it is left out, whatever it holds",
        low=0,
        high=1 << 30,
    )
    cache_imbalance_ratio: float = knob(
        2.0, "of cache_aware: times the shortest queue that such a queue may be, where that is longer", low=1, high=1000
    )
    cache_index_max_mib: int = knob(
        256,
        "of cache_aware: MiB that the index of all nodes' blocks may take, at 20 bytes or so for a block; over it every "
        "second block is left out, then three of four, …",
        low=1,
        high=1 << 16,
    )
    placement_decode: Literal["least_loaded", "power_of_two", "random", "round_robin"] = knob(
        "least_loaded", "how a decode node is chosen; least_loaded compares the shares of their sequences in use"
    )
    placement_seed: int | None = knob(
        None, "what random and power_of_two draw from; none: drawn at start", low=0, high=2**63 - 1, metavar="N"
    )
    max_body_mib: int = knob(
        8, "MiB of a request's body; a larger one is answered 413 while it is read", low=1, high=1024
    )
    timelines: int = knob(
        1000,
        "requests whose timelines are kept behind their ends, the newest ones (GET /v1/requests); 0: none",
        low=0,
        high=1 << 20,
    )
    max_prompt_tokens: int | None = knob(
        None, "tokens of one prompt; a longer one is answered 400; none: what nodes can hold", low=1, high=1 << 24
    )
    max_n: int = knob(16, "choices that one prompt may ask for (n)", low=1, high=MAX_CHOICES_PER_PROMPT)
    max_header_kib: int = knob(32, "KiB of a request's line and headers; more is answered 431", low=1, high=1024)
    header_timeout_s: float = knob(
        10.0, "seconds until a request's headers must have come; then 408", low=0.1, high=3600
    )
    max_connections: int = knob(
        4096,
        "client connections at once; requests on more are answered 503, but for /health, /ready and /metrics",
        low=1,
        high=1 << 20,
    )
    session_grace_s: float = knob(2.0, "seconds without a node's stream until its work is lost", low=0.1, high=3600)
    drain_timeout_s: float = knob(
        25.0,
        "seconds that SIGTERM leaves what was accepted to finish; 0: none; less than what the process gets before it is "
        "killed, which is 30 on Kubernetes",
        low=0,
        high=86_400,
    )
    log_level: Literal["debug", "info", "warning", "error"] = knob("info", "least level that is logged")
    log_format: Literal["text", "json"] = knob("text", "of a log line: key=value for people, or a JSON object")
    otlp_endpoint: str | None = knob(
        None,
        "OpenTelemetry collector that is told spans, over OTLP/HTTP: http://HOST:4318; none: nobody",
        metavar="URL",
    )

    @property
    def registry_address(self) -> str:
        """The host that the embedded registry listens on."""
        return self.host if self.registry_host is None else self.registry_host

    def __post_init__(self) -> None:
        if problem := registry_problem(self.registry, self.registry_namespace):
            raise ValueError(problem)
        if not self.host:
            raise ValueError("--host: must be an address of this machine, or 0.0.0.0 or :: for all of them")
        if self.registry != EMBEDDED and self.registry_port:
            raise ValueError(
                f"--registry-port {self.registry_port}: nodes announce themselves in Redis, since --registry says so"
            )
        if self.registry != EMBEDDED and self.registry_host is not None:
            raise ValueError(
                f"--registry-host {self.registry_host}: nodes announce themselves in Redis, since --registry says so"
            )
        if self.registry_host == "":
            raise ValueError("--registry-host: must be an address of this machine, or none: as --host")
        if self.launcher is not None and not re.fullmatch(r"[^/\s]+:\d{1,5}/[\w-]+", self.launcher):
            raise ValueError("--launcher: is not HOST:PORT/TOKEN")
        if problem := endpoint_problem(self.otlp_endpoint):
            raise ValueError(problem)
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise ValueError("--served-model-name: must not be empty")
        if self.served_model_name is None and not is_unicode(self.model.resolve().name):
            name = self.model.resolve().name
            raise ValueError(
                f"--model {name!a}: is no name that clients could ask for, not being UTF-8; say --served-model-name"
            )
