"""Bugs of moves and of drains in production code, planted while a test runs, for the simulation to find."""

from __future__ import annotations

from typing import Any, cast

import pytest

from decode_node import receiving
from decode_node.core import DecodeCore
from decode_node.lease import started_branch
from decode_node.mover import Mover
from decode_node.moving import MOVE_TABLE, MoveAction, MoveEvent, MoveRow, MoveState
from decode_node.running_branch import RunningBranch
from engine.scheduler import Scheduler
from router.live import LiveRequests
from router.moves import Moves
from router.ownership import Side
from router.requests import LiveBranch

Patch = pytest.MonkeyPatch
_Table = dict[tuple[MoveState, MoveEvent], MoveRow]


def _change(patch: Patch, state: MoveState, event: MoveEvent, *row: object) -> None:
    patch.setitem(cast(_Table, MOVE_TABLE), (state, event), cast(MoveRow, row))


def a_target_counts_from_the_wrong_index(patch: Patch) -> None:
    """A branch that has moved goes on one token too early."""

    def counted(*given: Any) -> RunningBranch:
        branch = started_branch(*given)
        if len(branch.token_ids) - branch.first_index > 2:  # a prefill node has told one
            branch.token_ids.pop()
        return branch

    patch.setattr(receiving, "started_branch", counted)


def a_holder_decodes_on_behind_its_commit(patch: Patch) -> None:
    """Two nodes decode one branch until the target has answered."""
    both = (MoveAction.COMMIT, MoveAction.RESUME)
    _change(patch, MoveState.PAUSED, MoveEvent.WRITTEN, MoveState.COMMITTED, both)


def a_lease_is_left_behind(patch: Patch) -> None:
    """Of a branch that ends while it moves the holder does not give the target's blocks back, and the router does not either."""
    for state in (MoveState.SENDING, MoveState.PAUSING):
        _change(patch, state, MoveEvent.ENDED, MoveState.OVER, ())
    patch.setattr(LiveRequests, "cancel_at", lambda self, ref, branch, now: None)


def a_move_that_fails_leaves_its_branch_stopped(patch: Patch) -> None:
    """A holder keeps what it could not hand over, and does not decode it either."""
    _change(patch, MoveState.PAUSED, MoveEvent.FAILED, MoveState.RESTING, ())


def a_holder_goes_on_when_its_commit_has_no_answer(patch: Patch) -> None:
    """What may be another node's runs here again."""
    _change(patch, MoveState.COMMITTED, MoveEvent.UNKNOWN, MoveState.RESTING, (MoveAction.RESUME,))


def old_attempts_are_believed(patch: Patch) -> None:
    """What a branch's former nodes say of its former attempts counts."""
    right = LiveBranch.side_of

    def side_of(self: Any, node: Any, attempt: int, from_receiver: bool | None = None) -> Side | None:
        side = right(self, node, attempt, from_receiver)
        return Side.RECEIVER if side is None and attempt < self.attempt else side

    patch.setattr(LiveBranch, "side_of", side_of)


def moving_blocks_are_free_before_the_link_has_read_them(patch: Patch) -> None:
    """What ends while it moves gives back at once what its link will read."""
    right = Scheduler.lend

    def lend(self: Any, sequence_id: Any) -> None:
        right(self, sequence_id)
        self._all.read[sequence_id].is_read = False

    patch.setattr(Scheduler, "lend", lend)


def a_target_counts_as_taken_for_ever(patch: Patch) -> None:
    """Of a move that came to nothing the router still counts a branch at the target."""
    patch.setattr(Moves, "call_off", lambda self, branch, now: None)


def a_node_has_drained_when_all_is_on_its_way(patch: Patch) -> None:
    """A node ends when the last of its branches is asked for, not when it is another node's."""

    def is_empty(self: Any) -> bool:
        return all(key in self._running._mover._moves for key in self._running._branches)

    patch.setattr(DecodeCore, "_is_empty", is_empty)


def a_draining_node_asks_once(patch: Patch) -> None:
    """Whoever found no place is not asked for again."""
    right = Mover.want

    def want(self: Any, branch: Any, now: float) -> bool:
        asked = self.__dict__.setdefault("asked", set())
        is_first = branch.key not in asked
        asked.add(branch.key)
        return is_first and right(self, branch, now)

    patch.setattr(Mover, "want", want)
