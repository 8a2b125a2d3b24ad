"""The oracle of the end-to-end tests: one pool, one scheduler, one runner in this process, no network."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.block_pool import BlockPool
from engine.device import choose_device
from engine.fingerprint import fingerprint_fields
from engine.grammars import Grammars
from engine.kv_memory import KvMemory, kv_block_bytes
from engine.local_engine import LocalEngine
from engine.model import load_model
from engine.model_config import read_model_config
from engine.runner import TorchRunner
from engine.scheduler import Scheduler, SchedulerConfig
from proto.block_key import seed_key
from tests.kernels_choice import KERNELS

NUM_SLOTS = 32


def engine_alone(
    model_dir: Path,
    dtype: str = "fp32",
    *,
    block_size: int = 16,
    num_blocks: int = 1200,
    chunk_tokens: int = 64,
    max_model_len: int = 1024,
    memory: KvMemory | None = None,
) -> LocalEngine:
    """An engine with sizes of its own: what it says depends on none of them. `memory`: for a test that looks into it."""
    torch.set_num_threads(1)  # as the nodes have; idle threads of a second one would take their core
    device = choose_device("auto") if memory is None else memory.tensor.device  # as the nodes choose
    model = load_model(model_dir, dtype, KERNELS, device)
    if memory is None:
        memory = KvMemory(model.config, block_size, num_blocks, dtype, device, copies=model.kernels)
    pool = BlockPool(num_blocks, block_size)
    key_seed = seed_key(fingerprint_fields(model_dir, dtype, block_size, model.bits_name).to_bytes())
    scheduler = Scheduler(SchedulerConfig(NUM_SLOTS, chunk_tokens, max_model_len), pool, key_seed)
    grammars = Grammars(model_dir, model.config.vocab_size)
    return LocalEngine(scheduler, TorchRunner(model, memory, NUM_SLOTS, max_model_len, grammars=grammars))


def block_bytes(model_dir: Path, dtype: str = "fp32", block_size: int = 16) -> int:
    """Bytes of one KV block: what crosses the wire for it."""
    return kv_block_bytes(read_model_config(model_dir), block_size, dtype)
