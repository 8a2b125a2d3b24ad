"""Bugs of moves and of drains: two owners, gaps, blocks that are lost or never given back, nodes that never end."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_MOVE: Final = ("tests/handoff/test_move_exhaustive.py",)
_MOVES: Final = ("tests/cores/test_moves.py", "tests/cores/test_moves_under_pressure.py")

MUTANTS: Final = (
    Mutant(
        "two-owners-after-a-lost-ack",
        "A node whose Commit was not answered decodes on, though the target may have the sequence.",
        "decode_node/moving.py",
        "    (_S.COMMITTED, _E.UNKNOWN): _UNANSWERED,\n",
        "    (_S.COMMITTED, _E.UNKNOWN): (_S.RESTING, (_A.RESUME,)),\n",
        _MOVE,
    ),
    Mutant(
        "refused-move-never-goes-on",
        "A sequence whose move fails behind the pause is never resumed.",
        "decode_node/moving.py",
        "    (_S.PAUSED, _E.FAILED): (_S.RESTING, (_A.RESUME,)),\n",
        "    (_S.PAUSED, _E.FAILED): (_S.RESTING, ()),\n",
        _MOVE,
    ),
    Mutant(
        "moved-lease-left-behind",
        "A sequence that ends by itself while it moves does not release the lease at the target.",
        "decode_node/moving.py",
        "    (_S.SENDING, _E.ENDED): (_S.OVER, (_A.WITHDRAW,)),\n",
        "    (_S.SENDING, _E.ENDED): (_S.OVER, ()),\n",
        _MOVE,
    ),
    Mutant(
        "move-repeats-its-last-token-only",
        "A move's Commit begins with the last token: what the holder's session has not brought yet is a gap.",
        "decode_node/mover.py",
        "        first_index=branch.first_index,\n",
        "        first_index=len(branch.token_ids) - 1,\n",
        _MOVES,
    ),
    Mutant(
        "moved-before-the-last-block",
        "The last, partly filled block of a stopped sequence is not written.",
        "decode_node/mover.py",
        "blocks_for(num_final, self._block_size) if move.state in _STOPPED else num_full",
        "num_full",
        _MOVES,
    ),
    Mutant(
        "outgrows-its-reservation",
        "A sequence that moves over a slow link decodes on until the target has no blocks for it.",
        "decode_node/mover.py",
        "self._scheduler.num_planned(move.branch.key) + STEPS_AHEAD > num_reserved",
        "False",
        _MOVES,
    ),
    Mutant(
        "who-has-no-blocks-is-resumed",
        "A mixed node's sequence that gave way on its move is resumed when its Commit is refused, though its blocks have gone.",
        "decode_node/mover.py",
        "if self._scheduler.resumes_preempted and self._scheduler.knows(key):",
        "if self._scheduler.resumes_preempted:",
        _MOVES,
    ),
    Mutant(
        "commit-that-no-link-takes",
        "A move is begun whose Commit is longer than a message may be: its link is closed, with every move that shares it.",
        "decode_node/mover.py",
        "if _commit_bytes(branch, num_tokens) > MAX_FRAME_BYTES:",
        "if _commit_bytes(branch, 0) > 2 * MAX_FRAME_BYTES:",
        _MOVES,
    ),
    Mutant(
        "length-asked-of-who-is-queued-again",
        "A target that comes for a sequence which gave way and is queued here again ends the node: its length is nobody's.",
        "decode_node/mover.py",
        "        if not self._scheduler.can_move(branch.key):  # it gave way meanwhile, and is queued here again\n"
        "            return None\n"
        "        most = branch.max_total_tokens - 2  # at least one more is said there\n"
        "        num_tokens = self._scheduler.num_planned(branch.key)\n"
        "        if num_tokens > most:",
        "        most = branch.max_total_tokens - 2  # at least one more is said there\n"
        "        num_tokens = self._scheduler.num_planned(branch.key)\n"
        "        if not self._scheduler.can_move(branch.key) or num_tokens > most:",
        _MOVES,
    ),
    Mutant(
        "commit-queued-behind-everything",
        "The Commit is queued as soon as the last block is: a move under pressure cannot be taken back in time.",
        "decode_node/mover.py",
        "if handover.num_queued >= num_last and handover.num_unread <= FEW_BLOCKS:",
        "if handover.num_queued >= num_last:",
        _MOVES,
    ),
    Mutant(
        "moving-blocks-never-released",
        "The source blocks of a move stay lent when the link is quiet.",
        "decode_node/mover.py",
        "                    self._scheduler.release(key)\n                    del self._lent",
        "                    del self._lent",
        _MOVES,
    ),
    Mutant(
        "late-answer-unheard",
        "A move whose router has ended the old attempt before its Commit was answered is counted as nothing.",
        "node/handing_over.py",
        "            if (link_id, answer.lease_id) in self._unheard:\n",
        "            if False:\n",
        ("tests/cores/test_moving_lives.py",),
    ),
    Mutant(
        "kept-for-ever",
        "Who gave way is kept for a target that never answers, and older ones wait for its blocks.",
        "decode_node/mover.py",
        "        self._too_late.set(branch.key, now + self._preempt_s)\n",
        "",
        _MOVES,
    ),
    Mutant(
        "drain-swamps-the-link",
        "A draining node moves everything at once.",
        "decode_node/draining.py",
        "elif len(self._mover) < MOVES_AT_ONCE:",
        "else:",
        _MOVES,
    ),
    Mutant(
        "drain-asks-once",
        "A draining node does not ask again for a branch whose move came to nothing.",
        "decode_node/draining.py",
        "self._rests_until[key] = max(until, now + REST_S)",
        "self._rests_until[key] = inf",
        _MOVES,
    ),
    Mutant(
        "draining-node-gives-leases",
        "A node that is to end still gives leases.",
        "decode_node/door.py",
        "        elif self.is_draining:\n            self._refuse([call_id], keys[0], _DRAINING)\n",
        "",
        _MOVES,
    ),
    Mutant(
        "drained-with-a-link-open",
        "A node says that it is drained while a link still reads blocks of what has left.",
        "decode_node/mover.py",
        "return not (self._moves or self._lent or self._handovers.num_asked)",
        "return not self._moves",
        _MOVES,
    ),
    Mutant(
        "drained-prefill-forgets-what-it-began",
        "A prefill node that drains gives back what it has begun as well.",
        "prefill_node/core.py",
        "self._give_back([self._tasks[key] for key in (*ours, *self._not_started)], now)",
        "self._give_back([*self._tasks], now)",
        ("tests/cores/test_prefill_core.py",),
    ),
    Mutant(
        "stays-for-ever",
        "A move that came to nothing while its sequence gave way to others is never over, and no other is asked for.",
        "decode_node/mover.py",
        "        elif move.state is MoveState.STAYING and self._scheduler.is_waiting(move.branch.key):\n",
        "        elif False:\n",
        ("tests/cores/test_moves_under_pressure.py",),
    ),
)
