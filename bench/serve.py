"""`baton bench`: load on any server of OpenAI's API over HTTP, and what its clients saw.

    settings, trace --serve_load.py--> requests, arrivals --load.py--> records --report.py--> figures
                                    rates or sweep.py: one such run after the other --> table, JSON, picture

Everything random comes from the seed, which the result names; each run's prompts are its own, so that none finds another's in a
cache, and with `ignore_eos` answers have the length that was asked for. Latencies are measured from when a request was begun, its
connecting included (a new connection each, shown beside). Not here: what the server did meanwhile (its metrics say that).
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import signal
import ssl
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import httpx
import uvloop
from rich.console import Console

from bench.completions import Asking, Record, one_line
from bench.frame import INTERRUPTED, PIPE_WIDTH, facts
from bench.http_exchange import Server
from bench.load import Halt, Sender, run_closed_loop, run_open_loop
from bench.load_progress import LoadProgress
from bench.report import report_of
from bench.serve_config import BARE_FLAGS, DESCRIPTION, BenchConfig
from bench.serve_load import Loads, NoRequest, RunLoad
from bench.serve_result import Outcome, Run, show_outcome, write_outcome
from bench.sweep import Search, Try
from bench.workload import Piece, PromptForm, Prompts, Space, alphabet
from runtime.authority import believing
from runtime.command_words import as_flags
from runtime.config import load
from runtime.process import EXIT_USAGE, allow_descriptors, fatal, run_async
from runtime.unanswered import why_no_authority, why_no_entry, why_no_http

PROG: Final = "baton bench"
_LOWEST_RATE: Final = 0.01  # requests per second, of a sweep
_MAX_OPEN_FILES: Final = 1 << 20


class ServerProblem(Exception):
    """The server cannot be measured; the message is one sentence for the user."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, or 1 if no request was answered, 2 for what the user can mend, 130 after Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    config = load(BenchConfig, PROG, DESCRIPTION, as_flags(words, ("--url",), BARE_FLAGS))
    if config.seed is None:
        config = replace(config, seed=secrets.randbits(32))
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    allow_descriptors(_MAX_OPEN_FILES)  # a request under way is an open file
    try:
        outcome = run_async(_Call(config, console).run(), uvloop.new_event_loop)
    except (ServerProblem, ValueError) as problem:
        fatal(f"{PROG}: {problem}")
    except KeyboardInterrupt:
        sys.stderr.write(f"{PROG}: interrupted; nothing was sent\n")
        return INTERRUPTED
    show_outcome(console, outcome, config)
    write_outcome(console, outcome, config, facts(PROG, config, words))
    if outcome.is_halted:
        return INTERRUPTED
    if outcome.is_broken:
        return EXIT_USAGE
    return 0 if any(run.report.num_ok for run in outcome.runs) else 1


@dataclass(slots=True)
class _Call:
    """One call's runs."""

    config: BenchConfig
    console: Console
    runs: list[Run] = field(default_factory=list)

    async def run(self) -> Outcome:
        """All of them, or those that were done when somebody halted it. ServerProblem, ValueError."""
        loads = Loads(self.config)
        asking = await find_asking(self.config)
        self.console.print(f"{self.config.url}, model {asking.model}, seed {self.config.seed}")
        is_broken = False
        with _halt_by_signals(self.console) as halt:
            try:
                if self.config.sweep:
                    await self._sweep(loads, asking, halt)
                for rate in () if self.config.sweep else self.config.fixed_rates:
                    if not halt.is_asked:
                        await self._one(loads, asking, rate, halt)
            except (NoRequest, ServerProblem) as problem:  # the server may have died of a rate that a sweep has tried
                if not self.runs:
                    raise
                sys.stderr.write(f"{PROG}: {problem}; what follows is of the runs before\n")
                is_broken = isinstance(problem, ServerProblem)
            return Outcome(asking.model, asking.prompt_form, self.runs, halt.is_asked, is_broken)

    async def _sweep(self, loads: Loads, asking: Asking, halt: Halt) -> None:
        search = Search(self.config.first_rate, self.config.sweep_step, _LOWEST_RATE, self.config.sweep_max_rate)
        tries: list[Try] = []
        while (rate := search.next_rate(tries)) is not None:
            run = await self._one(loads, asking, rate, halt)
            if halt.is_asked:
                return
            tries.append(Try(rate, run.verdict(self.config.slo_share)))
            if self.config.slo_tpot_ms and run.report.num_uncounted == run.report.num_ok > 0:
                raise ServerProblem(
                    "--slo-tpot-ms: no answer tells how many tokens it has, so none is known to meet it; try "
                    "--return-token-ids on, or sweep with --slo-ttft-ms alone"
                )
            share = run.report.goodput.attainment
            self.console.print(f"{run.pace}: {share:.1%} met the limits: {tries[-1].verdict.value}")

    async def _one(self, loads: Loads, asking: Asking, rate: float | None, halt: Halt) -> Run:
        load_ = loads.of_run(asking, rate, f"{self.config.seed}/{len(self.runs)}")
        pace = _pace(self.config, rate)
        sender = await warmed_up(self.config, asking, load_, halt)
        with LoadProgress(self.console, pace, load_.num_requests) as progress:
            began_at, computed_s = time.monotonic(), time.process_time()
            records = await send(replace(sender, watcher=progress), self.config, asking, load_, halt)
            busy = (time.process_time() - computed_s) / max(time.monotonic() - began_at, 1e-9)
        self.runs.append(Run(rate, pace, records, report_of(records, self.config.slo), busy))
        return self.runs[-1]


async def measure(config: BenchConfig, asking: Asking) -> list[Record]:
    """One run at the first of the config's rates; a record of each request, in order. ServerProblem, ValueError."""
    load_ = Loads(config).of_run(asking, config.fixed_rates[0], f"{config.seed}/0")
    return await send(await warmed_up(config, asking, load_, Halt()), config, asking, load_, Halt())


async def warmed_up(config: BenchConfig, asking: Asking, load_: RunLoad, halt: Halt) -> Sender:
    """Who sends a run's requests, once those before it, which nobody counts, have been answered. ServerProblem."""
    try:
        server = await Server.parse(config.url).resolved()
    except OSError as error:
        raise _unreachable(config, error) from None
    sender = Sender(server, asking.is_stream, config.timeout_s, None, _tls(config), config.api_key, asking.path)
    await run_closed_loop(sender, load_.asked(asking, load_.warmup), 1, halt)
    return sender


async def send(sender: Sender, config: BenchConfig, asking: Asking, load_: RunLoad, halt: Halt) -> list[Record]:
    """Send a run's requests; a record of each that was begun, in order."""
    if config.concurrency is not None:
        asked = load_.asked(asking, load_.requests)
        return await run_closed_loop(sender, asked, config.concurrency, halt, config.duration_s or math.inf)
    requests = list(load_.requests)
    asked = load_.asked(asking, requests)
    return await run_open_loop(sender, asked, [each.at_s for each in requests], halt)


async def find_model(config: BenchConfig) -> str:
    """The first model that the server names. Raises ServerProblem."""
    async with _client(config) as client:
        return await _first_model(client)


async def find_asking(config: BenchConfig) -> Asking:
    """Ask the server for its model's name and try which form of prompt it takes. Raises ServerProblem."""
    async with _client(config) as client:
        model = config.model or await _first_model(client)
        answer: httpx.Response | None = None
        for asking in _ways_to_ask(config, model):
            prompts = Prompts(str(config.seed), asking.prompt_form, alphabet(asking.prompt_form, config.vocab_size), 1)
            body = asking.body(prompts.json([Piece(Space.WARMUP, 0, 4)]), 1)
            answer = await client.post(asking.path, content=body, headers={"Content-Type": "application/json"})
            if answer.status_code == httpx.codes.OK:
                return asking
            if not answer.is_client_error:
                break
    assert answer is not None
    _refuse_redirect(answer)
    said = one_line(answer.text) or "without a word"
    raise ServerProblem(f"--url {config.url}: a first request is answered {answer.status_code}: {said}")


@asynccontextmanager
async def _client(config: BenchConfig) -> AsyncIterator[httpx.AsyncClient]:
    headers = {} if config.api_key is None else {"Authorization": f"Bearer {config.api_key}"}
    options: dict[str, Any] = {"headers": headers, "timeout": config.timeout_s, "verify": _tls(config) or True}
    async with httpx.AsyncClient(base_url=Server.parse(config.url).base_url, trust_env=False, **options) as client:
        try:
            yield client
        except httpx.HTTPError as error:
            raise _unreachable(config, error) from None


def _ways_to_ask(config: BenchConfig, model: str) -> Iterator[Asking]:
    forms: list[PromptForm] = ["token_ids", "words"] if config.prompt_form == "auto" else [config.prompt_form]
    for form in ["words"] if config.api == "chat" else forms:
        yield Asking(
            model,
            "words" if form == "words" else "token_ids",
            config.stream,
            config.ignore_eos,
            config.temperature,
            config.api,
            config.return_token_ids,
        )


async def _first_model(client: httpx.AsyncClient) -> str:
    answer = await client.get("/v1/models")
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        raise ServerProblem(f"{client.base_url}: {why_no_entry('Authorization' in answer.request.headers)}")
    _refuse_redirect(answer)
    try:
        content: dict[str, Any] = answer.raise_for_status().json()
        if (name := str(content["data"][0]["id"])).isprintable():
            return name
        raise ValueError
    except (httpx.HTTPStatusError, ValueError, LookupError, TypeError, RecursionError):
        raise ServerProblem(f"{client.base_url}/v1/models: names no model; give --model") from None


def _refuse_redirect(answer: httpx.Response) -> None:
    if answer.has_redirect_location:
        there = one_line(answer.headers["Location"])
        raise ServerProblem(f"{answer.request.url}: sends elsewhere, to {there}; give that server's address as --url")


def _unreachable(config: BenchConfig, error: Exception) -> ServerProblem:
    if (why := why_no_http(str(error), config.url, "--ca FILE")) is not None:
        return ServerProblem(f"--url {config.url}: {why}")
    if isinstance(error, httpx.TimeoutException):
        return ServerProblem(f"--url {config.url}: no answer within {config.timeout_s:g} s")
    told = str(error) or type(error).__name__
    return ServerProblem(f"--url {config.url}: cannot be reached: {told}; `make up` starts a cluster")


def _tls(config: BenchConfig) -> ssl.SSLContext | None:
    if not Server.parse(config.url).is_tls:
        return None
    try:
        return believing(config.ca)
    except OSError as error:
        raise ServerProblem(f"--ca {config.ca}: {why_no_authority(error)}") from None


def _pace(config: BenchConfig, rate: float | None) -> str:
    if config.concurrency is not None:
        return f"{config.concurrency} at a time"
    if rate is None:
        return "the trace's times" if config.speed == 1 else f"the trace's times, {config.speed:g} times as fast"
    return "all at once" if math.isinf(rate) else f"{rate:g} per second"


@contextmanager
def _halt_by_signals(console: Console) -> Iterator[Halt]:
    """SIGINT and SIGTERM end the run in good order; the second one ends the process."""
    loop, halt = asyncio.get_running_loop(), Halt()

    def on_signal() -> None:
        if halt.is_asked:
            console.show_cursor(True)  # which a live line hides
            os._exit(INTERRUPTED)  # the user has asked twice
        console.print("ending: what is under way is given up; once more ends at once, without a report")
        halt.ask()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        yield halt
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


if __name__ == "__main__":
    sys.exit(main())
