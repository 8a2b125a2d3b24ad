"""The router's decisions: which attempt of which request runs where, and what its end is. Pure: no clock, no I/O.

Theory of operation. A request has one branch per choice. Each branch is in exactly one phase (requests.py) and ends with
exactly one Finished, or with the request's one Failed, unless the client aborts. An attempt is fenced by its number: a message
of any other attempt, or of a node that is not the attempt's, changes nothing, is counted, and is answered with a Cancel where
something may still run. Tokens enter the token log by index, whoever reports them, and leave it as Emitted once. The log is the
truth: an attempt that ends without a finish, for whatever reason, is followed by one that starts from it.

Not here: text, HTTP, sockets (shell.py); what lives and how it ends (live.py); whether there is another attempt (retry.py); who is
next (waiting.py); which node is best (placement.py); what a node is (nodes.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from proto import baton_pb2 as pb
from proto.attempt_key import BranchKey
from router import events as ev
from router.breaker import Breakers, BreakerTiming
from router.entrance import Entrance, RouterCoreConfig
from router.live import LiveRequests
from router.nodes import NodeEvent, NodeTable
from router.ownership import Owner, Verdict, Word, judge, word_of
from router.placement import Draw, Pair, Placement
from router.requests import (
    AwaitingPrompt,
    CommitUnknown,
    Decoding,
    LiveBranch,
    Prefilling,
    Waiting,
    dispatch_message,
)
from router.retry import Cost, Over, Tries, culprit
from router.token_log import Appended
from router.waiting import WaitingBranches


class RouterCore:
    """Owns every request between Submitted and its end, and all that is known of nodes."""

    def __init__(self, config: RouterCoreConfig, placement: Placement) -> None:
        self._config = config
        self._draw = Draw(config.seed)
        self._nodes = NodeTable()
        self._breakers = Breakers(
            BreakerTiming(config.breaker_failures, config.breaker_first_s, config.breaker_longest_s)
        )
        self._entrance = Entrance(self._nodes, config)
        self._waiting = WaitingBranches(self._nodes, self._breakers, placement, config)
        self._live = LiveRequests(self._nodes, self._breakers, self._waiting, config)
        self._num_arrived = 0

    # ---------------------------------------------------------------- the four methods

    def receive(self, event: ev.Event, now: float) -> list[ev.Action]:
        """Take one event; `now` is in seconds of a monotonic clock and never goes back."""
        match event:
            case ev.FromNode(node, message):
                self._on_message(node, message, now)
            case ev.Submitted(request):
                self._on_submitted(request, now)
            case ev.Aborted(request_id):
                self._live.drop(request_id, now)
            case ev.Stopped(request_id, choice, num_tokens):
                self._on_stopped(BranchKey(request_id, choice), num_tokens, now)
            case _:
                self._on_node_event(event, now)
        return self._settle(now)

    def tick(self, now: float) -> list[ev.Action]:
        """Fire every timer that is due; to be called before receive, and when next_deadline comes."""
        if (gives_up_at := self._entrance.gives_up_at) is not None and gives_up_at <= now:
            self._entrance.give_up()
            for request_id in dict.fromkeys(branch.key.request_id for branch in self._waiting):
                if not self._live.has_told(request_id):
                    self._live.end(self._entrance.no_nodes(request_id), now)
        for branch in self._live.due(now):
            match branch.phase:
                case _ if branch.request.deadline <= now:
                    self._live.fail(branch, pb.DEADLINE, "PD Error: the request's deadline has passed", now)
                case CommitUnknown(pair, error=error):
                    self._on_end(branch, pair, Word.GRACE_OVER, error, now)
                case AwaitingPrompt():
                    self._live.fail(branch, pb.NODE_LOST, "PD Error: the prompt's logprobs did not arrive", now)
                case Waiting():  # a node that refused it may be asked again, or it has rested
                    self._waiting.recall()
                    self._live.may_place = True
                    self._live.set_timer(branch, now)
                case Prefilling() | Decoding():
                    self._live.set_timer(branch, now)
        return self._settle(now)

    def next_deadline(self) -> float | None:
        """When tick must be called at the latest, or None."""
        gives_up_at = self._entrance.gives_up_at if len(self._waiting) else None
        instants = [at for at in (self._live.next_deadline(), gives_up_at) if at is not None]
        return min(instants, default=None)

    def snapshot(self) -> Mapping[str, object]:
        """JSON-able state for /metrics and the invariants of tests; costs a pass over nodes and requests."""
        return {
            "queued": len(self._waiting),
            **self._live.snapshot(),
            "nodes": self._nodes.snapshot(),
            "degraded": self._nodes.degraded(),
            "circuits": {node.ref.name: self._breakers.state(node.ref.name) for node in self._nodes},
        }

    # ---------------------------------------------------------------- what the API asks

    @property
    def max_total_tokens(self) -> int | None:
        """The longest sequence (prompt and completion) that can be served, or could when a pair of nodes was there last;
        None before the first."""
        return self._nodes.longest_known

    def missing(self) -> list[str]:
        """What is lacking before a request can be served now, as sentences; empty when ready."""
        return self._nodes.missing()

    def degraded(self) -> list[str]:
        """What requests are served without, as sentences."""
        return self._nodes.degraded()

    # ---------------------------------------------------------------- clients

    def _on_submitted(self, request: ev.GenerationRequest, now: float) -> None:
        if request.request_id in self._live:
            raise ValueError(f"request id {request.request_id} is in use")
        if refusal := self._entrance.find_refusal(request, len(self._waiting), now):
            self._live.actions.append(refusal)
            return
        first, self._num_arrived = self._num_arrived + 1, self._num_arrived + request.num_choices
        branches = [
            LiveBranch(request, choice, first + choice, Tries(self._config), now)
            for choice in range(request.num_choices)
        ]
        self._live.add(branches, now)

    def _on_stopped(self, key: BranchKey, num_tokens: int, now: float) -> None:
        if (branch := self._live.find(key)) is not None:
            self._live.cancel(branch, now)
            self._live.finish_when_scored(branch, "stop", now, num_tokens)

    # ---------------------------------------------------------------- nodes

    def _on_node_event(self, event: NodeEvent, now: float) -> None:
        change = self._nodes.receive(event)
        for ref in change.lost:
            self._live.count("nodes_lost")
            self._fail_at(ref.name, f"incarnation {ref.incarnation}", now)
        for key, ref in change.orphans.items():
            branch = self._live.find(key)
            if branch is None or branch.pair is None:
                continue  # ended with its request a moment ago
            is_receiver = branch.pair.decode == ref  # a mixed node may be both
            message = f"PD Error NODE_LOST: node {ref.name} was lost while the request was on it"
            error = pb.PDError(code=pb.NODE_LOST, message=message, retryable=True, node_id=ref.name)
            branch.tries.nodes_lost.add(ref)
            self._on_end(branch, branch.pair, Word.RECEIVER_LOST if is_receiver else Word.SENDER_LOST, error, now)
        self._live.actions += change.actions
        if not isinstance(event, ev.LoadReported):
            self._entrance.look(now)
            self._live.may_place = True
            self._waiting.recall()

    def _fail_at(self, name: str, what: str, now: float) -> None:
        if self._breakers.failed(name, what, now):
            self._live.count("circuits_opened")

    def _on_message(self, node: ev.NodeRef, message: pb.NodeMessage, now: float) -> None:
        match message.WhichOneof("kind"):
            case "tokens":
                batch = message.tokens
                for tokens in batch.branches:
                    self._on_tokens(node, tokens, batch.from_receiver, now)
            case "error":
                self._on_error(node, message.error, now)
            case _:
                self._live.count("stale_messages", "unknown")

    def _find_running(self, key: pb.AttemptKey, node: ev.NodeRef) -> tuple[LiveBranch, Pair] | None:
        """The branch and its nodes, if `key` is its newest attempt, which still counts, and the node is one of them."""
        branch = self._live.find(BranchKey(key.request_id, key.choice))
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
            self._live.fail(branch, pb.INTERNAL, f"PD Error: {problem}", now)
            return
        if branch.awaits_prompt_logprobs and tokens.prompt_logprobs:  # a retry brings them again
            branch.awaits_prompt_logprobs = False
            self._live.actions.append(ev.PromptScored(*branch.key, tuple(tokens.prompt_logprobs)))
            if isinstance(branch.phase, AwaitingPrompt):
                self._live.finish(branch, branch.phase.finish_reason, now, branch.phase.num_tokens)
                return
        owner, verdict = judge(branch.phase.owner, word_of(from_receiver, tokens.finish))
        if verdict is Verdict.IGNORE:
            self._live.count("stale_messages", "tokens")
            return
        if branch.phase.owner is not Owner.RECEIVER and (from_receiver or verdict is Verdict.FINISH):
            branch.tries.succeeded()
            for ref in pair.nodes if from_receiver else (pair.prefill,):
                self._breakers.succeeded(ref.name)
        if owner is Owner.RECEIVER and branch.phase.owner is not owner:
            self._live.leave_prefill(branch, now)
            self._live.enter(branch, Decoding(pair), now)
        is_sound = self._append(branch, tokens.first_index, tokens.token_ids, tokens.logprobs, now)
        if is_sound and verdict is Verdict.FINISH:
            self._live.finish_when_scored(branch, "stop" if tokens.finish == pb.FINISH_STOP else "length", now)

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
            self._live.fail(branch, pb.INTERNAL, f"PD Error: {result}", now)
            return False
        fresh = result.token_ids
        if len(fresh) < len(token_ids):
            self._live.count("repeated_batches")
        if fresh:
            scored = () if branch.request.sampling.num_logprobs is None else tuple(logprobs[-len(fresh) :])
            request_id, choice = branch.key
            self._live.actions.append(ev.Emitted(request_id, result.first_index, fresh, choice, scored))
        return True

    def _refuse_stale(self, node: ev.NodeRef, key: pb.AttemptKey, now: float) -> None:
        """Stop what still runs of an attempt that no longer counts."""
        self._live.count("stale_messages", "tokens")
        branch = self._live.find(BranchKey(key.request_id, key.choice))
        ms_left = int(self._config.forgotten_fence_s * 1000) if branch is None else branch.ms_left(now)
        self._live.send(node, pb.RouterMessage(cancel=pb.Cancel(key=key, ms_left=ms_left)))

    # ---------------------------------------------------------------- attempts that end without a finish

    def _on_error(self, node: ev.NodeRef, error: pb.PDError, now: float) -> None:
        found = self._find_running(error.key, node)
        if found is None:
            self._live.count("stale_messages", "error")
            return
        branch, pair = found
        if error.code not in pb.ErrorCode.values():
            error.code = pb.INTERNAL  # a newer version's
        word = Word.SENDER_UNSURE if error.commit_unanswered else Word.SENDER_ERROR
        self._on_end(branch, pair, Word.RECEIVER_ERROR if node == pair.decode else word, error, now)

    def _on_end(self, branch: LiveBranch, pair: Pair, word: Word, error: pb.PDError, now: float) -> None:
        """An attempt is said to have ended, or is believed to have: by a node, by a node's loss, by a grace that is over."""
        _, verdict = judge(branch.phase.owner, word)
        if verdict is Verdict.IGNORE:
            if error.code != pb.NODE_LOST:
                self._live.count("stale_messages", "error")
            return
        if word is not Word.GRACE_OVER and not self._take_error(branch, error, now):
            return
        if verdict is Verdict.AWAIT_RECEIVER:
            self._live.leave_prefill(branch, now)
            self._live.enter(branch, CommitUnknown(pair, now + self._config.commit_unknown_grace_s, error), now)
        elif branch.is_complete:  # its last token was on the way in the error
            self._live.cancel(branch, now)
            self._live.finish_when_scored(branch, "stop" if branch.ended_by_stop_token else "length", now)
        else:
            self._retry(branch, pair, error, now)

    def _take_error(self, branch: LiveBranch, error: pb.PDError, now: float) -> bool:
        """Count an error and take the tokens that it brings; False if they ended the request."""
        self._live.count("pd_errors", pb.ErrorCode.Name(error.code))
        token_ids: Sequence[int] = error.completion_token_ids
        if branch.request.sampling.num_logprobs is not None:
            token_ids = token_ids[: len(branch.log)]  # of those beyond nobody told the logprobs: they are drawn again
        return self._append(branch, 0, token_ids, (), now)

    def _retry(self, branch: LiveBranch, pair: Pair, error: pb.PDError, now: float) -> None:
        """End the attempt on both nodes; put the branch back to its old place in the queue, or end it."""
        blamed = culprit(error, pair)
        again = branch.tries.after(error, blamed == pair.decode, self._draw)
        if isinstance(again, Over):
            self._give_up(branch, again, error, now)
            return
        if again.cost is not Cost.NOTHING:
            self._live.count("retries", pb.ErrorCode.Name(error.code))
        if again.cost is Cost.RETRY:
            if error.code != pb.NODE_LOST:  # counted once, not for each of its branches
                for ref in (blamed,) if error.code == pb.INTERNAL else pair.nodes:
                    self._fail_at(ref.name, branch.key.request_id, now)
            if branch.tries.failures_in_row > 1:  # so it may be the prefill node after all
                branch.held_off[pair.prefill] = now + again.rest_s
        if again.held_s is not None:
            branch.held_off[blamed] = now + again.held_s
        branch.rests_until = now + again.rest_s
        self._live.cancel(branch, now)
        self._live.leave_nodes(branch, now)
        branch.phase = Waiting()
        branch.waits_since = now
        self._live.enqueue(branch, now)

    def _give_up(self, branch: LiveBranch, why: Over, error: pb.PDError, now: float) -> None:
        if why is Over.FINAL:
            self._live.fail(branch, error.code, error.message, now)
        elif branch.log or self._live.has_told(branch.key.request_id):
            self._live.cancel(branch, now)
            self._live.finish_when_scored(branch, "pd_reschedule", now)
        else:
            self._live.fail(branch, error.code, error.message, now, status=503)

    # ---------------------------------------------------------------- placing

    def _settle(self, now: float) -> list[ev.Action]:
        """Dispatch from the queue's head while there is room; return what has been decided."""
        while self._live.may_place:
            self._live.may_place = self._place_head(now)
        actions, self._live.actions = self._live.actions, []
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
            branch.attempt, branch.last_pair = attempt, pair
            self._live.enter(branch, Prefilling(pair), now)
            self._live.actions.append(ev.Observe("queue", now - branch.waits_since))
        for ref in pair.nodes:
            self._breakers.placed(ref.name, group[0].key, now)
        self._live.send(pair.prefill, pb.RouterMessage(dispatch=dispatch_message(group, target, now)))
        self._live.count("dispatches", kind)
        return True
