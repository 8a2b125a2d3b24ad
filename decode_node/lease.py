"""One lease on a decode node: what was promised to whom, what has landed, and where the handoff stands."""

from __future__ import annotations

from dataclasses import dataclass, field

from connector.handoff import ReceiverState
from decode_node.admission import LeasedBlocks
from engine.sequence import SequenceSpec
from node.events import RouterId
from node.identity import NodeLimits
from node.sampling import to_sampling_params
from node.validate import sampling_problem
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey
from proto.block_key import block_keys


@dataclass(slots=True)
class Lease:
    """Owned by the core; `state` changes through step_receiver only."""

    lease_id: int
    secret: bytes
    key: AttemptKey
    router: RouterId
    blocks: LeasedBlocks
    num_tokens: int
    max_total_tokens: int  # that growth is promised for
    block_keys: tuple[bytes, ...]
    life_s: float
    expires_at: float
    deadline: float
    missing: set[int] = field(default_factory=set)  # block indices that have not landed
    state: ReceiverState = ReceiverState.RESERVED
    outcome: str = "cancelled"
    refusal: pb.ErrorCode.ValueType = pb.LEASE_EXPIRED  # what a Commit is told once the lease is over
    commit: pb.Commit | None = None
    reply_to: object = None  # of the Commit

    @property
    def received_commit(self) -> pb.Commit:
        """The Commit of a lease that has had one."""
        if self.commit is None:
            raise AssertionError(f"lease {self.lease_id:x} in {self.state.name} has no Commit")
        return self.commit

    def to_message(self) -> pb.Lease:
        """The answer to Reserve; the shell adds the endpoints."""
        return pb.Lease(
            lease_id=self.lease_id,
            secret=self.secret,
            num_blocks=len(self.blocks.block_ids),
            num_blocks_held=self.blocks.num_held,
            life_ms=int(self.life_s * 1000),
        )

    def writable(self, num_written: int) -> tuple[int, ...]:
        """Block ids by index as the transport may write them: -1 where nothing is to be written."""
        held = self.blocks.num_held
        return tuple(b if held <= i < num_written else -1 for i, b in enumerate(self.blocks.block_ids))

    def next_timer(self) -> float:
        """When the core must look at this lease again."""
        return min(self.expires_at, self.deadline)


@dataclass(slots=True)
class RunningBranch:
    """A committed attempt: the engine's sequence, and to whom its tokens go."""

    key: AttemptKey
    router: RouterId
    deadline: float
    token_ids: list[int]  # of the whole completion


def spec_of(commit: pb.Commit, key: AttemptKey, keys: tuple[bytes, ...]) -> SequenceSpec:
    """The engine's view of a committed attempt: its last token is the one that the first step feeds."""
    generated = tuple(commit.branch.generated_token_ids)
    return SequenceSpec(
        sequence_id=key,
        token_ids=tuple(commit.prompt_token_ids) + generated,
        num_generated=len(generated),
        sampling=to_sampling_params(commit.sampling, commit.branch.seed),
        max_new_tokens=commit.sampling.max_tokens - len(generated),
        stop_token_ids=frozenset(commit.sampling.stop_token_ids),
        block_keys=keys,
    )


def commit_flaw(commit: pb.Commit, lease: Lease, key_seed: bytes, block_size: int, limits: NodeLimits) -> str | None:
    """What in a Commit contradicts its lease or this node's model, in words; None if it fits."""
    generated = commit.branch.generated_token_ids
    tokens = (*commit.prompt_token_ids, *generated)
    if len(tokens) != lease.num_tokens + 1:
        return f"{len(tokens)} token ids, not the {lease.num_tokens + 1} that were reserved for"
    if not 1 <= len(generated) < commit.sampling.max_tokens:
        return f"{len(generated)} completion tokens of max_tokens {commit.sampling.max_tokens}"
    if commit.first_index >= len(generated):
        return f"first_index {commit.first_index}, not below the {len(generated)} completion tokens"
    if len(commit.prompt_token_ids) + commit.sampling.max_tokens > lease.max_total_tokens:
        return f"max_tokens {commit.sampling.max_tokens}, above what was reserved for"
    if max(tokens) >= limits.vocab_size:
        return f"token id {max(tokens)}, not below vocab_size {limits.vocab_size}"
    num_told = len(generated) - commit.first_index if commit.sampling.HasField("num_logprobs") else 0
    if len(commit.logprobs) != num_told:
        return f"logprobs of {len(commit.logprobs)} tokens, not of {num_told}"
    if (problem := sampling_problem(commit.sampling, limits.vocab_size)) is not None:
        return f"a wrong {problem}"
    if block_keys(key_seed, tokens[:-1], block_size) != list(lease.block_keys):
        return "token ids that do not have the block keys that were reserved for"
    return None
