"""The router's decisions: which attempt of which request runs where, and what its end is. Pure: no clock, no I/O.

Theory of operation. A request has one branch per choice. Each branch is in exactly one phase (requests.py) and ends with
exactly one Finished, or with the request's one Failed, unless the client aborts. An attempt is fenced by its number: a message
of any other attempt, or of a node that is not the attempt's, changes nothing, is counted, and is answered with a Cancel where
something may still run. Tokens enter the token log by index, whoever reports them, and leave it as Emitted once. The log is the
truth: an attempt that ends without a finish, for whatever reason, is followed by one that starts from it.

Not here: text, HTTP, sockets (shell.py); what lives and how it ends (live.py); what follows an attempt that failed
(attempt_ends.py); moves (moves.py); who is next (waiting.py); which node is best (placement.py); what a node is (nodes.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from proto import baton_pb2 as pb
from proto.attempt_key import BranchKey
from router import events as ev
from router.attempt_ends import AttemptEnds, error_of_silence, node_drained, node_lost
from router.breaker import Breakers, BreakerTiming
from router.entrance import Entrance, RouterCoreConfig
from router.live import LiveRequests
from router.moves import Moves
from router.node_state import Node
from router.nodes import NodeEvent, NodeTable
from router.ownership import Owner, Side, Verdict, Word, judge, word_of_error, word_of_loss, word_of_tokens
from router.phases import (
    AwaitingPrompt,
    CommitUnknown,
    Decoding,
    MoveDoubted,
    MoveUnknown,
    Moving,
    Prefilling,
    Waiting,
    ends_of,
)
from router.placement import Draw, Pair, Placement
from router.requests import LiveBranch, dispatch_message
from router.retry import Tries, culprit
from router.waiting import WaitingBranches

if TYPE_CHECKING:
    from router.cache_map import CacheMap  # heavy: only who places by cache pays for its tables

MAX_BRANCHES: Final = 1 << 16  # of one batch: no step of a node has so many
_PLACED: Final = 4  # attempts that one call places, at some 0.1 ms each; a lost node may leave hundreds
_PLACED_TOKENS: Final = 8192  # that it places at most one attempt beyond: to copy 3,000 takes as long as all else


class RouterCore:
    """Owns every request between Submitted and its end, and all that is known of nodes."""

    def __init__(self, config: RouterCoreConfig, placement: Placement, caches: CacheMap | None = None) -> None:
        """`caches`: where placement is to know what nodes hold; without it they are not asked."""
        self._config = config
        self._caches = caches
        self._nodes = NodeTable(config.max_inflight_prefills, config.tokenizer)
        timing = BreakerTiming(config.breaker_failures, config.breaker_first_s, config.breaker_longest_s)
        self._breakers = Breakers(timing)
        self._entrance = Entrance(self._nodes, config)
        self._waiting = WaitingBranches(self._nodes, self._breakers, placement, config, caches)
        self._live = LiveRequests(self._nodes, self._breakers, self._waiting, config)
        self._moves = Moves(self._nodes, self._breakers, placement, self._live, config)
        self._ends = AttemptEnds(self._live, self._moves, self._breakers, config, Draw(config.seed))
        self._num_arrived = self._num_lost = 0
        self._rest_ends_at: float | None = None  # of a node that is left alone, while somebody waits
        self._goes_on_at: float | None = None  # there may be more to place than one turn has

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
        for ref, ask in self._caches.questions(now) if self._caches is not None else ():
            self._live.send(ref, pb.RouterMessage(cache=ask))
        if (gives_up_at := self._entrance.gives_up_at) is not None and gives_up_at <= now:
            self._entrance.give_up()
            self._live.may_place = True
        if self._rest_ends_at is not None and self._rest_ends_at <= now:
            self._live.may_place = True
        for branch in self._live.due(now):
            match branch.phase:
                case _ if branch.request.deadline <= now:
                    self._live.fail(branch, pb.DEADLINE, "PD Error: the request's deadline has passed", now)
                case CommitUnknown(pair, error=error) | MoveUnknown(pair, error=error):
                    self._ends.hear(branch, pair, Word.GRACE_OVER, error, now)
                case MoveDoubted(pair):
                    self._ends.hear(branch, pair, Word.GRACE_OVER, error_of_silence(branch.phase), now)
                case AwaitingPrompt(pair):
                    self._ends.unscored(branch, pair, now)
                case Waiting() if branch.gives_up_at is not None and branch.gives_up_at <= now:
                    self._ends.without_nodes(branch, now)
                case Waiting():  # a node that refused it may be asked again, or it has rested
                    self._waiting.recall_one(branch.key)
                    self._live.may_place = True
                    self._live.set_timer(branch, now)
                case Prefilling() | Decoding() | Moving():
                    self._live.set_timer(branch, now)
        return self._settle(now)

    def next_deadline(self) -> float | None:
        """When tick must be called at the latest, or None."""
        gives_up_at = self._entrance.gives_up_at if len(self._waiting) else None
        asks_at = None if self._caches is None else self._caches.next_deadline()
        ends = (self._live.next_deadline(), gives_up_at, self._rest_ends_at, asks_at, self._goes_on_at)
        return min((at for at in ends if at is not None), default=None)

    @property
    def num_queued(self) -> int:
        """Branches that wait for room."""
        return len(self._waiting)

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def figures(self) -> Mapping[str, object]:
        """JSON-able state for /metrics; costs a pass over nodes."""
        return {
            "queued": self.num_queued,
            "live_requests": self.num_live,
            "nodes": self._nodes.snapshot(),
            "degraded": self._nodes.degraded(),
            "circuits": {node.ref.name: self._breakers.state(node.ref.name) for node in self._nodes},
            "caches": {} if self._caches is None else self._caches.snapshot(),
        }

    def snapshot(self) -> Mapping[str, object]:
        """The same with every request, for the invariants of tests."""
        return {**self.figures(), **self._live.snapshot()}

    def nodes(self) -> Iterator[tuple[Node, str]]:
        """Every node process that is known, with the state of its circuit; for people."""
        return ((node, self._breakers.state(node.ref.name)) for node in self._nodes)

    # ---------------------------------------------------------------- what the API asks

    @property
    def max_total_tokens(self) -> int | None:
        """The longest sequence (prompt and completion) that can be served, or could a while ago; None before the first pair."""
        return self._entrance.longest

    @property
    def max_total_tokens_now(self) -> int | None:
        """The same without what only nodes could serve that are gone; None: no pair is there."""
        return self._nodes.max_total_tokens

    def most_prompts(self, num_choices: int) -> int:
        """Prompts with so many choices each that could come at once, were nobody else here, or could a while ago."""
        return self._entrance.most_prompts(num_choices)

    def missing(self, waits: bool = False) -> list[str]:
        """What is lacking before a request can be served now, or with `waits` let in to wait, as sentences; empty when ready."""
        return [] if waits and not self._entrance.has_given_up else self._nodes.missing()

    def degraded(self) -> list[str]:
        """What requests are served without, as sentences."""
        return self._nodes.degraded()

    # ---------------------------------------------------------------- clients

    def _on_submitted(self, request: ev.GenerationRequest, now: float) -> None:
        if request.request_id in self._live:
            raise ValueError(f"request id {request.request_id} is in use")
        queued, wait_s = len(self._waiting), self._waiting.wait_s(now)
        if refusal := self._entrance.find_refusal(request, queued, wait_s, now):
            self._live.actions.append(replace(refusal, is_refusal=True))
            return
        first, self._num_arrived = self._num_arrived + 1, self._num_arrived + request.num_choices
        config = self._config if request.pinned is None else replace(self._config, preempt_retry_count=0)
        branches = [
            LiveBranch(request, choice, first + choice, Tries(config), now) for choice in range(request.num_choices)
        ]
        self._live.add(branches, now)

    def _on_stopped(self, key: BranchKey, num_tokens: int, now: float) -> None:
        if (branch := self._live.find(key)) is not None:
            self._live.stop(branch, num_tokens, now)

    # ---------------------------------------------------------------- nodes

    def _on_node_event(self, event: NodeEvent, now: float) -> None:
        change = self._nodes.receive(event)
        for ref in change.lost:
            self._num_lost += 1
            self._live.count("nodes_lost")
            self._ends.fail_at(ref.name, f"loss {self._num_lost}", now)
        if isinstance(event, ev.NodeListed):
            self._breakers.listed(event.entry.node.name, event.entry.role)
        for key, ref in change.orphans:
            branch = self._live.find(key)
            if branch is None or branch.pair is None or (side := branch.side_at(ref)) is None:
                continue  # ended a moment ago, with its request or by the loss of its other node
            if ref in change.died:
                branch.tries.saw_death(ref)
            word, error = word_of_loss(side), node_lost(ref, "while the request was on it")
            if ref in change.drained:
                error = node_drained(ref)
                if side is Side.SENDER and isinstance(branch.phase, Moving):
                    word = Word.SENDER_UNSURE  # it ends once it has handed over: its target is about to speak
            self._ends.hear(branch, branch.pair, word, error, now)
        for ref in (*change.lost, *change.drained):
            for branch in self._live.unscored_at(ref):
                if ref in change.died:
                    branch.tries.saw_death(ref)
                is_here = self._live.find(branch.key) is branch  # else its request has ended for another's sake
                if branch.pair is not None and is_here:
                    self._ends.unscored(branch, branch.pair, now, has_drained=ref in change.drained)
        self._live.actions += change.actions
        if self._caches is not None:
            for ref in change.touched:
                self._caches.look(ref, self._nodes.find(ref), now)
        if change.is_news:
            self._entrance.look(now)
            self._live.may_place = True
            self._waiting.recall()

    def _on_message(self, node: ev.NodeRef, message: pb.NodeMessage, now: float) -> None:
        match message.WhichOneof("kind"):
            case "tokens":
                batch = message.tokens
                # Each branch would be answered with a Cancel: gigabytes of them.
                if max(len(batch.branches), len(batch.timings)) > MAX_BRANCHES:
                    self._live.count("stale_messages", "oversized")
                    return
                if batch.timings:  # of few
                    self._live.actions += map(ev.Timed, batch.timings)
                for tokens in batch.branches:
                    self._on_tokens(node, tokens, batch.from_receiver, now)
            case "error":
                self._on_error(node, message.error, now)
            case "wants_move":
                if message.wants_move.reason == pb.MOVE_DRAINING:
                    self._on_node_event(ev.NodeDrains(node), now)
                self._on_wants_move(node, message.wants_move.key, now)
            case "cache":
                if self._caches is None or not self._caches.take(node, message.cache, now):
                    self._live.count("stale_messages", "cache")
            case _:
                self._live.count("stale_messages", "unknown")

    def _find_speaking(
        self, node: ev.NodeRef, key: pb.AttemptKey, from_receiver: bool | None = None
    ) -> tuple[LiveBranch, Pair, Side] | None:
        """The branch, its nodes, and as which of them this one speaks, if the attempt counts and the node is at work on it."""
        branch = self._live.find(BranchKey(key.request_id, key.choice))
        if branch is None or (pair := branch.pair) is None:
            return None
        side = branch.side_of(node, key.attempt, from_receiver)
        return None if side is None else (branch, pair, side)

    def _on_tokens(self, node: ev.NodeRef, tokens: pb.BranchTokens, from_receiver: bool, now: float) -> None:
        found = self._find_speaking(node, tokens.key, from_receiver)
        if found is None:
            self._refuse_stale(node, tokens.key, "tokens", now)
            return
        branch, pair, side = found
        if problem := branch.logprobs_problem(tokens):
            self._live.fail(branch, pb.INTERNAL, f"PD Error: {problem}", now)
            return
        if branch.awaits_prompt_logprobs and tokens.prompt_logprobs:  # a retry brings them again
            branch.awaits_prompt_logprobs = False
            self._live.actions.append(ev.PromptScored(*branch.key, tuple(tokens.prompt_logprobs)))
            if branch.known_end is not None:
                if not isinstance(branch.phase, AwaitingPrompt):
                    self._live.cancel(branch, now)
                self._live.finish(branch, branch.known_end, now)
                return
        owner, verdict = judge(branch.phase.owner, word_of_tokens(side, tokens.finish))
        if verdict is Verdict.IGNORE:
            self._live.count("stale_messages", "tokens")
            return
        self._follow(branch, pair, side, owner, now)
        is_sound = self._live.take_tokens(branch, tokens.first_index, tokens.token_ids, tokens.logprobs, now)
        if is_sound and verdict is Verdict.FINISH:
            self._moves.call_off(branch, now)
            self._live.finish_when_scored(branch, "stop" if tokens.finish == pb.FINISH_STOP else "length", now)

    def _follow(self, branch: LiveBranch, pair: Pair, side: Side, owner: Owner, now: float) -> None:
        """Who speaks has the branch: what that changes."""
        match branch.phase:
            case Moving(_, target) | MoveUnknown(_, target) if side is Side.RECEIVER:
                self._succeeded(branch, now, target.node)
                self._moves.arrived(branch, pair, target, now)
            case Prefilling() | CommitUnknown() if side is Side.RECEIVER:
                if pair.prefill != pair.decode:
                    self._live.note(branch, "handed_over", branch.attempt, (pair.decode,))
                self._succeeded(branch, now, *pair.nodes)
                self._live.leave_prefill(branch, now)
                self._live.enter(branch, Decoding(pair), now)
            case Prefilling() if owner is Owner.NOBODY:
                self._succeeded(branch, now, pair.prefill)
            case MoveDoubted(lost=lost) if owner is Owner.DOUBTED:
                self._moves.doubt(branch, pair, lost, now)

    def _succeeded(self, branch: LiveBranch, now: float, *nodes: ev.NodeRef) -> None:
        branch.tries.succeeded(now)
        for ref in nodes:
            self._ends.succeed_at(ref.name)

    def _refuse_stale(self, node: ev.NodeRef, key: pb.AttemptKey, kind: str, now: float) -> None:
        """Stop what still runs of an attempt that no longer counts."""
        self._live.count("stale_messages", kind)
        branch = self._live.find(BranchKey(key.request_id, key.choice))
        ms_left = int(self._config.forgotten_fence_s * 1000) if branch is None else branch.ms_left(now)
        self._live.send(node, pb.RouterMessage(cancel=pb.Cancel(key=key, ms_left=ms_left)))

    def _on_error(self, node: ev.NodeRef, error: pb.PDError, now: float) -> None:
        found = self._find_speaking(node, error.key)
        if found is None:
            self._live.count("stale_messages", "error")
            return
        branch, pair, side = found
        if error.code not in pb.ErrorCode.values():
            error.code = pb.INTERNAL  # a newer version's
        sender, receiver = ends_of(branch.phase)
        is_passed_on = side is Side.SENDER and error.node_id == receiver.name
        if not is_passed_on:  # whomever it names
            error.node_id = node.name
        if error.code == pb.DRAINING:
            self._on_node_event(ev.NodeDrains(culprit(error, sender, receiver)), now)
        self._ends.hear(branch, pair, word_of_error(side, error.commit_unanswered), error, now)

    def _on_wants_move(self, node: ev.NodeRef, key: pb.AttemptKey, now: float) -> None:
        branch = self._live.find(BranchKey(key.request_id, key.choice))
        if branch is None or (pair := branch.pair) is None or (node, key.attempt) != (pair.decode, branch.attempt):
            self._refuse_stale(node, key, "wants_move", now)
        elif judge(branch.phase.owner, Word.HOLDER_ASKS)[1] is Verdict.PLACE:
            self._moves.place(branch, pair, now)
        else:
            self._live.count("stale_messages", "wants_move")

    # ---------------------------------------------------------------- placing

    def _settle(self, now: float) -> list[ev.Action]:
        """Dispatch from the queue's head while there is room, and the bound; return what has been decided."""
        if self._live.may_place and self._entrance.has_given_up:
            self._turn_away(now)
        num_attempts = num_tokens = 0
        while self._live.may_place and num_attempts < _PLACED and num_tokens < _PLACED_TOKENS:
            placed = self._place_head(now)
            self._live.may_place, num_attempts, num_tokens = placed > 0, num_attempts + 1, num_tokens + placed
        self._goes_on_at = now if self._live.may_place else None
        self._rest_ends_at = self._breakers.first_rest_end(now) if len(self._waiting) else None
        actions, self._live.actions = self._live.actions, []
        return actions

    def _turn_away(self, now: float) -> None:
        """Who waits in vain, and whose client has got nothing, also if it came back to the queue only now."""
        for request_id in dict.fromkeys(branch.key.request_id for branch in self._waiting):
            if not self._live.has_told(request_id):
                self._live.end(self._entrance.no_nodes(request_id), now)

    def _place_head(self, now: float) -> int:
        """Dispatch who comes next; how many tokens the attempt goes on from, 0 if there is nobody or no room."""
        taken = self._waiting.take(now)
        while self._waiting.orphans:
            self._live.set_timer(self._waiting.orphans.pop(), now)
        if taken is None:
            return 0
        group, pair, kind, num_cached, num_pooled = taken
        attempt = 1 + max(branch.newest_attempt for branch in group)
        for branch in group:
            num_tokens = max(group[0].num_tokens - num_cached - num_pooled, 1) if branch is group[0] else 0
            target = self._nodes.occupy(branch.key, pair, num_tokens)
            if branch.author is None:
                branch.begun_by = self._nodes.fingerprint_of(pair.prefill)
            branch.attempt = branch.newest_attempt = attempt
            branch.last_pair = pair
            self._live.enter(branch, Prefilling(pair), now)
            self._live.actions.append(ev.Observe("queue", now - branch.waits_since))
            self._live.note(branch, "dispatched", attempt, (pair.prefill, pair.decode), kind)
        for ref in pair.nodes:
            self._breakers.placed(ref.name, group[0].key, now)
        self._live.send(pair.prefill, pb.RouterMessage(dispatch=dispatch_message(group, target, now)))
        self._live.count("dispatches", kind)
        for name, amount in (("cached_tokens", num_cached), ("pooled_tokens", num_pooled)):
            if amount:
                self._live.actions.append(ev.Count(name, amount=amount))
        return group[0].num_tokens
