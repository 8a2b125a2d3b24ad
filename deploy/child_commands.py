"""What a process of `baton up` is told: its command line, and its environment.

What the user has said to the launcher, in whichever way, reaches the children as flags, which win over all that they read
themselves; the variables that said it stop here, or a flag's `none` would lose to them. What was not said is a child's own
affair, and its table's in the user's TOML file. Not here: who is started when (launcher.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from deploy.up_config import UpConfig
from runtime.config import child_environment, tables_in
from runtime.knobs import ENVIRONMENT_PREFIX
from runtime.redis_address import EMBEDDED

HANDED_ON: Final = (
    "block_size",
    "num_blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "dtype",
    "kernels",
    "weight_dtype",
    "reserve_policy",
    "decode_reserve",
    "local_prefill",
    "local_prefill_chunk",
    "device",
    "transport",
    "cache_generated",
    "kv_pool_max_mib",
    "kv_pool_ttl_s",
    "kv_pool_staging_mib",
    "kv_pool_secret_file",
    "save_preempted_kv",
    "save_finished_kv",
    "tls_dir",
)
TO_ROUTERS: Final = ("workers", "local_prefill_max_tokens", "placement_prefill", "tls_dir", "api_keys")
TAKES_NONE: Final = frozenset(  # of both: the child's own flag does, too
    (
        "num_blocks",
        "max_model_len",
        "kv_pool_max_mib",
        "kv_pool_ttl_s",
        "kv_pool_staging_mib",
        "kv_pool_secret_file",
        "save_preempted_kv",
        "tls_dir",
        "api_keys",
    )
)
_SAID_BY_FLAG: Final = frozenset(
    ENVIRONMENT_PREFIX + field.upper() for field in (*HANDED_ON, *TO_ROUTERS, "served_model_name", "tp")
)


def environment_of(config: UpConfig, threads: int) -> dict[str, str]:
    """A child's; `threads`: that compute in it."""
    environment = {name: value for name, value in child_environment(threads).items() if name not in _SAID_BY_FLAG}
    # By variable: a password in a command line is everybody's to see.
    environment["BATON_REGISTRY"] = config.registry
    for field in ("registry_namespace", "kv_pool"):
        unsaid = "none" if field in config.given else ""  # empty is unset: then a child's table may say it
        environment[ENVIRONMENT_PREFIX + field.upper()] = getattr(config, field) or unsaid
    return environment


def router_command(config: UpConfig, index: int) -> list[str]:
    """Of one of the routers."""
    port = config.port and config.port + index
    command = ["router", "--model", str(config.model_dir), "--host", config.host, "--port", str(port)]
    if config.model_name is not None or "served_model_name" in config.given:
        command += ["--served-model-name", config.model_name or "none"]
    # On loopback, as all nodes are: whoever can reach a registry becomes a node, and is sent prompts.
    command += ["--registry-host", "127.0.0.1" if config.registry == EMBEDDED else "none", "--registry-port", "0"]
    return [*command, *_said(config, TO_ROUTERS), *_shared_file(config)]


def node_command(config: UpConfig, role: str, name: str, registry: str) -> list[str]:
    """Of a node, as `baton` takes it; `registry`: of each router, where they embed theirs."""
    command = [role, "--model", str(config.model_dir), "--node-id", name]
    # Whatever the variables say, which may be those of a container with one process: all nodes are here, each with its own ports.
    command += ["--host", "127.0.0.1", "--advertise", "none", "--http-port", "0", "--grpc-port", "0", "--kv-port", "0"]
    command += ["--router", registry if config.registry == EMBEDDED else ""]
    command += _said(config, HANDED_ON)
    if (tp := config.tp_of(role)) is not None:
        command += ["--tp", str(tp)]
    return [*command, *_shared_file(config)]


def _said(config: UpConfig, fields: Sequence[str]) -> list[str]:
    """Flags for those of these that the user has given a value, which may be the launcher's default."""
    flags = []
    for field in fields:
        value = getattr(config, field)
        if field in config.given and (value is not None or field in TAKES_NONE):
            flags += ["--" + field.replace("_", "-"), "none" if value is None else str(value)]
    return flags


def _shared_file(config: UpConfig) -> list[str]:
    """The user's TOML file, if it says anything to the children."""
    if config.config is None or not tables_in(config.config).keys() - {"up"}:
        return []
    return ["--config", str(config.config)]
