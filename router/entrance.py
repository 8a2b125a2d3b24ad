"""The core's numbers, and whether a request is let in at all. Pure.

Not here: what is wrong with a request by itself (openai_types.py, intake.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from router.events import Failed, GenerationRequest
from router.nodes import NodeTable


@dataclass(frozen=True, slots=True)
class RouterCoreConfig:
    """The core's numbers; the router's flags fill the first four."""

    max_queue: int = 1024  # branches waiting; beyond: 429. A request is taken whole, so its last ones may be beyond
    max_inflight_prefills: int = 32  # per prefill node
    preempt_retry_count: int = 3  # attempts after the first that a broken handoff may cost
    local_prefill_max_tokens: int = 0  # that a decode node computes of short prompts at once, instead of a handoff
    commit_unknown_grace_s: float = 2.0  # how long the receiver's first batch is awaited after an unanswered Commit
    prompt_logprobs_grace_s: float = 2.0  # how long the sender's first batch is awaited once the receiver has finished
    min_refusal_wait_s: float = 0.05  # a node that refused is not asked again before
    max_refusal_wait_s: float = 2.0  # whatever it says: the branch holds up those behind it meanwhile
    retry_after_s: float = 1.0  # what a client turned away is told
    forgotten_fence_s: float = 30.0  # how long a node fences an attempt of a request that has ended here


def find_refusal(
    request: GenerationRequest, nodes: NodeTable, num_queued: int, config: RouterCoreConfig, now: float
) -> Failed | None:
    """Why the request is turned away at once, if it is."""
    wait_s = config.retry_after_s
    longest = nodes.max_total_tokens
    total_tokens = len(request.prompt_token_ids) + request.sampling.max_tokens
    if num_queued >= config.max_queue:
        message = f"The router's queue is full ({config.max_queue} requests)."
        return Failed(request.request_id, 429, "OVERLOADED", message, wait_s)
    if longest is None:
        message = f"No nodes to serve the request: {', '.join(nodes.missing())}."
        return Failed(request.request_id, 503, "NO_NODES", message, wait_s)
    if total_tokens > longest:
        message = f"Prompt and max_tokens need {total_tokens} tokens, more than the {longest} that a node can hold."
        return Failed(request.request_id, 400, "context_length_exceeded", message, None)
    if request.deadline <= now:
        return Failed(request.request_id, 504, "DEADLINE", "The request's deadline has passed.", None)
    return None
