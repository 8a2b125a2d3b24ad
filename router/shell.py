"""The loop's side of the router: feeds the core, does what it asks, keeps its timer. Decides nothing.

Everything that the core hears arrives here, on one asyncio loop, and is fed in order of arrival; what a performed action
causes (a send that overflows a session loses it) waits until the actions before it are done. Per request it holds only the
handle that the HTTP side reads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from proto import baton_pb2 as pb
from router.answer import Answer, ClientGone
from router.core import RouterCore
from router.events import (
    Aborted,
    Action,
    CircuitChanged,
    Count,
    Degraded,
    Dial,
    Emitted,
    Event,
    Failed,
    Finished,
    FromNode,
    HangUp,
    LeftOut,
    LoadReported,
    NodeListed,
    NodeMissed,
    NodeRef,
    NodeUnlisted,
    Noted,
    Observe,
    PromptScored,
    SessionBroken,
    SessionLost,
    SessionUp,
    Stopped,
    Submitted,
    Timed,
    ToNode,
)
from router.metrics import RouterMetrics
from router.newcomers import Newcomers
from router.node_state import Node
from router.request_log import log_end, log_failure
from router.spans import RequestSpans
from router.timeline import Record
from router.timelines import Timelines
from runtime.alarm import Alarm
from runtime.credentials import NO_CREDENTIALS, Credentials
from runtime.logs import log_event
from runtime.session import Peer, SessionTiming
from runtime.session_dialer import SessionDialer
from runtime.session_events import Loss

_LOG: Final = logging.getLogger(__name__)


class RouterShell:
    """Owns the core and the sessions; the registry server and the HTTP handlers call it. Make and use it on the loop."""

    def __init__(
        self,
        core: RouterCore,
        me: Peer,
        timing: SessionTiming,
        credentials: Credentials = NO_CREDENTIALS,
        max_timelines: int = 1000,
        spans: RequestSpans | None = None,
    ) -> None:
        """`max_timelines`: requests whose timelines are kept; `spans`: where a collector is told of requests."""
        self._spans = spans
        self._core = core
        self.name = me.name
        self.timelines = Timelines(max_timelines)
        self._loop = asyncio.get_running_loop()
        self._dialer = SessionDialer(me, self, timing, credentials)
        self.is_draining = self._is_closed = False
        self._answers: dict[str, Answer] = {}  # by request id
        self._ended_tokens = 0  # completion tokens of requests that have ended
        self._events: deque[Event] = deque()
        self._newcomers = Newcomers[asyncio.Future[None]]()
        self._is_woken = False
        self._alarm = Alarm(self._loop, self._run)
        self.metrics = RouterMetrics(
            lambda: {**core.figures(), "ready": not self.missing(), "completion_tokens": self.num_generated}
        )

    # ---------------------------------------------------------------- the HTTP side

    async def step_aside(self) -> None:
        """Return when a new request may begin: tokens that are here go before it."""
        if not (self._events or self._newcomers):
            return  # a turn for nothing costs a twentieth of what the request does
        turn: asyncio.Future[None] = self._loop.create_future()
        self._newcomers.add(turn, self._loop.time())
        self._wake()
        await turn

    def submit(self, answer: Answer) -> None:
        """Start a request; the handle gets its tokens and its ends."""
        request = answer.request
        self._answers[request.request_id] = answer
        arrival, num_tokens = answer.arrival, len(request.prompt_token_ids)
        self.timelines.begin(
            Record(
                request.request_id,
                arrival.client_request_id,
                num_tokens,
                request.num_choices,
                arrival.at,
                self.now(),
            )
        )
        if self._spans is not None:
            ago_s = self.now() - arrival.at
            self._spans.begin(request.request_id, arrival.within, num_tokens, request.num_choices, ago_s)
        if self._is_closed:
            self._end(request.request_id, replace(_shutting_down(request.request_id), is_refusal=True))
        elif answer.known_end is None:
            self._feed(Submitted(request))
        else:
            self._finish(Finished(request.request_id, answer.known_end, request.generated_token_ids))

    def abort(self, answer: Answer) -> None:
        """The client has gone; without effect once the request has ended."""
        request_id = answer.request.request_id
        if request_id in self._answers:
            self._end(request_id, ClientGone())
            self._feed(Aborted(request_id))

    def note_written(self, request_id: str, choice: int, num_tokens: int) -> None:
        """The first so many tokens of a choice, one or two, were handed to its client's connection."""
        self.timelines.written(request_id, choice, num_tokens, self.now())

    @property
    def max_total_tokens(self) -> int | None:
        """The longest sequence (prompt and completion) that may be asked for; None before the first pair of nodes."""
        return self._core.max_total_tokens

    @property
    def max_total_tokens_now(self) -> int | None:
        """The longest that can be served by the nodes that are there; None: no pair is."""
        return self._core.max_total_tokens_now

    def most_prompts(self, num_choices: int) -> int:
        """Prompts with so many choices each that one answer may have: more find the queue full whenever they come."""
        return self._core.most_prompts(num_choices)

    def missing(self, waits: bool = False) -> list[str]:
        """What is lacking before a request can be served now, or with `waits` let in to wait, as sentences; empty when ready."""
        return ["the router is shutting down"] if self.is_draining else self._core.missing(waits)

    def drain(self) -> None:
        """Be ready no more; what is here goes on."""
        self.is_draining = True

    def degraded(self) -> list[str]:
        """What requests are served without, as sentences."""
        return self._core.degraded()

    @property
    def num_queued(self) -> int:
        """Branches that wait for room."""
        return self._core.num_queued

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return self._core.num_live

    def snapshot(self) -> Mapping[str, object]:
        """The core's state, every request with it: for tests."""
        return self._core.snapshot()

    def nodes(self) -> Iterator[tuple[Node, str]]:
        """The core's nodes, each with the state of its circuit."""
        return self._core.nodes()

    def live_tokens(self) -> dict[str, int]:
        """Completion tokens so far, of each request that lives."""
        return {request_id: answer.num_tokens for request_id, answer in self._answers.items()}

    @property
    def num_generated(self) -> int:
        """Completion tokens of all clients since the start; those of who lives are in it as they come."""
        return self._ended_tokens + sum(each.num_tokens for each in self._answers.values() if not each.is_canary)

    def now(self) -> float:
        """The clock that timelines and durations go by: finer than the loop's, by which the core goes."""
        return time.monotonic()

    async def close(self) -> None:
        """End every request with an error, whenever it comes, then every session, once the nodes have heard that they may stop."""
        self.is_draining = self._is_closed = True
        for request_id in list(self._answers):
            self._end(request_id, _shutting_down(request_id))
            self._feed(Aborted(request_id))
        while self._events:
            self._take_one()
        await self._dialer.close()
        self._alarm.cancel()

    # ---------------------------------------------------------------- sessions and registry

    def on_up(self, node: Peer) -> None:
        """SessionHandler."""
        self._feed(SessionUp(NodeRef(*node)))

    def on_broken(self, node: Peer) -> None:
        """SessionHandler."""
        self._feed(SessionBroken(NodeRef(*node)))

    def on_lost(self, node: Peer, loss: Loss) -> None:
        """SessionHandler."""
        self._feed(SessionLost(NodeRef(*node), has_died=loss is Loss.DIED))

    def on_message(self, node: Peer, message: pb.NodeMessage) -> None:
        """SessionHandler."""
        self._feed(FromNode(NodeRef(*node), message))

    def on_load(self, node: Peer, load: pb.LoadReport) -> None:
        """SessionHandler."""
        self._feed(LoadReported(NodeRef(*node), load))

    def on_listed(self, entry: pb.NodeEntry) -> None:
        """RegistryHandler."""
        self._feed(NodeListed(entry))

    def on_missed(self, node: Peer) -> None:
        """RegistryHandler."""
        self._feed(NodeMissed(NodeRef(*node)))

    def on_unlisted(self, node: Peer) -> None:
        """RegistryHandler."""
        self._feed(NodeUnlisted(NodeRef(*node)))

    # ---------------------------------------------------------------- the core

    def _feed(self, event: Event) -> None:
        """Queue an event. The loop itself runs the core, so that its bugs reach the loop's handler, whoever fed it."""
        self._events.append(event)
        self._wake()

    def _wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        """Take one event, and leave the next to the loop's next turn: what the first has clients written goes out before it."""
        self._is_woken = False
        self._take_one()
        if (turn := self._newcomers.next(self._loop.time(), bool(self._events))) is not None and not turn.done():
            turn.set_result(None)
        if self._events or self._newcomers:
            self._wake()
        else:
            self._alarm.arm(self._core.next_deadline())

    def _take_one(self) -> None:
        """Tick, then feed what has waited longest: nothing beats its own deadline."""
        now = self._loop.time()
        self._perform_all(self._core.tick(now), now)
        if self._events:
            self._perform_all(self._core.receive(self._events.popleft(), now), now)

    def _perform_all(self, actions: list[Action], now: float) -> None:
        for action in actions:
            match action:
                case Emitted():
                    self._emit(action, now)
                case ToNode(node, message):
                    if self._spans is not None and message.WhichOneof("kind") == "dispatch":
                        self._spans.dispatch(node.name, message.dispatch)
                    self._dialer.send(node.name, node.incarnation, message)
                case Count(name, label, amount):
                    self.metrics.count(name, label, amount)
                case Observe(name, seconds):
                    self.metrics.observe(name, seconds)
                case PromptScored(request_id, choice, logprobs):
                    if (answer := self._answers.get(request_id)) is not None:
                        answer.choices[choice].put_prompt_logprobs(logprobs)
                case Noted():
                    self._note(action)
                case Timed(timing):
                    self.timelines.timed(timing)
                    answer = self._answers.get(timing.key.request_id)
                    if answer is not None and timing.HasField("cached_tokens"):
                        answer.note_cached(timing.cached_tokens)
                case Finished():
                    self._finish(action)
                case Failed(request_id):
                    self._end(request_id, action)
                case Dial(entry):
                    self._dialer.dial(entry)
                case LeftOut(entry):
                    why = "its tokenizer is not that of the router's --model: its text would be wrong"
                    log_event(_LOG, logging.WARNING, "node_left_out", node=entry.node.name, reason=why)
                case Degraded(sentences):
                    level = logging.WARNING if sentences else logging.INFO
                    log_event(_LOG, level, "degraded" if sentences else "not_degraded", without="; ".join(sentences))
                case CircuitChanged(name, is_open):
                    level, event = (logging.WARNING, "circuit_opened") if is_open else (logging.INFO, "circuit_closed")
                    log_event(_LOG, level, event, node=name)
                case HangUp(node):
                    log_event(_LOG, logging.INFO, "node_forgotten", node=node.name)
                    self._dialer.hang_up(node.name, node.incarnation)

    def _note(self, note: Noted) -> None:
        if note.what == "dispatched" and (answer := self._answers.get(note.request_id)) is not None:
            answer.num_attempts += 1
        log_failure(note)
        self.timelines.noted(note, self.now())
        if self._spans is not None:
            self._spans.noted(note)

    def _emit(self, emitted: Emitted, now: float) -> None:
        answer = self._answers.get(emitted.request_id)
        if answer is None:
            return
        if answer.untold:
            at = self.now()
            if answer.first_token_at is None:
                answer.first_token_at = at
                if not answer.is_canary:
                    self.metrics.observe("first_token", at - answer.arrival.at)
            if self.timelines.emitted(emitted.request_id, emitted.choice, len(emitted.token_ids), at):
                answer.untold.discard(emitted.choice)
        num_tokens = answer.choices[emitted.choice].put(emitted.token_ids, emitted.logprobs, now)
        if num_tokens is not None:
            self._events.append(Stopped(emitted.request_id, emitted.choice, num_tokens))

    def _finish(self, finished: Finished) -> None:
        answer = self._answers.get(finished.request_id)
        if answer is None:
            return
        choice = answer.choices[finished.choice]
        choice.finish(finished.finish_reason, finished.token_ids)
        self._count(answer, finished.choice)
        if answer.is_complete:
            self._end(finished.request_id, None)

    def _count(self, answer: Answer, index: int) -> None:
        """The one place where a choice's end is counted."""
        if index not in answer.uncounted:
            return
        answer.uncounted.discard(index)
        request_id, choice = answer.request.request_id, answer.choices[index]
        reason = choice.finish_reason or ""
        if not answer.is_canary:
            self.metrics.choice_finished(reason, choice.seconds_per_token)
        self.timelines.finished(request_id, index, reason, self.now())
        if self._spans is not None:
            self._spans.finished(request_id, index)

    def _end(self, request_id: str, end: Failed | ClientGone | None) -> None:
        """The one place where a request's end is logged and counted; without `end` each of its choices had its own."""
        answer = self._answers.pop(request_id, None)
        if answer is None:
            return
        if answer.is_complete:
            reasons = {choice.finish_reason or "" for choice in answer.choices}
            outcome, end = reasons.pop() if len(reasons) == 1 else "mixed", None
        elif isinstance(end, Failed):
            outcome = end.code
        else:
            outcome, end = "aborted", ClientGone()
        for index in sorted(answer.uncounted):  # a stop string's client may have all before the core has said Finished
            if answer.choices[index].is_over:
                self._count(answer, index)
        if end is not None:
            answer.fail(end)
        seconds = (now := self.now()) - answer.arrival.at
        record = self.timelines.ended(request_id, outcome, answer.num_tokens, now)
        if not answer.is_canary:
            self._ended_tokens += answer.num_tokens
            if record is not None:
                self.metrics.request_parted(*record.parts())
            num_to_compute = len(answer.request.prompt_token_ids) if answer.num_attempts else 0
            was_let_in = not (isinstance(end, Failed) and end.is_refusal)
            self.metrics.request_ended(outcome, seconds if was_let_in else None, num_to_compute)
        if self._spans is not None:
            self._spans.ended(request_id, outcome, answer.num_tokens, None if end is None else outcome)
        log_end(answer, outcome, seconds, end.message if isinstance(end, Failed) else None)


def _shutting_down(request_id: str) -> Failed:
    return Failed(request_id, 503, "SHUTTING_DOWN", "The router is shutting down.", 1.0)
