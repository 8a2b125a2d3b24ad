"""A request's spans at the router: the request, and in it each Dispatch, from which the nodes' spans hang (node/spans.py).

    request [─────────────────────────────────────────────]
      attempt [──────────X NODE_LOST]  attempt [───────────]
        prefill, decode, … of nodes      prefill, decode, …

Only where a collector is told anything (runtime/tracing.py). A Dispatch of several choices is one span, until the last of them has
left it.
"""

from __future__ import annotations

from dataclasses import dataclass

from proto import baton_pb2 as pb
from router.events import Noted
from runtime.tracing import TraceContext, TracedSpan, Tracing


@dataclass(slots=True)
class _Dispatched:
    """One Dispatch, and the choices that are on it."""

    span: TracedSpan
    choices: set[int]


class RequestSpans:
    """Spans of the requests that live."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._requests: dict[str, TracedSpan] = {}
        self._attempts: dict[str, dict[int, _Dispatched]] = {}  # request -> choice -> where it is

    def begin(
        self, request_id: str, within: TraceContext, num_prompt_tokens: int, num_choices: int, ago_s: float
    ) -> None:
        """A request came `ago_s` ago, and has been read; `within` its client's own span, if it named one."""
        self._requests[request_id] = self._tracing.begin(
            "request",
            within,
            ago_s=ago_s,
            request_id=request_id,
            prompt_tokens=num_prompt_tokens,
            choices=num_choices,
        )
        self._attempts[request_id] = {}

    def dispatch(self, node: str, message: pb.Dispatch) -> None:
        """Name the span that the node's are to hang from, in a message that is about to be sent."""
        request = self._requests.get(message.request_id)
        if request is None:
            return
        request_id, number = message.request_id, message.attempt
        receiver = message.target.node.name
        span = self._tracing.begin(
            "attempt", request.context, request_id=request_id, attempt=number, sender=node, receiver=receiver
        )
        message.traceparent = span.traceparent  # the tracestate stays here: no message has a field for it
        choices = {branch.choice for branch in message.branches}
        self._attempts[message.request_id].update(dict.fromkeys(choices, _Dispatched(span, choices)))

    def noted(self, note: Noted) -> None:
        """Something has happened to a choice."""
        dispatched = self._attempts.get(note.request_id, {}).get(note.choice)
        if dispatched is None or note.what == "dispatched":  # that message is sent behind the note
            return
        if note.what in ("failed", "given_up"):
            self._leave(note.request_id, note.choice, note.code)
        else:
            dispatched.span.note(note.what, choice=note.choice, attempt=note.attempt, nodes=" ".join(note.nodes))

    def finished(self, request_id: str, choice: int) -> None:
        """A choice has its end."""
        self._leave(request_id, choice, None)

    def ended(self, request_id: str, outcome: str, num_tokens: int, error: str | None) -> None:
        """The request has its end; `error`: the code of its failure."""
        for choice in list(self._attempts.get(request_id, {})):
            self._leave(request_id, choice, error)
        self._attempts.pop(request_id, None)
        if (request := self._requests.pop(request_id, None)) is not None:
            request.describe(outcome=outcome, completion_tokens=num_tokens)
            request.end(error)

    def _leave(self, request_id: str, choice: int, error: str | None) -> None:
        dispatched = self._attempts.get(request_id, {}).pop(choice, None)
        if dispatched is not None:
            dispatched.choices.discard(choice)
            if not dispatched.choices:
                dispatched.span.end(error)
