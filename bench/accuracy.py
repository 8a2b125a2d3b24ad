"""`python -m bench.accuracy`: held-out questions to the demo model: through one process, a cluster, and one whose nodes die.

    the same questions --chat, temperature 0--> one mixed node                              --> answers, share right by exam
                       '----------------------> 2 prefill, 2 decode nodes                   --> the same answers
                       '----------------------> the same, one after the other of them killed, stopped, drained --> the same answers

What a byte of KV in the wrong place does to users: another number. Exit code 1 where an answer is not the one of one process,
where no stream was hit, or where fewer are right than a model as good as promised has by chance.
"""

from __future__ import annotations

import asyncio
import math
import shlex
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import httpx
from rich.console import Console
from rich.table import Table

from bench.cluster import ClusterProblem
from bench.fleet import Fleet
from bench.frame import check_files, check_model, write_result
from bench.machine import machine, utc_date
from bench.progress import StepProgress
from bench.recovery import model_name
from engine.demo.examine import EXAMS, draw_exam
from engine.demo.talk import Turn
from runtime.config import knob, load
from runtime.process import fatal, run_async

PROG: Final = "python -m bench.accuracy"
SIDES: Final = ("one process", "cluster", "cluster, nodes dying")
LEAST_RIGHT: Final = MappingProxyType({"recall": 0.99, "questions": 0.95})  # by the first word of the exam's name
_DESCRIPTION: Final = (
    "Ask the demo model what it never saw: recall over up to 1,000 tokens, facts in other wordings, copying, sorting, arithmetic. "
    "Through one process, through prefill and decode nodes, and through them while one after the other is killed, stopped "
    "or drained: the answers must be the same, each one. The defaults take a few minutes on two cores."
)
_SIZES: Final = ("--max-model-len", "2048", "--num-blocks", "1024")
_NODES: Final = ("prefill-0", "prefill-1", "decode-0", "decode-1")
_FAULTS: Final = (
    ("kill", "decode-0"),
    ("kill", "prefill-0"),
    ("drain", "decode-1"),
    ("stop", "decode-0"),
    ("kill", "decode-1"),
    ("drain", "prefill-1"),
    ("stop", "prefill-0"),
)
_LEAST_CHANCE: Final = 0.01  # a model as good as promised is called worse once in a hundred runs at most
_STOPPED_S: Final = 3.0  # longer than it takes to be missed
_MOST_ANSWER_TOKENS: Final = 96
_DEADLINE_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class AccuracyConfig:
    """One run."""

    model: Path = knob(Path("deploy/demo_model"), help="the demo model's directory", metavar="DIR")
    exams: str = knob(",".join(name.replace(",", "") for name in EXAMS), "what is asked", metavar="NAME,…")
    count: int = knob(200, "questions of each exam", low=1, high=100_000)
    streams: int = knob(16, "under way at once", low=1, high=256)
    fault_pause: float = knob(0.5, "seconds from a node's return to the next fault", low=0.0, high=3600.0)
    seed: int = knob(1, "of the questions", low=0, high=(1 << 63) - 1)
    output: Path | None = knob(None, "JSON file for all shares", metavar="FILE")

    def __post_init__(self) -> None:
        for name in self.exams.split(","):
            if name not in _BY_NAME:
                raise ValueError(f"--exams {name}: is none of {', '.join(_BY_NAME)}")
        check_model(self.model)
        check_files(self.output)


_BY_NAME: Final = MappingProxyType({name.replace(",", ""): name for name in EXAMS})


@dataclass(frozen=True, slots=True)
class Side:
    """What one way of serving answered."""

    name: str
    answers: Mapping[str, Sequence[str]]  # by exam
    faults: int
    retries: Mapping[str, int]  # by the code of the PD Error before

    def share_right(self, exam: str, turns: Sequence[Turn]) -> float:
        """Of an exam's questions."""
        return sum(turn.answer == said for turn, said in zip(turns, self.answers[exam], strict=True)) / len(turns)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, 1 if answers differ or too few are right, 2 for what the user can mend, 130."""
    config = load(AccuracyConfig, PROG, _DESCRIPTION, argv)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or a cluster would outlive the benchmark
    names = [_BY_NAME[name] for name in config.exams.split(",")]
    exams = {name: list(draw_exam(name, config.count, config.seed)) for name in names}
    try:
        sides = [_measure(config, name, exams, console) for name in SIDES]
    except ClusterProblem as error:
        fatal(f"{PROG}: {error}")
    except KeyboardInterrupt:
        sys.stderr.write(f"{PROG}: interrupted; nothing was written\n")
        return 130
    _show(console, exams, sides)
    complaints = list(_complaints(exams, sides))
    for complaint in complaints:
        console.print(f"broken: {complaint}")
    if config.output is not None:
        command = f"{PROG} {shlex.join(sys.argv[1:] if argv is None else argv)}"
        facts: dict[str, Any] = {"command": command, "date": utc_date(), "machine": machine(), "complaints": complaints}
        write_result(PROG, config.output, facts | {"sides": [_figures(side, exams) for side in sides]})
        console.print(f"written: {config.output}")
    return 1 if complaints else 0


def _complaints(exams: Mapping[str, Sequence[Turn]], sides: Sequence[Side]) -> Iterator[str]:
    alone = sides[0]
    for exam, turns in exams.items():
        least, share = LEAST_RIGHT.get(exam.split(",")[0], 0.0), alone.share_right(exam, turns)
        if chance_of(round(share * len(turns)), len(turns), least) < _LEAST_CHANCE:
            yield f"{exam}: {share:.1%} are right, and {least:.0%} are promised"
        for side in sides[1:]:
            num_other = sum(ours != its for ours, its in zip(side.answers[exam], alone.answers[exam], strict=True))
            if num_other:
                yield f"{exam}: {num_other} of {len(turns)} answers through the {side.name} are not those of one process"
    if not sides[-1].retries:
        yield "no stream had a second attempt: nothing that died was in use"


def chance_of(num_right: int, num_asked: int, share: float) -> float:
    """How likely so few right answers are, or fewer, where each is right with this probability (binomial distribution)."""
    ways = (
        math.comb(num_asked, right) * share**right * (1 - share) ** (num_asked - right)
        for right in range(num_right + 1)
    )
    return sum(ways)


def _figures(side: Side, exams: Mapping[str, Sequence[Turn]]) -> dict[str, Any]:
    right = {exam: side.share_right(exam, turns) for exam, turns in exams.items()}
    return {"name": side.name, "right": right, "faults": side.faults, "retries": dict(side.retries)}


# ---------------------------------------------------------------- one side


def _measure(config: AccuracyConfig, side: str, exams: Mapping[str, Sequence[Turn]], console: Console) -> Side:
    is_alone, is_hurt = side == SIDES[0], side == SIDES[2]
    nodes = ("mixed-0",) if is_alone else _NODES
    flags: dict[str, Sequence[str]] = {"router": (), **dict.fromkeys(nodes, _SIZES)}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-")))
        fleet = stack.enter_context(Fleet.started(config.model.absolute(), folder, flags))
        with _faults(fleet, config.fault_pause) if is_hurt else nullcontext([0]) as faults:
            answers = run_async(_ask_all(fleet.url, config, exams, console, side))
        return Side(side, answers, faults[0], fleet.metric_by_code("retries_total"))


async def _ask_all(
    url: str, config: AccuracyConfig, exams: Mapping[str, Sequence[Turn]], console: Console, side: str
) -> dict[str, list[str]]:
    gate = asyncio.Semaphore(config.streams)
    total = sum(map(len, exams.values()))
    async with httpx.AsyncClient(
        timeout=_DEADLINE_S, trust_env=False, limits=httpx.Limits(max_connections=None)
    ) as client:
        with StepProgress(console, side, total) as progress:

            async def ask(exam: str, turn: Turn) -> str:
                body = {
                    "model": model_name(config.model.absolute()),
                    "messages": [{"role": "user", "content": turn.asked}],
                    "temperature": 0,
                    "max_tokens": _MOST_ANSWER_TOKENS,
                }
                async with gate:
                    answer = await client.post(f"{url}/v1/chat/completions", json=body)
                    progress.advance(exam)
                if answer.status_code != httpx.codes.OK:
                    raise ClusterProblem(f"{side}, {exam}: {answer.status_code} {answer.text[:300]}")
                said: str = answer.json()["choices"][0]["message"]["content"]
                return said

            asked = [(exam, turn) for exam, turns in exams.items() for turn in turns]
            said = await asyncio.gather(*(ask(exam, turn) for exam, turn in asked))
            return {exam: [each for (of, _), each in zip(asked, said, strict=True) if of == exam] for exam in exams}


@contextmanager
def _faults(fleet: Fleet, pause_s: float) -> Iterator[list[int]]:
    """One node after the other is hurt and comes back, until the context is left; yields how many so far."""
    count, is_over = [0], threading.Event()

    def hurt() -> None:
        for way, node in cycle(_FAULTS):
            match way:
                case "kill":
                    fleet.kill(node)
                case "drain":
                    fleet.terminate(node)
                    fleet.wait_for_end(node)
                case "stop":
                    fleet.freeze(node)
                    is_over.wait(_STOPPED_S)
                    fleet.thaw(node)
            count[0] += 1
            if way != "stop":
                fleet.start(node)
            fleet.wait_until_ready()
            if is_over.wait(pause_s):
                return

    thread = threading.Thread(target=hurt, name="faults")
    thread.start()
    try:
        yield count
    finally:
        is_over.set()
        thread.join()


def _show(console: Console, exams: Mapping[str, Sequence[Turn]], sides: Sequence[Side]) -> None:
    table = Table(title=None, box=None, pad_edge=False)
    table.add_column("right answers")
    for side in sides:
        table.add_column(side.name, justify="right")
    for exam, turns in exams.items():
        table.add_row(exam, *(f"{side.share_right(exam, turns):.1%}" for side in sides))
    table.add_row("nodes hurt", *(str(side.faults) for side in sides))
    codes = sorted({code for side in sides for code in side.retries})
    for code in codes:
        table.add_row(f"second attempts, {code}", *(str(side.retries.get(code, 0)) for side in sides))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
