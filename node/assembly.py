"""Builds one node's engine from its knobs and the model directory: weights, KV memory, pool, scheduler, runner.

Not here: the core (the role's), sockets, threads (node/process.py). Loads torch, so its environment must be set by then.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from engine.block_pool import BlockPool
from engine.device import choose_device, free_device_bytes
from engine.fingerprint import fingerprint_fields
from engine.kv_memory import KvMemory, kv_block_bytes
from engine.model import load_model
from engine.model_config import ModelConfig, read_model_config
from engine.probe import find_inexactness
from engine.reserve import ReserveConfig
from engine.runner import TorchRunner
from engine.saving import SaveRules
from engine.scheduler import Scheduler, SchedulerConfig
from node.config import NodeConfig
from node.identity import NodeIdentity, NodeLimits
from node.sizes import EngineSizes, engine_sizes, free_memory_bytes
from proto import baton_pb2 as pb
from proto.block_key import seed_key


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
    parts: CoreParts
    inexactness: str | None  # why a row's bits depend on more than its own tokens; None: they do not
    kernels_shortfall: str  # why it does not compute on the kernels asked for, or ""


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
    torch.set_num_threads(config.num_threads)
    device = choose_device(config.device)
    model_config = read_model_config(config.model)
    dtype = model_config.resolve_dtype(config.dtype)
    block_bytes = kv_block_bytes(model_config, config.block_size, dtype)
    free_bytes = free_device_bytes(device, free_memory_bytes(Path("/proc/meminfo").read_text(encoding="ascii")))
    sizes = engine_sizes(config, model_config.max_position_embeddings, block_bytes, free_bytes)
    if sizes.num_blocks * block_bytes > free_bytes:  # the kernel would kill the process, without a word to the user
        wanted_mib, free_mib = sizes.num_blocks * block_bytes >> 20, free_bytes >> 20
        raise ValueError(f"--num-blocks {sizes.num_blocks}: {wanted_mib} MiB are more than the {free_mib} MiB free")
    model = load_model(config.model, dtype, config.kernels, device, config.weight_dtype)
    fields = fingerprint_fields(config.model, dtype, config.block_size, model.kernels.name)
    memory = KvMemory(model_config, config.block_size, sizes.num_blocks, dtype, device, copies=model.kernels)
    key_seed = seed_key(fields.to_bytes())
    pool = BlockPool(sizes.num_blocks, config.block_size)
    scheduler_config = _scheduler_config(config, sizes, resumes_preempted, max_prompt_tokens_beside_decodes)
    parts = CoreParts(
        identity=identity,
        limits=NodeLimits(
            max_model_len=sizes.max_model_len,
            vocab_size=model_config.vocab_size,
            lease_life_s=config.lease_life_s,
            reserve_wait_s=config.reserve_wait_s,
            max_waiting_reserves=config.max_waiting_reserves,
            reserves_for_running=config.decode_reserve == "on",
            preempt_move_s=config.preempt_move_ms / 1000,
            reads_kv_pool=config.kv_pool is not None,
        ),
        scheduler=Scheduler(scheduler_config, pool, key_seed),
        pool=pool,
        fingerprint=pb.Fingerprint(**asdict(fields)),
        key_seed=key_seed,
    )
    runner = TorchRunner(model, memory, config.max_num_seqs, sizes.max_model_len)
    return NodeEngine(model_config, sizes, memory, runner, parts, find_inexactness(model), model.shortfall)


def _scheduler_config(
    config: NodeConfig, sizes: EngineSizes, resumes_preempted: bool, max_beside_decodes: int | None
) -> SchedulerConfig:
    return SchedulerConfig(
        num_slots=config.max_num_seqs,
        max_batched_tokens=config.max_num_batched_tokens,
        max_model_len=sizes.max_model_len,
        max_prompt_tokens_beside_decodes=max_beside_decodes,
        reserve=ReserveConfig(
            policy=config.reserve_policy,
            init_ratio=config.new_token_ratio_init,
            min_ratio=config.new_token_ratio_min,
            decay_steps=config.new_token_ratio_decay_steps,
            clip_max_new_tokens=config.clip_max_new_tokens,
        ),
        cache_generated=config.cache_generated == "on",
        saves=SaveRules(of_preempted=config.saves_preempted, of_finished=config.saves_finished),
        resumes_preempted=resumes_preempted,
        keeps_preempted=config.preempt_move_ms > 0,
    )
