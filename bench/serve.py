"""`python -m bench.serve`: load on any server of OpenAI's API over HTTP, and what its clients saw.

    settings --draw--> requests, arrivals --load.py--> records --report.py--> table, histograms, JSON

Everything random comes from the seed, which the result names. Requests go to /v1/completions with random prompts, so that no
cache helps, and with `ignore_eos`, so that answers have the length that was asked for. Latencies are measured from when a
request was begun, its connecting included (a new connection each, shown beside). Not here: traces,
chats, prompts that share a prefix.
"""

from __future__ import annotations

import asyncio
import random
import resource
import secrets
import shlex
import ssl
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import httpx
import uvloop
from rich.console import Console

from bench.arrivals import Lengths, parse_rate, poisson_offsets
from bench.completions import Asked, Asking, PromptForm, Record
from bench.http_exchange import Server
from bench.load import PATH, Sender, run_closed_loop, run_open_loop
from bench.machine import machine, utc_date
from bench.progress import RunProgress
from bench.report import report_of, show, to_json
from runtime.config import knob, load
from runtime.process import fatal, write_atomically

PROG: Final = "python -m bench.serve"


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """One run."""

    url: str = knob("http://127.0.0.1:8000", "the server, with or without /v1", metavar="URL")
    model: str | None = knob(None, "name to ask for; none: the first one of /v1/models", metavar="NAME")
    num_requests: int = knob(100, "requests to measure", low=1, high=10_000_000)
    rate: str | None = knob(
        None,
        "arrivals per second, a Poisson process that waits for no answer; inf: all at once; none: inf, unless "
        "concurrency is given",
        metavar="R",
    )
    concurrency: int | None = knob(
        None, "instead of a rate: keep so many requests under way, which waits for answers", low=1, high=100_000
    )
    prompt_tokens: str = knob(
        "64", "prompt length, uniform over MEAN - SPREAD .. MEAN + SPREAD; spread 0 if left out", metavar="MEAN:SPREAD"
    )
    output_tokens: str = knob("32", "answer length, likewise", metavar="MEAN:SPREAD")
    stream: bool = knob(True, "ask for streams; off: whole answers, which tell nothing of TTFT and TPOT")
    temperature: float = knob(0.0, "of the sampling; 0 is greedy", low=0, high=2)
    ignore_eos: bool = knob(True, "ask servers that know it to go on behind an end of text, so that lengths are kept")
    prompt_form: Literal["auto", "token_ids", "words"] = knob(
        "auto", "auto: random token ids if the server takes them, which have exact lengths; else random words"
    )
    vocab_size: int = knob(256, "token ids are drawn below it; 256 suits every model", low=2, high=1 << 24)
    seed: int | None = knob(
        None,
        "of arrivals, lengths and prompts; none: drawn anew, because a server may have cached an earlier run's prompts",
        low=0,
        high=(1 << 63) - 1,
    )
    warmup: int = knob(1, "requests before the measured ones, one after the other, not counted", low=0, high=100_000)
    timeout_s: float = knob(600.0, "seconds that a request may take until it counts as failed", low=0.001)
    output: Path | None = knob(None, "JSON file for the figures of the run and of each request", metavar="FILE")

    def __post_init__(self) -> None:
        if self.rate is not None and self.concurrency is not None:
            raise ValueError("--rate and --concurrency: give one of them")
        checks = {
            "url": Server.parse,
            "rate": parse_rate,
            "prompt_tokens": Lengths.parse,
            "output_tokens": Lengths.parse,
        }
        for name, parse in checks.items():
            try:
                if (text := getattr(self, name)) is not None:
                    parse(text)
            except ValueError as error:
                raise ValueError(f"--{name.replace('_', '-')} {error}") from None
        if self.output is not None and not self.output.absolute().parent.is_dir():
            raise ValueError(f"--output {self.output}: its folder does not exist")


class ServerProblem(Exception):
    """The server cannot be measured; the message is one sentence for the user."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, or 1 if no request was answered, 2 for what the user can mend, 130 after Ctrl-C."""
    config = load(ServeConfig, PROG, "Put load on a server of OpenAI's API and measure what its clients see.", argv)
    if config.seed is None:
        config = replace(config, seed=secrets.randbits(32))
    console = Console(highlight=False, markup=False, soft_wrap=True)
    command = f"{PROG} {shlex.join(sys.argv[1:] if argv is None else argv)}"
    _allow_many_connections()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            records = runner.run(_run(config, console))
    except ServerProblem as problem:
        fatal(f"{PROG}: {problem}")
    except KeyboardInterrupt:
        sys.stderr.write(f"{PROG}: interrupted; nothing was written\n")
        return 130
    report = report_of(records)
    show(console, report, records)
    if config.output is not None:
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()}
        facts = {"command": command, "date": utc_date(), "machine": machine(), "settings": settings}
        write_atomically(config.output, to_json(report, records, facts))
        console.print(f"written: {config.output}")
    return 0 if report.num_ok else 1


async def _run(config: ServeConfig, console: Console) -> list[Record]:
    asking = await find_asking(config)
    pace = f"{config.concurrency} at a time" if config.concurrency else f"{config.rate or 'inf'} per second"
    console.print(f"{config.num_requests} requests to {config.url}, model {asking.model}, {pace}, seed {config.seed}")
    with RunProgress(console, config.num_requests) as progress:
        return await measure(config, asking, progress)


async def measure(config: ServeConfig, asking: Asking, progress: RunProgress | None = None) -> list[Record]:
    """Warm up, then send the measured requests; a record of each, in order. Raises ServerProblem."""
    rng = random.Random(config.seed)
    prompt_lengths, output_lengths = Lengths.parse(config.prompt_tokens), Lengths.parse(config.output_tokens)

    def draw(number: int) -> list[Asked]:
        lengths = [(prompt_lengths.draw(rng), output_lengths.draw(rng)) for _ in range(number)]
        return [Asked(index, asking.body(rng, *each), *each) for index, each in enumerate(lengths)]

    asked, warmup = draw(config.num_requests), draw(config.warmup)
    tls = ssl.create_default_context() if Server.parse(config.url).is_tls else None
    try:
        server = await Server.parse(config.url).resolved()
    except OSError as error:
        raise ServerProblem(f"--url {config.url}: cannot be reached: {error}") from None
    quiet = Sender(server, config.stream, config.timeout_s, tls=tls)
    await run_closed_loop(quiet, warmup, 1)
    sender = quiet if progress is None else Sender(server, config.stream, config.timeout_s, progress.count, tls)
    if config.concurrency is not None:
        return await run_closed_loop(sender, asked, config.concurrency)
    return await run_open_loop(sender, asked, poisson_offsets(rng, parse_rate(config.rate or "inf"), len(asked)))


async def find_asking(config: ServeConfig) -> Asking:
    """Ask the server for its model's name and try which form of prompt it takes. Raises ServerProblem."""
    base_url = Server.parse(config.url).base_url
    async with httpx.AsyncClient(base_url=base_url, timeout=config.timeout_s, trust_env=False) as client:
        try:
            model = config.model or await _first_model(client)
            forms: list[PromptForm] = ["token_ids", "words"] if config.prompt_form == "auto" else [config.prompt_form]
            answer: httpx.Response | None = None
            for form in forms:
                asking = Asking(model, form, config.vocab_size, config.stream, config.ignore_eos, config.temperature)
                body = asking.body(random.Random(config.seed), 4, 1)
                answer = await client.post(PATH, content=body, headers={"Content-Type": "application/json"})
                if answer.status_code == httpx.codes.OK:
                    return asking
                if not answer.is_client_error:
                    break
        except httpx.HTTPError as error:
            raise ServerProblem(f"--url {config.url}: cannot be reached: {error or type(error).__name__}") from None
    assert answer is not None
    raise ServerProblem(f"--url {config.url}: a first request is answered {answer.status_code}: {answer.text[:300]}")


async def _first_model(client: httpx.AsyncClient) -> str:
    answer = await client.get("/v1/models")
    try:
        content: dict[str, Any] = answer.raise_for_status().json()
        return str(content["data"][0]["id"])
    except (httpx.HTTPStatusError, ValueError, LookupError, TypeError):
        raise ServerProblem(f"{client.base_url}/v1/models: names no model; give --model") from None


def _allow_many_connections() -> None:
    """A request under way is an open file; the usual bound of 1,024 is for programs that use select()."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    sys.exit(main())
