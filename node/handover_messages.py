"""What a sender says of a handoff, whatever its role: the control messages, and what is wrong with a granted lease."""

from __future__ import annotations

from dataclasses import dataclass

from connector.transport import LeaseRef
from node.events import RouterId
from node.identity import NodeIdentity
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey


@dataclass(frozen=True, slots=True)
class Offer:
    """What is to be handed over, and to whom."""

    key: AttemptKey  # the attempt at the receiver; of several branches that of the first
    more_choices: tuple[int, ...]  # the other branches
    router: RouterId
    target: pb.Target
    num_tokens: int  # whose KV is written, at most
    max_total_tokens: int  # how far each branch may grow
    block_keys: tuple[bytes, ...]  # of the full blocks that are known
    deadline: float
    wait_s: float  # how long the receiver may let Reserve wait for room
    grammar: pb.Grammar | None = None  # of the sampling


def ms_left(deadline: float, now: float) -> int:
    """Milliseconds to the deadline, at least one: zero would read as no deadline at all."""
    return max(1, int((deadline - now) * 1000))


def reserve_request(
    offer: Offer, sender: NodeIdentity, fingerprint: pb.Fingerprint, wait_s: float, now: float
) -> pb.ReserveRequest:
    """Asks for blocks for the KV of what is known, and for growth up to the limit."""
    return pb.ReserveRequest(
        key=offer.key.to_proto(),
        to_incarnation=offer.target.node.incarnation,
        sender=sender.to_proto(),
        router=pb.PeerId(name=offer.router.name, incarnation=offer.router.incarnation),
        num_tokens=offer.num_tokens,
        max_total_tokens=offer.max_total_tokens,
        block_keys=offer.block_keys,
        fingerprint=fingerprint,
        ms_left=ms_left(offer.deadline, now),
        more_choices=offer.more_choices,
        wait_ms=int(wait_s * 1000),
        grammar=offer.grammar,
    )


def renew_request(offer: Offer, lease: LeaseRef) -> pb.RenewRequest:
    """Keeps the lease for another life."""
    return pb.RenewRequest(
        key=offer.key.to_proto(),
        to_incarnation=offer.target.node.incarnation,
        lease_id=lease.lease_id,
        secret=lease.secret,
    )


def release_request(offer: Offer, now: float) -> pb.ReleaseRequest:
    """Gives the attempt's lease back, whether or not its grant was heard of."""
    return pb.ReleaseRequest(
        key=offer.key.to_proto(),
        to_incarnation=offer.target.node.incarnation,
        ms_left=ms_left(offer.deadline, now),
        more_choices=offer.more_choices,
    )


def receiver_of(offer: Offer) -> tuple[str, int]:
    """Name and incarnation of the node that the KV goes to."""
    return offer.target.node.name, offer.target.node.incarnation


def receivers_error(receiver_name: str, error: pb.PDError) -> pb.PDError:
    """A receiver's error, in its name whatever it says; a code that we do not know (a newer version's) counts as INTERNAL."""
    if error.code not in pb.ErrorCode.values():
        error.code = pb.INTERNAL
    error.node_id = receiver_name
    return error


def lease_flaw(offer: Offer, lease: pb.Lease, block_size: int, is_new: bool) -> str | None:
    """What is wrong with a lease, in words, that a right receiver would not have granted; None if nothing is."""
    if not is_new:
        return f"lease_id {lease.lease_id:x}, which another attempt holds"
    num_branches = 1 + len(offer.more_choices)
    if lease.num_blocks < (needed := offer.num_tokens // block_size + num_branches):
        return (
            f"num_blocks {lease.num_blocks}, of {needed} for {offer.num_tokens + 1} tokens of {num_branches} branches"
        )
    if lease.num_blocks_held > len(offer.block_keys):
        return f"num_blocks_held {lease.num_blocks_held}, above the {len(offer.block_keys)} full blocks"
    if lease.life_ms == 0:
        return "life_ms 0"
    return None
