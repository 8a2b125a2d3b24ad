"""The knobs of a node process, equal for all roles.

Not here: what follows from them and the model together (`node/sizes.py`), because that needs the model's own config.
Imports nothing heavy: `--help` and a wrong flag answer before torch is loaded, and the threads must be known by then.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from engine.reserve import ReservePolicy
from runtime.advertise import advertise_problem
from runtime.config import knob
from runtime.cores import usable_cores
from runtime.kv_pool_address import read_kv_pool_address
from runtime.process import is_everywhere
from runtime.redis_address import DEFAULT_NAMESPACE, EMBEDDED, registry_problem
from runtime.tracing import endpoint_problem

_ADDRESS: Final = re.compile(r"(\[[0-9a-fA-F:]+\]|[^:\s]+):\d{1,5}")
_NODE_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """What a node is told when it starts."""

    model: Path = knob(help="model directory in Hugging Face layout", metavar="DIR")
    router: tuple[str, ...] = knob(
        (), "registry of each router to register with, where the routers embed theirs", metavar="HOST:PORT,…"
    )
    registry: str = knob(
        EMBEDDED,
        "where to register; embedded: with each router; or the Redis where the routers look, redis://HOST:PORT/DB (rediss: "
        "over TLS); a password is better off in the variable, where ps does not show it",
        metavar="URL",
    )
    registry_namespace: str | None = knob(
        None, f"this cluster's name in Redis, which may hold several; none: {DEFAULT_NAMESPACE}", metavar="NAME"
    )
    node_id: str | None = knob(None, "name in the cluster; none: the role and a random number", metavar="NAME")

    host: str = knob(
        "127.0.0.1",
        "address to listen on, 0.0.0.0 or :: for all; loopback, because without --tls-dir nobody is asked who he is",
    )
    advertise: str | None = knob(
        None,
        "host name or address by which routers and other nodes dial this one; none: --host, or where that is all addresses the "
        "one from which this machine speaks to its registry",
        metavar="HOST",
    )
    tls_dir: Path | None = knob(
        None,
        "this host's certificates, as `baton certs make` makes them: every connection of the cluster is then encrypted, and "
        "taken from and made to its members only; equal on all processes of a cluster",
        metavar="DIR",
    )
    http_port: int = knob(0, "port of /health, /metrics, /state; 0 takes a free one", low=0, high=65535)
    grpc_port: int = knob(
        0, "port of the sessions and the handoff's control calls; 0 takes a free one", low=0, high=65535
    )
    kv_port: int = knob(0, "port where KV comes in over zmq; 0 takes a free one", low=0, high=65535)
    ready_file: Path | None = knob(
        None, "JSON file to write once the node takes work: its ids, ports and pid", metavar="FILE"
    )
    parent_pid: int = knob(0, "die when the process with this id dies; 0: never (a launcher gives its own)", low=0)

    dtype: Literal["auto", "fp32", "bf16", "fp16"] = knob(
        "auto", "of weights and KV; auto: what config.json says, and fp32 where that is fp16, or nothing"
    )
    kernels: Literal["cpu", "numba", "torch", "triton"] = knob(
        "cpu",
        "what computes; cpu: compiled from C++ by make setup; where it is not there numba, and where that is not, torch; "
        "on a CUDA device Triton, or torch where that is asked for or Triton is not there; equal on all nodes of a cluster",
    )
    weight_dtype: Literal["auto", "int8"] = knob(
        "auto",
        "of the linears' weights; int8: 8 bits and a scale per output channel, half of bf16's memory and nearly half of its time "
        "where weights are what a step reads, at a small loss (docs/engine.md); equal on all nodes of a cluster; CPUs only",
    )
    device: Literal["auto", "cpu", "cuda"] = knob(
        "auto",
        "where weights and KV lie and what computes; auto: CUDA where there is one, else the CPU",
    )
    tp: int = knob(
        1,
        "ranks that compute together, tensor parallel: processes on CPUs, one for each CUDA device (never run there), with equal "
        "parts of every layer and of its KV; nodes of any number work together, and say the same tokens",
        low=1,
        high=64,
    )
    threads: int | None = knob(
        None,
        "compute threads, of all ranks together; none: every core that this process may use (a launcher shares them out)",
        low=1,
        high=1024,
    )
    block_size: int = knob(16, "token positions of a KV block; equal on all nodes of a cluster", low=1, high=1024)
    num_blocks: int | None = knob(
        None,
        "KV blocks of the pool; none: room for max_num_seqs full sequences, at most a quarter of the free memory",
        low=1,
    )
    max_num_seqs: int = knob(32, "sequences that run at once: rows of a step's batch", low=1, high=4096)
    max_num_batched_tokens: int = knob(
        512, "token positions of a step, which also bounds a prompt's chunk", low=1, high=1 << 20
    )
    max_model_len: int | None = knob(
        None,
        "tokens of prompt and completion together; none: what the model was made for, at most 4096",
        low=2,
        high=1 << 20,  # a Commit with so many ids fits into a frame of every transport
    )

    reserve_policy: ReservePolicy = knob(
        "ratio",
        "room that admission leaves to what runs; ratio: a share of what it may still say, which follows what is said; fixed: "
        "some blocks each, for a while after a preemption; full: all it may ever need, nothing is preempted; none: nothing",
    )
    new_token_ratio_init: float = knob(
        0.7, "ratio: the share at start, and the most that a preemption brings back", low=0, high=1
    )
    new_token_ratio_min: float = knob(
        0.098, "ratio: the share that it falls to while nothing is preempted", low=0, high=1
    )
    new_token_ratio_decay_steps: int = knob(600, "ratio: steps from the first share to the least", low=1, high=1 << 30)
    clip_max_new_tokens: int = knob(
        4096, "ratio: tokens that a sequence may still say count as no more than this", low=1, high=1 << 30
    )
    decode_reserve: Literal["on", "off"] = knob(
        "on", "whether a decode node leaves that room when it answers Reserve; off admits more, and preempts more"
    )
    reserve_wait_s: float = knob(
        5.0,
        "seconds that a prefill node lets its Reserve wait at a full decode node; 0: refused at once",
        low=0,
        high=3600,
    )
    max_waiting_reserves: int = knob(
        64, "Reserve calls that wait for room at a decode node; more are refused at once", low=0, high=1 << 20
    )

    local_prefill: Literal["on", "off"] = knob(
        "on",
        "whether a decode node computes prompts itself where a router asks it to: short ones, and all while there is no prefill "
        "node",
    )

    local_prefill_chunk: int = knob(
        32,
        "token positions of prompts in a step of a decode node that also decodes: what decodes waits for them",
        low=1,
        high=1 << 20,
    )

    preempt_move_ms: int = knob(
        250,
        "milliseconds that a decode node keeps what gave way for want of blocks, so that it goes, KV and all, to another node "
        "with room instead of being computed again; older sequences wait so long for its blocks at most; 0: not at all",
        low=0,
        high=60_000,
    )

    cache_generated: Literal["on", "off"] = knob(
        "on",
        "whether completion tokens, too, stay in the prefix cache (and go to the KV pool): of use to whoever asks on",
    )
    kv_pool: str | None = knob(
        None,
        "where all nodes of a cluster keep KV blocks for each other, beyond the life of a sequence and of a node: "
        "file:///DIR (a local disk, a shared file system), redis://HOST:PORT/DB (rediss: over TLS), or memory:// (in this "
        "process, for itself: a mixed node, or a test); a password is better off in the variable, where ps does not show it",
        metavar="URL",
    )
    kv_pool_max_mib: int | None = knob(
        None, "MiB that the KV pool may hold, the least recently used block goes first; none: 8192", low=1, high=1 << 40
    )
    kv_pool_ttl_s: float | None = knob(
        None, "seconds that a block stays in a Redis or a directory unused; none: 86400, a day", low=1, high=1 << 30
    )
    kv_pool_staging_mib: int | None = knob(
        None,
        "MiB of this process for blocks that wait to be written to the KV pool; what finds it full is not stored; none: 256",
        low=1,
        high=1 << 30,
    )
    kv_pool_secret_file: Path | None = knob(
        None,
        "file with the cluster's secret, at least 16 bytes, by which nodes know blocks of their own from those that somebody else "
        "put into the KV pool; none: whoever can write there is trusted",
        metavar="FILE",
    )
    save_preempted_kv: Literal["on", "off"] | None = knob(
        None,
        "whether the blocks of a sequence that gave way for want of blocks go to the KV pool, so that whoever goes on with it "
        "computes no more than the tail; none: on where there is a --kv-pool",
    )
    save_finished_kv: Literal["on", "off"] = knob(
        "off",
        "whether those of a sequence that is done here go there: its next turn, and others that begin alike, find them on every "
        "node; it fills the pool with every prompt",
    )

    transport: Literal["auto", "shm", "zmq", "nixl"] = knob(
        "auto",
        "how KV travels between nodes; auto: shared memory where both are on one host, else nixl where both have it and RDMA, else "
        "zmq over TCP; nixl needs NIXL at both ends, encrypts nothing, and trusts the other nodes with this one's KV",
    )
    lease_life_s: float = knob(
        10.0, "seconds that a reservation lives unrenewed: what a dead sender costs", low=0.1, high=3600
    )
    session_grace_s: float = knob(2.0, "seconds without a router's stream until its work here ends", low=0.1, high=3600)
    drain_timeout_s: float = knob(
        25.0,
        "seconds that SIGTERM leaves to finish or hand over what runs; 0: none; less than what the process gets before it is "
        "killed, which is 30 on Kubernetes",
        low=0,
        high=86_400,
    )
    step_timeout_s: float = knob(
        300.0,
        "seconds without an answer from the model's runner, though it has work, until the process ends (exit code 1), so that what "
        "it serves goes on elsewhere: a device or its driver may hang",
        low=1,
        high=86_400,
    )
    log_level: Literal["debug", "info", "warning", "error"] = knob("info", "least level that is logged")
    log_format: Literal["text", "json"] = knob("text", "of a log line: key=value for people, or a JSON object")
    otlp_endpoint: str | None = knob(
        None,
        "OpenTelemetry collector that is told spans, over OTLP/HTTP: http://HOST:4318; none: nobody",
        metavar="URL",
    )

    def __post_init__(self) -> None:
        """Check what a bound cannot say."""
        if problem := registry_problem(self.registry, self.registry_namespace):
            raise ValueError(problem)
        if problem := endpoint_problem(self.otlp_endpoint):
            raise ValueError(problem)
        if self.registry != EMBEDDED and self.router:
            raise ValueError(f"--router {self.router[0]}: routers look into Redis, since --registry says so")
        if self.registry == EMBEDDED and not self.router:
            raise ValueError("--router: at least one HOST:PORT is needed, or --registry redis://HOST:PORT/DB")
        for address in self.router:
            if not _ADDRESS.fullmatch(address) or not 0 < int(address.rpartition(":")[2]) < 1 << 16:
                raise ValueError(f"--router {address}: must be HOST:PORT, the port between 1 and 65535")
        if not self.host:
            raise ValueError("--host: must be an address of this machine, or 0.0.0.0 or :: for all of them")
        if self.advertise is not None:
            problem = advertise_problem(self.advertise)
        else:
            problem = None if is_everywhere(self.host) else advertise_problem(self.host, "--host")
        if problem is not None:
            raise ValueError(problem)
        if self.node_id is not None and not _NODE_ID.fullmatch(self.node_id):
            raise ValueError(f"--node-id {self.node_id}: must be 1 to 64 letters, digits, '.', '_' or '-'")
        self._check_kv_pool()
        if self.transport == "nixl" and self.tls_dir is not None:
            raise ValueError("--transport nixl: encrypts nothing, so not together with --tls-dir; zmq does")
        if self.new_token_ratio_min > self.new_token_ratio_init:
            raise ValueError(
                f"--new-token-ratio-min {self.new_token_ratio_min}: must not be above new_token_ratio_init "
                f"{self.new_token_ratio_init}"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens}: must be at least max_num_seqs "
                f"{self.max_num_seqs}, or a full batch cannot decode"
            )

    def _check_kv_pool(self) -> None:
        if self.kv_pool is not None:
            read_kv_pool_address(self.kv_pool)
            if self.save_preempted_kv == self.save_finished_kv == "off" and self.kv_pool.startswith("memory:"):
                raise ValueError(f"--kv-pool {self.kv_pool}: nothing is saved there, since both --save flags are off")
            return
        given = {
            "--kv-pool-max-mib": self.kv_pool_max_mib,
            "--kv-pool-ttl-s": self.kv_pool_ttl_s,
            "--kv-pool-staging-mib": self.kv_pool_staging_mib,
            "--kv-pool-secret-file": self.kv_pool_secret_file,
            "--save-preempted-kv": "on" if self.save_preempted_kv == "on" else None,
            "--save-finished-kv": "on" if self.save_finished_kv == "on" else None,
        }
        for flag, value in given.items():
            if value is not None:
                value = f"{value:g}" if isinstance(value, float) else value
                raise ValueError(f"{flag} {value}: there is no KV pool without --kv-pool URL")

    @property
    def known_as(self) -> str:
        """The host that others dial; for a node that listens on all addresses, once it has been found (runtime/advertise.py)."""
        return self.advertise or self.host

    @property
    def saves_preempted(self) -> bool:
        """Whether the blocks of who gave way go to the KV pool."""
        return self.kv_pool is not None and self.save_preempted_kv != "off"

    @property
    def saves_finished(self) -> bool:
        """Whether the blocks of who is done here go to the KV pool."""
        return self.kv_pool is not None and self.save_finished_kv == "on"

    @property
    def threads_per_rank(self) -> int:
        """Each rank's share of them, one at least."""
        return max(1, self.num_threads // self.tp)

    @property
    def num_threads(self) -> int:
        """Compute threads, the default worked out."""
        return self.threads if self.threads is not None else usable_cores()
