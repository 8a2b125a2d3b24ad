"""`python -m node.rank_process`: a rank of a node behind the first (`--tp`), started, told and ended by the node's own process.

    stdin     a line: the job; a line: all ranks are loaded; then steps (engine/lockstep.py), until it ends
    stdout    one line: loaded, or the sentence why not
    stderr    the node's own: a rank that dies of a bug says so in the node's log

It maps the node's KV memory and writes its heads into it, and knows no plan, no token's meaning and no network but the other
ranks'. Signals to stop are the node's business; it ends with the pipe, and is killed by the kernel if the node's process dies.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Final, Literal, TextIO

from runtime.collecting import loading
from runtime.process import EXIT_USAGE, die_with_parent, end_process

LOADED: Final = "loaded"


@dataclass(frozen=True, slots=True)
class RankJob:
    """What a rank is told: what its node was told, and what the ranks share."""

    rank: int
    size: int
    model: str
    dtype: str
    kernels: str
    device: str  # the type: which of several follows from the rank
    weight_dtype: Literal["auto", "int8"]
    threads: int
    block_size: int
    num_blocks: int
    kv_descriptor: int  # inherited, as the next
    meeting_descriptor: int  # of a file by which the ranks find each other
    parent_pid: int

    def to_line(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"


def meeting_path(descriptor: int) -> str:
    """How a process that has it opens a file without a name."""
    return f"/proc/self/fd/{descriptor}"


def main() -> int:
    """Serve until the pipe ends; 0 then, 2 where it could not load."""
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # of a terminal or a service manager, who mean all processes of a node
        signal.signal(number, signal.SIG_IGN)
    steps = sys.stdin.buffer
    job = RankJob(**json.loads(steps.readline()))
    die_with_parent(job.parent_pid)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    return _run(job, steps, answers)


def _run(job: RankJob, steps: IO[bytes], answers: TextIO) -> int:
    # Behind the job: until then nobody has said with how many threads. It takes seconds.
    with loading():
        import torch

        from engine.device import rank_device
        from engine.kv_memory import mapped_kv
        from engine.lockstep import follow
        from engine.model import load_model
        from engine.model_config import read_model_config
        from engine.probe import find_inexactness
        from engine.ranks import join_ranks, meeting_store
        from engine.split import Split

    torch.set_num_threads(job.threads)
    split, device, path = Split(job.rank, job.size), rank_device(torch.device(job.device), job.rank), Path(job.model)
    try:
        config = read_model_config(path)
        memory = mapped_kv(job.kv_descriptor, config, job.block_size, job.num_blocks, job.dtype)
        model = load_model(path, job.dtype, job.kernels, device, job.weight_dtype, split)
        kv = memory.part(split, device, copies=model.kernels)
        answer = LOADED
    except ValueError as error:
        answer = " ".join(str(error).split())
    with answers:
        answers.write(answer + "\n")
    if answer != LOADED or not steps.readline():
        return 0 if answer == LOADED else EXIT_USAGE
    ranks = join_ranks(split, meeting_store(meeting_path(job.meeting_descriptor), job.size), device)
    model = model.joins(ranks)
    find_inexactness(model)  # all ranks together; what comes of it rank 0 says
    follow(model, kv, steps, ranks)
    return 0


if __name__ == "__main__":
    end_process(main)
