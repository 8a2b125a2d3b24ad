"""A node's spans: one for each Dispatch and each Reserve that names a trace, until its attempts have ended here.

    attempt (the router's)
      prefill [── queue, prefill ── Commit answered]        of the node that a Dispatch went to; `generate` where it does all itself
        decode   [── lease ── Commit ── tokens ── end]      of the node that it asked for a lease, and so on where a sequence moves

Fed by the loop beside node/watch.py, and only where a collector is told anything (runtime/tracing.py). It adds the trace's context
to the Reserves that go out; the core knows nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from node import events as ev
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey, BranchKey, attempt_key
from runtime.tracing import TraceContext, TracedSpan, Tracing

MAX_SPANS: Final = 16_384  # attempts; the oldest are ended above it: a core drops some without a word
_WELL: Final = frozenset({"committed", "finished", "moved", "released"})
_PARTS: Final = ("queue_us", "prefill_us", "reserve_wait_us", "admit_us", "first_step_us")


@dataclass(slots=True)
class _Shared:
    """A span, and the attempts of branches that are in it."""

    span: TracedSpan
    keys: set[AttemptKey]


class AttemptSpans:
    """Spans of what is on this node."""

    def __init__(self, tracing: Tracing, node: str) -> None:
        self._tracing = tracing
        self._node = node
        self._spans: dict[AttemptKey, _Shared] = {}  # oldest first
        self._newest: dict[BranchKey, AttemptKey] = {}
        self._asked: dict[int, tuple[AttemptKey, ...]] = {}  # Reserve calls that are not answered

    def received(self, event: ev.Event) -> None:
        """The core is about to get this event."""
        match event:
            case ev.FromRouter(_, message) if message.WhichOneof("kind") == "dispatch" and message.dispatch.traceparent:
                dispatch = message.dispatch
                keys = [AttemptKey(dispatch.request_id, each.choice, dispatch.attempt) for each in dispatch.branches]
                name = "generate" if dispatch.target.node.name == self._node else "prefill"
                self._begin(name, dispatch.traceparent, keys, len(dispatch.prompt_token_ids))
            case ev.ReserveAsked(call_id, request) if request.traceparent:
                lead = attempt_key(request.key)
                keys = [lead, *(lead._replace(choice=choice) for choice in request.more_choices)]
                if lead not in self._spans:  # else it is asked again
                    self._begin("decode", request.traceparent, keys, request.num_tokens)
                    self._asked[call_id] = tuple(keys)

    def performed(self, action: ev.Action) -> None:
        """The core has asked for this, and it is not done yet."""
        match action:
            case ev.SendReserve(key, _, request):
                shared = self._spans.get(key) or self._spans.get(self._newest.get(key.branch, key))
                if shared is not None:
                    request.traceparent = shared.span.traceparent
            case ev.AnswerReserve(call_id, reply) if call_id in self._asked:
                for key in self._asked.pop(call_id):
                    if reply.WhichOneof("result") == "error":
                        self._end(key, pb.ErrorCode.Name(reply.error.code))
                    elif (shared := self._spans.get(key)) is not None:
                        shared.span.note("lease", blocks=reply.lease.num_blocks, held=reply.lease.num_blocks_held)
            case ev.ToRouter(_, message) if message.WhichOneof("kind") == "tokens" and message.tokens.timings:
                for timing in message.tokens.timings:
                    if (shared := self._spans.get(attempt_key(timing.key))) is not None:
                        shared.span.describe(**{part: value for part in _PARTS if (value := getattr(timing, part))})
            case ev.Ended(key, outcome):
                self._end(key, None if outcome in _WELL else outcome)

    def _begin(self, name: str, traceparent: str, keys: list[AttemptKey], num_tokens: int) -> None:
        lead = keys[0]
        within = TraceContext(traceparent)
        span = self._tracing.begin(
            name, within, request_id=lead.request_id, attempt=lead.attempt, node=self._node, tokens=num_tokens
        )
        shared = _Shared(span, set(keys))
        for key in keys:
            self._end(key, "begun again")
            self._spans[key] = shared
            self._newest[key.branch] = key
        while len(self._spans) > MAX_SPANS:
            self._end(next(iter(self._spans)), "forgotten")

    def _end(self, key: AttemptKey, error: str | None) -> None:
        shared = self._spans.pop(key, None)
        if shared is None:
            return
        if self._newest.get(key.branch) == key:
            del self._newest[key.branch]
        shared.keys.discard(key)
        if not shared.keys:
            shared.span.describe(outcome=error or "ok")
            shared.span.end(error)
