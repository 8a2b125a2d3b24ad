"""`python -m bench.exposed`: what of a handoff nobody has hidden behind computing: the time behind the last chunk, against prefill.

    prompt's chunks  [ 1 ][ 2 ][ 3 ] first token
    KV on its way         [ 1 ][ 2 ]|[ 3 ][Commit, its answer]| next step        exposed: between the bars

Each transport has a prefill and a decode node, a core each where there are two; requests come one by one, in turns, so that nothing
queues. What is said is what the cluster itself says of each request (`/v1/requests/{id}/timeline`, docs/sight.md): `prefill`, and
`reserve_wait` + `transfer` + `admit`. The decode node's first step, which follows, is no cost of the handoff.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from rich.console import Console
from rich.table import Table

from bench.cluster import ClusterProblem
from bench.fleet import Fleet, pin
from bench.frame import Bench, check_files, check_model, whole_numbers
from bench.progress import StepProgress
from runtime.config import knob, load

PROG: Final = "python -m bench.exposed"
TARGET: Final = 0.05  # of prefill, for prompts of 1024 tokens and more (docs/design.md, section 10)
_PARTS: Final = ("reserve_wait", "transfer", "admit")
_KNOWN: Final = ("shm", "zmq", "nixl")
_BLOCK: Final = 16


@dataclass(frozen=True, slots=True)
class ExposedConfig:
    """One run."""

    model: Path = knob(help="model directory; baton model make --like smollm2-135m", metavar="DIR")
    lengths: str = knob("256,1024,2048", "tokens of the prompts", metavar="N,…")
    chunk: int = knob(512, "--max-num-batched-tokens of the prefill node", low=16, high=1 << 16)
    transports: str = knob("shm,zmq", f"of {', '.join(_KNOWN)}; a cluster for each", metavar="NAME,…")
    rounds: int = knob(
        8, "requests of each length and transport; one more before them is not counted", low=1, high=10_000
    )
    seed: int = knob(0, "of the prompts", low=0, high=(1 << 63) - 1)
    output: Path | None = knob(None, "JSON file for all figures", metavar="FILE")

    def __post_init__(self) -> None:
        whole_numbers("--lengths", self.lengths)
        if not self.transports or not set(self.transports.split(",")) <= set(_KNOWN):
            raise ValueError(f"--transports {self.transports}: of {', '.join(_KNOWN)}, with commas between")
        check_files(self.output)
        check_model(self.model)


@dataclass(frozen=True, slots=True)
class Exposed:
    """One length over one transport; seconds are medians, `shares` each request's own, in order."""

    transport: str
    prompt_tokens: int
    prefill_s: float
    exposed_s: float
    parts_s: dict[str, float]
    share: float  # the median of exposed / prefill
    share_p90: float
    shares: list[float]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, 2 for what the user can mend, 130 after Ctrl-C."""
    config = load(ExposedConfig, PROG, "Measure what of a handoff is not hidden behind the prefill.", argv)
    return Bench(PROG, measure, show, to_json).run(config, argv)


def measure(config: ExposedConfig, console: Console) -> list[Exposed]:
    """Every transport and length, in turns. ClusterProblem."""
    lengths, transports = whole_numbers("--lengths", config.lengths), config.transports.split(",")
    vocab_size = json.loads((config.model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    chance = random.Random(config.seed)
    seen: dict[tuple[str, int], list[Mapping[str, float]]] = {}
    with ExitStack() as stack:
        fleets = {each: stack.enter_context(_started(config, each, max(lengths))) for each in transports}
        http = stack.enter_context(httpx.Client(timeout=600, trust_env=False))
        progress = stack.enter_context(
            StepProgress(console, "requests", len(lengths) * len(transports) * (config.rounds + 1))
        )
        for number in range(config.rounds + 1):
            for length in lengths:
                for transport in transports[number % len(transports) :] + transports[: number % len(transports)]:
                    prompt = [chance.randrange(vocab_size) for _ in range(length)]
                    found = _ask(http, fleets[transport].url, config.model.absolute().name, prompt)
                    progress.advance(f"prompts of {length}, {transport}")
                    if number:
                        seen.setdefault((transport, length), []).append(found)
        for transport, fleet in fleets.items():
            used = set(fleet.state("prefill-0")["transport"]["links"].values())
            if used != {transport}:
                raise ClusterProblem(f"{transport}: links went over {', '.join(used) or 'nothing'}")
    return [figures_of(transport, length, found) for (transport, length), found in seen.items()]


@contextmanager
def _started(config: ExposedConfig, transport: str, longest: int) -> Iterator[Fleet]:
    """A fleet whose nodes have half of the cores each."""
    cores = sorted(os.sched_getaffinity(0))
    half = max(len(cores) // 2, 1)
    num_blocks = 4 * -(-longest // _BLOCK)
    flags = ["--max-model-len", str(longest + _BLOCK), "--num-blocks", str(num_blocks), "--block-size", str(_BLOCK)]
    flags += ["--max-num-batched-tokens", str(config.chunk), "--threads", str(half), "--transport", transport]
    of_processes = {"router": ["--local-prefill-max-tokens", "0"], "prefill-0": flags, "decode-0": flags}
    with (
        tempfile.TemporaryDirectory(prefix="baton-bench-", ignore_cleanup_errors=True) as folder,
        Fleet.started(config.model.absolute(), Path(folder), of_processes) as fleet,
    ):
        pin(fleet.pid("prefill-0"), cores[:half])
        pin(fleet.pid("decode-0"), cores[half:] or cores)
        yield fleet


def _ask(http: httpx.Client, url: str, model: str, prompt: list[int]) -> dict[str, float]:
    """Seconds of each part, by name, of one request."""
    fields = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 3,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": False,
    }
    answer = http.post(f"{url}/v1/completions", json=fields)
    if answer.status_code != httpx.codes.OK:
        raise ClusterProblem(f"{answer.status_code}: {answer.text[:200]}")
    told = http.get(f"{url}/v1/requests/{answer.json()['id']}/timeline").json()
    parts: dict[str, float] = told["time_to_first_token"]["parts"] | told["first_to_second_token"]["parts"]
    if told["choices"][0]["attempts"][0]["kind"] != "handoff" or parts["retry"]:
        raise ClusterProblem("a request was not handed over at the first try")
    return parts


def figures_of(transport: str, length: int, found: Sequence[Mapping[str, float]]) -> Exposed:
    """Of the requests of one length over one transport; `found`: seconds by part."""
    exposed = [sum(each[name] for name in _PARTS) for each in found]
    shares = [part / each["prefill"] for part, each in zip(exposed, found, strict=True)]
    return Exposed(
        transport=transport,
        prompt_tokens=length,
        prefill_s=statistics.median(each["prefill"] for each in found),
        exposed_s=statistics.median(exposed),
        parts_s={name: statistics.median(each[name] for each in found) for name in _PARTS},
        share=statistics.median(shares),
        share_p90=sorted(shares)[int(0.9 * (len(shares) - 1) + 0.5)],
        shares=[round(each, 5) for each in shares],
    )


def show(console: Console, figures: Sequence[Exposed]) -> None:
    """The table."""
    table = Table(title=f"exposed behind the last chunk, of prefill; asked for from 1024 tokens on: {TARGET:.0%}")
    for heading in ("transport", "prompt", "share", "p90", "prefill", "exposed", *(f"of it {name}" for name in _PARTS)):
        table.add_column(heading, justify="right")
    for each in figures:
        parts = [f"{1000 * each.parts_s[name]:.2f} ms" for name in _PARTS]
        shares = (f"{each.share:.1%}", f"{each.share_p90:.1%}")
        times = (f"{1000 * each.prefill_s:.0f} ms", f"{1000 * each.exposed_s:.2f} ms")
        table.add_row(each.transport, str(each.prompt_tokens), *shares, *times, *parts)
    console.print(table)


def to_json(figures: Sequence[Exposed]) -> dict[str, Any]:
    """All figures."""
    return {"target": TARGET, "figures": [asdict(each) for each in figures]}


if __name__ == "__main__":
    sys.exit(main())
