"""Moves: a branch goes from the decode node that holds it to another, KV and all, and no token is computed twice. Pure.

The holder asks (its node is to end, or others need its blocks), and is told of a node that seems to have room, or of none. It
decodes on while it copies, and hands over when it has. The branch counts at the target from Move on, and at the holder until the
target's first batch. A move that has come to nothing is known by the holder's asking again, or going on to its end; then the
target, which refused it or could not be reached, is held off for a while.

A branch whose prompt's logprobs have not arrived stays: they come under the number of the attempt that it has.
"""

from __future__ import annotations

from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey
from router.breaker import Breakers
from router.entrance import RouterCoreConfig
from router.events import NodeRef
from router.live import LiveRequests
from router.nodes import NodeTable
from router.phases import Decoding, MoveDoubted, MoveUnknown, Moving, Post
from router.placement import Pair, Placement
from router.requests import LiveBranch


class Moves:
    """Begins moves and notes how they end."""

    def __init__(
        self,
        nodes: NodeTable,
        breakers: Breakers,
        placement: Placement,
        live: LiveRequests,
        config: RouterCoreConfig,
    ) -> None:
        self._nodes = nodes
        self._breakers = breakers
        self._placement = placement
        self._live = live
        self._config = config

    def place(self, branch: LiveBranch, pair: Pair, now: float) -> None:
        """The holder, `pair.decode`, has asked; a move that was under way has come to nothing."""
        if isinstance(branch.phase, Moving):
            branch.held_off[branch.phase.target.node] = now + self._config.move_retry_s
        self.call_off(branch, now)
        answer = pb.Move(key=AttemptKey(*branch.key, branch.attempt).to_proto())
        target = self._find_target(branch, pair, now)
        if target is None:
            answer.retry_after_ms = int(self._config.move_retry_s * 1000)
            self._live.enter(branch, Decoding(pair), now)
        else:
            branch.newest_attempt += 1
            answer.next_attempt = branch.newest_attempt
            answer.target.CopyFrom(self._nodes.occupy_decode(branch.key, target))
            self._breakers.placed(target.name, branch.key, now)
            self._live.note(branch, "move_begun", branch.newest_attempt, (pair.decode, target))
            self._live.enter(branch, Moving(pair, Post(target, branch.newest_attempt)), now)
        self._live.count("moves", "no_room" if target is None else "begun")
        self._live.send(pair.decode, pb.RouterMessage(move=answer))

    def _find_target(self, branch: LiveBranch, pair: Pair, now: float) -> NodeRef | None:
        if branch.awaits_prompt_logprobs or branch.num_moves >= self._config.max_moves:
            return None
        names = self._breakers.avoided(now)
        while names and not self._nodes.has_target(pair.decode, branch.total_tokens, self._nodes.named(names)):
            names = names[1:]  # the least bad first
        without = self._nodes.named(names) | {node for node, until in branch.held_off.items() if until > now}
        found = self._nodes.move_targets(pair.decode, branch.num_tokens, branch.total_tokens, without)
        return self._placement.choose_target(found, branch.held_off)

    def arrived(self, branch: LiveBranch, pair: Pair, target: Post, now: float) -> None:
        """The target has spoken: the branch is its."""
        self._leave(branch, pair.decode, now)
        branch.attempt = target.attempt
        branch.num_moves += 1
        branch.last_pair = moved = Pair(pair.prefill, target.node)
        self._live.enter(branch, Decoding(moved), now)
        self._live.note(branch, "moved", target.attempt, (target.node,))
        self._live.count("moves", "done")

    def call_off(self, branch: LiveBranch, now: float) -> None:
        """The holder goes on by itself, or has ended the branch: the target is rid of it."""
        if isinstance(branch.phase, Moving):
            target = branch.phase.target.node
            self._live.cancel_at(target, branch, now)
            self._leave(branch, target, now)
            self._live.note(branch, "move_off", branch.attempt, (target,))
            self._live.count("moves", "off")

    def target_lost(self, branch: LiveBranch, pair: Pair, target: NodeRef, now: float) -> None:
        """The holder goes on, if it has not handed over yet."""
        self._leave(branch, target, now)
        self._live.note(branch, "move_off", branch.attempt, (target,))
        self._live.count("moves", "off")
        self.doubt(branch, pair, target, now)

    def doubt(self, branch: LiveBranch, pair: Pair, lost: NodeRef, now: float) -> None:
        """Await the holder's next word."""
        self._live.enter(branch, MoveDoubted(pair, lost, now + self._config.commit_unknown_grace_s), now)

    def holder_unsure(self, branch: LiveBranch, pair: Pair, target: Post, error: pb.PDError, now: float) -> None:
        """Await the target's first word; the holder has ended."""
        self._leave(branch, pair.decode, now)
        until = now + self._config.commit_unknown_grace_s
        self._live.enter(branch, MoveUnknown(pair, target, until, error), now)

    def _leave(self, branch: LiveBranch, node: NodeRef, now: float) -> None:
        self._nodes.vacate_decode(branch.key, node)
        self._breakers.left(node.name, branch.key, now)
        self._live.may_place = True
