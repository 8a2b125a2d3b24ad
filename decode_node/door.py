"""What becomes of a Reserve: refused, a lease, or a place in the line. Pure; the core ends what a newer attempt ends.

    flaw, stale, no room for its fence -------------------------> refused at once
    the same again: granted, or in line ------------------------> the same lease, the same place
                    refused ------------------------------------> refused
    room, and nobody before it ---------------------------------> a lease
    no room: may wait, and the line is not full ----------------> in line, until room, its time, or its end comes
             else ----------------------------------------------> refused

Room is exact (D01): the blocks that it takes now, beside what admission leaves to those that run (engine/reserve.py, unless
the node was told not to), are available to the last block, or they are not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from connector.fence import FenceFloor
from connector.handoff import ReceiverState
from decode_node import admission
from decode_node.lease import Lease, lease_of
from decode_node.leases import Leases
from decode_node.waiting import WaitingReserve, WaitingReserves
from engine.block_pool import BlockPool
from engine.prefix_cache import PrefixCache
from engine.scheduler import Scheduler
from node import events as ev
from node.identity import NodeIdentity, NodeLimits
from node.pd_error import pd_error
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey

OPEN: Final = {ReceiverState.RESERVED, ReceiverState.FILLED}
_MAX_CALLS: Final = 4  # that wait for one attempt: a sender asks once, and may repeat itself
_Refusal = tuple[pb.ErrorCode.ValueType, str]
_DRAINING: Final[_Refusal] = (pb.DRAINING, "the node is to end")


def _is_nowhere_else(_: AttemptKey) -> bool:
    """Of a node with one core."""
    return False


class Door:
    """Owned by the decode core, as are `fence` and `leases`, which it shares."""

    def __init__(
        self,
        identity: NodeIdentity,
        limits: NodeLimits,
        scheduler: Scheduler,
        pool: BlockPool,
        fence: FenceFloor,
        leases: Leases,
        draw: Callable[[], tuple[int, bytes]],
    ) -> None:
        self._identity = identity
        self._limits = limits
        self._scheduler = scheduler
        self._pool = pool
        self._cache = PrefixCache(pool)
        self._fence = fence
        self._leases = leases
        self._draw = draw
        self.line = WaitingReserves(limits.max_waiting_reserves)
        self.is_draining = False  # nothing new comes in
        self.is_elsewhere: Callable[[AttemptKey], bool] = _is_nowhere_else  # another core of this node has it
        self.is_held_up = False  # the node's own queue waits for room, and goes first
        self.out: list[ev.Action] = []  # the core takes them at the end of its turn, or when their order matters

    # ------------------------------------------------------------ a Reserve comes

    def turn_away(self, call_id: int, keys: tuple[AttemptKey, ...], flaw: str | None) -> bool:
        """Answer what needs no decision: flaws, repeats, old attempts. True if that was all."""
        lease, waiting = self._leases.of_any(keys), self.line.of_any(keys)
        if flaw is not None:
            self._refuse([call_id], keys[0], (pb.INCOMPATIBLE, flaw))
        elif lease is not None and lease.keys == keys and lease.state in OPEN:
            # The same attempt twice gives the same lease (H06).
            self.out.append(ev.AnswerReserve(call_id, pb.ReserveReply(lease=lease.to_message())))
        elif waiting is not None and waiting.keys == keys and len(waiting.call_ids) < _MAX_CALLS:
            waiting.call_ids.append(call_id)
        elif waiting is not None and waiting.keys == keys:
            self._refuse([call_id], keys[0], (pb.BUSY, f"{_MAX_CALLS} calls wait for this attempt already"))
        elif waiting is not None:
            self._refuse([call_id], keys[0], (pb.CANCELLED, f"attempt {keys[0].attempt} waits with other choices"))
        elif lease is not None or any(self._scheduler.knows(key) or self.is_elsewhere(key) for key in keys):
            self._refuse([call_id], keys[0], (pb.CANCELLED, f"attempt {keys[0].attempt} is here already"))
        elif not any(map(self._fence.admits, keys)):
            self.out.append(ev.Count("stale_refused"))
            refusal: _Refusal = (pb.CANCELLED, f"attempt {keys[0].attempt} is below the fence floor")
            if any(map(self._fence.was_refused, keys)):  # it came twice: that costs its request nothing either
                refusal = (pb.BUSY, f"attempt {keys[0].attempt} was refused here before")
            self._refuse([call_id], keys[0], refusal)
        elif self.is_draining:
            self._refuse([call_id], keys[0], _DRAINING)
        elif len(keys) > self._scheduler.num_slots:
            self._refuse(
                [call_id], keys[0], (pb.BUSY, f"{len(keys)} branches, there are {self._scheduler.num_slots} slots")
            )
        elif not self._fence.has_room(*(key.branch for key in keys if self._fence.admits(key))):
            self._refuse([call_id], keys[0], (pb.BUSY, f"{len(self._fence)} fences are the most that it keeps"))
        else:
            return False
        return True

    def enter(self, call_id: int, request: pb.ReserveRequest, keys: tuple[AttemptKey, ...], now: float) -> Lease | None:
        """Give an attempt whose fences have begun its lease, a place in the line, or a refusal."""
        deadline = now + request.ms_left / 1000
        until = min(now + request.wait_ms / 1000, deadline)
        admitted = dict.fromkeys(filter(self._fence.admits, keys))
        asked = WaitingReserve(request, keys, admitted, deadline, until, [call_id])
        result: Lease | _Refusal = (pb.NO_BLOCKS, f"{len(self.line)} others wait for room")
        if self.is_held_up:
            result = (pb.NO_BLOCKS, "what was queued here before waits for room")
        elif not len(self.line):
            result = self._grant(asked, now)
        if isinstance(result, Lease):
            return result
        if until <= now or self.line.is_full or not self._can_ever_fit(asked):
            self._give_up(asked, result, now)
        else:
            self.line.put(asked)
        return None

    # ------------------------------------------------------------ the line moves

    def serve(self, now: float) -> list[Lease]:
        """Leases for those whose turn it is, as long as there is room."""
        granted: list[Lease] = []
        while not self.is_held_up and (waiting := self.line.next()) is not None:
            result = self._grant(waiting, now)
            if not isinstance(result, Lease):
                break
            self.line.take(waiting)
            granted.append(result)
        return granted

    def expire(self, waiting: WaitingReserve, now: float) -> None:
        """Its time is over."""
        self.line.take(waiting)
        self._give_up(waiting, (pb.NO_BLOCKS, "no room was found in the time that it would wait"), now)

    def drain(self, now: float) -> None:
        """Nothing new comes in from now on, and nobody waits in vain."""
        self.is_draining = True
        for waiting in self.line:
            self.line.take(waiting)
            self._give_up(waiting, _DRAINING, now)

    def close(self, waiting: WaitingReserve, key: AttemptKey, now: float) -> None:
        """This branch is not wanted any more; without any the attempt's calls are answered."""
        self.line.close(waiting, key)
        self._fence.end(key, waiting.deadline, now)
        if not waiting.open:
            self._refuse(waiting.call_ids, waiting.keys[0], (pb.CANCELLED, "it was cancelled while it waited"))

    def next_expiry(self) -> float | None:
        """When somebody in the line has waited long enough."""
        return min((waiting.until for waiting in self.line), default=None)

    # ------------------------------------------------------------ room

    def _can_ever_fit(self, asked: WaitingReserve) -> bool:
        """Whether the node, were it empty, has the blocks."""
        need = self._need(asked)
        num_blocks = need.num_total if self._scheduler.promises_growth else need.num_now
        return num_blocks <= self._pool.num_blocks

    def _need(self, asked: WaitingReserve) -> admission.BlockNeed:
        request = asked.request
        return admission.block_need(
            request.num_tokens, request.max_total_tokens, self._pool.block_size, len(asked.keys)
        )

    def _grant(self, asked: WaitingReserve, now: float) -> Lease | _Refusal:
        """A lease, told to those who wait for it; or why there is none, and nothing has changed."""
        keys, scheduler = asked.keys, self._scheduler
        if not scheduler.reserve_slots(len(keys)):
            return pb.BUSY, f"{scheduler.num_free_slots} of {len(keys)} slots are free"
        need = self._need(asked)
        blocks = self._take_blocks(need, asked)
        if blocks is None:
            scheduler.unreserve_slots(len(keys))
            return pb.NO_BLOCKS, f"{need.num_now} blocks are needed now, {self._pool.num_available} available"
        block_size, drawn = self._pool.block_size, self._draw()
        lease = lease_of(asked.request, blocks, block_size, drawn, self._limits.lease_life_s, asked.deadline, now)
        lease.open &= asked.open.keys()
        self._leases.add(lease)
        self.out.append(ev.AdmitLease(lease.lease_id, lease.secret, lease.writable()))
        reply = pb.ReserveReply(lease=lease.to_message())
        self.out += [ev.AnswerReserve(call_id, reply) for call_id in asked.call_ids]
        return lease

    def _take_blocks(self, need: admission.BlockNeed, asked: WaitingReserve) -> admission.LeasedBlocks | None:
        scheduler, request = self._scheduler, asked.request
        is_promised = scheduler.promises_growth
        remaining = [] if is_promised else [request.max_total_tokens - request.num_tokens - 1] * len(asked.keys)

        def has_room(num_blocks: int) -> bool:
            granted = self._leases.remaining_tokens()
            return scheduler.admits(num_blocks, remaining, granted, self._limits.reserves_for_running)

        return admission.take_blocks(self._pool, self._cache, need, request.block_keys, is_promised, has_room)

    # ------------------------------------------------------------ refusals

    def _give_up(self, asked: WaitingReserve, refusal: _Refusal, now: float) -> None:
        for key in asked.open:
            self._fence.refuse(key, asked.deadline, now)
        self._refuse(asked.call_ids, asked.keys[0], refusal)

    def _refuse(self, call_ids: list[int], key: AttemptKey, refusal: _Refusal) -> None:
        code, reason = refusal
        self.out.append(ev.Count(f"reserve_refused_{pb.ErrorCode.Name(code).lower()}"))
        retry_after_ms = 50 if code in (pb.NO_BLOCKS, pb.BUSY) else 0
        error = pd_error(code, reason, key, self._identity.name, retry_after_ms=retry_after_ms)
        self.out += [ev.AnswerReserve(call_id, pb.ReserveReply(error=error)) for call_id in call_ids]
