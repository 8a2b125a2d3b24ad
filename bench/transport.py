"""`python -m bench.transport`: how fast blocks get from one node process to another, against what the machine can do at all.

    sender process ──zmq, shm, nixl, with and without checksums─► receiver process
                   ──raw TCP, the same bytes────────────────────► the same memory            what zmq is measured against
                   ──libzmq, nothing copied by us───────────────► nowhere                    what zmq cannot exceed
                   ──NIXL alone, all blocks in one request──────► the same memory            what nixl is measured against
    Mooncake's transfer engine alone, over TCP, between two processes of its own environment (transport_mooncake.py)
                   ──a byte, and one back───────────────────────► np.copyto from the sender's    the most with such a copy
                                      receiver process: np.copyto, block by block            what shm is measured against

All ways take turns within a round, in an order that changes from round to round, and ratios are taken within a round: only they
mean anything on a machine that others use. The first rounds (`--warmup`) are not counted; in them what arrives is compared with
what was sent. A transfer lasts from giving it to the transport until the receiver's word that all of it is in place is back.
Transports without a suffix run with checksums switched off on both ends; shm then asks behind each copy whether its link
still stood. Not here: prefill, handoffs, links that are opened (they are open before the first transfer).
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from rich.console import Console

from bench.frame import check_files, write_result
from bench.machine import machine, utc_date
from bench.progress import RunProgress
from bench.transport_node import TRANSPORTS, Setup
from bench.transport_report import (
    MOONCAKE_ALONE,
    NIXL_ALONE,
    REFERENCES,
    CaseReport,
    Sample,
    report_of,
    show,
    size,
    to_json,
)
from connector.nixl_agent import is_installed
from runtime.config import knob, load

PROG: Final = "python -m bench.transport"
_MAX_BYTES: Final = 1 << 36
_WIDTH: Final = 100  # of a table that goes to a file
_ROOT: Final = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class TransportBenchConfig:
    """One run."""

    block_kib: str = knob("64,512,2048", "sizes of a KV block in KiB, each a case of its own", metavar="N,N,..")
    transfer_mib: str = knob(
        "16,128", "sizes of a transfer in MiB; the receiver needs twice as much memory", metavar="N,N,.."
    )
    rounds: int = knob(30, "rounds to measure; in each of them every way has one transfer", low=1, high=1_000_000)
    warmup: int = knob(3, "rounds before them, not counted; what arrives is checked in these", low=1, high=1000)
    transport: Literal["all", "zmq", "shm", "nixl"] = knob("all", "which to measure; all: nixl if it is installed")
    checksum: Literal["both", "on", "off"] = knob("both", "measure them with checksums, without, or both")
    mooncake: Path | None = knob(
        None, "Python of an environment with mooncake-transfer-engine: measure that, alone, beside ours", metavar="FILE"
    )
    output: Path | None = knob(None, "JSON file for the figures of the run and of each transfer", metavar="FILE")

    def __post_init__(self) -> None:
        if self.transport == "nixl" and not is_installed():
            raise ValueError("--transport nixl: NIXL is not installed: pip install -c constraints.txt -e '.[nixl]'")
        for name, unit in (("block_kib", 1 << 10), ("transfer_mib", 1 << 20)):
            try:
                sizes(getattr(self, name), unit)
            except ValueError as error:
                raise ValueError(f"--{name.replace('_', '-')} {error}") from None
        if max(sizes(self.block_kib, 1 << 10)) > min(sizes(self.transfer_mib, 1 << 20)):
            raise ValueError("--block-kib: a transfer holds one block at least")
        if self.mooncake is not None and not os.access(self.mooncake, os.X_OK):
            raise ValueError(f"--mooncake {self.mooncake}: no program that can be run")
        check_files(self.output)

    @property
    def transports(self) -> tuple[str, ...]:
        """The ways that are measured against a baseline."""
        every = ("zmq", "shm", "nixl") if is_installed() else ("zmq", "shm")
        kinds = every if self.transport == "all" else (self.transport,)
        suffixes = {"both": ("", "+checksum"), "on": ("+checksum",), "off": ("",)}[self.checksum]
        return tuple(name for name in TRANSPORTS if name in {kind + suffix for kind in kinds for suffix in suffixes})

    @property
    def references(self) -> tuple[str, ...]:
        """What the machine and the libraries alone can do."""
        has_nixl = any(name.startswith("nixl") for name in self.transports)
        alone = ((NIXL_ALONE, has_nixl), (MOONCAKE_ALONE, self.mooncake is not None))
        return (*REFERENCES, *(name for name, is_there in alone if is_there))


class BenchProblem(Exception):
    """The transports cannot be measured; the message is one sentence for the user."""


def sizes(text: str, unit_bytes: int) -> list[int]:
    """Bytes of "1,2,3" units; raises ValueError."""
    try:
        values = [int(each) * unit_bytes for each in text.split(",")]
    except ValueError:
        raise ValueError(f"{text}: whole numbers with commas between them") from None
    if not all(0 < value <= _MAX_BYTES for value in values):
        raise ValueError(f"{text}: from 1 to {_MAX_BYTES // unit_bytes}")
    return values


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, 1 if a transfer failed, 2 for what the user can mend, 130 after Ctrl-C."""
    config = load(TransportBenchConfig, PROG, "Measure the transports against raw TCP and memcpy.", argv)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _WIDTH
    command = f"{PROG} {shlex.join(sys.argv[1:] if argv is None else argv)}".rstrip()
    blocks, transfers = sizes(config.block_kib, 1 << 10), sizes(config.transfer_mib, 1 << 20)
    pairs = [(block, transfer // block * block) for transfer in transfers for block in blocks]
    num_ways = len(config.transports) + len(config.references)
    cases: list[CaseReport] = []
    samples: list[list[Sample]] = []
    console.print(
        f"{len(pairs)} cases of {config.rounds} rounds, {', '.join((*config.references, *config.transports))}"
    )
    try:
        with RunProgress(console, len(pairs) * config.rounds * num_ways, "transfers") as progress:
            for block_bytes, transfer_bytes in pairs:
                samples.append(list(measure(config, block_bytes, transfer_bytes, progress)))
                cases.append(report_of(block_bytes, transfer_bytes, samples[-1]))
    except BenchProblem as problem:
        sys.stderr.write(f"{PROG}: {problem}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write(f"{PROG}: interrupted; nothing was written\n")
        return 130
    show(console, cases)
    if config.output is not None:
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()}
        facts = {"command": command, "date": utc_date(), "machine": machine(), "settings": settings}
        write_result(PROG, config.output, to_json(cases, samples, facts))
        console.print(f"written: {config.output}")
    return 0


def measure(
    config: TransportBenchConfig, block_bytes: int, transfer_bytes: int, progress: RunProgress
) -> Iterator[Sample]:
    """The transfers of one case, between two fresh processes. Raises BenchProblem."""
    with Pair(block_bytes, transfer_bytes // block_bytes, config.transports, config.mooncake) as pair:
        ways = (*config.references, *config.transports)
        for round_index in range(-config.warmup, config.rounds):
            first = round_index % len(ways)
            for way in ways[first:] + ways[:first]:
                if round_index < 0:
                    pair.check(way)
                    continue
                sample = Sample(way, round_index, *pair.transfer(way))
                progress.count(sample)
                yield sample


class Process:
    """One of the two ends, spoken to over pipes."""

    def __init__(self, process: subprocess.Popen[str], setup: Setup) -> None:
        self._process = process
        self._role = setup.role
        self.hello = self._ask(asdict(setup))

    def ask(self, do: str, **details: object) -> dict[str, Any]:
        """What came of it; raises BenchProblem."""
        return self._ask({"do": do, **details})

    def _ask(self, content: dict[str, Any]) -> dict[str, Any]:
        if self._process.stdin is None or self._process.stdout is None:
            raise AssertionError("a process without pipes")
        try:
            self._process.stdin.write(json.dumps(content) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer: dict[str, Any] = json.loads(line) if line else {"error": "its process has ended"}
        if "error" in answer:
            raise BenchProblem(f"the {self._role}: {answer['error']}")
        return answer


@contextmanager
def started(setup: Setup, mooncake: Path | None = None) -> Iterator[Process]:
    """A process for the time of the context: an end of ours, or with `mooncake` the sending one of Mooncake's two."""
    command = [sys.executable, "-m", "bench.transport_node"]
    folder = None
    if mooncake is not None:
        command = ["env", "MC_LOG_LEVEL=ERROR", str(mooncake.absolute()), "-m", "bench.transport_mooncake"]
        folder = _ROOT  # where that Python finds the module
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder) as process:
        try:
            yield Process(process, setup)
        finally:
            process.kill()


class Pair:
    """Sender and receiver with open links between them; used as a context."""

    def __init__(
        self, block_bytes: int, num_blocks: int, transports: tuple[str, ...], mooncake: Path | None = None
    ) -> None:
        roles = ("receiver", "sender", MOONCAKE_ALONE)
        self._setups = {role: Setup(role, block_bytes, num_blocks, transports, os.getpid()) for role in roles}
        self._mooncake = mooncake
        self._label = f"{size(block_bytes)} blocks"
        self._num_leases = 0
        self._stack = ExitStack()

    def __enter__(self) -> Pair:
        with ExitStack() as undo:
            self.receiver = undo.enter_context(started(self._setups["receiver"]))
            self.sender = undo.enter_context(started(self._setups["sender"]))
            self.sender.ask("open", **self.receiver.hello)
            self._digest = self.sender.ask("digest")["digest"]
            if self._mooncake is not None:
                self.mooncake = undo.enter_context(started(self._setups[MOONCAKE_ALONE], self._mooncake))
            self._stack = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def transfer(self, way: str) -> tuple[float, float]:
        """Seconds that it took, and processor seconds that it took of both."""
        if way == "memcpy":
            seconds: float = self.receiver.ask("memcpy")["seconds"]
            return seconds, seconds
        if way == MOONCAKE_ALONE:
            took = self.mooncake.ask("send")
            return took["seconds"], took["cpu_s"]
        self._num_leases += 1
        lease = {"way": way, "lease_id": self._num_leases}
        is_leased = way not in (*REFERENCES, NIXL_ALONE)
        if is_leased:
            self.receiver.ask("admit", **lease)
        if way == NIXL_ALONE:
            self.receiver.ask("drive")
        cpu_before_s = self._cpu_s()
        seconds = self.sender.ask("send", **lease)["seconds"]
        cpu_s = self._cpu_s() - cpu_before_s
        if way == NIXL_ALONE:
            self.receiver.ask("rest")
        if is_leased:
            self.receiver.ask("revoke", **lease)
        return seconds, cpu_s

    def check(self, way: str) -> None:
        """Transfer, and compare what arrived with what was sent; raises BenchProblem where it differs."""
        if way == MOONCAKE_ALONE:
            is_same: bool = self.mooncake.ask("check")["is_same"]
        else:
            self.receiver.ask("clear")
            self.transfer(way)
            is_same = way in ("memcpy", "libzmq") or self.receiver.ask("digest")["digest"] == self._digest
        if not is_same:
            raise BenchProblem(f"{way}, {self._label}: other bytes arrived than were sent")

    def _cpu_s(self) -> float:
        return float(self.receiver.ask("cpu")["cpu_s"]) + float(self.sender.ask("cpu")["cpu_s"])


if __name__ == "__main__":
    sys.exit(main())
