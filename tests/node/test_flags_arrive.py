"""What a node is told reaches what goes by it: each knob, by its flag, with a value that is not the default."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import pytest

from engine.scheduler import SchedulerConfig
from node.assembly import node_limits, scheduler_config
from node.config import NodeConfig
from node.identity import NodeLimits
from node.roles import prefills_locally, rules_of
from node.sizes import EngineSizes, engine_sizes
from runtime.config import parse
from runtime.knobs import knobs_of

ROOT: Final = Path(__file__).parents[2]


@dataclass(frozen=True)
class Made:
    """Of one config, of a decode node."""

    sizes: EngineSizes
    limits: NodeLimits
    scheduler: SchedulerConfig
    prefills_locally: bool


# knob -> what is given, where it arrives, what arrives there
ARRIVES: Final[Mapping[str, tuple[str, Callable[[Made], object], object]]] = {
    "block_size": ("8", lambda made: made.sizes.block_size, 8),
    "num_blocks": ("999", lambda made: made.sizes.num_blocks, 999),
    "max_model_len": (
        "77",
        lambda made: (made.sizes.max_model_len, made.limits.max_model_len, made.scheduler.max_model_len),
        (77, 77, 77),
    ),
    "max_num_seqs": ("9", lambda made: made.scheduler.num_slots, 9),
    "max_num_batched_tokens": ("99", lambda made: made.scheduler.max_batched_tokens, 99),
    "reserve_policy": ("fixed", lambda made: made.scheduler.reserve.policy, "fixed"),
    "new_token_ratio_init": ("0.5", lambda made: made.scheduler.reserve.init_ratio, 0.5),
    "new_token_ratio_min": ("0.25", lambda made: made.scheduler.reserve.min_ratio, 0.25),
    "new_token_ratio_decay_steps": ("10", lambda made: made.scheduler.reserve.decay_steps, 10),
    "clip_max_new_tokens": ("11", lambda made: made.scheduler.reserve.clip_max_new_tokens, 11),
    "decode_reserve": ("off", lambda made: made.limits.reserves_for_running, False),
    "reserve_wait_s": ("1.5", lambda made: made.limits.reserve_wait_s, 1.5),
    "max_waiting_reserves": ("12", lambda made: made.limits.max_waiting_reserves, 12),
    "local_prefill": ("off", lambda made: made.prefills_locally, False),
    "local_prefill_chunk": ("13", lambda made: made.scheduler.max_prompt_tokens_beside_decodes, 13),
    "preempt_move_ms": ("0", lambda made: (made.limits.preempt_move_s, made.scheduler.keeps_preempted), (0, False)),
    "cache_generated": ("off", lambda made: made.scheduler.cache_generated, False),
    "kv_pool": (
        "memory://",
        lambda made: (
            made.limits.reads_kv_pool,
            made.scheduler.saves.takes_out_broken,
            made.scheduler.saves.of_preempted,
        ),
        (True, True, True),
    ),
    "lease_life_s": ("2.5", lambda made: made.limits.lease_life_s, 2.5),
}
WITH_POOL: Final[Mapping[str, tuple[str, Callable[[Made], object], object]]] = {
    "save_preempted_kv": ("off", lambda made: made.scheduler.saves.of_preempted, False),
    "save_finished_kv": ("on", lambda made: made.scheduler.saves.of_finished, True),
}
# What arrives where only a process, or another test, can see it; the file reads it, `num_threads` and the like for it.
ELSEWHERE: Final[Mapping[str, tuple[str, str]]] = {
    "model": ("node/assembly.py", "model"),
    "router": ("node/process.py", "router"),
    "registry": ("node/process.py", "registry"),
    "registry_namespace": ("node/process.py", "registry_namespace"),
    "node_id": ("node/process.py", "node_id"),
    "host": ("node/process.py", "host"),
    "advertise": ("node/process.py", "known_as"),
    "tls_dir": ("node/process.py", "tls_dir"),
    "http_port": ("node/process.py", "http_port"),
    "grpc_port": ("node/process.py", "grpc_port"),
    "kv_port": ("node/process.py", "kv_port"),
    "ready_file": ("node/process.py", "ready_file"),
    "parent_pid": ("node/starting.py", "parent_pid"),
    "dtype": ("node/assembly.py", "dtype"),
    "kernels": ("node/assembly.py", "kernels"),
    "weight_dtype": ("node/assembly.py", "weight_dtype"),
    "device": ("node/assembly.py", "device"),
    "tp": ("node/assembly.py", "tp"),
    "threads": ("node/assembly.py", "threads_per_rank"),
    "kv_pool_max_mib": ("node/kv_pool_opening.py", "kv_pool_max_mib"),
    "kv_pool_ttl_s": ("node/kv_pool_opening.py", "kv_pool_ttl_s"),
    "kv_pool_staging_mib": ("node/process.py", "kv_pool_staging_mib"),
    "kv_pool_secret_file": ("node/kv_pool_opening.py", "kv_pool_secret_file"),
    "transport": ("node/process.py", "transport"),
    "session_grace_s": ("node/incarnation.py", "session_grace_s"),
    "drain_timeout_s": ("node/process.py", "drain_timeout_s"),
    "step_timeout_s": ("node/process.py", "step_timeout_s"),
    "log_level": ("node/process.py", "log_level"),
    "log_format": ("node/process.py", "log_format"),
    "otlp_endpoint": ("node/process.py", "otlp_endpoint"),
}


def made(**values: str) -> Made:
    """Of these flags."""
    flags = [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", value)]
    config = parse(NodeConfig, "baton decode", "", ["--model", "m", "--router", "127.0.0.1:1", *flags], {})
    sizes, rules = engine_sizes(config, 2048, 1, 1 << 40), rules_of("decode", config)
    scheduler = scheduler_config(config, sizes, **asdict(rules))
    return Made(sizes, node_limits(config, sizes, 320), scheduler, prefills_locally("decode", config))


@pytest.mark.parametrize("name", [each.name for each in knobs_of(NodeConfig)])
def test_every_knob_of_a_node_arrives_or_is_named_as_read_elsewhere(name: str) -> None:
    assert [name in each for each in (ARRIVES, WITH_POOL, ELSEWHERE)].count(True) == 1
    if name in ELSEWHERE:
        file, read_as = ELSEWHERE[name]
        assert re.search(rf"\b_?config\.{read_as}\b", (ROOT / file).read_text())
        return
    flag, arrived, expected = {**ARRIVES, **WITH_POOL}[name]
    pool = {"kv_pool": "redis://localhost"} if name in WITH_POOL else {}
    assert arrived(made(**pool, **{name: flag})) == expected
    assert arrived(made(**pool)) != expected, "it is the default"
