"""One attempt on a prefill node: what was asked, how far its KV is, and where the handoff stands."""

from __future__ import annotations

from dataclasses import dataclass, field

from connector.handoff import SenderState
from connector.transport import LeaseRef
from engine.plan import TokenLogprobs
from engine.sequence import SequenceSpec
from node.events import RouterId
from node.sampling import to_sampling_params
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey
from proto.block_key import block_keys


@dataclass(frozen=True, slots=True)
class Work:
    """What a Dispatch asks for, in the form that the core uses."""

    key: AttemptKey
    router: RouterId
    target: pb.Target
    sampling: pb.Sampling
    seed: int
    prompt_token_ids: tuple[int, ...]
    generated_token_ids: tuple[int, ...]  # by earlier attempts
    block_keys: tuple[bytes, ...]  # of the full blocks of both
    deadline: float

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV is computed and handed over."""
        return len(self.prompt_token_ids) + len(self.generated_token_ids)

    @property
    def ends_with_first_token(self) -> bool:
        """Whether max_tokens is reached by the token that this node samples."""
        return len(self.generated_token_ids) + 1 >= self.sampling.max_tokens

    def to_spec(self) -> SequenceSpec:
        """The engine's view: compute everything, sample one token, keep the blocks until they are released."""
        return SequenceSpec(
            sequence_id=self.key,
            token_ids=self.prompt_token_ids + self.generated_token_ids,
            num_generated=len(self.generated_token_ids),
            sampling=to_sampling_params(self.sampling, self.seed),
            max_new_tokens=1,
            stop_token_ids=frozenset(self.sampling.stop_token_ids),
            block_keys=self.block_keys,
            lends=True,
        )


def work_of(router: RouterId, message: pb.Dispatch, key_seed: bytes, block_size: int, now: float) -> Work:
    """A validated Dispatch (node/validate.py) as Work."""
    branch = message.branches[0]
    prompt, generated = tuple(message.prompt_token_ids), tuple(branch.generated_token_ids)
    return Work(
        key=AttemptKey(message.request_id, branch.choice, message.attempt),
        router=router,
        target=message.target,
        sampling=message.sampling,
        seed=branch.seed,
        prompt_token_ids=prompt,
        generated_token_ids=generated,
        block_keys=tuple(block_keys(key_seed, prompt + generated, block_size)),
        deadline=now + message.ms_left / 1000,
    )


@dataclass(frozen=True, slots=True)
class HeldLease:
    """The receiver's promise, and the link that leads to it."""

    ref: LeaseRef
    link_id: str
    life_s: float


@dataclass(slots=True)
class PrefillTask:
    """Work in progress. Owned by the core; `state` changes through step_sender only."""

    work: Work
    state: SenderState = SenderState.IDLE
    lease: HeldLease | None = None  # from WRITING on
    renew_at: float = float("inf")
    overdue_at: float = float("inf")  # lease end while WRITING, patience while COMMITTING and DRAINING
    num_computed: int = 0  # leading tokens whose KV is final
    num_queued: int = 0  # leading blocks given to the link, or held by the receiver already
    num_unread: int = 0  # blocks that the link may still read
    first_token_id: int | None = None
    first_logprobs: TokenLogprobs | None = None  # of the first token, where asked for
    prompt_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)  # of the prompt so far, where asked for
    outcome: str = "cancelled"

    def completion_token_ids(self) -> tuple[int, ...]:
        """All completion tokens of the branch that this node knows."""
        sampled = () if self.first_token_id is None else (self.first_token_id,)
        return self.work.generated_token_ids + sampled

    def next_timer(self) -> float:
        """When the core must look at this task again."""
        match self.state:
            case SenderState.WRITING:
                return min(self.renew_at, self.overdue_at, self.work.deadline)
            case SenderState.COMMITTING:
                return min(self.overdue_at, self.work.deadline)
            case SenderState.DRAINING:
                return self.overdue_at
            case _:
                return self.work.deadline
