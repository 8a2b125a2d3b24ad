"""The router's decisions: which attempt of which request runs where, and what its end is. Pure: no clock, no I/O.

Theory of operation. Each request is in exactly one phase (requests.py) and ends with exactly one Finished or Failed, unless
its client aborts. An attempt is fenced by its number: a message of any other attempt, or of a node that is not the
attempt's, changes nothing, is counted, and is answered with a Cancel where something may still run. Tokens enter the token
log by index, whoever reports them, and leave it as Emitted once.

Waiting requests form one queue ordered by arrival; one that was refused keeps its place, and while the head finds no room
nothing behind it is dispatched: capacity is not given to the small at the cost of the large, and refused work is not
prefilled in vain. Every request has one timer, the nearest of its deadline and what its phase waits for.

Not here: text, HTTP, sockets (shell.py); which node is best (placement.py); what a node is (nodes.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from proto import baton_pb2 as pb
from router import events as ev
from router.keyed_heap import KeyedHeap
from router.nodes import NodeEvent, NodeTable, Session
from router.ownership import Owner, Verdict, Word, judge, word_of
from router.placement import Pair, Placement
from router.requests import (
    BROKEN_HANDOFFS,
    REFUSALS,
    STATUS,
    CommitUnknown,
    Decoding,
    LiveRequest,
    Prefilling,
    RouterCoreConfig,
    Waiting,
)
from router.token_log import Appended, Differs, Gap, TokenLog, TooLong


class RouterCore:
    """Owns every request between Submitted and its end, and all that is known of nodes."""

    def __init__(self, config: RouterCoreConfig, placement: Placement) -> None:
        self._config = config
        self._placement = placement
        self._nodes = NodeTable()
        self._requests: dict[str, LiveRequest] = {}
        self._queue = KeyedHeap()  # ids of waiting requests by arrival
        self._aside: dict[str, None] = {}  # ids of waiting requests that no node left can hold: they hold up nobody
        self._timers = KeyedHeap()  # one instant per request
        self._num_arrived = 0
        self._may_place = False  # room may have appeared since the queue was looked at
        self._actions: list[ev.Action] = []

    # ---------------------------------------------------------------- the four methods

    def receive(self, event: ev.Event, now: float) -> list[ev.Action]:
        """Take one event; `now` is in seconds of a monotonic clock and never goes back."""
        match event:
            case ev.FromNode(node, message):
                self._on_message(node, message, now)
            case ev.Submitted(request):
                self._on_submitted(request, now)
            case ev.Aborted(request_id):
                self._on_aborted(request_id, now)
            case _:
                self._on_node_event(event, now)
        return self._settle(now)

    def tick(self, now: float) -> list[ev.Action]:
        """Fire every timer that is due; to be called before receive, and when next_deadline comes."""
        while (first := self._timers.first()) is not None and first[1] <= now:
            live = self._requests[first[0]]
            match live.phase:
                case _ if live.request.deadline <= now:
                    self._fail_with_code(live, pb.DEADLINE, "PD Error: the request's deadline has passed", now)
                case CommitUnknown(error=error):
                    self._fail_if_decided(live, Word.GRACE_OVER, error.code, error.message, now)
                case Waiting():  # a node that refused it may be asked again
                    self._may_place = True
                    self._timers.put(first[0], live.wake_at(now))
                case Prefilling() | Decoding():
                    self._timers.put(first[0], live.wake_at(now))
        return self._settle(now)

    def next_deadline(self) -> float | None:
        """When tick must be called at the latest, or None."""
        first = self._timers.first()
        return None if first is None else first[1]

    def snapshot(self) -> Mapping[str, object]:
        """JSON-able state for /metrics and the invariants of tests; costs a pass over nodes and requests."""
        return {
            "queued": len(self._queue) + len(self._aside),
            "timers": len(self._timers),
            "requests": {
                request_id: {
                    "phase": type(live.phase).__name__,
                    "attempt": live.attempt,
                    "tokens": len(live.log),
                    "retries_left": live.retries_left,
                }
                for request_id, live in self._requests.items()
            },
            "nodes": {
                f"{node.ref.name}@{node.ref.incarnation}": {
                    "role": pb.Role.Name(node.entry.role).removeprefix("ROLE_").lower(),
                    "session": node.session.value,
                    "listed": node.is_listed,
                    "prefilling": len(node.prefilling),
                    "prefill_tokens": node.prefill_tokens,
                    "branches": len(node.branches),
                }
                for node in self._nodes
            },
        }

    # ---------------------------------------------------------------- what the API asks

    @property
    def max_total_tokens(self) -> int | None:
        """The longest sequence (prompt and completion) that can be served; None while no pair of nodes is known."""
        return self._nodes.max_total_tokens

    def missing(self) -> list[str]:
        """What is lacking before a request can be served now, as sentences; empty when ready."""
        return self._nodes.missing()

    # ---------------------------------------------------------------- clients

    def _on_submitted(self, request: ev.GenerationRequest, now: float) -> None:
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id} is in use")
        if refusal := self._find_refusal(request, now):
            self._actions.append(refusal)
            return
        self._num_arrived += 1
        live = LiveRequest(
            request, self._num_arrived, TokenLog(request.max_tokens), self._config.preempt_retry_count, Waiting()
        )
        self._requests[request.request_id] = live
        self._enqueue(live, now)

    def _find_refusal(self, request: ev.GenerationRequest, now: float) -> ev.Failed | None:
        """Why the request is turned away at once, if it is."""
        wait_s = self._config.retry_after_s
        longest = self._nodes.max_total_tokens
        total_tokens = len(request.prompt_token_ids) + request.max_tokens
        if len(self._queue) + len(self._aside) >= self._config.max_queue:
            message = f"The router's queue is full ({self._config.max_queue} requests)."
            return ev.Failed(request.request_id, 429, "OVERLOADED", message, wait_s)
        if longest is None:
            message = f"No nodes to serve the request: {', '.join(self._nodes.missing())}."
            return ev.Failed(request.request_id, 503, "NO_NODES", message, wait_s)
        if total_tokens > longest:
            message = f"Prompt and max_tokens need {total_tokens} tokens, more than the {longest} that a node can hold."
            return ev.Failed(request.request_id, 400, "context_length_exceeded", message, None)
        if request.deadline <= now:
            return ev.Failed(request.request_id, 504, "DEADLINE", "The request's deadline has passed.", None)
        return None

    def _on_aborted(self, request_id: str, now: float) -> None:
        live = self._requests.get(request_id)
        if live is not None:
            self._cancel(live, now)
            self._forget(live)

    # ---------------------------------------------------------------- nodes

    def _on_node_event(self, event: NodeEvent, now: float) -> None:
        change = self._nodes.receive(event)
        for request_id, ref in change.orphans.items():
            live = self._requests[request_id]
            is_sender = live.pair is not None and live.pair.prefill == ref
            message = f"PD Error: node {ref.name} was lost while the request was on it"
            word = Word.SENDER_LOST if is_sender else Word.RECEIVER_LOST
            self._fail_if_decided(live, word, pb.NODE_LOST, message, now)
        self._actions += change.actions
        if not isinstance(event, ev.LoadReported):
            self._may_place = True
            while self._aside:  # a node may have come that can hold them
                request_id = self._aside.popitem()[0]
                self._queue.put(request_id, self._requests[request_id].arrival)

    def _on_message(self, node: ev.NodeRef, message: pb.NodeMessage, now: float) -> None:
        match message.WhichOneof("kind"):
            case "tokens":
                batch = message.tokens
                for tokens in batch.branches:
                    self._on_tokens(node, tokens, batch.from_receiver, now)
            case "error":
                self._on_error(node, message.error, now)
            case None:
                self._count("stale_messages", "unknown")

    def _find_running(self, key: pb.AttemptKey, node: ev.NodeRef) -> tuple[LiveRequest, Pair] | None:
        """The request and its nodes, if `key` is its newest attempt, which still counts, and the node is one of them."""
        live = self._requests.get(key.request_id)
        if live is None or (pair := live.pair) is None or (key.choice, key.attempt) != (0, live.attempt):
            return None
        return (live, pair) if node in (pair.prefill, pair.decode) else None

    def _on_tokens(self, node: ev.NodeRef, tokens: pb.BranchTokens, from_receiver: bool, now: float) -> None:
        found = self._find_running(tokens.key, node)
        if found is None or node != (found[1].decode if from_receiver else found[1].prefill):
            self._refuse_stale(node, tokens.key, now)
            return
        live, pair = found
        owner, verdict = judge(live.phase.owner, word_of(from_receiver, tokens.finish))
        if verdict is Verdict.IGNORE:
            self._count("stale_messages", "tokens")
            return
        if owner is Owner.RECEIVER and live.phase.owner is not owner:
            self._end_prefill(live, Decoding(pair), now)
        if self._append(live, tokens.first_index, tokens.token_ids, now) and verdict is Verdict.FINISH:
            self._finish(live, "stop" if tokens.finish == pb.FINISH_STOP else "length")

    def _append(self, live: LiveRequest, first_index: int, token_ids: Sequence[int], now: float) -> bool:
        """Take tokens into the log and emit the new ones; False if they ended the request instead."""
        request_id = live.request.request_id
        match live.log.append(first_index, token_ids):
            case Appended(start, fresh):
                if len(fresh) < len(token_ids):
                    self._count("repeated_batches")
                if fresh:
                    self._actions.append(ev.Emitted(request_id, start, fresh))
                return True
            case Gap(expected_index, index):
                message = f"PD Error: tokens from index {index} arrived where index {expected_index} was due"
            case Differs(index, known, other):
                message = f"PD Error: token {index} was reported as {known} and as {other}"
            case TooLong(max_tokens):
                message = f"PD Error: more than max_tokens = {max_tokens} tokens arrived"
        self._fail_with_code(live, pb.INTERNAL, message, now)
        return False

    def _refuse_stale(self, node: ev.NodeRef, key: pb.AttemptKey, now: float) -> None:
        """Stop what still runs of an attempt that no longer counts."""
        self._count("stale_messages", "tokens")
        live = self._requests.get(key.request_id)
        ms_left = int(self._config.forgotten_fence_s * 1000) if live is None else live.ms_left(now)
        self._send(node, pb.RouterMessage(cancel=pb.Cancel(key=key, ms_left=ms_left)))

    # ---------------------------------------------------------------- PD Errors

    def _on_error(self, node: ev.NodeRef, error: pb.PDError, now: float) -> None:
        found = self._find_running(error.key, node)
        if found is None:
            self._count("stale_messages", "error")
            return
        live, pair = found
        if error.code not in pb.ErrorCode.values():
            error.code = pb.INTERNAL  # a newer version's
        word = Word.SENDER_UNSURE if error.commit_unanswered else Word.SENDER_ERROR
        _, verdict = judge(live.phase.owner, Word.RECEIVER_ERROR if node == pair.decode else word)
        if verdict is Verdict.IGNORE:
            self._count("stale_messages", "error")
            return
        self._count("pd_errors", pb.ErrorCode.Name(error.code))
        if not self._append(live, 0, error.completion_token_ids, now):
            return
        if verdict is Verdict.RETRY:
            self._retry_or_fail(live, pair, error, now)
        elif verdict is Verdict.AWAIT_RECEIVER:
            self._end_prefill(live, CommitUnknown(pair, now + self._config.commit_unknown_grace_s, error), now)
        else:
            self._fail_with_code(live, error.code, error.message, now)

    def _retry_or_fail(self, live: LiveRequest, pair: Pair, error: pb.PDError, now: float) -> None:
        """Decide on an attempt that ended before its Commit."""
        if live.is_complete:  # its last token was on the way in the error
            self._cancel(live, now)
            self._finish(live, "stop" if live.ended_by_stop_token else "length")
            return
        wait_s = min(error.retry_after_ms / 1000, self._config.max_refusal_wait_s)
        if error.retryable and error.code in REFUSALS:
            live.num_refusals += 1  # every one has cost a prefill: ask less and less often
            patience_s = self._config.min_refusal_wait_s * 2 ** min(live.num_refusals - 1, 6)
            wait_s = min(max(wait_s, patience_s), self._config.max_refusal_wait_s)
            self._requeue(live, pair, error, now + wait_s, now)
        elif error.retryable and error.code in BROKEN_HANDOFFS and live.retries_left > 0:
            live.retries_left -= 1
            self._count("retries", pb.ErrorCode.Name(error.code))
            self._requeue(live, pair, error, now + wait_s, now)
        else:
            self._fail_with_code(live, error.code, error.message, now)

    def _requeue(self, live: LiveRequest, pair: Pair, error: pb.PDError, retry_at: float, now: float) -> None:
        """End the attempt on both nodes and put the request back to its old place in the queue."""
        is_prefill_busy = error.code in REFUSALS and error.node_id == pair.prefill.name
        live.held_off[pair.prefill if is_prefill_busy else pair.decode] = retry_at
        self._cancel(live, now)
        self._nodes.vacate(live.request.request_id, pair)
        live.phase = Waiting()
        self._enqueue(live, now)

    # ---------------------------------------------------------------- placing

    def _enqueue(self, live: LiveRequest, now: float) -> None:
        self._queue.put(live.request.request_id, live.arrival)
        self._timers.put(live.request.request_id, live.wake_at(now))
        self._may_place = True

    def _settle(self, now: float) -> list[ev.Action]:
        """Dispatch from the queue's head while there is room; return what has been decided."""
        while self._may_place:
            self._may_place = self._place_head(now)
        actions, self._actions = self._actions, []
        return actions

    def _place_head(self, now: float) -> bool:
        """Dispatch the queue's head, or put it aside; False if there is none or it finds no room."""
        head = self._queue.first()
        if head is None:
            return False
        live = self._requests[head[0]]
        if (longest := self._nodes.max_total_tokens) is not None and live.total_tokens > longest:
            self._queue.discard(head[0])
            self._aside[head[0]] = None
            return True
        pair = self._placement.choose(
            self._nodes.prefill_candidates(live.total_tokens, self._config.max_inflight_prefills),
            self._nodes.decode_candidates(live.total_tokens),
            kept=live.last_pair.prefill if live.last_pair is not None else None,
            excluded=[node for node, until in live.held_off.items() if until > now],
            avoided=live.held_off,
        )
        decode = None if pair is None else self._nodes.find(pair.decode)
        if pair is None or decode is None:
            return False
        self._queue.discard(head[0])
        live.attempt += 1
        live.last_pair = pair
        self._nodes.occupy(head[0], pair, len(live.request.prompt_token_ids) + len(live.log))
        live.phase = Prefilling(pair)
        self._timers.put(head[0], live.wake_at(now))
        target = pb.Target(node=decode.entry.node, grpc_address=decode.entry.grpc_address)
        self._send(pair.prefill, pb.RouterMessage(dispatch=live.dispatch(target, now)))
        self._count("dispatches")
        return True

    # ---------------------------------------------------------------- ends

    def _end_prefill(self, live: LiveRequest, phase: CommitUnknown | Decoding, now: float) -> None:
        """The prefill node's part is over: its load is released now, not when the request ends."""
        self._nodes.vacate_prefill(live.request.request_id, phase.pair)
        live.phase = phase
        self._timers.put(live.request.request_id, live.wake_at(now))
        self._may_place = True

    def _finish(self, live: LiveRequest, reason: str) -> None:
        self._actions.append(ev.Finished(live.request.request_id, reason, live.log.token_ids))
        self._forget(live)

    def _fail_if_decided(
        self, live: LiveRequest, word: Word, code: pb.ErrorCode.ValueType, message: str, now: float
    ) -> None:
        """End the request with an error, unless the owner rule says that this word does not count."""
        if judge(live.phase.owner, word)[1] is Verdict.FAIL:
            self._fail_with_code(live, code, message, now)

    def _fail_with_code(self, live: LiveRequest, code: pb.ErrorCode.ValueType, message: str, now: float) -> None:
        """End the request with one error, everywhere."""
        status = STATUS.get(code, 500)
        wait_s = self._config.retry_after_s if status == 503 else None
        self._cancel(live, now)
        self._actions.append(ev.Failed(live.request.request_id, status, pb.ErrorCode.Name(code), message, wait_s))
        self._forget(live)

    def _forget(self, live: LiveRequest) -> None:
        request_id = live.request.request_id
        if live.pair is not None:
            self._nodes.vacate(request_id, live.pair)
        del self._requests[request_id]
        self._queue.discard(request_id)
        self._aside.pop(request_id, None)
        self._timers.discard(request_id)
        self._may_place = True

    def _cancel(self, live: LiveRequest, now: float) -> None:
        """Fence the newest attempt and all older ones at every node of it."""
        if live.pair is None:
            return  # was done when the request came back
        cancel = pb.RouterMessage(cancel=pb.Cancel(key=live.key.to_proto(), ms_left=live.ms_left(now)))
        self._send(live.pair.prefill, cancel)
        self._send(live.pair.decode, cancel)

    def _send(self, ref: ev.NodeRef, message: pb.RouterMessage) -> None:
        node = self._nodes.find(ref)
        if node is not None and node.session is not Session.LOST:
            self._actions.append(ev.ToNode(ref, message))

    def _count(self, name: str, label: str = "") -> None:
        self._actions.append(ev.Count(name, label))
