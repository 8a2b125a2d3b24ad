"""The knobs of `baton bench`, and what must fit together among them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from bench.arrivals import Arrivals, Lengths, parse_rate, parse_rates
from bench.completions import Api
from bench.frame import SUFFIXES, check_files
from bench.goodput import Slo
from bench.http_exchange import Server
from bench.trace import TRACE_BLOCK
from runtime.config import knob
from runtime.unanswered import check_key

BARE_FLAGS: Final = ("--sweep",)  # as people write them: without `on`
NUM_REQUESTS: Final = 100  # where nothing bounds a run of random requests

DESCRIPTION: Final = """\
Put load on a server of OpenAI's API, Baton or another, and measure what its clients see.

  baton bench                                    100 random requests at once at http://127.0.0.1:8000
  baton bench http://10.0.0.5:8000 --rate 4 --duration-s 60 --prompt-tokens 512:128 --output-tokens exp:128
  baton bench --concurrency 8 --max-requests 200             eight at a time instead: the load waits for answers
  baton bench --trace mooncake.jsonl --length-scale 0.05 --speed 10 --max-requests 500
                                                 a recorded service: its arrivals, lengths and shared prefixes, smaller
  baton bench --rates 1,2,4,8 --slo-ttft-ms 500 --slo-tpot-ms 50 --output runs.json --plot runs.png
                                                 one run after the other, and how many requests of each met both limits
  baton bench --sweep --rate 1 --slo-ttft-ms 500 --duration-s 30
                                                 the highest rate at which 90 % of the requests meet them: doubling, then bisecting

Load is open: requests are sent at their instants, whether or not answers keep up, and how late the generator itself was
is part of the result. Ctrl-C ends the run and reports what is done. docs/benchmarking.md explains the figures."""


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """One call."""

    url: str = knob("http://127.0.0.1:8000", "the server, with or without /v1; also without the flag", metavar="URL")
    model: str | None = knob(
        None, "name to ask for; none: the first one of /v1/models", metavar="NAME", variable="BATON_BENCH_MODEL"
    )
    api: Api = knob("completions", "completions: /v1/completions; chat: /v1/chat/completions, which takes words only")
    api_key: str | None = knob(
        None, "key to show, where the server asks; better in the variable, where ps does not show it", metavar="KEY"
    )
    ca: Path | None = knob(
        None,
        "certificate authority that signed the server's certificate, as PEM; none: those that this host trusts",
        metavar="FILE",
    )
    rate: str | None = knob(
        None,
        "requests per second, on average; inf: all at once; none: inf, or a trace's own times, unless concurrency is "
        "given; of a sweep, where it begins (1)",
        metavar="R",
    )
    rates: str | None = knob(None, "several, one run after the other", metavar="R,R,…", variable="BATON_BENCH_RATES")
    sweep: bool = knob(False, "search the highest rate at which --slo-share of the requests meet the limits")
    sweep_step: float = knob(
        0.1, "a sweep ends when the rate that failed is at most so much above the one that passed", low=0.005, high=1
    )
    sweep_max_rate: float = knob(1000.0, "requests per second that a sweep does not exceed", low=0.01, high=1e6)
    arrivals: Arrivals = knob("poisson", "of random requests: how the gaps between them are spread")
    burstiness: float = knob(
        1.0, "of gamma arrivals: the shape; 1 is poisson, below it come bursts, above it even gaps", low=0.01, high=100
    )
    concurrency: int | None = knob(
        None, "instead of a rate: keep so many requests under way, which waits for answers", low=1, high=100_000
    )
    max_requests: int | None = knob(
        None,
        f"requests of each run at most; none: {NUM_REQUESTS} random ones if no duration is given, of a sweep as many more as "
        "show that a queue grows; the whole trace",
        low=1,
        high=10_000_000,
    )
    duration_s: float | None = knob(
        None, "seconds in which each run's requests arrive, at most; what is under way then is waited for", low=0.001
    )
    prompt_tokens: str = knob(
        "64",
        "of random requests, uniform over MEAN - SPREAD .. MEAN + SPREAD (64:32); or exp:64, or lognormal:64:0.8",
        metavar="LENGTHS",
    )
    output_tokens: str = knob("32", "answer length, likewise", metavar="LENGTHS")
    prefix_share: float = knob(0.0, "of random prompts: the share that is the same in all of a group", low=0, high=1)
    prefix_groups: int = knob(1, "number of such groups, each with a prefix of its own", low=1, high=1_000_000)
    trace: Path | None = knob(
        None, "replay this instead of random requests: JSON lines in the format of Mooncake's traces", metavar="FILE"
    )
    length_scale: float = knob(
        1.0,
        f"a trace's lengths are multiplied by it, to whole tokens per block of {TRACE_BLOCK}",
        low=1 / 128,
        high=4,
        variable="BATON_BENCH_LENGTH_SCALE",
    )
    speed: float = knob(1.0, "a trace's times are divided by it", low=0.001, high=1e6)
    max_prompt_tokens: int | None = knob(
        None,
        "longer prompts of a trace are cut at their ends",
        low=1,
        high=1 << 24,
        variable="BATON_BENCH_MAX_PROMPT_TOKENS",
    )
    max_output_tokens: int | None = knob(None, "longer answers of a trace are cut", low=1, high=1 << 24)
    slo_ttft_ms: float | None = knob(None, "limit on the time to the first token, for goodput", low=0.001)
    slo_tpot_ms: float | None = knob(None, "limit on the time per token behind the first, for goodput", low=0.001)
    slo_share: float = knob(
        0.9, "share of a run's requests that must meet the limits for its rate to pass", low=0.01, high=1
    )
    stream: bool = knob(True, "ask for streams; off: whole answers, which tell nothing of TTFT and TPOT")
    temperature: float = knob(0.0, "of the sampling; 0 is greedy", low=0, high=2)
    ignore_eos: bool = knob(True, "ask servers that know it to go on behind an end of text, so that lengths are kept")
    return_token_ids: bool = knob(
        False, "ask servers that know it for token ids; they are counted where usage is not told"
    )
    prompt_form: Literal["auto", "token_ids", "words"] = knob(
        "auto", "auto: random token ids if the server takes them, which have exact lengths; else random words"
    )
    vocab_size: int = knob(256, "token ids are drawn below it; 256 suits every model", low=16, high=1 << 24)
    seed: int | None = knob(
        None,
        "of arrivals, lengths and prompts; none: drawn anew, because a server may have cached an earlier run's prompts",
        low=0,
        high=(1 << 63) - 1,
    )
    warmup: int = knob(1, "requests before each measured run, one after the other, not counted", low=0, high=100_000)
    timeout_s: float = knob(600.0, "seconds that a request may take until it counts as failed", low=0.001)
    output: Path | None = knob(None, "JSON file for the figures of each run and of each request", metavar="FILE")
    plot: Path | None = knob(
        None, f"picture of the runs, its suffix {', '.join(SUFFIXES)}; needs matplotlib", metavar="FILE"
    )

    def __post_init__(self) -> None:
        self._check_texts()
        self._check_load()
        check_key(self.api_key)
        if self.trace is not None and not self.trace.is_file():
            what = "is a folder; name one of its files" if self.trace.is_dir() else "is no file"
            raise ValueError(f"--trace {self.trace}: {what}")
        if self.ca is not None and not self.ca.is_file():
            raise ValueError(f"--ca {self.ca}: is no file")
        if self.api == "chat" and self.prompt_form == "token_ids":
            raise ValueError(
                "--prompt-form token_ids: a chat takes words only; leave it out, or ask for --api completions"
            )
        if not self.stream and (self.slo != Slo() or self.return_token_ids):
            raise ValueError(
                "--stream off: whole answers tell nothing of TTFT and TPOT; leave out limits and token ids"
            )
        check_files(self.output, self.plot)

    def _check_texts(self) -> None:
        checks = {
            "url": Server.parse,
            "rate": parse_rate,
            "rates": parse_rates,
            "prompt_tokens": Lengths.parse,
            "output_tokens": Lengths.parse,
        }
        for name, parse in checks.items():
            try:
                if (text := getattr(self, name)) is not None:
                    parse(text)
            except ValueError as error:
                raise ValueError(f"--{name.replace('_', '-')} {error}") from None

    def _check_load(self) -> None:
        given = [name for name in ("rate", "rates", "concurrency") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"--{given[0]} and --{given[1]}: give one of them")
        if self.sweep and (self.rates or self.concurrency or self.rate == "inf"):
            raise ValueError("--sweep: finds the rate itself; give only --rate R, where it begins, or nothing")
        if self.sweep and self.slo == Slo():
            raise ValueError("--sweep: needs to know what is too slow: --slo-ttft-ms, --slo-tpot-ms, or both")
        if self.sweep and self.first_rate > self.sweep_max_rate:
            raise ValueError(f"--rate {self.rate}: is above --sweep-max-rate {self.sweep_max_rate:g}")
        is_endless = self.max_requests is None and self.duration_s is not None and not self.sweep
        if is_endless and self.trace is None and math.inf in self.fixed_rates:
            raise ValueError(f"--duration-s {self.duration_s:g}: is for a rate; without --rate R all are sent at once")
        if self.trace is not None and self.speed != 1 and (given or self.sweep):
            raise ValueError("--speed: scales a trace's own times; a rate, concurrency or sweep replaces them")
        random_only = (("prefix_share", 0.0), ("prompt_tokens", "64"), ("output_tokens", "32"), ("arrivals", "poisson"))
        for name, default in random_only if self.trace is not None else ():
            if getattr(self, name) != default:
                raise ValueError(f"--{name.replace('_', '-')}: is of random requests; a trace has its own")
        if self.burstiness != 1 and (self.arrivals != "gamma" or self.trace is not None):
            raise ValueError(
                "--burstiness: is of --arrivals gamma, of random requests; give that, too, or leave it out"
            )
        trace_only = (("length_scale", 1.0), ("speed", 1.0), ("max_prompt_tokens", None), ("max_output_tokens", None))
        for name, nothing in trace_only if self.trace is None else ():
            if getattr(self, name) != nothing:
                raise ValueError(f"--{name.replace('_', '-')}: is of a trace; give --trace FILE, too")

    @property
    def slo(self) -> Slo:
        """The limits, in seconds."""
        return Slo(*(None if each is None else each / 1000 for each in (self.slo_ttft_ms, self.slo_tpot_ms)))

    @property
    def first_rate(self) -> float:
        """Where a sweep begins."""
        return parse_rate(self.rate or "1")

    @property
    def fixed_rates(self) -> list[float | None]:
        """Of each run, without a sweep; None: a trace's own times, or none at all with a closed loop."""
        if self.rates is not None:
            return [*parse_rates(self.rates)]
        if self.rate is not None:
            return [parse_rate(self.rate)]
        return [None] if self.concurrency or self.trace else [math.inf]

    @property
    def settling_s(self) -> float:
        """How long a sweep's rate must last, so that one a step beyond what a server stands is seen to fail; 0: nothing says that.

        There each second adds `sweep_step` of one to the wait, which has reached the limit on TTFT when `slo_share` have arrived.
        """
        return (self.slo.ttft_s or 0.0) / (self.slo_share * self.sweep_step) if self.sweep else 0.0

    def num_random(self, rate: float | None) -> int | None:
        """Of random requests in a run; None: as many as arrive in its duration."""
        if self.max_requests or self.duration_s:
            return self.max_requests
        return max(NUM_REQUESTS, math.ceil((rate or 0.0) * self.settling_s)) if self.sweep else NUM_REQUESTS
