"""The knobs of the router process.

Not here: what follows from the model directory (text.py); limits that the nodes announce (nodes.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runtime.config import knob


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """What the router is told when it starts."""

    model: Path = knob(
        help="model directory in Hugging Face layout: tokenizer, chat template, stop tokens", metavar="DIR"
    )
    served_model_name: str | None = knob(None, "name that clients ask for; none: the directory's name", metavar="NAME")

    host: str = knob("127.0.0.1", "address to listen on; loopback because nothing here asks for credentials yet")
    port: int = knob(8000, "HTTP port; 0 takes a free one", low=0, high=65535)
    registry_port: int = knob(0, "gRPC port where nodes announce themselves; 0 takes a free one", low=0, high=65535)
    ready_file: Path | None = knob(
        None, "JSON file to write once the router listens: url, registry, pid", metavar="FILE"
    )
    parent_pid: int = knob(0, "die when the process with this id dies; 0: never (a launcher gives its own)", low=0)

    max_queue: int = knob(
        1024, "requests (each choice of n is one) that wait for room; one more is answered 429", low=1, high=1 << 20
    )
    max_inflight_prefills: int = knob(
        32, "requests in prefill per prefill node; more would only wait there instead of here", low=1, high=4096
    )
    request_timeout_s: float = knob(600.0, "seconds from a request's arrival to its end", low=0.1, high=86_400)
    preempt_retry_count: int = knob(
        3, "attempts that a broken handoff may cost a request after its first", low=0, high=100
    )
    local_prefill_max_tokens: int = knob(
        64,
        "tokens of short prompts that a decode node computes itself, at most so many at once, instead of a handoff; 0: none",
        low=0,
        high=1 << 20,
    )
    placement_prefill: Literal["least_loaded", "power_of_two", "random", "round_robin"] = knob(
        "least_loaded",
        "how a prefill node is chosen; least_loaded counts prompt tokens, since prompts differ a hundredfold",
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
    session_grace_s: float = knob(2.0, "seconds without a node's stream until its work is lost", low=0.1, high=3600)
    log_level: Literal["debug", "info", "warning", "error"] = knob("info", "least level that is logged")

    def __post_init__(self) -> None:
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise ValueError("--served-model-name: must not be empty")
