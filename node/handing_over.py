"""The sending half of handoffs: who was asked for blocks, over which link they go, what the machine says comes next. Pure.

For every role that sends KV: a prefill node what it computes, a decode node what moves on. The legal order is
connector/handoff.py; this file does what is the same for all (Reserve, Renew, Release, links, timers) and hands its owner, in
order, what is left (`Due`): which blocks are ready, what the Commit says, what becomes of the computing and of the blocks, who
hears of a failure. Not here: the request's deadline, which is its owner's timer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from connector.handoff import SenderAction, SenderEvent, SenderState, step_sender
from connector.transport import Answered, BlocksTaken, LeaseRef, LinkClosed
from node import events as ev
from node import handover_messages as messages
from node.handover_messages import Offer
from node.identity import NodeIdentity, NodeLimits
from node.links import Links
from node.pd_error import TOO_LATE, pd_error
from node.timers import Timers
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey

MAX_UNHEARD: Final = 1024  # Commits whose senders have given up, and whose answers are still of interest
GIVEN_UP: Final = {SenderState.DRAINING, SenderState.FAILED, SenderState.DONE}


@dataclass(frozen=True, slots=True)
class HeldLease:
    """The receiver's promise, and the link that leads to it."""

    ref: LeaseRef
    link_id: str
    life_s: float


@dataclass(slots=True)
class Handover:
    """One attempt on its way to a receiver. `state` changes through Handovers.step only."""

    offer: Offer
    state: SenderState = SenderState.IDLE
    lease: HeldLease | None = None  # from WRITING on
    renew_at: float = inf
    overdue_at: float = (
        inf  # lease end while WRITING; patience while COMMITTING and DRAINING, with a link that carries nothing
    )
    num_queued: int = 0  # leading blocks given to the link, or held by the receiver already
    num_unread: int = 0  # blocks that the link may still read

    @property
    def key(self) -> AttemptKey:
        """The attempt at the receiver."""
        return self.offer.key

    @property
    def held_lease(self) -> HeldLease:
        """The lease, from WRITING on."""
        if self.lease is None:
            raise AssertionError(f"{self.state.name} without a lease")
        return self.lease

    def next_timer(self) -> float | None:
        """When it must be looked at again."""
        match self.state:
            case SenderState.WRITING | SenderState.COMMITTING:
                return min(self.renew_at, self.overdue_at)
            case SenderState.DRAINING:
                return self.overdue_at
            case _:
                return None


class Due(NamedTuple):
    """What its owner has to do about a handover."""

    handover: Handover
    action: SenderAction  # none of those that are the same for every role
    error: pb.PDError | None  # what to report, of no branch yet

    @property
    def certain_error(self) -> pb.PDError:
        """What to report, which is there with REPORT and REPORT_UNANSWERED."""
        if self.error is None:
            raise AssertionError(f"{self.action.name} without an error")
        return self.error


class Late(NamedTuple):
    """Handovers that were given up behind their Commit, and what the receiver has made of it."""

    num_taken: int
    num_failed: int  # refused, or the link is gone without an answer


class Handovers:
    """All handovers that one core sends. What it asks of the shell goes to `out`, in the order of the core's own actions."""

    def __init__(
        self,
        identity: NodeIdentity,
        limits: NodeLimits,
        fingerprint: pb.Fingerprint,
        block_size: int,
        out: list[ev.Action],
        tag: str = "",
    ) -> None:
        """`tag` tells the links of several senders in one process apart."""
        self._identity = identity
        self._limits = limits
        self._fingerprint = fingerprint
        self._block_size = block_size
        self.out = self._out = out
        self._links = Links(tag)
        self._asked: dict[AttemptKey, Handover] = {}  # Reserve sent, answer not here; may outlive the owner's interest
        self._held: dict[AttemptKey, Handover] = {}  # with a lease, until the blocks may be dropped
        self._timers: Timers[AttemptKey] = Timers()
        self._unheard: dict[tuple[str, int], None] = {}  # link and lease of what was given up behind its Commit
        self._late = Late(0, 0)

    @property
    def num_asked(self) -> int:
        """Reserves that have no answer."""
        return len(self._asked)

    @property
    def num_links(self) -> int:
        """Links that are not closed."""
        return len(self._links)

    def is_asked(self, key: AttemptKey) -> bool:
        """Whether an answer to this attempt's Reserve may still come."""
        return key in self._asked

    def is_mine(self, event: ev.Event) -> bool:
        """Whether `take` has a use for this answer, where several cores send from one process."""
        match event:
            case ev.ReserveAnswered(key, _):
                return key in self._asked
            case ev.RenewAnswered(key, _):
                return key in self._held
            case BlocksTaken(link_id) | Answered(link_id) | LinkClosed(link_id):
                return link_id in self._links
            case _:
                return False

    # ------------------------------------------------------------ from the receiver

    def take(self, event: ev.Event, now: float) -> list[Due]:
        """What the receiver, or the link, has said."""
        match event:
            case ev.ReserveAnswered(key, reply):
                return self._reserve_answered(self._asked.pop(key), reply, now)
            case ev.RenewAnswered(key, answer):
                return self._renew_answered(key, answer, now)
            case BlocksTaken():
                return self._blocks_taken(event, now)
            case Answered(link_id, payload):
                return self._answered(link_id, payload, now)
            case LinkClosed(link_id, reason):
                dues: list[Due] = []
                for lease in [each for each in self._unheard if each[0] == link_id]:
                    self._hear_late(lease, was_taken=False)
                for key in self._links.lost(link_id):
                    error = self.error(pb.TRANSFER_FAILED, f"the link broke: {reason}")
                    dues += self.step(self._held[key], SenderEvent.LINK_LOST, now, error)
                return dues
            case _:
                raise AssertionError(f"{event} is nothing that a receiver says")

    def _reserve_answered(self, handover: Handover, reply: pb.ReserveReply | None, now: float) -> list[Due]:
        receiver_name = handover.offer.target.node.name
        if reply is None:
            error = self.error(pb.TRANSFER_FAILED, f"{receiver_name} did not answer Reserve")
            return self.step(handover, SenderEvent.UNANSWERED, now, error)
        if reply.WhichOneof("result") == "error":
            return self.step(handover, SenderEvent.REFUSED, now, messages.receivers_error(receiver_name, reply.error))
        if handover.state is SenderState.RESERVING:
            is_new = self._links.is_new_lease(messages.receiver_of(handover.offer), reply.lease.lease_id)
            if (flaw := messages.lease_flaw(handover.offer, reply.lease, self._block_size, is_new)) is not None:
                error = self.error(pb.TRANSFER_FAILED, f"{receiver_name} granted a lease with {flaw}")
                return self.step(handover, SenderEvent.UNANSWERED, now, error)
            self._hold(handover, reply.lease, now)
        return self.step(handover, SenderEvent.GRANTED, now)

    def _hold(self, handover: Handover, lease: pb.Lease, now: float) -> None:
        receiver = messages.receiver_of(handover.offer)
        link_id = self._links.find(receiver)
        if link_id is None:
            link_id = self._links.make(receiver)
            self._out.append(ev.OpenLink(link_id, tuple(lease.endpoints)))
        self._links.attach(link_id, lease.lease_id, handover.key)
        self._held[handover.key] = handover
        handover.lease = HeldLease(LeaseRef(lease.lease_id, lease.secret), link_id, lease.life_ms / 1000)
        handover.num_queued = lease.num_blocks_held
        handover.renew_at = now + handover.lease.life_s / 3
        handover.overdue_at = now + handover.lease.life_s

    def _renew_answered(self, key: AttemptKey, reply: pb.RenewReply | None, now: float) -> list[Due]:
        handover = self._held.get(key)
        if handover is None or reply is None:
            return []  # unanswered: the next one may get through before the lease ends
        if reply.life_ms == 0:
            receiver_name = handover.offer.target.node.name
            if reply.is_draining:  # said by the receiver, or the router would take this node for the one that is to end
                error = pd_error(pb.DRAINING, f"{receiver_name} is to end", None, receiver_name)
            else:
                gone = (pb.LEASE_EXPIRED, f"{receiver_name} has no such lease any more")
                error = self.error(*((pb.DEADLINE, TOO_LATE) if reply.is_too_late else gone))
            return self.step(handover, SenderEvent.LEASE_GONE, now, error)
        self._links.note_landed(handover.held_lease.link_id, reply.num_landed, now)
        if handover.state is SenderState.WRITING:
            handover.overdue_at = now + reply.life_ms / 1000
        elif handover.state is SenderState.COMMITTING:  # the Commit is on its way, behind what the link carries
            handover.overdue_at = max(handover.overdue_at, self._patient_until(handover))
        self._timers.set(key, handover.next_timer())
        return []

    def _blocks_taken(self, taken: BlocksTaken, now: float) -> list[Due]:
        if not taken.is_dropped:  # which a stuck link does as well
            self._links.note_read(taken.link_id, now)
        key = self._links.attempt(taken.link_id, taken.lease_id)
        if key is None:
            return []
        handover = self._held[key]
        handover.num_unread -= len(taken.block_indices)
        if handover.state is SenderState.COMMITTING and not handover.num_unread:
            handover.overdue_at = now + handover.held_lease.life_s  # the Commit is on its way
        return self.step(handover, SenderEvent.QUIET, now) if handover.num_unread == 0 else []

    def _answered(self, link_id: str, payload: bytes, now: float) -> list[Due]:
        try:
            answer = pb.DataMessage.FromString(payload).answer
        except DecodeError:
            self._out.append(ev.Count("malformed_messages"))
            return []
        key = self._links.attempt(link_id, answer.lease_id)
        if key is None:
            if (link_id, answer.lease_id) in self._unheard:
                self._hear_late((link_id, answer.lease_id), was_taken=not answer.HasField("error"))
            else:
                self._out.append(ev.Count("stale_refused"))
            return []
        handover = self._held[key]
        if handover.state is not SenderState.COMMITTING or handover.num_unread > 0:
            self._out.append(ev.Count("unexpected_events"))  # too late to matter, or before it can have seen the Commit
            return []
        if answer.HasField("error"):
            error = messages.receivers_error(handover.offer.target.node.name, answer.error)
            return self.step(handover, SenderEvent.COMMIT_REFUSED, now, error)
        return self.step(handover, SenderEvent.ACKED, now)

    def _hear_late(self, lease: tuple[str, int], *, was_taken: bool) -> None:
        del self._unheard[lease]
        self._late = Late(self._late.num_taken + was_taken, self._late.num_failed + (not was_taken))

    def take_late(self) -> Late:
        """What has been heard since this was asked last."""
        late, self._late = self._late, Late(0, 0)
        return late

    # ------------------------------------------------------------ from its owner

    def write(self, handover: Handover, blocks: Sequence[tuple[int, int]]) -> None:
        """Queue (block index in the lease, block id) pairs, which follow what was queued before."""
        lease = handover.held_lease
        handover.num_queued += len(blocks)
        handover.num_unread += len(blocks)
        self._out.append(ev.WriteBlocks(lease.link_id, lease.ref, tuple(blocks)))

    def send_commit(self, handover: Handover, commit: pb.Commit) -> None:
        """Queue the Commit behind every write: what SEND_COMMIT asks for."""
        lease = handover.held_lease
        commit.key.CopyFrom(handover.key.to_proto())
        commit.lease_id, commit.secret = lease.ref.lease_id, lease.ref.secret
        self._out.append(ev.NotifyLink(lease.link_id, pb.DataMessage(commit=commit)))

    def step(self, handover: Handover, event: SenderEvent, now: float, error: pb.PDError | None = None) -> list[Due]:
        """Feed the machine; what it asks for and is not done here, in order. `error`: what there is to report."""
        before = handover.state
        handover.state, actions = step_sender(before, event)
        if handover.state is SenderState.DRAINING and before is not SenderState.DRAINING:
            handover.overdue_at = now + self._limits.lease_life_s
            if handover.num_unread:
                # It would cross the wire for nothing, before what others have queued behind it, and keep its blocks so long.
                lease = handover.held_lease
                self._out.append(ev.DropWrites(lease.link_id, lease.ref))
            if before is SenderState.COMMITTING and event is SenderEvent.CANCEL:
                if len(self._unheard) >= MAX_UNHEARD:
                    self._hear_late(next(iter(self._unheard)), was_taken=False)
                lease = handover.held_lease
                self._unheard[lease.link_id, lease.ref.lease_id] = None
        dues = [Due(handover, action, error) for action in actions if not self._do(handover, action, now)]
        if handover.state is SenderState.DRAINING and handover.num_unread == 0:
            dues += self.step(handover, SenderEvent.QUIET, now)
        self._timers.set(handover.key, handover.next_timer())
        return dues

    def _do(self, handover: Handover, action: SenderAction, now: float) -> bool:
        """Do what is the same for every role. False: the owner does it, or something beside."""
        offer = handover.offer
        match action:
            case SenderAction.SEND_RESERVE:
                self._asked[offer.key] = handover
                wait_s = min(offer.wait_s, max(offer.deadline - now, 0))
                request = messages.reserve_request(offer, self._identity, self._fingerprint, wait_s, now)
                patience_s = wait_s + self._patience_s(offer, now)
                self._out.append(ev.SendReserve(offer.key, offer.target.grpc_address, request, patience_s))
            case SenderAction.SEND_RELEASE:
                self._out.append(ev.SendRelease(offer.target.grpc_address, messages.release_request(offer, now)))
            case SenderAction.CLOSE_LINK:
                handover.overdue_at = inf  # LinkClosed is certain to come
                link_id = handover.held_lease.link_id
                self._links.retire(link_id)
                self._out.append(ev.CloseLink(link_id))
            case SenderAction.SEND_COMMIT:
                handover.overdue_at = now + handover.held_lease.life_s
                return False
            case SenderAction.DROP_BLOCKS:
                if handover.lease is not None:
                    self._links.detach(handover.lease.link_id, handover.lease.ref.lease_id)
                    del self._held[offer.key]
                return False
            case _:
                return False
        return True

    # ------------------------------------------------------------ timers

    def expire(self, now: float) -> list[Due]:
        """Fire every timer that is due."""
        dues: list[Due] = []
        for key in self._timers.pop_due(now):
            dues += self._on_timer(self._held[key], now)
        return dues

    def _on_timer(self, handover: Handover, now: float) -> list[Due]:
        if now >= handover.overdue_at:
            if handover.state is SenderState.WRITING:
                error = self.error(pb.LEASE_EXPIRED, "a lease life passed without renewal")
                return self.step(handover, SenderEvent.LEASE_GONE, now, error)
            if not handover.num_unread or self._patient_until(handover) <= now:
                error = self.error(pb.TRANSFER_FAILED, "Commit was not answered within a lease life")
                return self.step(handover, SenderEvent.OVERDUE, now, error)
            handover.overdue_at = self._patient_until(handover)
        offer, lease = handover.offer, handover.held_lease
        if now >= handover.renew_at and handover.state is not SenderState.DRAINING:
            handover.renew_at = now + lease.life_s / 3
            request = messages.renew_request(offer, lease.ref)
            self._out.append(ev.SendRenew(offer.key, offer.target.grpc_address, request, self._patience_s(offer, now)))
        self._timers.set(offer.key, handover.next_timer())
        return []

    def _patient_until(self, handover: Handover) -> float:
        """A link that carries something all the while is slow, not stuck: what is queued there, and whoever shares it, has time."""
        lease = handover.held_lease
        return self._links.carried_at(lease.link_id) + lease.life_s

    def next_deadline(self) -> float | None:
        """When `expire` must be called at the latest."""
        return self._timers.next()

    def _patience_s(self, offer: Offer, now: float) -> float:
        return min(self._limits.rpc_timeout_s, max(offer.deadline - now, 0.001))

    def error(self, code: pb.ErrorCode.ValueType, reason: str) -> pb.PDError:
        """One of this node; whoever reports it says of which branch."""
        return pd_error(code, reason, None, self._identity.name)
