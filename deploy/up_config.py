"""The knobs of `baton up`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from runtime.config import knob, tables_in
from runtime.kv_pool_address import read_kv_pool_address
from runtime.process import is_loopback
from runtime.redis_address import DEFAULT_NAMESPACE, EMBEDDED, registry_problem

DEMO_MODEL: Final = Path(__file__).resolve().parent / "demo_model"  # ships with Baton (docs/demo_model.md)
DEMO_NAME: Final = "baton-demo"

# What a child's table must not say, by room. Of these the launcher has to know, to reach its children and to tell the user how to;
# or it gives them to each, whatever a table says.
_CHOSEN: Final = (
    "advertise", "http_port", "grpc_port", "kv_port", "node_id", "router", "registry_host", "registry_port",
)  # fmt: skip
_KNOWN: Final = ("model", "registry", "registry_namespace", "tls_dir", "api_keys", "threads")


def _of_nodes(help: str, low: float | None = 1, **details: Any) -> Any:
    """A knob that is handed on to the nodes when given; its default is the node's."""
    return knob(None, f"handed on to every node: {help}", low=low, **details)


@dataclass(frozen=True, slots=True)
class UpConfig:
    """One cluster on this machine."""

    model: Path | None = knob(
        None, help="model directory in Hugging Face layout; none: the demo model, which ships with Baton", metavar="DIR"
    )
    served_model_name: str | None = knob(
        None,
        f"handed on to every router: name that clients ask for; none: the directory's name, {DEMO_NAME} for the demo model",
        metavar="NAME",
    )
    prefill: int = knob(
        1,
        "number of prefill nodes; 0 with mixed ones, or where decode nodes compute prompts (--local-prefill)",
        low=0,
        high=64,
    )
    decode: int = knob(1, "number of decode nodes; 0 only with mixed ones", low=0, high=64)
    mixed: int = knob(0, "number of mixed nodes, which do both", low=0, high=64)
    routers: int = knob(1, "number of routers over the same nodes; each takes the next port", low=1, high=64)
    workers: int = knob(1, "handed on to each router: processes that serve behind its port", low=1, high=64)
    registry: str = knob(
        EMBEDDED,
        "where nodes announce themselves; embedded: in each router; or a Redis, redis://HOST:PORT/DB (rediss: over TLS)",
        metavar="URL",
    )
    registry_namespace: str | None = knob(
        None, f"this cluster's name in Redis, which may hold several; none: {DEFAULT_NAMESPACE}", metavar="NAME"
    )
    host: str = knob("127.0.0.1", "address of the routers' HTTP servers; nodes stay on loopback", metavar="ADDRESS")
    port: int = knob(8000, "port of the first router's HTTP server; 0 takes free ones", low=0, high=65535)
    tls_dir: Path | None = knob(
        None,
        "handed on to every node, and every router: this host's certificates (baton certs make); everything is encrypted",
        metavar="DIR",
    )
    api_keys: Path | None = knob(None, "handed on to every router: file of the keys that clients show", metavar="FILE")
    kill_button: Literal["auto", "on", "off"] = knob(
        "auto",
        "whether the dashboard has a button that kills a node and starts a new one; auto: where only this machine reaches the "
        "routers, and nobody is asked for a key",
    )
    run_dir: Path = knob(Path("run"), "where cluster.json and a log file per process are written", metavar="DIR")
    parent_pid: int = knob(0, "die, and all processes with it, when the process with this id dies; 0: never", low=0)
    start_timeout_s: float = knob(120.0, "seconds until /ready before giving up: a large model loads slowly", low=1)
    stop_timeout_s: float = knob(5.0, "seconds that a process may take to stop before it is killed", low=0)
    block_size: int | None = _of_nodes("token positions per KV block")
    num_blocks: int | None = _of_nodes("KV blocks in the pool")
    max_num_seqs: int | None = _of_nodes("sequences that run at once")
    max_num_batched_tokens: int | None = _of_nodes("token positions computed per step")
    max_model_len: int | None = _of_nodes("longest prompt + completion, in tokens")
    dtype: Literal["auto", "fp32", "bf16", "fp16"] | None = _of_nodes("what the node computes in", low=None)
    kernels: Literal["cpu", "numba", "torch", "triton"] | None = _of_nodes("which back end computes", low=None)
    weight_dtype: Literal["auto", "int8"] | None = _of_nodes("how the linears' weights are kept", low=None)
    reserve_policy: Literal["full", "ratio", "fixed", "none"] | None = _of_nodes(
        "room that admission leaves to what runs", low=None
    )
    decode_reserve: Literal["on", "off"] | None = _of_nodes("whether decode nodes leave that room", low=None)
    local_prefill: Literal["on", "off"] | None = _of_nodes("whether decode nodes may compute prompts", low=None)
    local_prefill_chunk: int | None = _of_nodes("tokens of prompts in a step of a decode node that also decodes")
    local_prefill_max_tokens: int | None = knob(
        None, "handed on to the router: tokens of short prompts that a decode node computes itself", low=0
    )
    placement_prefill: Literal["cache_aware", "least_loaded", "power_of_two", "random", "round_robin"] | None = knob(
        None, "handed on to the router: how a prefill node is chosen"
    )
    device: Literal["auto", "cpu", "cuda"] | None = _of_nodes("where weights and KV lie and what computes", low=None)
    transport: Literal["auto", "shm", "zmq", "nixl"] | None = _of_nodes("how KV travels between nodes", low=None)
    cache_generated: Literal["on", "off"] | None = _of_nodes("whether completion tokens are cached", low=None)
    kv_pool: str | None = knob(
        None,
        "handed on to every node: where nodes keep KV blocks for each other, file:///DIR or redis://HOST:PORT/DB; a password is "
        "better off in the variable, where ps does not show it",
        metavar="URL",
    )
    kv_pool_max_mib: int | None = _of_nodes("MiB that the KV pool may hold")
    kv_pool_ttl_s: float | None = _of_nodes("seconds that a block stays in a Redis or a directory unused")
    kv_pool_staging_mib: int | None = _of_nodes("MiB for blocks that wait to be written there")
    kv_pool_secret_file: Path | None = knob(
        None, "handed on to every node: file with the secret by which they know their own blocks there", metavar="FILE"
    )
    save_preempted_kv: Literal["on", "off"] | None = _of_nodes("whether who gave way is saved there", low=None)
    save_finished_kv: Literal["on", "off"] | None = _of_nodes("whether who is done is saved there", low=None)
    tp: int | None = knob(None, "handed on to nodes: ranks of each that compute together, tensor parallel", low=1)
    prefill_tp: int | None = knob(None, "the same for prefill nodes; none: as --tp", low=1)
    decode_tp: int | None = knob(None, "the same for decode nodes; none: as --tp", low=1)
    threads: int | None = _of_nodes(
        "threads that compute; none: the cores that it may use here, in equal parts for all ranks of all nodes"
    )
    config: Path | None = (
        None  # the file that --config named: its tables [router], [prefill], [decode], [mixed] go to the children
    )
    given: frozenset[str] = frozenset()  # knobs that a flag, a variable or that file has a value for, be it the default

    @property
    def model_dir(self) -> Path:
        """The directory that is served."""
        return DEMO_MODEL if self.model is None else self.model

    @property
    def is_demo(self) -> bool:
        """Whether the demo model is served, of which it is known what it can answer."""
        return self.model_dir.resolve() == DEMO_MODEL

    def example(self, model_id: str) -> tuple[str, dict[str, Any]]:
        """An endpoint, and what to send there: to the demo model a question that it can answer."""
        if not self.is_demo:
            return "/v1/completions", {"model": model_id, "prompt": "Once upon a time", "max_tokens": 32}
        asked = [{"role": "user", "content": "What does a prefill node do?"}]
        return "/v1/chat/completions", {"model": model_id, "messages": asked, "max_tokens": 64}

    @property
    def model_name(self) -> str | None:
        """What routers are told to call the model, if anything."""
        return self.served_model_name or (DEMO_NAME if self.is_demo else None)

    @property
    def nodes(self) -> dict[str, int]:
        """How many nodes of each role there are to be; only roles that have any."""
        numbers = {"prefill": self.prefill, "decode": self.decode, "mixed": self.mixed}
        return {role: number for role, number in numbers.items() if number}

    def tp_of(self, role: str) -> int | None:
        """What nodes of this role are told, if anything."""
        own = {"prefill": self.prefill_tp, "decode": self.decode_tp}.get(role)
        return self.tp if own is None else own

    def threads_by_role(self, num_cores: int) -> dict[str, int]:
        """Compute threads of a node of each role that there is: at least one a rank."""
        ranks = {role: self.tp_of(role) or 1 for role in self.nodes}
        num_ranks = sum(ranks[role] * number for role, number in self.nodes.items())
        return {role: self.threads or max(num_cores // num_ranks, 1) * ranks[role] for role in ranks}

    @property
    def has_kill_button(self) -> bool:
        """Whether routers are told how to have a node killed."""
        if self.kill_button == "auto":
            return is_loopback(self.host) and self.api_keys is None
        return self.kill_button == "on"

    def what_is_open(self) -> list[str]:
        """What other machines can do to the routers, a sentence each."""
        if is_loopback(self.host):
            return []
        sentences = []
        if self.api_keys is None:
            sentences.append(
                f"{self.host} can be reached from other machines, and nobody is asked for a key (--api-keys)"
            )
        if self.tls_dir is None:
            what = "prompts and answers" if self.api_keys is None else "prompts, answers and keys"
            told = f"{what} travel unencrypted (--tls-dir)"
            sentences.append(f"{self.host} can be reached from other machines, and {told}")
        return sentences

    @property
    def may_prefill(self) -> bool:
        """Whether there are nodes whose role it is to compute prompts; else decode nodes do, for good."""
        return self.prefill + self.mixed > 0

    def _check_tables(self, path: Path) -> None:
        for room, table in tables_in(path).items():
            for key in table if room != "up" else ():
                if key in _CHOSEN or (key in ("host", "port") and room != "router"):
                    raise ValueError(f"{path}: [{room}] {key}: baton up chooses that itself, for each process")
                if key in _KNOWN or key in ("host", "port"):
                    flag = "--" + key.replace("_", "-")
                    raise ValueError(f"{path}: [{room}] {key}: baton up has to know; say it under [up], or by {flag}")

    def __post_init__(self) -> None:
        if self.config is not None:
            self._check_tables(self.config)
        if problem := registry_problem(self.registry, self.registry_namespace):
            raise ValueError(problem)
        if self.kv_pool is not None:
            read_kv_pool_address(self.kv_pool)
        if self.port and self.port + self.routers > 1 << 16:
            raise ValueError(
                f"--port {self.port}: there are not {self.routers} ports from there on, one for each router"
            )
        if not self.decode and not self.mixed:
            raise ValueError("--decode 0: nobody would decode; at least 1 is needed, or --mixed 1")
        if not self.may_prefill and self.local_prefill == "off":
            raise ValueError(
                "--prefill 0: nobody would prefill, with --local-prefill off; at least 1 is needed, or --mixed 1"
            )
        if not self.model_dir.is_dir():
            hint = "" if self.model_dir.exists() else f"; make one with: baton model make --out {self.model_dir}"
            raise ValueError(f"--model {self.model_dir}: is not a directory{hint}")
        if not (self.model_dir / "config.json").is_file():
            raise ValueError(
                f"--model {self.model_dir}: has no config.json, so it is not a Hugging Face model directory"
            )
