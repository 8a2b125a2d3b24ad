"""One core by itself, with its pool and scheduler, and messages to feed it: for behaviours that an example shows best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

from decode_node.core import DecodeCore
from engine.block_pool import BlockPool
from engine.reserve import ReserveConfig, ReservePolicy
from engine.saving import SaveRules
from engine.scheduler import Scheduler, SchedulerConfig
from node import events as ev
from node.identity import NodeIdentity, NodeLimits
from prefill_node.core import PrefillCore
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey
from proto.block_key import block_keys, seed_key

BLOCK_SIZE = 4
MAX_MODEL_LEN = 64
VOCAB_SIZE = 32
ROUTER = ev.RouterId("router", 7)
FINGERPRINT = pb.Fingerprint(
    architecture="LlamaForCausalLM", dtype="fp32", block_size=BLOCK_SIZE, weights="ab", kernels="torch"
)
SEED = seed_key(FINGERPRINT.SerializeToString(deterministic=True))
DECODE = NodeIdentity("decode-0", 5)
PREFILL = NodeIdentity("prefill-0", 3)

A = TypeVar("A", bound=ev.Action)


def only(actions: list[ev.Action], kind: type[A]) -> A:
    """The one action of this kind."""
    found = [action for action in actions if isinstance(action, kind)]
    assert len(found) == 1, actions
    return found[0]


@dataclass
class Decode:
    """A decode core and its engine's bookkeeping."""

    num_blocks: int = 16
    num_slots: int = 4
    policy: ReservePolicy = "full"
    max_waiting_reserves: int = 64
    reserves_for_running: bool = True
    identity: NodeIdentity = DECODE
    preempt_move_s: float = 0.0
    resumes: bool = False
    saves: SaveRules = field(default_factory=SaveRules)
    pool: BlockPool = field(init=False)
    scheduler: Scheduler = field(init=False)
    core: DecodeCore = field(init=False)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks, BLOCK_SIZE)
        reserve = ReserveConfig(self.policy)
        config = SchedulerConfig(
            self.num_slots,
            32,
            MAX_MODEL_LEN,
            reserve=reserve,
            resumes_preempted=self.resumes,
            keeps_preempted=self.preempt_move_s > 0,
            saves=self.saves,
        )
        self.scheduler = Scheduler(config, self.pool, SEED)
        serial = count(1)
        limits = NodeLimits(
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            max_waiting_reserves=self.max_waiting_reserves,
            reserves_for_running=self.reserves_for_running,
            preempt_move_s=self.preempt_move_s,
        )
        self.core = DecodeCore(
            self.identity, limits, self.scheduler, self.pool, FINGERPRINT, SEED, lambda: (next(serial), bytes(16))
        )

    def reserve(self, key: AttemptKey, prompt: list[int], max_tokens: int, now: float = 0.0) -> pb.ReserveReply:
        """Ask as a prefill node would."""
        return self.ask(reserve_request(key, prompt, max_tokens), now)

    def ask(self, request: pb.ReserveRequest, now: float = 0.0) -> pb.ReserveReply:
        """The answer to a Reserve."""
        return only(list(self.core.receive(ev.ReserveAsked(1, request), now)), ev.AnswerReserve).reply


def reserve_request(key: AttemptKey, prompt: list[int], max_tokens: int, ms_left: int = 60_000) -> pb.ReserveRequest:
    """A right Reserve for the whole prompt."""
    return pb.ReserveRequest(
        key=key.to_proto(),
        to_incarnation=DECODE.incarnation,
        sender=PREFILL.to_proto(),
        router=pb.PeerId(name=ROUTER.name, incarnation=ROUTER.incarnation),
        num_tokens=len(prompt),
        max_total_tokens=len(prompt) + max_tokens,
        block_keys=block_keys(SEED, prompt, BLOCK_SIZE),
        fingerprint=FINGERPRINT,
        ms_left=ms_left,
    )


def commit(
    key: AttemptKey,
    lease: pb.Lease,
    prompt: list[int],
    first_token: int,
    max_tokens: int,
    more_choices: Sequence[int] = (),
) -> bytes:
    """A right Commit of a first attempt, as it travels."""
    message = pb.Commit(
        key=key.to_proto(),
        lease_id=lease.lease_id,
        secret=lease.secret,
        prompt_token_ids=prompt,
        branches=[
            pb.StartedBranch(branch=pb.Branch(choice=choice, seed=1, generated_token_ids=[first_token]))
            for choice in (key.choice, *more_choices)
        ],
        sampling=pb.Sampling(max_tokens=max_tokens),
        ms_left=60_000,
    )
    return pb.DataMessage(commit=message).SerializeToString()


@dataclass
class Prefill:
    """A prefill core and its engine's bookkeeping."""

    num_blocks: int = 16
    num_slots: int = 4
    reads_kv_pool: bool = False
    saves: SaveRules = field(default_factory=SaveRules)
    pool: BlockPool = field(init=False)
    scheduler: Scheduler = field(init=False)
    core: PrefillCore = field(init=False)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks, BLOCK_SIZE)
        config = SchedulerConfig(self.num_slots, 8, MAX_MODEL_LEN, saves=self.saves)
        self.scheduler = Scheduler(config, self.pool, SEED)
        limits = NodeLimits(
            max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE, max_attempts=8, reads_kv_pool=self.reads_kv_pool
        )
        self.core = PrefillCore(PREFILL, limits, self.scheduler, self.pool, FINGERPRINT, SEED)

    def dispatch(
        self,
        key: AttemptKey,
        prompt: list[int],
        max_tokens: int,
        now: float = 0.0,
        ms_left: int = 60_000,
        target: NodeIdentity = DECODE,
        generated: Sequence[int] = (),
    ) -> list[ev.Action]:
        """What the core does about a Dispatch."""
        message = pb.Dispatch(
            request_id=key.request_id,
            attempt=key.attempt,
            branches=[pb.Branch(choice=key.choice, seed=1, generated_token_ids=generated)],
            prompt_token_ids=prompt,
            sampling=pb.Sampling(max_tokens=max_tokens),
            target=pb.Target(node=target.to_proto(), grpc_address="decode-0:1"),
            ms_left=ms_left,
        )
        return list(self.core.receive(ev.FromRouter(ROUTER, pb.RouterMessage(dispatch=message)), now))


def grant(lease_id: int, num_tokens: int, num_held: int = 0, life_ms: int = 10_000) -> pb.ReserveReply:
    """A right lease for so many tokens."""
    num_blocks = -(-(num_tokens + 1) // BLOCK_SIZE)
    endpoint = pb.Endpoint(transport="memory", address="decode-0")
    return pb.ReserveReply(
        lease=pb.Lease(
            lease_id=lease_id,
            secret=bytes(16),
            num_blocks=num_blocks,
            num_blocks_held=num_held,
            life_ms=life_ms,
            endpoints=[endpoint],
        )
    )
