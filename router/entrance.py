"""The core's numbers, and whether a request is let in at all. Pure.

A role's last node may be gone for a moment only: somebody restarts it. For a grace after the last pair was there, requests are let
in and wait; then they, and all that has given its client nothing yet, are turned away until a pair is back. What has begun
waits on, to its deadline. So it is, beside shorter nodes, with what only a longer one that is gone could hold: for ten minutes that
is nothing that the client did wrong, then it is longer than nodes are.

Not here: what is wrong with a request by itself (openai_types.py, intake.py); how long it would wait (pace.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from router.events import Failed, GenerationRequest
from router.nodes import NodeTable

LONGEST_KEPT_S: Final = 600.0  # how long what a node that has gone could hold is the longest that may be asked for


@dataclass(frozen=True, slots=True)
class RouterCoreConfig:
    """The core's numbers; those that users set are the router's flags of these names."""

    max_queue: int = 1024  # branches waiting; beyond: 429. A request is taken whole, so its last ones may be beyond
    max_inflight_prefills: int = 32  # per node that prefills
    tokenizer: str = ""  # digest of the router's: a node with another one gets no work; empty: unknown
    preempt_retry_count: int = 3  # attempts after the first that failures may cost a branch
    preempt_retry_exclude_decode: bool = True  # who failed a branch is its last resort
    max_nodes_lost: int = 2  # a branch that was on so many when they died is sent to no other
    one_event_s: float = 2.5  # two of them found within so long count as one: a session's grace and a heartbeat
    max_moves: int = 8  # of a branch, from decode node to decode node
    no_nodes_grace_s: float = 10.0  # how long a last pair of nodes may be gone before requests are turned away
    local_prefill_max_tokens: int = 0  # that a decode node computes of short prompts at once, instead of a handoff
    breaker_failures: int = 5  # requests in a row that a node fails before it is left alone
    seed: int = 0  # of the jitter
    breaker_first_s: float = 1.0  # for how long it is left alone then; doubled each time that it fails again
    breaker_longest_s: float = 60.0
    commit_unknown_grace_s: float = 2.0  # how long the receiver's first batch is awaited after an unanswered Commit
    prompt_logprobs_grace_s: float = 2.0  # how long the sender's first batch is awaited once the receiver has finished
    min_refusal_wait_s: float = 0.05  # a node that refused is not asked again before
    max_refusal_wait_s: float = 2.0  # whatever it says: the branch holds up those behind it meanwhile
    min_backoff_s: float = 0.1  # before the second attempt in a row that follows a failure; the first follows at once
    max_backoff_s: float = 5.0
    move_retry_s: float = (
        0.5  # when a holder may ask for a target again, and before which a target that it failed at is not named
    )
    refuses_late: bool = True  # who would still be waiting at its deadline is turned away at once
    retry_after_s: float = 1.0  # what a client turned away is told, at least
    max_retry_after_s: float = 60.0  # and at most
    forgotten_fence_s: float = 30.0  # how long a node fences an attempt of a request that has ended here


@dataclass(slots=True)
class _Greatest:
    """The greatest that there has been, until for LONGEST_KEPT_S there was less: what asks for it did nothing wrong meanwhile."""

    value: int | None = None
    less_since: float | None = None

    def look(self, found: int, now: float) -> None:
        """So much is there."""
        if self.value is None or found >= self.value:
            self.value, self.less_since = found, None
        elif self.less_since is None:
            self.less_since = now
        elif now - self.less_since > LONGEST_KEPT_S:
            self.value, self.less_since = found, None


class Entrance:
    """Knows whether a pair of nodes is there, and since when none is."""

    def __init__(self, nodes: NodeTable, config: RouterCoreConfig) -> None:
        self._nodes = nodes
        self._config = config
        self._gone_at: float | None = -math.inf  # None: a pair is there
        self.has_given_up = True  # who waits for a pair is turned away
        self._longest, self._most_slots, self._most_prefills = _Greatest(), _Greatest(), _Greatest()

    def look(self, now: float) -> None:
        """The nodes have changed, or time has passed."""
        self._most_slots.look(self._nodes.num_slots, now)
        self._most_prefills.look(self._nodes.num_prefill_places, now)
        longest = self._nodes.max_total_tokens
        if longest is None:
            self._gone_at = now if self._gone_at is None else self._gone_at
            return
        self._gone_at, self.has_given_up = None, False
        self._longest.look(longest, now)

    @property
    def longest(self) -> int | None:
        """Prompt and completion, that may be asked for; None: no pair has been there."""
        return self._longest.value

    def most_prompts(self, num_choices: int) -> int:
        """Prompts with so many choices each that could come at once, were nobody else here: begun at once, or in the queue."""
        num_begun = min(self._most_slots.value or 0, (self._most_prefills.value or 0) * num_choices)
        return 1 + (self._config.max_queue + num_begun - 1) // num_choices

    @property
    def gives_up_at(self) -> float | None:
        """When those who wait for a pair that was there are to be turned away; None: there is one, or they have been."""
        if self._gone_at is None or self.has_given_up:
            return None
        return self._gone_at + self._config.no_nodes_grace_s

    def give_up(self) -> None:
        """No pair has come back in time."""
        self.has_given_up = True

    def no_nodes(self, request_id: str) -> Failed:
        """The answer to who finds no pair of nodes."""
        message = f"No nodes to serve the request: {', '.join(self._nodes.missing())}."
        return Failed(request_id, 503, "NO_NODES", message, self._config.retry_after_s)

    def find_refusal(self, request: GenerationRequest, num_queued: int, wait_s: float, now: float) -> Failed | None:
        """Why the request, which would find so many in the queue and wait so long, is turned away at once, if it is."""
        self.look(now)
        longest, longest_now = self.longest, self._nodes.max_total_tokens
        total_tokens = len(request.prompt_token_ids) + request.sampling.max_tokens
        if num_queued >= self._config.max_queue:
            message = f"The router's queue is full ({self._config.max_queue} requests)."
            return Failed(request.request_id, 429, "OVERLOADED", message, self._config.retry_after_s)
        if longest is None or self.has_given_up:
            return self.no_nodes(request.request_id)
        if total_tokens > longest:
            message = f"Prompt and max_tokens need {total_tokens} tokens, more than the {longest} that a node can hold."
            return Failed(request.request_id, 400, "context_length_exceeded", message, None)
        shorter_at = self._longest.less_since
        is_over = shorter_at is not None and now - shorter_at >= self._config.no_nodes_grace_s
        if is_over and total_tokens > (longest_now or longest):
            return none_large_enough(request.request_id, total_tokens, self._config.retry_after_s)
        if request.deadline <= now:
            return Failed(request.request_id, 504, "DEADLINE", "The request's deadline has passed.", None)
        if self._config.refuses_late and now + wait_s > request.deadline:
            return self._late(request.request_id, wait_s, request.deadline - now)
        return None

    def _late(self, request_id: str, wait_s: float, left_s: float) -> Failed:
        """The answer to who would wait in vain. If nobody else comes, the queue is short enough once it may come back."""
        message = f"The wait for room would be {wait_s:.1f} s, and the request's deadline is in {left_s:.1f} s."
        retry_after_s = min(max(wait_s - left_s, self._config.retry_after_s), self._config.max_retry_after_s)
        return Failed(request_id, 503, "LATE", message, retry_after_s)


def none_large_enough(request_id: str, total_tokens: int, retry_after_s: float) -> Failed:
    """The answer to who asks for more than the nodes that are left can hold, where another one could a while ago."""
    message = f"No node that is left can hold the {total_tokens} tokens of prompt and answer; one that can has gone."
    return Failed(request_id, 503, "NO_NODES", message, retry_after_s)
