"""The router's decisions: which attempt of which request runs where, and what its end is. Pure: no clock, no I/O.

Theory of operation. A request has one branch per choice. Each branch is in exactly one phase (requests.py) and ends with
exactly one Finished, or with the request's one Failed, unless the client aborts. An attempt is fenced by its number: a message
of any other attempt, or of a node that is not the attempt's, changes nothing, is counted, and is answered with a Cancel where
something may still run. Tokens enter the token log by index, whoever reports them, and leave it as Emitted once.

Every branch has one timer, the nearest of its deadline and what its phase waits for.

Not here: text, HTTP, sockets (shell.py); who is next (waiting.py); which node is best (placement.py); what a node is (nodes.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from proto import baton_pb2 as pb
from proto.attempt_key import BranchKey
from router import events as ev
from router.entrance import RouterCoreConfig, find_refusal
from router.keyed_heap import KeyedHeap
from router.nodes import NodeEvent, NodeTable, Session
from router.ownership import Owner, Verdict, Word, judge, word_of
from router.placement import Pair, Placement
from router.requests import (
    BROKEN_HANDOFFS,
    NO_ROOM,
    STATUS,
    AwaitingPrompt,
    CommitUnknown,
    Decoding,
    LiveBranch,
    Prefilling,
    Waiting,
    dispatch_message,
)
from router.token_log import Appended
from router.waiting import WaitingBranches


class RouterCore:
    """Owns every request between Submitted and its end, and all that is known of nodes."""

    def __init__(self, config: RouterCoreConfig, placement: Placement) -> None:
        self._config = config
        self._nodes = NodeTable()
        self._requests: dict[str, dict[int, LiveBranch]] = {}  # request id -> choice -> branch, while it has not ended
        self._waiting = WaitingBranches(self._nodes, placement, config)
        self._timers = KeyedHeap[BranchKey]()  # one instant per branch
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
                self._drop(request_id, now)
            case ev.Stopped(request_id, choice, num_tokens):
                self._on_stopped(BranchKey(request_id, choice), num_tokens, now)
            case _:
                self._on_node_event(event, now)
        return self._settle(now)

    def tick(self, now: float) -> list[ev.Action]:
        """Fire every timer that is due; to be called before receive, and when next_deadline comes."""
        while (first := self._timers.first()) is not None and first[1] <= now:
            key = first[0]
            branch = self._requests[key.request_id][key.choice]
            match branch.phase:
                case _ if branch.request.deadline <= now:
                    self._fail(branch, pb.DEADLINE, "PD Error: the request's deadline has passed", now)
                case CommitUnknown(error=error):
                    self._fail_if_decided(branch, Word.GRACE_OVER, error.code, error.message, now)
                case AwaitingPrompt():
                    self._fail(branch, pb.NODE_LOST, "PD Error: the prompt's logprobs did not arrive", now)
                case Waiting():  # a node that refused it may be asked again
                    self._may_place = True
                    self._timers.put(key, branch.wake_at(now))
                case Prefilling() | Decoding():
                    self._timers.put(key, branch.wake_at(now))
        return self._settle(now)

    def next_deadline(self) -> float | None:
        """When tick must be called at the latest, or None."""
        first = self._timers.first()
        return None if first is None else first[1]

    def snapshot(self) -> Mapping[str, object]:
        """JSON-able state for /metrics and the invariants of tests; costs a pass over nodes and requests."""
        return {
            "queued": len(self._waiting),
            "timers": len(self._timers),
            "requests": {
                request_id: [branch.snapshot() for branch in branches.values()]
                for request_id, branches in self._requests.items()
            },
            "nodes": self._nodes.snapshot(),
            "degraded": self._nodes.degraded(),
        }

    # ---------------------------------------------------------------- what the API asks

    @property
    def max_total_tokens(self) -> int | None:
        """The longest sequence (prompt and completion) that can be served; None while there are no nodes for it."""
        return self._nodes.max_total_tokens

    def missing(self) -> list[str]:
        """What is lacking before a request can be served now, as sentences; empty when ready."""
        return self._nodes.missing()

    def degraded(self) -> list[str]:
        """What requests are served without, as sentences."""
        return self._nodes.degraded()

    # ---------------------------------------------------------------- clients

    def _on_submitted(self, request: ev.GenerationRequest, now: float) -> None:
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id} is in use")
        if refusal := find_refusal(request, self._nodes, len(self._waiting), self._config, now):
            self._actions.append(refusal)
            return
        branches = self._requests[request.request_id] = {}
        for choice in range(request.num_choices):
            self._num_arrived += 1
            branches[choice] = LiveBranch(request, choice, self._num_arrived, self._config.preempt_retry_count, now)
            self._enqueue(branches[choice], now)

    def _on_stopped(self, key: BranchKey, num_tokens: int, now: float) -> None:
        if (branch := self._find(key)) is not None:
            self._cancel(branch, now)
            self._finish_when_scored(branch, "stop", now, num_tokens)

    # ---------------------------------------------------------------- nodes

    def _on_node_event(self, event: NodeEvent, now: float) -> None:
        change = self._nodes.receive(event)
        for key, ref in change.orphans.items():
            if (branch := self._find(key)) is None:
                continue  # ended with its request a moment ago
            is_receiver = branch.pair is not None and branch.pair.decode == ref  # a mixed node may be both
            message = f"PD Error: node {ref.name} was lost while the request was on it"
            word = Word.RECEIVER_LOST if is_receiver else Word.SENDER_LOST
            self._fail_if_decided(branch, word, pb.NODE_LOST, message, now)
        self._actions += change.actions
        if not isinstance(event, ev.LoadReported):
            self._may_place = True
            self._waiting.recall()

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

    def _find(self, key: BranchKey) -> LiveBranch | None:
        return self._requests.get(key.request_id, {}).get(key.choice)

    def _find_running(self, key: pb.AttemptKey, node: ev.NodeRef) -> tuple[LiveBranch, Pair] | None:
        """The branch and its nodes, if `key` is its newest attempt, which still counts, and the node is one of them."""
        branch = self._find(BranchKey(key.request_id, key.choice))
        if branch is None or (pair := branch.pair) is None or key.attempt != branch.attempt:
            return None
        return (branch, pair) if node in (pair.prefill, pair.decode) else None

    def _on_tokens(self, node: ev.NodeRef, tokens: pb.BranchTokens, from_receiver: bool, now: float) -> None:
        found = self._find_running(tokens.key, node)
        if found is None or node != (found[1].decode if from_receiver else found[1].prefill):
            self._refuse_stale(node, tokens.key, now)
            return
        branch, pair = found
        if problem := branch.logprobs_problem(tokens):
            self._fail(branch, pb.INTERNAL, f"PD Error: {problem}", now)
            return
        if branch.awaits_prompt_logprobs and tokens.prompt_logprobs:  # a retry brings them again
            branch.awaits_prompt_logprobs = False
            self._actions.append(ev.PromptScored(*branch.key, tuple(tokens.prompt_logprobs)))
            if isinstance(branch.phase, AwaitingPrompt):
                self._finish(branch, branch.phase.finish_reason, branch.phase.num_tokens)
                return
        owner, verdict = judge(branch.phase.owner, word_of(from_receiver, tokens.finish))
        if verdict is Verdict.IGNORE:
            self._count("stale_messages", "tokens")
            return
        if owner is Owner.RECEIVER and branch.phase.owner is not owner:
            self._end_prefill(branch, Decoding(pair), now)
        is_sound = self._append(branch, tokens.first_index, tokens.token_ids, tokens.logprobs, now)
        if is_sound and verdict is Verdict.FINISH:
            self._finish_when_scored(branch, "stop" if tokens.finish == pb.FINISH_STOP else "length", now)

    def _append(
        self,
        branch: LiveBranch,
        first_index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[pb.TokenLogprobs],
        now: float,
    ) -> bool:
        """Take tokens into the log and emit the new ones; False if they ended the request instead."""
        result = branch.log.append(first_index, token_ids)
        if not isinstance(result, Appended):
            self._fail(branch, pb.INTERNAL, f"PD Error: {result}", now)
            return False
        fresh = result.token_ids
        if len(fresh) < len(token_ids):
            self._count("repeated_batches")
        if fresh:
            scored = () if branch.request.sampling.num_logprobs is None else tuple(logprobs[-len(fresh) :])
            request_id, choice = branch.key
            self._actions.append(ev.Emitted(request_id, result.first_index, fresh, choice, scored))
        return True

    def _refuse_stale(self, node: ev.NodeRef, key: pb.AttemptKey, now: float) -> None:
        """Stop what still runs of an attempt that no longer counts."""
        self._count("stale_messages", "tokens")
        branch = self._find(BranchKey(key.request_id, key.choice))
        ms_left = int(self._config.forgotten_fence_s * 1000) if branch is None else branch.ms_left(now)
        self._send(node, pb.RouterMessage(cancel=pb.Cancel(key=key, ms_left=ms_left)))

    # ---------------------------------------------------------------- PD Errors

    def _on_error(self, node: ev.NodeRef, error: pb.PDError, now: float) -> None:
        found = self._find_running(error.key, node)
        if found is None:
            self._count("stale_messages", "error")
            return
        branch, pair = found
        if error.code not in pb.ErrorCode.values():
            error.code = pb.INTERNAL  # a newer version's
        word = Word.SENDER_UNSURE if error.commit_unanswered else Word.SENDER_ERROR
        _, verdict = judge(branch.phase.owner, Word.RECEIVER_ERROR if node == pair.decode else word)
        if verdict is Verdict.IGNORE:
            self._count("stale_messages", "error")
            return
        self._count("pd_errors", pb.ErrorCode.Name(error.code))
        token_ids: Sequence[int] = error.completion_token_ids
        if branch.request.sampling.num_logprobs is not None:
            token_ids = token_ids[: len(branch.log)]  # of those beyond nobody told the logprobs: they are drawn again
        if not self._append(branch, 0, token_ids, (), now):
            return
        if verdict is Verdict.RETRY:
            self._retry_or_fail(branch, pair, error, now)
        elif verdict is Verdict.AWAIT_RECEIVER:
            self._end_prefill(branch, CommitUnknown(pair, now + self._config.commit_unknown_grace_s, error), now)
        else:
            self._fail(branch, error.code, error.message, now)

    def _retry_or_fail(self, branch: LiveBranch, pair: Pair, error: pb.PDError, now: float) -> None:
        """Decide on an attempt that ended without a finish: before its Commit, or because its blocks were needed."""
        if branch.is_complete:  # its last token was on the way in the error
            self._cancel(branch, now)
            self._finish_when_scored(branch, "stop" if branch.ended_by_stop_token else "length", now)
            return
        wait_s = min(error.retry_after_ms / 1000, self._config.max_refusal_wait_s)
        if error.retryable and error.code in NO_ROOM:
            self._requeue(branch, pair, error, now + branch.refused(wait_s, self._config), now)
        elif error.retryable and error.code in BROKEN_HANDOFFS and branch.retries_left > 0:
            branch.retries_left -= 1
            self._count("retries", pb.ErrorCode.Name(error.code))
            self._requeue(branch, pair, error, now + wait_s, now)
        else:
            self._fail(branch, error.code, error.message, now)

    def _requeue(self, branch: LiveBranch, pair: Pair, error: pb.PDError, retry_at: float, now: float) -> None:
        """End the attempt on both nodes and put the request back to its old place in the queue."""
        is_prefill_busy = error.code in NO_ROOM and error.node_id == pair.prefill.name
        branch.held_off[pair.prefill if is_prefill_busy else pair.decode] = retry_at
        self._cancel(branch, now)
        self._nodes.vacate(branch.key, pair)
        branch.phase = Waiting()
        branch.waits_since = now
        self._enqueue(branch, now)

    # ---------------------------------------------------------------- placing

    def _enqueue(self, branch: LiveBranch, now: float) -> None:
        self._waiting.put(branch)
        self._timers.put(branch.key, branch.wake_at(now))
        self._may_place = True

    def _settle(self, now: float) -> list[ev.Action]:
        """Dispatch from the queue's head while there is room; return what has been decided."""
        while self._may_place:
            self._may_place = self._place_head(now)
        actions, self._actions = self._actions, []
        return actions

    def _place_head(self, now: float) -> bool:
        """Dispatch who comes next; False if there is nobody or no room."""
        taken = self._waiting.take(now)
        if taken is None:
            return False
        group, pair, kind = taken
        attempt = 1 + max(branch.attempt for branch in group)
        for branch in group:
            target = self._nodes.occupy(branch.key, pair, group[0].num_tokens if branch is group[0] else 0)
            branch.attempt, branch.last_pair, branch.phase = attempt, pair, Prefilling(pair)
            self._timers.put(branch.key, branch.wake_at(now))
            self._actions.append(ev.Observe("queue", now - branch.waits_since))
        self._send(pair.prefill, pb.RouterMessage(dispatch=dispatch_message(group, target, now)))
        self._count("dispatches", kind)
        return True

    # ---------------------------------------------------------------- ends

    def _end_prefill(self, branch: LiveBranch, phase: CommitUnknown | Decoding, now: float) -> None:
        """The prefill node's part is over: its load is released now, not when the request ends."""
        self._nodes.vacate_prefill(branch.key, phase.pair)
        branch.phase = phase
        self._timers.put(branch.key, branch.wake_at(now))
        self._may_place = True

    def _finish_when_scored(self, branch: LiveBranch, reason: str, now: float, num_tokens: int | None = None) -> None:
        """Finish a branch that no node works on any more, now or when its prompt's logprobs are there."""
        if not branch.awaits_prompt_logprobs:
            self._finish(branch, reason, num_tokens)
        elif branch.pair is not None:
            self._nodes.vacate(branch.key, branch.pair)
            until = now + self._config.prompt_logprobs_grace_s
            branch.phase = AwaitingPrompt(branch.pair, until, reason, num_tokens)
            self._timers.put(branch.key, branch.wake_at(now))
            self._may_place = True

    def _finish(self, branch: LiveBranch, reason: str, num_tokens: int | None) -> None:
        request_id, choice = branch.key
        self._actions.append(ev.Finished(request_id, reason, branch.log.token_ids[:num_tokens], choice))
        self._forget(branch)

    def _fail_if_decided(
        self, branch: LiveBranch, word: Word, code: pb.ErrorCode.ValueType, message: str, now: float
    ) -> None:
        """End the request with an error, unless the owner rule says that this word does not count."""
        if judge(branch.phase.owner, word)[1] is Verdict.FAIL:
            self._fail(branch, code, message, now)

    def _fail(self, branch: LiveBranch, code: pb.ErrorCode.ValueType, message: str, now: float) -> None:
        """End the branch's request, its other branches included, with one error, everywhere."""
        status = STATUS.get(code, 500)
        wait_s = self._config.retry_after_s if status == 503 else None
        request_id = branch.key.request_id
        self._drop(request_id, now)
        self._actions.append(ev.Failed(request_id, status, pb.ErrorCode.Name(code), message, wait_s))

    def _drop(self, request_id: str, now: float) -> None:
        """Cancel and forget what there is of a request."""
        for branch in list(self._requests.get(request_id, {}).values()):
            self._cancel(branch, now)
            self._forget(branch)

    def _forget(self, branch: LiveBranch) -> None:
        key = branch.key
        if branch.pair is not None:
            self._nodes.vacate(key, branch.pair)
        branches = self._requests[key.request_id]
        del branches[key.choice]
        if not branches:
            del self._requests[key.request_id]
        self._waiting.discard(key)
        self._timers.discard(key)
        self._may_place = True

    def _cancel(self, branch: LiveBranch, now: float) -> None:
        """Fence the newest attempt and all older ones at every node of it."""
        if branch.pair is None:
            return  # was done when the branch came back
        cancel = pb.RouterMessage(cancel=pb.Cancel(key=branch.attempt_key.to_proto(), ms_left=branch.ms_left(now)))
        for ref in branch.pair.nodes:
            self._send(ref, cancel)

    def _send(self, ref: ev.NodeRef, message: pb.RouterMessage) -> None:
        node = self._nodes.find(ref)
        if node is not None and node.session is not Session.LOST:
            self._actions.append(ev.ToNode(ref, message))

    def _count(self, name: str, label: str = "") -> None:
        self._actions.append(ev.Count(name, label))
