"""One lease on a decode node: what was promised to whom, what has landed, and where the handoff stands."""

from __future__ import annotations

from dataclasses import dataclass

from connector.handoff import ReceiverState
from decode_node.admission import LeasedBlocks
from decode_node.running_branch import RunningBranch
from engine.sequence import SequenceSpec
from node.events import RouterId
from node.identity import NodeLimits
from node.sampling import to_sampling_params
from node.timing import Received
from node.validate import sampling_problem
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey, attempt_keys
from proto.block_key import block_keys
from proto.own_copy import own_copy


@dataclass(slots=True)
class Lease:
    """Owned by the core; `state` changes through step_receiver only."""

    lease_id: int
    secret: bytes
    keys: tuple[AttemptKey, ...]  # of the branches that it was asked for; the first is what the handoff goes by
    router: RouterId
    sender: tuple[str, int]  # name and incarnation of who writes
    blocks: LeasedBlocks
    num_tokens: int  # whose KV there is room for; of a sequence that moves, the most
    max_total_tokens: int  # that growth is promised for
    block_keys: tuple[bytes, ...]
    life_s: float
    expires_at: float
    deadline: float
    missing: set[int]  # block indices that have not landed
    open: set[AttemptKey]  # branches that are still wanted here
    state: ReceiverState = ReceiverState.RESERVED
    outcome: str = "cancelled"
    refusal: pb.ErrorCode.ValueType = pb.LEASE_EXPIRED  # what a Commit is told once the lease is over
    commit: pb.Commit | None = None
    committed_at: float = 0.0  # when it came
    reply_to: object = None  # of the Commit

    @property
    def key(self) -> AttemptKey:
        """What the handoff goes by."""
        return self.keys[0]

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
            num_blocks=len(self.blocks.all),
            num_blocks_held=self.blocks.num_held,
            life_ms=int(self.life_s * 1000),
        )

    def writable(self) -> tuple[int, ...]:
        """Block ids by index as the transport may write them: -1 where nothing is to be written."""
        return tuple(block_id if index in self.missing else -1 for index, block_id in enumerate(self.blocks.all))

    def next_timer(self) -> float:
        """When the core must look at this lease again."""
        return min(self.expires_at, self.deadline)


def router_of(request: pb.ReserveRequest) -> RouterId:
    """Whose attempt it is."""
    return RouterId(request.router.name, request.router.incarnation)


def lease_of(
    request: pb.ReserveRequest,
    blocks: LeasedBlocks,
    block_size: int,
    drawn: tuple[int, bytes],
    life_s: float,
    deadline: float,
    now: float,
) -> Lease:
    """A new lease for what was asked. `drawn`: its id and secret."""
    keys = attempt_keys(request)
    return Lease(
        lease_id=drawn[0],
        secret=drawn[1],
        keys=keys,
        router=router_of(request),
        sender=(request.sender.name, request.sender.incarnation),
        blocks=blocks,
        num_tokens=request.num_tokens,
        max_total_tokens=request.max_total_tokens,
        block_keys=tuple(request.block_keys),
        life_s=life_s,
        expires_at=now + life_s,
        deadline=deadline,
        missing=_blocks_to_write(blocks, request.num_tokens, block_size),
        open=set(keys),
    )


def blocks_still_missing(lease: Lease, commit: pb.Commit, block_size: int) -> set[int]:
    """Of the blocks that have not landed those that the committed tokens lie in.

    One that moves goes on decoding while it is written: nobody knows before how many tokens it will have.
    """
    num_tokens = len(commit.prompt_token_ids) + len(commit.branches[0].branch.generated_token_ids) - 1
    is_shorter = num_tokens < lease.num_tokens
    return {index for index in lease.missing if not is_shorter or index * block_size < num_tokens}


def starting_branches(lease: Lease) -> dict[int, tuple[pb.StartedBranch, SequenceSpec]]:
    """The committed branches that are still wanted here, by their position in the lease, each with the engine's view of it."""
    position_of = {key.choice: position for position, key in enumerate(lease.keys)}
    prompt = tuple(lease.received_commit.prompt_token_ids)
    starting = {}
    for started in lease.received_commit.branches:
        position = position_of[started.branch.choice]
        if lease.keys[position] in lease.open:
            starting[position] = (started, _spec_of(lease, prompt, started.branch, lease.keys[position]))
    return starting


def started_branch(
    key: AttemptKey, lease: Lease, deadline: float, started: pb.StartedBranch, now: float
) -> RunningBranch:
    """What runs from now on, as its sender has told it."""
    commit = lease.received_commit
    return RunningBranch(
        key=key,
        router=lease.router,
        deadline=deadline,
        prompt_token_ids=tuple(commit.prompt_token_ids),
        sampling=own_copy(commit.sampling),
        seed=started.branch.seed,
        token_ids=list(started.branch.generated_token_ids),
        first_index=commit.first_index,
        times=Received(commit.reserve_wait_us, lease.committed_at, now),
        logprobs=list(map(own_copy, started.logprobs)),
    )


def commit_answer(commit: pb.Commit, error: pb.PDError | None) -> pb.DataMessage:
    """What its sender hears of a Commit; without an error the branches are ours."""
    return pb.DataMessage(answer=pb.CommitAnswer(key=commit.key, lease_id=commit.lease_id, error=error))


def _blocks_to_write(blocks: LeasedBlocks, num_tokens: int, block_size: int) -> set[int]:
    """Indices of the blocks that the sender has to write: the last ones only where a block is left partly filled."""
    num_full = len(blocks.full)
    return set(range(blocks.num_held, num_full + (len(blocks.last) if num_tokens % block_size else 0)))


def _spec_of(lease: Lease, prompt: tuple[int, ...], branch: pb.Branch, key: AttemptKey) -> SequenceSpec:
    """Of a branch whose last token is the one that the first step feeds."""
    commit, generated = lease.received_commit, tuple(branch.generated_token_ids)
    return SequenceSpec(
        sequence_id=key,
        token_ids=prompt + generated,
        num_generated=len(generated),
        sampling=to_sampling_params(commit.sampling, branch.seed),
        max_new_tokens=commit.sampling.max_tokens - len(generated),
        stop_token_ids=frozenset(commit.sampling.stop_token_ids),
        block_keys=lease.block_keys,
    )


def commit_flaw(commit: pb.Commit, lease: Lease, key_seed: bytes, block_size: int, limits: NodeLimits) -> str | None:
    """What in a Commit contradicts its lease or this node's model, in words; None if it fits."""
    choices = [started.branch.choice for started in commit.branches]
    if not choices or len({*choices}) < len(choices) or not {*choices} <= {key.choice for key in lease.keys}:
        return f"choices {choices[:9]} of {[key.choice for key in lease.keys][:9]} reserved for"
    if (problem := sampling_problem(commit.sampling, limits.vocab_size)) is not None:
        return f"a wrong {problem}"
    if len(commit.prompt_token_ids) + commit.sampling.max_tokens > lease.max_total_tokens:
        return f"max_tokens {commit.sampling.max_tokens}, above what was reserved for"
    if (highest := max(commit.prompt_token_ids, default=0)) >= limits.vocab_size:
        return f"token id {highest}, not below vocab_size {limits.vocab_size}"
    for started in commit.branches:
        if (flaw := _branch_flaw(commit, started, lease, limits)) is not None:
            return flaw
    tokens = (*commit.prompt_token_ids, *commit.branches[0].branch.generated_token_ids)
    if block_keys(key_seed, tokens[:-1], block_size)[: len(lease.block_keys)] != list(lease.block_keys):
        return "token ids that do not have the block keys that were reserved for"
    return None


def _branch_flaw(commit: pb.Commit, started: pb.StartedBranch, lease: Lease, limits: NodeLimits) -> str | None:
    generated = started.branch.generated_token_ids
    num_tokens = len(commit.prompt_token_ids) + len(generated)
    # Several branches have their last blocks where the lease's number of tokens says.
    most, is_alone = lease.num_tokens + 1, len(lease.keys) == 1
    if num_tokens > most or (num_tokens < most and not is_alone):
        return f"{num_tokens} token ids, not the {most} that were reserved for"
    if not 1 <= len(generated) < commit.sampling.max_tokens:
        return f"{len(generated)} completion tokens of max_tokens {commit.sampling.max_tokens}"
    if len(commit.branches) > 1 and len(generated) > 1:
        return f"{len(generated)} completion tokens of one of {len(commit.branches)} branches, which share their KV"
    if commit.first_index >= len(generated):
        return f"first_index {commit.first_index}, not below the {len(generated)} completion tokens"
    if max(generated) >= limits.vocab_size:
        return f"token id {max(generated)}, not below vocab_size {limits.vocab_size}"
    num_told = len(generated) - commit.first_index if commit.sampling.HasField("num_logprobs") else 0
    if len(started.logprobs) != num_told:
        return f"logprobs of {len(started.logprobs)} tokens, not of {num_told}"
    return None
