"""`python -m bench.token_path`: where the time of one token goes on its way from a step to a client that reads one stream.

    alone    milliseconds of a decode step of the engine by itself
    served   milliseconds from token to token of one stream (or --clients of them) through a mixed node and a router
    parts    processor time of a token by who took it, and for how long the threads that compute stood ready without a core

All of it is on the same cores, so whatever the parts beside computing take is taken from computing. A thread's time and its waiting
are the kernel's own count (/proc/PID/task/TID/schedstat), to the nanosecond; it costs whom it measures nothing. Rounds alternate
between the engine alone and the cluster, and a ratio is the median over rounds. Not here: peers (peers.py), many streams behind
the router alone (router.py).
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import httpx
from rich.console import Console
from rich.table import Table

from bench.cluster import Cluster, ClusterProblem, Settings, started_cluster
from bench.completions import Asked, Asking
from bench.frame import Bench, check_files, check_model
from bench.http_exchange import Server
from bench.load import Sender, run_closed_loop
from bench.peers import decode_rate
from bench.progress import StepProgress
from runtime.config import knob, load, set_thread_environment
from runtime.process import run_async

if TYPE_CHECKING:
    from bench.engine_steps import Steps

PROG: Final = "python -m bench.token_path"
PARTS: Final = (
    "node, computing threads",
    "node, loop",
    "node, other threads",
    "router, loop",
    "router, other threads",
    "client",
    "computing threads waited for a core",
)
_REQUEST_LIMIT_S: Final = 300.0
_BLOCK_SIZE: Final = 16
_VOCABULARY: Final = 256  # ids that every model has


@dataclass(frozen=True, slots=True)
class TokenPathConfig:
    """One run."""

    model: Path = knob(help="model directory in Hugging Face layout", metavar="DIR")
    threads: int = knob(2, "compute threads of the node, and of the engine alone", low=1, high=1024)
    clients: int = knob(1, "streams at once", low=1, high=256)
    context: int = knob(128, "tokens of each prompt", low=1, high=100_000)
    tokens: int = knob(200, "tokens of each stream, and steps of the engine alone, in a round", low=8, high=100_000)
    rounds: int = knob(7, "rounds of each", low=1, high=10_000)
    output: Path | None = knob(None, "JSON file for all figures", metavar="FILE")

    def __post_init__(self) -> None:
        check_model(self.model)
        check_files(self.output)


class Spent(NamedTuple):
    """Of one thread, seconds."""

    ran_s: float
    waited_s: float


Threads = Mapping[int, Spent]  # of one process, by thread id


@dataclass(frozen=True, slots=True)
class Figures:
    """Seconds of a token of each stream, medians over rounds."""

    alone_s: float
    served_s: float
    ratio: float  # of served to alone, median over rounds
    best_ratio: float
    parts_s: dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, or 2 for what the user can mend, 130 after Ctrl-C."""
    config = load(TokenPathConfig, PROG, "Measure where the time of a token goes when it is served.", argv)
    set_thread_environment(config.threads)  # before torch loads
    return Bench(PROG, _measure, show, lambda figures: asdict(figures)).run(config, argv)


def threads_of(pid: int) -> Threads:
    """What each thread of a process has spent so far; one that ends meanwhile is left out."""
    spent: dict[int, Spent] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            ran_ns, waited_ns, _ = (task / "schedstat").read_text(encoding="ascii").split()
        except OSError:
            continue
        spent[int(task.name)] = Spent(int(ran_ns) / 1e9, int(waited_ns) / 1e9)
    return spent


def since(before: Threads, now: Threads) -> Threads:
    """What each thread has spent between two looks."""
    nothing = Spent(0.0, 0.0)
    return {
        thread: Spent(*(b - a for a, b in zip(before.get(thread, nothing), spent, strict=True)))
        for thread, spent in now.items()
    }


def parts_of(
    node: tuple[int, Threads], router: tuple[int, Threads], client_s: float, num_computing: int
) -> list[float]:
    """Seconds by PARTS. A process is given with its id, which is its first thread's, too.

    Of the node's other threads those compute that took most.
    """
    (node_pid, of_node), (router_pid, of_router) = node, router
    others = sorted((spent for thread, spent in of_node.items() if thread != node_pid), reverse=True)
    computing, rest = others[:num_computing], others[num_computing:]
    return [
        sum(spent.ran_s for spent in computing),
        of_node[node_pid].ran_s,
        sum(spent.ran_s for spent in rest),
        of_router[router_pid].ran_s,
        sum(spent.ran_s for thread, spent in of_router.items() if thread != router_pid),
        client_s,
        sum(spent.waited_s for spent in computing),
    ]


def _measure(config: TokenPathConfig, console: Console) -> Figures:
    steps = _engine(config)
    blocks = config.clients * -(-(config.context + config.tokens + _BLOCK_SIZE) // _BLOCK_SIZE)
    mixed: dict[str, int | str] = {
        "num_blocks": 2 * blocks,  # prompts stay cached
        "max_num_seqs": config.clients,
        "max_model_len": config.context + config.tokens + _BLOCK_SIZE,
    }
    alone: list[float] = []
    served: list[float] = []
    parts: list[list[float]] = []
    up: dict[str, int | str] = {"prefill": 0, "decode": 0, "mixed": 1, "threads": config.threads}
    roles: dict[str, Settings] = {"up": up, "mixed": mixed}
    with started_cluster(config.model, roles) as cluster:
        name = str(httpx.get(f"{cluster.url}/v1/models", trust_env=False, timeout=60).json()["data"][0]["id"])
        _served(config, cluster, name)  # the prompts are cached from now on
        with StepProgress(console, "rounds", 2 * config.rounds) as progress:
            for _ in range(config.rounds):
                alone.append(_alone_s(steps, config.tokens))
                progress.advance("the engine alone")
                seconds, of_round = _served(config, cluster, name)
                served.append(seconds)
                parts.append(of_round)
                progress.advance("served")
    ratios = [b / a for a, b in zip(alone, served, strict=True)]
    return Figures(
        statistics.median(alone),
        statistics.median(served),
        statistics.median(ratios),
        min(ratios),
        {part: statistics.median(column) for part, column in zip(PARTS, zip(*parts, strict=True), strict=True)},
    )


def _engine(config: TokenPathConfig) -> Steps:
    import torch

    from bench.engine_steps import Case, Steps, random_memory
    from engine.model import load_model

    torch.set_num_threads(config.threads)
    model = load_model(config.model, "auto", "cpu")
    case = Case(config.clients, config.context)
    return Steps(case, model, random_memory(model, _BLOCK_SIZE, [case]), 0.0)


def _alone_s(steps: Steps, num_steps: int) -> float:
    begin = time.perf_counter()
    for _ in range(num_steps):
        steps.run()
    return (time.perf_counter() - begin) / num_steps


def _served(config: TokenPathConfig, cluster: Cluster, model: str) -> tuple[float, list[float]]:
    """Seconds from token to token, and by PARTS. Raises ClusterProblem."""
    pids = cluster.pids["mixed"], cluster.pids["router"]
    asking, rng = Asking(model, "token_ids"), random.Random(0)
    prompts = [[rng.randrange(_VOCABULARY) for _ in range(config.context)] for _ in range(config.clients)]
    asked = [
        Asked(index, asking.body(json.dumps(prompt), config.tokens), config.context, config.tokens)
        for index, prompt in enumerate(prompts)
    ]
    before, client_s = [threads_of(pid) for pid in pids], time.process_time()
    sender = Sender(Server.parse(cluster.url), True, _REQUEST_LIMIT_S)
    records = run_async(run_closed_loop(sender, asked, config.clients))
    client_s = time.process_time() - client_s
    node, router = ((pid, since(seen, threads_of(pid))) for pid, seen in zip(pids, before, strict=True))
    for record in records:
        if not record.is_ok or not record.chunk_at_s:
            raise ClusterProblem(f"a stream ended with {record.status} {record.error}")
    spent = parts_of(node, router, client_s, config.threads)
    return config.clients / decode_rate(records), [each / config.tokens for each in spent]


def show(console: Console, figures: Figures) -> None:
    """The two times, then the parts."""
    console.print(
        f"engine alone {1000 * figures.alone_s:.2f} ms, served {1000 * figures.served_s:.2f} ms a token: "
        f"ratio {figures.ratio:.3f}, best {figures.best_ratio:.3f}; {os.cpu_count()} cores"
    )
    table = Table(title=None, box=None, pad_edge=False)
    table.add_column("processor time of a token", no_wrap=True)
    table.add_column("µs", justify="right", no_wrap=True)
    for part, seconds in figures.parts_s.items():
        table.add_row(part, f"{1e6 * seconds:.0f}")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
