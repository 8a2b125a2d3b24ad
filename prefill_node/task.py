"""One attempt on a prefill node: what was asked, how far its KV is, and where the handoff stands.

An attempt can have several branches (the choices of a request): their KV is the same and is computed and handed over once, their
first tokens differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.plan import BranchToken
from engine.sequence import SequenceSpec
from node.events import RouterId
from node.handing_over import Handover
from node.sampling import to_sampling_params
from node.timing import Computed
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey
from proto.block_key import block_keys


@dataclass(frozen=True, slots=True)
class Work:
    """What a Dispatch asks for, in the form that the core uses."""

    branches: tuple[tuple[AttemptKey, int], ...]  # with their seeds; all of one attempt, and of one KV
    router: RouterId
    target: pb.Target
    sampling: pb.Sampling
    prompt_token_ids: tuple[int, ...]
    generated_token_ids: tuple[int, ...]  # by earlier attempts; none if there are several branches
    block_keys: tuple[bytes, ...]  # of the full blocks of both
    deadline: float

    @property
    def key(self) -> AttemptKey:
        """The attempt of the first branch: what the handoff of all of them goes by."""
        return self.branches[0][0]

    @property
    def keys(self) -> tuple[AttemptKey, ...]:
        """The attempt of each branch."""
        return tuple(key for key, _ in self.branches)

    @property
    def more_choices(self) -> tuple[int, ...]:
        """The branches but the first."""
        return tuple(key.choice for key, _ in self.branches[1:])

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV is computed and handed over."""
        return len(self.prompt_token_ids) + len(self.generated_token_ids)

    def matchable_keys(self, block_size: int) -> tuple[bytes, ...]:
        """Keys of the blocks that may come from elsewhere: at least one token is computed, of a prompt with logprobs every one."""
        return () if self.sampling.prompt_logprobs else self.block_keys[: (self.num_tokens - 1) // block_size]

    def finish_of(self, first_token_id: int) -> str | None:
        """Why a branch ends with the token that this node samples, if it does."""
        if first_token_id in self.sampling.stop_token_ids:
            return "stop"
        return "length" if self.ends_with_first_token else None

    @property
    def ends_with_first_token(self) -> bool:
        """Whether max_tokens is reached by the token that this node samples."""
        return len(self.generated_token_ids) + 1 >= self.sampling.max_tokens

    def to_spec(self) -> SequenceSpec:
        """The engine's view: compute everything, sample one token of each branch, keep the blocks until they are released."""
        seed, *more_seeds = (seed for _, seed in self.branches)
        return SequenceSpec(
            sequence_id=self.key,
            token_ids=self.prompt_token_ids + self.generated_token_ids,
            num_generated=len(self.generated_token_ids),
            sampling=to_sampling_params(self.sampling, seed),
            max_new_tokens=1,
            stop_token_ids=frozenset(self.sampling.stop_token_ids),
            block_keys=self.block_keys,
            lends=True,
            branch_seeds=tuple(more_seeds),
        )


def work_of(router: RouterId, message: pb.Dispatch, key_seed: bytes, block_size: int, now: float) -> Work:
    """A validated Dispatch (node/validate.py) as Work."""
    prompt, generated = tuple(message.prompt_token_ids), tuple(message.branches[0].generated_token_ids)
    return Work(
        branches=tuple(
            (AttemptKey(message.request_id, branch.choice, message.attempt), branch.seed) for branch in message.branches
        ),
        router=router,
        target=message.target,
        sampling=message.sampling,
        prompt_token_ids=prompt,
        generated_token_ids=generated,
        block_keys=tuple(block_keys(key_seed, prompt + generated, block_size)),
        deadline=now + message.ms_left / 1000,
    )


@dataclass(slots=True)
class PrefillTask:
    """Work in progress. Owned by the core."""

    work: Work
    handover: Handover
    times: Computed
    num_computed: int = 0  # leading tokens whose KV is final
    first_tokens: dict[AttemptKey, BranchToken] = field(default_factory=dict)  # of every branch; empty until computed
    prompt_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)  # of the prompt so far, where asked for
    open: dict[AttemptKey, None] = field(
        init=False
    )  # branches that this node has not yet cancelled, finished or given up
    outcomes: dict[AttemptKey, str] = field(
        default_factory=dict
    )  # of those that ended otherwise than as the handoff did

    def __post_init__(self) -> None:
        self.open = dict.fromkeys(self.work.keys)

    def completion_token_ids(self, key: AttemptKey) -> tuple[int, ...]:
        """All completion tokens of the branch that this node knows."""
        sampled = (self.first_tokens[key].token_id,) if self.first_tokens else ()
        return self.work.generated_token_ids + sampled

    def blocks_to_write(self, block_ids: Sequence[int], block_size: int) -> tuple[tuple[int, int], ...]:
        """(block index in the lease, block id) of what is complete by now and was not queued before.

        The lease has the full blocks, then one block per branch: where a partial block is left, the same is written to each.
        """
        num_full, num_tail_tokens = divmod(self.work.num_tokens, block_size)
        num_ready = self.num_computed // block_size
        if self.first_tokens:
            num_ready = num_full + (len(self.work.branches) if num_tail_tokens else 0)
        return tuple((index, block_ids[min(index, num_full)]) for index in range(self.handover.num_queued, num_ready))
