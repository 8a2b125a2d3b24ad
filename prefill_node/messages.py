"""What a prefill node says about a task: the messages of the handoff, and what is wrong with a granted lease."""

from __future__ import annotations

from node.identity import NodeIdentity
from node.sampling import to_logprobs_message
from prefill_node.task import HeldLease, PrefillTask, Work
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey


def ms_left(work: Work, now: float) -> int:
    """Milliseconds to the deadline, at least one: zero would read as no deadline at all."""
    return max(1, int((work.deadline - now) * 1000))


def reserve_request(
    work: Work, sender: NodeIdentity, fingerprint: pb.Fingerprint, wait_s: float, now: float
) -> pb.ReserveRequest:
    """Asks for blocks for the KV of prompt and generated tokens, and for growth up to max_tokens."""
    return pb.ReserveRequest(
        key=work.key.to_proto(),
        to_incarnation=work.target.node.incarnation,
        sender=sender.to_proto(),
        router=pb.PeerId(name=work.router.name, incarnation=work.router.incarnation),
        num_tokens=work.num_tokens,
        max_total_tokens=len(work.prompt_token_ids) + work.sampling.max_tokens,
        block_keys=work.block_keys,
        fingerprint=fingerprint,
        ms_left=ms_left(work, now),
        more_choices=work.more_choices,
        wait_ms=int(wait_s * 1000),
    )


def renew_request(work: Work, lease: HeldLease) -> pb.RenewRequest:
    """Keeps the lease for another life."""
    return pb.RenewRequest(
        key=work.key.to_proto(),
        to_incarnation=work.target.node.incarnation,
        lease_id=lease.ref.lease_id,
        secret=lease.ref.secret,
    )


def release_request(work: Work, now: float) -> pb.ReleaseRequest:
    """Gives the attempt's lease back, whether or not its grant was heard of."""
    return pb.ReleaseRequest(
        key=work.key.to_proto(),
        to_incarnation=work.target.node.incarnation,
        ms_left=ms_left(work, now),
        more_choices=work.more_choices,
    )


def commit(task: PrefillTask, lease: HeldLease, now: float) -> pb.DataMessage:
    """Hands the branches that go on over, with all that the receiver needs."""
    work = task.work
    return pb.DataMessage(
        commit=pb.Commit(
            key=work.key.to_proto(),
            lease_id=lease.ref.lease_id,
            secret=lease.ref.secret,
            prompt_token_ids=work.prompt_token_ids,
            branches=[_started(task, key, seed) for key, seed in work.branches if key in task.open],
            first_index=len(work.generated_token_ids),
            sampling=work.sampling,
            ms_left=ms_left(work, now),
        )
    )


def _started(task: PrefillTask, key: AttemptKey, seed: int) -> pb.StartedBranch:
    logprobs = task.first_tokens[key].logprobs
    return pb.StartedBranch(
        branch=pb.Branch(choice=key.choice, seed=seed, generated_token_ids=task.completion_token_ids(key)),
        logprobs=() if logprobs is None else (to_logprobs_message(logprobs),),
    )


def receiver_of(work: Work) -> tuple[str, int]:
    """Name and incarnation of the node that the KV goes to."""
    return work.target.node.name, work.target.node.incarnation


def known_error(error: pb.PDError) -> pb.PDError:
    """A peer's error; one with a code that we do not know (a newer version's) counts as INTERNAL."""
    if error.code not in pb.ErrorCode.values():
        error.code = pb.INTERNAL
    return error


def lease_flaw(work: Work, lease: pb.Lease, block_size: int, is_new: bool) -> str | None:
    """What is wrong with a lease, in words, that a right receiver would not have granted; None if nothing is."""
    if not is_new:
        return f"lease_id {lease.lease_id:x}, which another attempt holds"
    if lease.num_blocks < (needed := work.num_tokens // block_size + len(work.branches)):
        return f"num_blocks {lease.num_blocks}, of {needed} for {work.num_tokens + 1} tokens of {len(work.branches)} branches"
    if lease.num_blocks_held > len(work.block_keys):
        return f"num_blocks_held {lease.num_blocks_held}, above the {len(work.block_keys)} full blocks"
    if lease.life_ms == 0:
        return "life_ms 0"
    return None
