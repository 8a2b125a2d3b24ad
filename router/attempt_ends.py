"""What becomes of a branch whose attempt is said to have ended without a finish: by a node, a node's loss, a silence. Pure.

The owner rule says whether the word counts, retry.py what another attempt costs. Whatever happens, the attempt and all before it
are fenced at every node that can be reached before there is another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from proto import baton_pb2 as pb
from router.breaker import Breakers
from router.entrance import RouterCoreConfig, none_large_enough
from router.events import RESCHEDULED, CircuitChanged, NodeRef
from router.live import LiveRequests
from router.moves import Moves
from router.ownership import Verdict, Word, judge
from router.phases import CommitUnknown, Decoding, MoveDoubted, Moving, Prefilling, Waiting, ends_of
from router.placement import Draw, Pair
from router.requests import KnownEnd, LiveBranch
from router.retry import Cost, Over, culprit

_OF_RECEIVERS: Final = (Word.RECEIVER_ERROR, Word.RECEIVER_LOST)


def node_lost(node: NodeRef, when: str) -> pb.PDError:
    """The router's own PD Error."""
    message = f"PD Error NODE_LOST: node {node.name} was lost {when}"
    return pb.PDError(code=pb.NODE_LOST, message=message, retryable=True, node_id=node.name)


def node_drained(node: NodeRef) -> pb.PDError:
    """What a node would have said that has ended as it said it would: nothing failed, and no retry is used.

    There may be such branches: what was on its way to the node when it had drained, what waits at a prefill node to be handed over
    to it, and what it could not give up in time.
    """
    message = f"PD Error DRAINING: node {node.name} has ended"
    return pb.PDError(code=pb.DRAINING, message=message, retryable=True, node_id=node.name)


class AttemptEnds:
    """Ends attempts, and puts their branches back into the queue or ends them, too."""

    def __init__(
        self, live: LiveRequests, moves: Moves, breakers: Breakers, config: RouterCoreConfig, draw: Draw
    ) -> None:
        self._live = live
        self._moves = moves
        self._breakers = breakers
        self._config = config
        self._draw = draw

    def hear(self, branch: LiveBranch, pair: Pair, word: Word, error: pb.PDError, now: float) -> None:
        """An attempt on `pair` is said to have ended."""
        _, verdict = judge(branch.phase.owner, word)
        if verdict is Verdict.IGNORE:
            if error.HasField("key"):  # those of the router's own making are no messages
                self._live.count("stale_messages", "error")
            return
        if verdict is Verdict.AWAIT_SENDER:
            if isinstance(branch.phase, Moving):
                self._moves.target_lost(branch, pair, branch.phase.target.node, now)
            return
        if word is not Word.GRACE_OVER and not self._take(branch, error, now):
            return
        if verdict is Verdict.AWAIT_RECEIVER:
            if isinstance(branch.phase, Moving):
                self._moves.holder_unsure(branch, pair, branch.phase.target, error, now)
            else:
                self._live.leave_prefill(branch, now)
                self._live.note(branch, "commit_unanswered", branch.attempt, pair.nodes)
                self._live.enter(branch, CommitUnknown(pair, now + self._config.commit_unknown_grace_s, error), now)
            return
        # The sender tells them before any end of its attempt, and over the same session.
        may_be_scored = isinstance(branch.phase, Prefilling | Decoding) and word in _OF_RECEIVERS
        if branch.is_complete:  # its last token was on the way in the error
            end = KnownEnd("stop" if branch.ended_by_stop_token else "length", None)
            if may_be_scored or not branch.awaits_prompt_logprobs:
                self._live.cancel(branch, now)
                self._live.finish_when_scored(branch, end.finish_reason, now)
                return
            branch.known_end = branch.known_end or end
        self._retry(branch, pair, error, now, may_be_scored=may_be_scored)

    def unscored(self, branch: LiveBranch, pair: Pair, now: float, *, has_drained: bool = False) -> None:
        """The prompt's logprobs have not come, and will not: the prefill node died with them, or its session.

        At once, even while the branch decodes: its client gets nothing before it has them.
        """
        prefill = pair.prefill
        error = node_drained(prefill) if has_drained else node_lost(prefill, "before the prompt's logprobs arrived")
        self._retry(branch, pair, error, now)

    def without_nodes(self, branch: LiveBranch, now: float) -> None:
        """Nobody has come who may go on with what the branch's client has, or who is large enough for it."""
        if branch.author is not None:
            message = "PD Error NODE_LOST: no node that is left has the weights that the answer was begun with"
            error = pb.PDError(code=pb.NODE_LOST, message=message)
            self._give_up(branch, Over.SPENT, error, now, may_be_scored=False)
        elif self._live.has_told(branch.key.request_id):
            branch.gives_up_at = None  # it waits on, as its request's other choices would
            self._live.set_timer(branch, now)
        else:
            self._live.end(
                none_large_enough(branch.key.request_id, branch.total_tokens, self._config.retry_after_s), now
            )

    def fail_at(self, name: str, what: str, now: float) -> None:
        """Note for a node's circuit what failed there."""
        if self._breakers.failed(name, what, now):
            self._live.count("circuits_opened")
            self._live.actions.append(CircuitChanged(name, is_open=True))

    def succeed_at(self, name: str) -> None:
        """Note that something went well there."""
        if self._breakers.succeeded(name):
            self._live.actions.append(CircuitChanged(name, is_open=False))

    def _take(self, branch: LiveBranch, error: pb.PDError, now: float) -> bool:
        """Count an error and take the tokens that it brings; False if they ended the request."""
        self._live.count("pd_errors", pb.ErrorCode.Name(error.code))
        token_ids: Sequence[int] = error.completion_token_ids
        if branch.request.sampling.num_logprobs is not None:
            token_ids = token_ids[: len(branch.log)]  # of those beyond nobody told the logprobs: they are drawn again
        return self._live.take_tokens(branch, 0, token_ids, (), now)

    def _retry(
        self, branch: LiveBranch, pair: Pair, error: pb.PDError, now: float, *, may_be_scored: bool = False
    ) -> None:
        """Put the branch back to its old place in the queue, or end it.

        `may_be_scored`: the prompt's logprobs, if they are awaited, may be on their way from the prefill node.
        """
        ends = ends_of(branch.phase)
        blamed = culprit(error, *ends)
        if error.code == pb.NODE_LOST:
            branch.tries.lost(blamed, now)
        is_at_decode = blamed != pair.prefill or pair.prefill == pair.decode
        again = branch.tries.after(error, is_at_decode, self._draw, now)
        if isinstance(again, Over):
            self._give_up(branch, again, error, now, may_be_scored=may_be_scored)
            return
        if again.cost is not Cost.NOTHING:
            self._live.count("retries", pb.ErrorCode.Name(error.code))
        if again.cost is Cost.RETRY:
            if error.code != pb.NODE_LOST:  # counted once, not for each of its branches
                for ref in (blamed,) if error.code == pb.INTERNAL else dict.fromkeys(ends):
                    self.fail_at(ref.name, branch.key.request_id, now)
            if branch.tries.failures_in_row > 1:  # so it may be the prefill node after all
                branch.held_off[pair.prefill] = now + again.rest_s
        if again.held_s is not None:
            branch.held_off[blamed] = now + again.held_s
        branch.rests_until = now + again.rest_s
        why = "" if again.cost is Cost.NOTHING else error.message
        self._live.note(branch, "failed", branch.attempt, (blamed,), pb.ErrorCode.Name(error.code), why)
        self._live.cancel(branch, now)
        self._live.leave_nodes(branch, now)
        branch.phase = Waiting()
        branch.waits_since = now
        self._live.enqueue(branch, now)

    def _give_up(self, branch: LiveBranch, why: Over, error: pb.PDError, now: float, *, may_be_scored: bool) -> None:
        may_finish = may_be_scored or not branch.awaits_prompt_logprobs
        self._live.note(branch, "given_up", branch.attempt, (), pb.ErrorCode.Name(error.code), error.message)
        if why is Over.FINAL:
            self._live.fail(branch, error.code, error.message, now)
        elif may_finish and (branch.log or self._live.has_told(branch.key.request_id)):
            self._live.cancel(branch, now)
            self._live.finish_when_scored(branch, RESCHEDULED, now)
        else:
            self._live.fail(branch, error.code, error.message, now, status=503)


def error_of_silence(phase: MoveDoubted) -> pb.PDError:
    """A target was lost, and the holder has said nothing since: the branch was the target's."""
    return node_lost(phase.lost, "with what had just moved there")
