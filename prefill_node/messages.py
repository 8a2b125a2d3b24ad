"""What a prefill node says of a task: its offer to the receiver, and the Commit of what it computed."""

from __future__ import annotations

from node.handover_messages import Offer, ms_left
from node.sampling import grammar_of, to_logprobs_message
from prefill_node.task import PrefillTask, Work
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey


def offer_of(work: Work, wait_s: float) -> Offer:
    """The KV of prompt and generated tokens, with room for growth up to max_tokens."""
    return Offer(
        key=work.key,
        more_choices=work.more_choices,
        router=work.router,
        target=work.target,
        num_tokens=work.num_tokens,
        max_total_tokens=len(work.prompt_token_ids) + work.sampling.max_tokens,
        block_keys=work.block_keys,
        deadline=work.deadline,
        wait_s=wait_s,
        grammar=grammar_of(work.sampling),
    )


def commit(task: PrefillTask, now: float) -> pb.Commit:
    """Hands the branches that go on over, with all that the receiver needs but the lease."""
    work = task.work
    return pb.Commit(
        prompt_token_ids=work.prompt_token_ids,
        branches=[_started(task, key, seed) for key, seed in work.branches if key in task.open],
        first_index=len(work.generated_token_ids),
        sampling=work.sampling,
        ms_left=ms_left(work.deadline, now),
        reserve_wait_us=task.times.reserve_wait_us(now),
    )


def _started(task: PrefillTask, key: AttemptKey, seed: int) -> pb.StartedBranch:
    logprobs = task.first_tokens[key].logprobs
    return pb.StartedBranch(
        branch=pb.Branch(choice=key.choice, seed=seed, generated_token_ids=task.completion_token_ids(key)),
        logprobs=() if logprobs is None else (to_logprobs_message(logprobs),),
    )
