"""`python -m bench.peers`: Baton, vLLM's CPU build, llama.cpp and transformers on one model, in one run, by turns.

    decode   CLIENTS streams at once behind prompts of CONTEXT tokens that every server has cached: tokens a second
    prefill  one new prompt at a time: tokens of it a second, until its first token comes

Servers are asked over HTTP, by the same client, on the same cores; transformers has none and computes where it is
(peers_transformers.py), which flatters it. Each round asks all of them, one after the other, the others stopped; a ratio is the
median over rounds of the rounds' own ratios. A peer that is not there is named and left out.
"""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import httpx
from rich.console import Console

from bench.cluster import ClusterProblem
from bench.completions import Asked, Asking, Record
from bench.frame import check_files, check_kernels, write_result, writing
from bench.http_exchange import Server
from bench.load import Sender, run_closed_loop
from bench.machine import machine, utc_date
from bench.page import write_page
from bench.peers_install import has_llama, has_vllm, install
from bench.peers_report import Figures, markdown, whole_rounds
from bench.peers_servers import (
    Peer,
    PeerProblem,
    Sizes,
    Weights,
    answer_of,
    baton,
    llama_cpp,
    transformers,
    vllm,
)
from bench.progress import StepProgress
from bench.workload import Piece, Prompts, Space, alphabet, num_digits
from runtime.config import knob, load
from runtime.process import EXIT_USAGE, fatal, run_async

PROG: Final = "python -m bench.peers"
PEERS: Final = ("Baton", "vLLM", "llama.cpp", "transformers")
_REQUEST_LIMIT_S: Final = 600.0
_ROOM_TOKENS: Final = 16  # of max_model_len beyond prompt and completion: servers count differently
_VOCABULARY: Final = 256  # ids that every model has


@dataclass(frozen=True, slots=True)
class PeersConfig:
    """One run."""

    envs: Path = knob(help="folder with the peers' environments", metavar="DIR")
    install: bool = knob(
        False, "make what is not there in --envs first: downloads, and compiles llama.cpp (10 minutes)"
    )
    model: Path | None = knob(
        None, "Llama directory in bf16, as `baton model make` makes; none: only --install", metavar="DIR"
    )
    weights: Weights = knob(
        "bf16", "int8: Baton with --weight-dtype int8 and llama.cpp with q8_0; the others stay bf16"
    )
    peers: tuple[str, ...] = knob(PEERS, f"whom to measure, of {', '.join(PEERS)}", metavar="NAME,…")
    threads: int = knob(2, "compute threads of each", low=1, high=1024)
    clients: str = knob("1,8,32", "streams at once", metavar="N,…")
    contexts: str = knob("128,2048", "tokens of the prompts that are decoded behind", metavar="N,…")
    prompts: str = knob("512,2048", "tokens of the prompts that are prefilled", metavar="N,…")
    output_tokens: int = knob(64, "tokens of each stream", low=2, high=4096)
    rounds: int = knob(3, "how often each is asked everything", low=1, high=1000)
    output: Path | None = knob(None, "JSON file for all figures; a table in Markdown goes beside it", metavar="FILE")

    def __post_init__(self) -> None:
        for name in ("clients", "contexts", "prompts"):
            numbers(name, getattr(self, name))
        for name in self.peers:
            if name not in PEERS:
                raise ValueError(f"--peers {name}: not one of {', '.join(PEERS)}")
        check_files(self.output)
        if self.model is not None:
            check_kernels()


class Case(NamedTuple):
    """What a peer is asked for in one go."""

    kind: Literal["decode", "prefill"]
    clients: int
    tokens: int  # of each prompt

    @property
    def name(self) -> str:
        """For tables."""
        return f"decode {self.clients} x {self.tokens}" if self.kind == "decode" else f"prefill {self.tokens}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, or 2 for what the user can mend, 130 after Ctrl-C."""
    config = load(PeersConfig, PROG, "Measure Baton and its peers by turns on one model.", argv)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # peers have sessions of their own and would stay
    try:
        if config.install:
            install(config.envs, console.print)
        if config.model is None:
            return 0
        figures, end = _measure(config, config.model, console)
    except (ValueError, ClusterProblem, PeerProblem) as error:
        fatal(f"{PROG}: {error}")
    except KeyboardInterrupt:
        sys.stderr.write(f"{PROG}: interrupted; nothing was measured\n")
        return 130
    console.print(markdown(figures))
    if config.output is not None:
        command = f"{PROG} {shlex.join(sys.argv[1:] if argv is None else argv)}"
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()}
        result: dict[str, Any] = {"command": command, "date": utc_date(), "machine": machine(), "settings": settings}
        result |= {} if end is None else {"interrupted": True}
        output = config.output if end is None else config.output.with_suffix(".part.json")  # a whole run's stays
        write_result(PROG, output, {**result, "tokens_per_s": figures})
        with writing(PROG, "--output", output):
            write_page(output)
        console.print(f"written: {output}")
    if end is None:
        return 0
    what, code = (str(end), EXIT_USAGE) if isinstance(end, PeerProblem) else ("interrupted", 130)
    sys.stderr.write(f"{PROG}: {what}; these are the cases and rounds in which all were measured\n")
    return code


def _measure(
    config: PeersConfig, model: Path, console: Console
) -> tuple[Figures, KeyboardInterrupt | PeerProblem | None]:
    """Figures, and what came before they were all: Ctrl-C, or a peer that failed; raises it where there were none yet."""
    cases = [
        Case("decode", n, context)
        for context in numbers("contexts", config.contexts)
        for n in numbers("clients", config.clients)
    ]
    cases += [Case("prefill", 1, tokens) for tokens in numbers("prompts", config.prompts)]
    clients = max(case.clients for case in cases)
    sizes = Sizes(
        threads=config.threads,
        clients=clients,
        max_model_len=max(case.tokens for case in cases) + config.output_tokens + _ROOM_TOKENS,
        weights=config.weights,
    )
    figures: Figures = {case.name: {} for case in cases}
    names: list[str] = []
    try:
        with ExitStack() as running:
            peers = _started(running, config, model, sizes, console)
            names += [peer.name for peer in peers]
            _ask_by_turns(config, cases, peers, figures, console)
    except (KeyboardInterrupt, PeerProblem) as end:  # perhaps only while peers end
        if not (measured := whole_rounds(figures, names)):
            raise
        is_whole = measured == figures and all(
            len(rates) == config.rounds for by_peer in figures.values() for rates in by_peer.values()
        )
        return measured, None if is_whole else end
    return figures, None


def _ask_by_turns(
    config: PeersConfig, cases: Sequence[Case], peers: Sequence[Peer], figures: Figures, console: Console
) -> None:
    with StepProgress(console, "measurements", config.rounds * len(cases) * len(peers)) as progress:
        for number in range(config.rounds):
            for case in cases:
                for peer in peers:
                    peer.send(signal.SIGCONT)
                    seed = f"{number} {case.name}" if case.kind == "prefill" else case.name
                    rate = _rate(peer, case, config.output_tokens, seed)
                    peer.send(signal.SIGSTOP)
                    figures[case.name].setdefault(peer.name, []).append(rate)
                    progress.advance(f"{peer.name}, {case.name}")


def _started(running: ExitStack, config: PeersConfig, model: Path, sizes: Sizes, console: Console) -> list[Peer]:
    """Those that are asked for and there, each stopped but for Baton."""
    ways: dict[str, tuple[bool, Callable[[], AbstractContextManager[Peer]]]] = {
        "Baton": (True, lambda: baton(model, sizes)),
        "vLLM": (has_vllm(config.envs), lambda: vllm(config.envs, model, sizes)),
        "llama.cpp": (has_llama(config.envs), lambda: llama_cpp(config.envs, model, sizes)),
        "transformers": (True, lambda: transformers(model, sizes)),
    }
    peers = []
    for name in config.peers:
        is_there, start = ways[name]
        if not is_there:
            console.print(f"{name}: not in {config.envs} (--install on)")
            continue
        console.print(f"{name}: starting")
        try:
            peer = running.enter_context(start())
        except PeerProblem as error:
            console.print(f"left out: {error}")
            continue
        peer.send(signal.SIGSTOP)
        peers.append(peer)
    return peers


def _rate(peer: Peer, case: Case, output_tokens: int, seed: str) -> float:
    """Tokens a second."""
    if not peer.url:
        if case.kind == "prefill":
            return case.tokens / answer_of(peer, f"prefill {case.tokens}")
        steps = output_tokens - 1
        return case.clients * steps / answer_of(peer, f"decode {case.clients} {case.tokens} {steps}")
    if case.kind == "prefill":
        (record,) = run_async(_ask(peer.url, case, 1, seed))
        assert record.ttft_s is not None
        return case.tokens / record.ttft_s
    run_async(_ask(peer.url, case, 1, seed))  # now its prompts are cached
    return decode_rate(run_async(_ask(peer.url, case, output_tokens, seed)))


async def _ask(url: str, case: Case, output_tokens: int, seed: str) -> list[Record]:
    """All clients at once, each with a prompt of its own that the seed draws. Raises PeerProblem unless all are answered."""
    asking = Asking(await _model_of(url), "token_ids")
    letters = alphabet("token_ids", _VOCABULARY)
    prompts = Prompts(seed, "token_ids", letters, num_digits(case.clients, len(letters)))
    asked = []
    for index in range(case.clients):
        prompt = prompts.json([Piece(Space.OWN, index, case.tokens)])
        asked.append(Asked(index, asking.body(prompt, output_tokens), case.tokens, output_tokens))
    records = await run_closed_loop(Sender(Server.parse(url), True, _REQUEST_LIMIT_S), asked, case.clients)
    for record in records:
        if not record.is_ok or not record.chunk_at_s:
            raise PeerProblem(f"{url}, {case.name}: {record.status} {record.error}")
    return records


async def _model_of(url: str) -> str:
    """Raises PeerProblem."""
    try:
        async with httpx.AsyncClient(timeout=_REQUEST_LIMIT_S, trust_env=False) as client:
            content: dict[str, Any] = (await client.get(f"{url}/v1/models")).raise_for_status().json()
        return str(content["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise PeerProblem(f"{url}/v1/models: {error or type(error).__name__}") from error


def decode_rate(records: Sequence[Record]) -> float:
    """Tokens behind each stream's first, a second, from the first of those to the last of all. Raises PeerProblem."""
    begins = [record.arrival_s + record.lag_s + record.chunk_at_s[0] for record in records]
    ends = [record.arrival_s + record.lag_s + record.chunk_at_s[-1] for record in records]
    if max(ends) == min(begins):
        raise PeerProblem("all tokens were read at once: a decode rate needs a greater --output-tokens")
    return sum((record.output_tokens or 0) - 1 for record in records) / (max(ends) - min(begins))


def numbers(name: str, text: str) -> list[int]:
    """Positive whole numbers out of a knob. Raises ValueError."""
    try:
        found = [int(part) for part in text.split(",") if part]
    except ValueError:
        found = [0]
    if any(number < 1 for number in found):
        raise ValueError(f"--{name} {text}: must be positive whole numbers with commas between")
    return found


if __name__ == "__main__":
    sys.exit(main())
