"""Moves what runs here to other nodes: asks for targets, writes while the sequences decode on, stops them in order, commits. Pure.

The legal order is decode_node/moving.py; the sending half of the handoff node/handing_over.py; stopping and keeping blocks
engine/scheduler.py. This file ties the three together.

    Move(target) -> Reserve for the tokens that are there and some more (SLACK_SHARE), under the next attempt
    each step    -> final blocks are written; when the link has read all but FEW_BLOCKS of them, or the reservation is nearly
                    used up, the sequence is paused; behind its last token the rest is written, and the Commit

How far the sequence is when it stops is not known when Reserve is sent. The receiver therefore takes num_tokens as the most, and
the keys of those full blocks that are known (decode_node/lease.py); the blocks that nothing was written into are where it grows.

The Commit says every token, and first_index of the holder's own attempt: there is no common order between the two nodes' sessions,
and so the target's first batch repeats all that the holder said in its attempt.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NamedTuple

from connector.handoff import SenderAction, SenderEvent, SenderState
from connector.transport import BlocksTaken
from connector.writes import MAX_FRAME_BYTES
from decode_node.moving import MoveAction, MoveEvent, MoveState, step_move
from decode_node.running_branch import RunningBranch
from engine.scheduler import Scheduler
from engine.sequence import blocks_for
from node import events as ev
from node.handing_over import GIVEN_UP, Due, Handover, Handovers
from node.handover_messages import Offer, ms_left
from node.sampling import grammar_of
from node.steps import STEPS_AHEAD
from node.timers import Timers, earliest
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey, attempt_key
from proto.block_key import block_keys

# What the sequence may fill while its blocks are written: so many, or that share of what it has. The more there is to write the
# longer that takes: over 100 MB/s 100,000 tokens of 128 KiB take two minutes, in which 12,500 more are said at 100 a second.
SLACK_BLOCKS: Final = 4
SLACK_SHARE: Final = 8
FEW_BLOCKS: Final = 2  # that the link has yet to read when the sequence stops, and when its Commit is queued
_ID_BYTES: Final = 3  # of a Commit: a token's id, below 2 ** 21
_OWN_BYTES: Final = 8  # a token's own logprob
_TOP_BYTES: Final = 11  # one of the most likely ones
_REST_BYTES: Final = 1024
_SENT: Final = {MoveState.COMMITTED, MoveState.SURRENDERED}
_STOPPED: Final = {MoveState.PAUSED, MoveState.YIELDED}


class Outcome(Enum):
    """What a branch that does not go on here comes to."""

    MOVED = auto()  # another node's
    UNANSWERED = auto()  # perhaps another node's
    PREEMPTED = auto()


class Verdict(NamedTuple):
    """The branch is no longer the mover's: its owner tells the router, and forgets it."""

    branch: RunningBranch
    outcome: Outcome


@dataclass(slots=True)
class Move:
    """One branch that is to go, or goes. `state` changes through step_move only."""

    branch: RunningBranch
    state: MoveState = MoveState.RESTING
    handover: Handover | None = None  # from SENDING and YIELDED on

    @property
    def sending(self) -> Handover:
        """The handoff, from SENDING and YIELDED on."""
        if self.handover is None:
            raise AssertionError(f"{self.state.name} without a handoff")
        return self.handover


class Mover:
    """Owned by what runs here (decode_node/running.py). What it asks of the shell goes to `out`, as do the handoffs' actions."""

    def __init__(
        self, handovers: Handovers, scheduler: Scheduler, key_seed: bytes, block_size: int, preempt_s: float
    ) -> None:
        """`preempt_s`: how long a sequence that gave way is kept for another node; 0: not at all."""
        self._handovers = handovers
        self._scheduler = scheduler
        self._key_seed = key_seed
        self._block_size = block_size
        self._preempt_s = preempt_s
        self._moves: dict[AttemptKey, Move] = {}  # by the holder's attempt
        self._lent: dict[AttemptKey, AttemptKey] = {}  # a handoff whose blocks are not dropped -> the holder's attempt
        self._too_late: Timers[AttemptKey] = Timers()  # of those that gave way
        self._verdicts: list[Verdict] = []
        self._rests: list[tuple[AttemptKey, float]] = []
        self.out: list[ev.Action] = handovers.out

    def __len__(self) -> int:
        """Branches that are asked for, or on their way."""
        return len(self._moves)

    @property
    def is_quiet(self) -> bool:
        """Whether no handoff of any branch, gone ones included, has anything under way."""
        return not (self._moves or self._lent or self._handovers.num_asked)

    def states(self) -> dict[str, int]:
        """How many there are by state."""
        names = [move.state.name for move in self._moves.values()]
        return {name: names.count(name) for name in sorted({*names})}

    def is_sent(self, key: AttemptKey) -> bool:
        """Whether the branch's Commit is under way: it may be another node's."""
        return key in self._moves and self._moves[key].state in _SENT

    # ------------------------------------------------------------ from who owns the branches

    def want(self, branch: RunningBranch, now: float) -> bool:
        """Ask for a target, because the node drains. False: not now; it does not decode, or an earlier move still ends.

        Who computes its prompt here and has said nothing is no holder to its router, which would not answer.
        """
        is_mute = len(branch.token_ids) == branch.first_index
        if branch.key in self._moves or is_mute or not self._scheduler.can_move(branch.key):
            return False
        self._step(self._new(branch), MoveEvent.WANT, now)
        return True

    def gave_way(self, branch: RunningBranch, now: float) -> list[Verdict]:
        """The scheduler has stopped it for older ones, and keeps its blocks."""
        move = self._moves.get(branch.key) or self._new(branch)
        self._too_late.set(branch.key, now + self._preempt_s)
        is_kept = self._preempt_s and not self._scheduler.resumes_preempted
        if not is_kept and move.state in (MoveState.RESTING, MoveState.ASKED):
            self._forget(move)
            self._give_up(move)
            return self._take_verdicts()
        self._step(move, MoveEvent.GAVE_WAY, now)
        return self._take_verdicts()

    def stopped(self, key: AttemptKey, now: float) -> list[Verdict]:
        """The scheduler has paused it, as it was asked to."""
        self._step(self._moves[key], MoveEvent.STOPPED, now)
        return self._take_verdicts()

    def ended(self, key: AttemptKey, now: float) -> None:
        """It said its last token here."""
        if (move := self._moves.get(key)) is not None:
            self._step(move, MoveEvent.ENDED, now)

    def stop(self, key: AttemptKey, now: float) -> None:
        """Nobody wants it here any more: out of the engine with it, moving or not."""
        if (move := self._moves.get(key)) is not None:
            self._step(move, MoveEvent.STOP, now)
        else:
            self._scheduler.abort(key)

    # ------------------------------------------------------------ from the router

    def answer(self, message: pb.Move, now: float) -> list[Verdict]:
        """A target, or none, for a branch that was asked for."""
        move = self._moves.get(attempt_key(message.key))
        if move is None or move.state not in (MoveState.ASKED, MoveState.HELD):
            self.out.append(ev.Count("unexpected_events"))
            return []
        offer = self._offer(move, message)
        if offer is None:
            self._rest(move, now + message.retry_after_ms / 1000)
            self._step(move, MoveEvent.NOWHERE, now)
        else:
            move.handover = Handover(offer)
            self._step(move, MoveEvent.TARGET, now)
        return self._take_verdicts()

    # ------------------------------------------------------------ from the target and the link

    def take(self, event: ev.Event, now: float) -> list[Verdict]:
        """What a target, or a link, has said."""
        self._do_dues(self._handovers.take(event, now), now)
        num_taken, num_failed = self._handovers.take_late()
        if num_taken:
            self.out.append(ev.Count("moves_done", num_taken))
        if num_failed:
            self.out.append(ev.Count("moves_failed", num_failed))
        if isinstance(event, BlocksTaken):
            self.look(now)
        return self._take_verdicts()

    def expire(self, now: float) -> list[Verdict]:
        """Fire every timer that is due."""
        self._do_dues(self._handovers.expire(now), now)
        for key in self._too_late.pop_due(now):
            self._step(self._moves[key], MoveEvent.TOO_LATE, now)
        return self._take_verdicts()

    def next_deadline(self) -> float | None:
        """When `expire` must be called at the latest."""
        return earliest(self._handovers.next_deadline(), self._too_late.next())

    def look(self, now: float) -> None:
        """Write what has become final, stop who is far enough, commit who is through: behind a step, before who was queued runs."""
        for move in list(self._moves.values()):
            self._look_at(move, now)

    def _look_at(self, move: Move, now: float) -> None:
        if move.state in (MoveState.SENDING, MoveState.PAUSING, *_STOPPED):
            if move.sending.state is SenderState.WRITING:
                self._write(move, now)
            if move.state is MoveState.SENDING and self._is_nearly_used_up(move):
                self._step(move, MoveEvent.FULL, now)
        elif move.state is MoveState.SURRENDERED and move.sending.num_unread == 0:
            self._scheduler.abort(move.branch.key)  # it never runs here again, and others wait for its blocks
            self._scheduler.release(move.branch.key)
        elif move.state is MoveState.STAYING and self._scheduler.is_waiting(move.branch.key):
            self._step(move, MoveEvent.REQUEUED, now)

    def _write(self, move: Move, now: float) -> None:
        key, handover = move.branch.key, move.sending
        num_final = move.branch.num_tokens - 1  # positions: the last token is never fed
        num_full = num_final // self._block_size
        num_last = blocks_for(num_final, self._block_size) if move.state in _STOPPED else num_full
        end = min(self._scheduler.num_readable(key), num_last)
        if end > handover.num_queued:
            block_ids = self._scheduler.block_ids(key)
            self._handovers.write(handover, [(index, block_ids[index]) for index in range(handover.num_queued, end)])
        if handover.num_queued >= num_last and handover.num_unread <= FEW_BLOCKS:
            if move.state in _STOPPED:  # no sooner: a Commit that is queued behind much cannot be taken back
                self._step(move, MoveEvent.WRITTEN, now)
            elif move.state is MoveState.SENDING:
                self._step(move, MoveEvent.FULL, now)

    def _is_nearly_used_up(self, move: Move) -> bool:
        """Whether the steps until the next look could take it beyond what is reserved."""
        num_reserved = move.sending.offer.num_tokens
        if num_reserved >= move.branch.max_total_tokens - 2:  # it ends by itself before that
            return False
        return self._scheduler.num_planned(move.branch.key) + STEPS_AHEAD > num_reserved

    # ------------------------------------------------------------ the two machines

    def _new(self, branch: RunningBranch) -> Move:
        move = self._moves[branch.key] = Move(branch)
        return move

    def _step(self, move: Move, event: MoveEvent, now: float) -> None:
        move.state, actions = step_move(move.state, event)
        if move.state in (MoveState.RESTING, MoveState.OVER):
            self._forget(move)
        for action in actions:
            self._do(move, action, now)
        if move.state in _STOPPED:
            self._look_at(move, now)

    def _do(self, move: Move, action: MoveAction, now: float) -> None:
        branch = move.branch
        match action:
            case MoveAction.ASK:
                reason = pb.MOVE_PREEMPTED if move.state is MoveState.HELD else pb.MOVE_DRAINING
                wants = pb.WantsMove(key=branch.key.to_proto(), reason=reason)
                self.out.append(ev.ToRouter(branch.router, pb.NodeMessage(wants_move=wants)))
            case MoveAction.RESERVE:
                self.out.append(ev.Count("moves_begun"))
                self._scheduler.lend(branch.key)
                self._lent[move.sending.key] = branch.key
                self._do_dues(self._handovers.step(move.sending, SenderEvent.START, now), now)
            case MoveAction.PAUSE:
                self._scheduler.pause(branch.key)  # if it does not decode any more, its end, or that it gave way, comes
            case MoveAction.COMMIT:
                self._do_dues(self._handovers.step(move.sending, SenderEvent.ALL_WRITTEN, now), now)
            case MoveAction.RESUME:
                self._scheduler.resume(branch.key)
            case MoveAction.WITHDRAW:
                self._withdraw(move, now)
            case MoveAction.DROP:
                self._scheduler.abort(branch.key)
            case MoveAction.GIVE_UP:
                self._give_up(move)
            case MoveAction.REPORT_MOVED:
                self.out.append(ev.Count("moves_done"))
                self._verdicts.append(Verdict(branch, Outcome.MOVED))
            case MoveAction.REPORT_UNANSWERED:
                self._verdicts.append(Verdict(branch, Outcome.UNANSWERED))

    def _give_up(self, move: Move) -> None:
        key = move.branch.key
        if self._scheduler.resumes_preempted and self._scheduler.knows(key):  # else its blocks went when they were read
            self._scheduler.resume(key)
        else:
            self._scheduler.abandon(key)
            self._verdicts.append(Verdict(move.branch, Outcome.PREEMPTED))

    def _withdraw(self, move: Move, now: float) -> None:
        if move.sending.state not in GIVEN_UP:
            if move.sending.state is not SenderState.COMMITTING:  # else its answer will tell
                self.out.append(ev.Count("moves_failed"))
            self._do_dues(self._handovers.step(move.sending, SenderEvent.CANCEL, now), now)

    def _do_dues(self, dues: Iterable[Due], now: float) -> None:
        """What the handoff's machine leaves to this role."""
        for due in dues:
            key = self._lent[due.handover.key]
            move = self._moves.get(key)
            is_current = move is not None and move.handover is due.handover
            match due.action:
                case SenderAction.START_WRITING if is_current and move is not None:
                    self._look_at(move, now)
                case SenderAction.SEND_COMMIT if move is not None:
                    self._handovers.send_commit(due.handover, _commit(move.branch, now))
                case SenderAction.REPORT if is_current and move is not None:
                    refused, failed = ev.Count("moves_refused"), ev.Count("moves_failed")
                    self.out.append(refused if due.handover.lease is None else failed)
                    self._rest(move, now)
                    self._step(move, MoveEvent.FAILED, now)
                case SenderAction.REPORT_UNANSWERED if is_current and move is not None:
                    self.out.append(ev.Count("moves_failed"))
                    self._step(move, MoveEvent.UNKNOWN, now)
                case SenderAction.DROP_BLOCKS:
                    if is_current and move is not None and due.handover.state is SenderState.DONE:
                        self._step(move, MoveEvent.ACKED, now)
                    self._scheduler.release(key)
                    del self._lent[due.handover.key]

    def _rest(self, move: Move, until: float) -> None:
        self._rests.append((move.branch.key, until))

    def take_rests(self) -> list[tuple[AttemptKey, float]]:
        """Branches whose move came to nothing, and when the router would like to be asked again."""
        rests, self._rests = self._rests, []
        return rests

    def _take_verdicts(self) -> list[Verdict]:
        verdicts, self._verdicts = self._verdicts, []
        return verdicts

    def _forget(self, move: Move) -> None:
        self._moves.pop(move.branch.key, None)
        self._too_late.set(move.branch.key, None)

    # ------------------------------------------------------------ what is said

    def _offer(self, move: Move, message: pb.Move) -> Offer | None:
        """What is asked of the target; None: there is none, or nothing that could go there."""
        branch = move.branch
        key = branch.key._replace(attempt=message.next_attempt)
        if not message.HasField("target") or message.next_attempt <= branch.key.attempt or key in self._lent:
            return None
        if not self._scheduler.can_move(branch.key):  # it gave way meanwhile, and is queued here again
            return None
        most = branch.max_total_tokens - 2  # at least one more is said there
        num_tokens = self._scheduler.num_planned(branch.key)
        if num_tokens > most:  # it is about to say its last one
            return None
        if move.state is not MoveState.HELD:
            num_tokens = min(num_tokens + max(SLACK_BLOCKS * self._block_size, num_tokens // SLACK_SHARE), most)
        if _commit_bytes(branch, num_tokens) > MAX_FRAME_BYTES:  # a link would be closed by it, with all who share it
            return None
        known = [*branch.prompt_token_ids, *branch.token_ids]
        return Offer(
            key=key,
            more_choices=(),
            router=branch.router,
            target=message.target,
            num_tokens=num_tokens,
            max_total_tokens=branch.max_total_tokens,
            block_keys=tuple(block_keys(self._key_seed, known[:-1], self._block_size)),
            deadline=branch.deadline,
            wait_s=0.0,  # two full nodes must not wait for each other
            grammar=grammar_of(branch.sampling),
        )


def _commit_bytes(branch: RunningBranch, num_tokens: int) -> int:
    """What the Commit takes at most, if prompt and completion are so many tokens."""
    num_said = num_tokens - len(branch.prompt_token_ids)
    of_each = _OWN_BYTES + _TOP_BYTES * branch.sampling.num_logprobs if branch.sampling.HasField("num_logprobs") else 0
    return _ID_BYTES * num_tokens + of_each * num_said + branch.sampling.ByteSize() + _REST_BYTES


def _commit(branch: RunningBranch, now: float) -> pb.Commit:
    """Hands the branch over with every token, and tells again all that was told in this attempt."""
    return pb.Commit(
        prompt_token_ids=branch.prompt_token_ids,
        branches=[
            pb.StartedBranch(
                branch=pb.Branch(choice=branch.key.choice, seed=branch.seed, generated_token_ids=branch.token_ids),
                logprobs=branch.logprobs,
            )
        ],
        first_index=branch.first_index,
        sampling=branch.sampling,
        ms_left=ms_left(branch.deadline, now),
    )
