"""Builds one node's engine from its knobs and the model directory: weights, KV memory, pool, scheduler, runner.

Not here: the core (the role's), sockets, threads (node/process.py). Loads torch, so its environment must be set by then.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch

from engine.block_pool import BlockPool
from engine.device import check_devices, choose_device, free_device_bytes, rank_device
from engine.fingerprint import Fingerprint, files_state, fingerprint_fields
from engine.host_memory import free_memory_bytes, physical_memory_bytes
from engine.kv_memory import KvMemory, KvSides, kv_block_bytes
from engine.lockstep import Followers, PipedFollowers
from engine.model import Model, load_model
from engine.model_config import ModelConfig, read_model_config
from engine.probe import find_inexactness
from engine.ranks import Ranks, join_ranks, meeting_store
from engine.reserve import ReserveConfig
from engine.runner import TorchRunner
from engine.saving import SaveRules
from engine.scheduler import Scheduler, SchedulerConfig
from engine.split import WHOLE, Split, check_split
from node.config import NodeConfig
from node.grammar_processes import GrammarProcesses
from node.identity import NodeIdentity, NodeLimits
from node.rank_process import RankJob
from node.ranks import RankProcesses
from node.sizes import EngineSizes, engine_sizes
from proto import baton_pb2 as pb
from proto.block_key import seed_key
from runtime.logs import log_event
from runtime.process import NotNow
from runtime.tokenizer_digest import tokenizer_digest

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CoreParts:
    """What a role's core is made with; the draw of secrets is the decode role's own."""

    identity: NodeIdentity
    limits: NodeLimits
    scheduler: Scheduler
    pool: BlockPool
    fingerprint: pb.Fingerprint
    key_seed: bytes


@dataclass(frozen=True, slots=True)
class NodeEngine:
    """One node's engine, ready to run plans."""

    model_config: ModelConfig
    sizes: EngineSizes
    memory: KvMemory
    runner: TorchRunner
    grammars: GrammarProcesses
    ranks: RankProcesses | None  # the others, where there are several
    parts: CoreParts
    inexactness: str | None  # why a row's bits depend on more than its own tokens; None: they do not
    tokenizer: str  # digest of which token each id is, or ""

    def entry(self) -> pb.NodeEntry:
        """What a node's entry says of it."""
        parts, sizes = self.parts, self.sizes
        return pb.NodeEntry(
            fingerprint=parts.fingerprint,
            num_blocks=sizes.num_blocks,
            max_model_len=sizes.max_model_len,
            tokenizer=self.tokenizer,
        )

    @property
    def rank_pids(self) -> Sequence[int]:
        """Process ids of the other ranks."""
        return () if self.ranks is None else self.ranks.pids

    @property
    def rank_ends(self) -> Sequence[tuple[int, Future[None]]]:
        """See RankProcesses.ends."""
        return () if self.ranks is None else self.ranks.ends

    def close(self) -> None:
        """End the other ranks, and whoever follows grammars."""
        self.grammars.close()
        if self.ranks is not None:
            self.ranks.close()


def build_engine(
    config: NodeConfig,
    identity: NodeIdentity,
    *,
    resumes_preempted: bool = False,
    max_prompt_tokens_beside_decodes: int | None = None,
) -> NodeEngine:
    """Load and allocate everything. `resumes_preempted`: a preempted sequence goes on here; else it moves, or its attempt ends.

    `max_prompt_tokens_beside_decodes`: see SchedulerConfig.
    Raises ValueError (ModelError included) in one sentence if the model directory or the sizes cannot be used.
    """
    torch.set_num_threads(config.threads_per_rank)
    device = choose_device(config.device)
    state = files_state(config.model)
    model_config = read_model_config(config.model)
    check_split(model_config, config.tp)
    check_devices(device, config.tp)
    dtype = model_config.resolve_dtype(config.dtype)
    block_bytes = kv_block_bytes(model_config, config.block_size, dtype)
    free_bytes = free_device_bytes(device, free_memory_bytes(), config.tp)
    sizes = engine_sizes(config, model_config.max_position_embeddings, block_bytes, free_bytes)
    if sizes.num_blocks * block_bytes > free_bytes:  # the kernel would kill the process, without a word to the user
        wanted_mib, free_mib = sizes.num_blocks * block_bytes >> 20, free_bytes >> 20
        kind = NotNow if wanted_mib << 20 < physical_memory_bytes() else ValueError
        raise kind(f"--num-blocks {sizes.num_blocks}: {wanted_mib} MiB are more than the {free_mib} MiB free")
    machine = (
        _one_rank(config, sizes, dtype, device) if config.tp == 1 else _several_ranks(config, sizes, dtype, device)
    )
    model = machine.model
    fields = _fingerprint(config, dtype, model.bits_name, state)
    key_seed = seed_key(fields.to_bytes())
    pool = BlockPool(sizes.num_blocks, config.block_size)
    scheduling = scheduler_config(config, sizes, resumes_preempted, max_prompt_tokens_beside_decodes)
    parts = CoreParts(
        identity=identity,
        limits=node_limits(config, sizes, model_config.vocab_size),
        scheduler=Scheduler(scheduling, pool, key_seed),
        pool=pool,
        fingerprint=pb.Fingerprint(**asdict(fields)),
        key_seed=key_seed,
    )
    grammars = GrammarProcesses(config.model, model_config.vocab_size)
    runner = TorchRunner(
        model, machine.kv, config.max_num_seqs, sizes.max_model_len, followers=machine.followers, grammars=grammars
    )
    found = (machine.inexactness, tokenizer_digest(config.model))
    return NodeEngine(model_config, sizes, machine.memory, runner, grammars, machine.ranks, parts, *found)


def _fingerprint(config: NodeConfig, dtype: str, kernels: str, state: object) -> Fingerprint:
    """Of the very files that were read: were it the next model's, this one's KV would go into its sequences.

    `state`: of the files before the first was read. Raises NotNow, or ModelError.
    """
    with suppress(OSError):  # one has gone meanwhile
        fields = fingerprint_fields(config.model, dtype, config.block_size, kernels)
        if files_state(config.model) == state:
            return fields
    raise NotNow(f"{config.model} was changed while it was read: start again once nobody writes to it")


class _Machine(NamedTuple):
    """What computes."""

    model: Model
    memory: KvMemory
    kv: KvSides  # of it, what this process computes with
    inexactness: str | None
    followers: Followers | None = None
    ranks: RankProcesses | None = None


def _one_rank(config: NodeConfig, sizes: EngineSizes, dtype: str, device: torch.device) -> _Machine:
    try:
        model = _loaded(config, dtype, device)
        memory = KvMemory(model.config, config.block_size, sizes.num_blocks, dtype, device, copies=model.kernels)
        if memory.is_mirrored and not memory.is_direct:
            log_event(LOG, logging.WARNING, "kv_not_page_locked", reason="CUDA refused: this process copies KV instead")
        inexactness = find_inexactness(model)
        model.capture(memory.tensor, config.max_num_seqs, sizes.max_model_len)
    except torch.OutOfMemoryError:
        needed = f"the weights, --num-blocks {sizes.num_blocks} of KV, and what steps need besides"
        raise NotNow(f"{device} has no room for {needed}: fewer blocks leave more") from None
    return _Machine(model, memory, memory, inexactness)


def _loaded(config: NodeConfig, dtype: str, device: torch.device, split: Split = WHOLE) -> Model:
    """Says at once why it will be slow: what comes next may be numba compiling, and who waits looks into the log."""
    model = load_model(config.model, dtype, config.kernels, device, config.weight_dtype, split)
    if model.shortfall:
        log_event(LOG, logging.WARNING, "slow_kernels", kernels=model.kernels.name, reason=model.shortfall)
    return model


def _several_ranks(config: NodeConfig, sizes: EngineSizes, dtype: str, device: torch.device) -> _Machine:
    """The same with other processes, which load while this one does."""
    memory = KvMemory(read_model_config(config.model), config.block_size, sizes.num_blocks, dtype)
    job = RankJob(
        rank=1,
        size=config.tp,
        model=str(config.model),
        dtype=dtype,
        kernels=config.kernels,
        device=device.type,
        weight_dtype=config.weight_dtype,
        threads=config.threads_per_rank,
        block_size=config.block_size,
        num_blocks=sizes.num_blocks,
        kv_descriptor=memory.writers_descriptor,
        meeting_descriptor=-1,
        parent_pid=os.getpid(),
    )
    split, own_device = Split(0, config.tp), rank_device(device, 0)
    with ExitStack() as undo:
        processes = RankProcesses(job)
        undo.callback(processes.close)
        model = _loaded(config, dtype, own_device, split)
        kv = memory.part(split, own_device, copies=model.kernels)
        processes.wait_until_loaded()

        def meet() -> tuple[Ranks, Model, str | None]:
            ranks = join_ranks(split, meeting_store(processes.meeting, config.tp), own_device)
            joined = model.joins(ranks)
            return ranks, joined, find_inexactness(joined)

        ranks, joined, inexactness = processes.until_met(meet)
        undo.pop_all()
    return _Machine(joined, memory, kv, inexactness, PipedFollowers(processes.pipes, ranks), processes)


def scheduler_config(
    config: NodeConfig,
    sizes: EngineSizes,
    resumes_preempted: bool,
    max_prompt_tokens_beside_decodes: int | None,
) -> SchedulerConfig:
    """What the scheduler goes by; see build_engine."""
    return SchedulerConfig(
        num_slots=config.max_num_seqs,
        max_batched_tokens=config.max_num_batched_tokens,
        max_model_len=sizes.max_model_len,
        max_prompt_tokens_beside_decodes=max_prompt_tokens_beside_decodes,
        reserve=ReserveConfig(
            policy=config.reserve_policy,
            init_ratio=config.new_token_ratio_init,
            min_ratio=config.new_token_ratio_min,
            decay_steps=config.new_token_ratio_decay_steps,
            clip_max_new_tokens=config.clip_max_new_tokens,
        ),
        cache_generated=config.cache_generated == "on",
        saves=SaveRules(config.saves_preempted, config.saves_finished, takes_out_broken=config.kv_pool is not None),
        resumes_preempted=resumes_preempted,
        keeps_preempted=config.preempt_move_ms > 0,
    )


def node_limits(config: NodeConfig, sizes: EngineSizes, vocab_size: int) -> NodeLimits:
    """The bounds that a core of any role keeps."""
    return NodeLimits(
        max_model_len=sizes.max_model_len,
        vocab_size=vocab_size,
        lease_life_s=config.lease_life_s,
        reserve_wait_s=config.reserve_wait_s,
        max_waiting_reserves=config.max_waiting_reserves,
        reserves_for_running=config.decode_reserve == "on",
        preempt_move_s=config.preempt_move_ms / 1000,
        reads_kv_pool=config.kv_pool is not None,
    )
