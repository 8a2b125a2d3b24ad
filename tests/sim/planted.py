"""Bugs of production code, planted while a test runs, for the simulation to find."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from connector.admissions import Admissions, Ended
from connector.fence import FenceFloor
from connector.handoff import SENDER_TABLE, SenderAction, SenderEvent, SenderState
from connector.one_sided import OneSidedWriters
from decode_node import admission
from decode_node.core import DecodeCore
from decode_node.door import Door
from engine.scheduler import Scheduler
from node.events import AnswerReserve
from node.handing_over import Handovers
from proto import baton_pb2 as pb
from router.breaker import Breakers
from router.cache_index import CacheIndex
from router.core import RouterCore
from router.entrance import Entrance, RouterCoreConfig
from router.events import RESCHEDULED
from router.live import LiveRequests
from router.nodes import NodeTable
from router.requests import KnownEnd, LiveBranch
from router.retry import COST, PREEMPTIONS_PER_RETRY, Again, Cost, Over, Tries
from router.token_log import Appended, TokenLog
from router.waiting import WaitingBranches
from runtime.session_end import SessionEnd

Patch = pytest.MonkeyPatch


def repeats_are_taken(patch: Patch) -> None:
    """A batch that comes twice is appended twice."""

    def append(self: Any, first_index: int, token_ids: Sequence[int]) -> Appended:
        self._token_ids.extend(token_ids)
        return Appended(first_index, tuple(token_ids))

    patch.setattr(TokenLog, "append", append)


def promises_are_kept_for_ever(patch: Patch) -> None:
    """The room that a lease was promised is not given back with it."""

    def return_blocks(pool: Any, blocks: Any) -> None:
        pool.release_lease(blocks.leased)
        pool.free(blocks.held)

    patch.setattr(admission, "return_blocks", return_blocks)


def writes_run_on_into_blocks_that_are_free(patch: Patch) -> None:
    """A lease is said to be quiet while a write into it runs."""
    right_revoke, right_end = Admissions.revoke, Admissions.end

    def revoke(self: Any, lease_id: int) -> bool:
        is_known = lease_id in self._leases
        right_revoke(self, lease_id)
        return is_known

    def end(self: Any, grant: Any, is_intact: bool) -> Ended:
        return Ended(right_end(self, grant, is_intact).landed, is_quiet=False)

    patch.setattr(Admissions, "revoke", revoke)
    patch.setattr(Admissions, "end", end)


def sent_blocks_are_dropped_before_they_are_read(patch: Patch) -> None:
    """A prefill node that is told to stop drops its blocks although the link will read them."""
    stop = (SenderState.FAILED, (SenderAction.SEND_RELEASE, SenderAction.STOP_COMPUTING, SenderAction.DROP_BLOCKS))
    patch.setitem(SENDER_TABLE, (SenderState.WRITING, SenderEvent.CANCEL), stop)


def blocks_are_free_before_the_last_step_is_read(patch: Patch) -> None:
    """An aborted sequence's blocks are free although a launched step writes them."""
    right = Scheduler.abort

    def abort(self: Any, sequence_id: Any) -> bool:
        last_read = self._reader._last_read_step_id
        self._reader._last_read_step_id = 1 << 60
        is_known = right(self, sequence_id)
        self._reader._last_read_step_id = last_read
        return is_known

    patch.setattr(Scheduler, "abort", abort)


def the_fence_admits_everything(patch: Patch) -> None:
    """What was cancelled or released may begin again."""
    patch.setattr(FenceFloor, "admits", lambda self, key: True)


def a_lost_router_is_not_noticed(patch: Patch) -> None:
    """A decode node goes on for a router that is gone."""
    patch.setattr(DecodeCore, "_router_lost", lambda self, router, now: None)


def senders_ignore_their_timers(patch: Patch) -> None:
    """Whoever hands KV over renews no lease and gives up nothing."""
    patch.setattr(Handovers, "_on_timer", lambda self, handover, now: [])


def a_resumed_session_starts_behind_what_was_lost(patch: Patch) -> None:
    """A new stream of a session does not repeat what the old one lost."""
    right = SessionEnd._attach

    def attach(self: Any, stream: int | None, now: float) -> None:
        right(self, stream, now)
        self._cursor = max(self._cursor, self._sent + 1)

    patch.setattr(SessionEnd, "_attach", attach)


def a_lost_node_orphans_nobody(patch: Patch) -> None:
    """The requests of a node that is gone are not taken up again."""

    def lose(self: Any, node: Any, change: Any, has_died: bool) -> None:
        node.session = type(node.session).LOST
        if not node.is_listed:
            self._remove(node, change)

    patch.setattr(NodeTable, "_lose", lose)


def the_queue_has_no_end(patch: Patch) -> None:
    """A router takes requests in, however many wait."""
    right = Entrance.find_refusal

    def find_refusal(self: Any, request: Any, num_queued: int, wait_s: float, now: float) -> Any:
        return right(self, request, 0, wait_s, now)

    patch.setattr(Entrance, "find_refusal", find_refusal)


def routers_overlook_evictions(patch: Patch) -> None:
    """A block that a node evicted is still believed to be there."""
    patch.setattr(CacheIndex, "evict", lambda self, holder, keys: None)


def a_routers_timers_are_late(patch: Patch) -> None:
    """Deadlines are noticed two seconds later."""
    tick, next_deadline = RouterCore.tick, RouterCore.next_deadline

    def late(self: Any) -> float | None:
        due = next_deadline(self)
        return None if due is None else due + 2

    patch.setattr(RouterCore, "tick", lambda self, now: tick(self, now - 2))
    patch.setattr(RouterCore, "next_deadline", late)


def refused_branches_are_not_queued(patch: Patch) -> None:
    """A branch that was refused twice is forgotten."""
    right = WaitingBranches.put

    def put(self: Any, branch: Any) -> None:
        right(self, branch)
        if branch.tries.num_refusals > 1:
            self._by_arrival.discard(branch.key)

    patch.setattr(WaitingBranches, "put", put)


def ended_leases_are_quiet_at_once(patch: Patch) -> None:
    """A one-sided transport does not wait for those who may still write."""
    right = OneSidedWriters.end

    def end(self: Any, lease_id: int) -> tuple[Any, ...]:
        links = right(self, lease_id)
        for link in links:
            self.stopped(link, lease_id)
        return links

    patch.setattr(OneSidedWriters, "end", end)


def budgets_are_one_short(patch: Patch) -> None:
    """A branch has a retry less than its user allows."""
    right = Tries.__init__

    def init(self: Any, config: RouterCoreConfig) -> None:
        right(self, config)
        self._credit = max(0, self._credit - PREEMPTIONS_PER_RETRY)

    patch.setattr(Tries, "__init__", init)


def a_node_that_died_counts_twice(patch: Patch) -> None:
    """A branch that was on one lost node fails as if it had been on two."""
    right = Tries.after

    def after(self: Any, error: Any, is_at_decode: bool, draw: Any, now: float) -> Again | Over:
        if error.code == pb.NODE_LOST and self.num_deaths:
            self.num_deaths += 1
        return right(self, error, is_at_decode, draw, now)

    patch.setattr(Tries, "after", after)


def a_rescheduled_answer_lacks_its_last_token(patch: Patch) -> None:
    """Who resubmits what the answer names would get a token that it has shown already."""
    right = LiveRequests.finish

    def finish(self: Any, branch: Any, end: KnownEnd, now: float) -> None:
        is_short = end.finish_reason == RESCHEDULED
        right(self, branch, end._replace(num_tokens=max(0, len(branch.log) - 1)) if is_short else end, now)

    patch.setattr(LiveRequests, "finish", finish)


def a_probe_that_says_nothing_probes_for_ever(patch: Patch) -> None:
    """A node that is tried with one attempt is left alone for good when that attempt is cancelled."""
    patch.setattr(Breakers, "left", lambda self, name, key, now: None)


def refused_attempts_count_as_failed(patch: Patch) -> None:
    """Who finds no room pays for it."""
    patch.setitem(cast(dict[int, Cost], COST), pb.NO_BLOCKS, Cost.RETRY)


def who_leaves_the_line_hears_nothing(patch: Patch) -> None:
    """The calls of an attempt that is cancelled while it waits for room are never answered."""
    right = Door.close

    def close(self: Any, waiting: Any, key: Any, now: float) -> None:
        num_before = len(self.out)
        right(self, waiting, key, now)
        self.out[num_before:] = [each for each in self.out[num_before:] if not isinstance(each, AnswerReserve)]

    patch.setattr(Door, "close", close)


def another_model_goes_on(patch: Patch) -> None:
    """Who has begun an answer is forgotten."""
    patch.setattr(LiveBranch, "author", None)


def attempts_keep_their_numbers(patch: Patch) -> None:
    """A retry has the number of the attempt that failed, which is fenced."""
    right = LiveBranch.__setattr__

    def set_attribute(self: Any, name: str, value: Any) -> None:
        right(self, name, 0 if name in ("attempt", "newest_attempt") and value > 0 else value)

    patch.setattr(LiveBranch, "__setattr__", set_attribute)
