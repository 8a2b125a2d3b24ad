"""The processes of a node's ranks behind the first, as the node's own process has them: started, waited for, watched, ended.

    start ──► each maps the KV memory and loads its part ──► loaded ──► all meet ──► steps … ──► their pipes end

They are this process's children and nothing without it: the kernel kills them when it dies, their pipes end when it is done with
them. One that ends before is the end of the node (node/process.py): its heads are computed by nobody else. Not here: what they do
(node/rank_process.py, engine/lockstep.py).
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Final, TypeVar

from node.rank_process import LOADED, RankJob, meeting_path
from runtime.config import child_environment
from runtime.logs import log_event
from runtime.process import computed_s
from runtime.threads import started_thread

T = TypeVar("T")
LOG: Final = logging.getLogger(__name__)
_ROOT: Final = Path(__file__).resolve().parent.parent
END_TIMEOUT_S: Final = 2.0  # for who has nothing left to do but return
# One that loads computes, if only what it takes to read; who computes nothing for so long is stopped, or hangs.
HANGS_S: Final = 60.0
_LOOK_S: Final = 0.5
_MAX_ANSWER_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    steps: IO[bytes]
    answers: IO[bytes]
    ended: Future[None]


class RankProcesses:
    """All ranks but this process's own."""

    def __init__(self, job: RankJob) -> None:
        """Start them, on the main thread, whose end is theirs; `job` as rank 1 is told it, the meeting's descriptor left out."""
        self._meeting = os.memfd_create("baton-ranks", os.MFD_CLOEXEC)
        self._kills = False  # from now on ends are this process's doing
        self._ranks: list[_Rank] = []
        for number in range(1, job.size):
            self._ranks.append(self._started(replace(job, rank=number, meeting_descriptor=self._meeting)))

    def _started(self, job: RankJob) -> _Rank:
        environment = child_environment(job.threads)
        # The code that this process runs, wherever it found it, and first of all.
        environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [environment.get("PYTHONPATH")])])
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "node.rank_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(job.kv_descriptor, job.meeting_descriptor),
            env=environment,
        )
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended already: `wait_until_loaded` says so
            process.stdin.write(job.to_line())
            process.stdin.flush()

        def wait_for_end() -> None:
            if process.wait() and not self._kills:
                log_event(LOG, logging.ERROR, "rank_ended", rank=job.rank, pid=process.pid, how=how_it_ended(process))

        ended = started_thread(f"rank-{job.rank}", wait_for_end)
        return _Rank(job.rank, process, process.stdin, process.stdout, ended)

    @property
    def pids(self) -> tuple[int, ...]:
        """Their process ids, in the ranks' order."""
        return tuple(rank.process.pid for rank in self._ranks)

    @property
    def pipes(self) -> Sequence[IO[bytes]]:
        """Where steps go."""
        return [rank.steps for rank in self._ranks]

    @property
    def ends(self) -> Sequence[tuple[int, Future[None]]]:
        """Of each rank its number, and what resolves when its process has ended, whyever."""
        return [(rank.number, rank.ended) for rank in self._ranks]

    @property
    def meeting(self) -> str:
        """The path of the file by which the ranks find each other; it has no name that could be left behind."""
        return meeting_path(self._meeting)

    def wait_until_loaded(self) -> None:
        """Wait for all of them, then have them join. Raises ValueError with the sentence of one that could not load, or hangs."""
        for rank in self._ranks:
            with rank.answers:
                answer = _answer(rank)
            if not answer:
                rank.ended.result()
                raise ValueError(f"--tp: rank {rank.number} ended while it loaded: {how_it_ended(rank.process)}")
            if answer != LOADED:
                raise ValueError(answer)
        for rank in self._ranks:
            with suppress(BrokenPipeError):  # it has ended meanwhile: `until_met` says so
                rank.steps.write(b"\n")
                rank.steps.flush()

    def until_met(self, meet: Callable[[], T]) -> T:
        """What `meet` returns, in which this process and the ranks wait for each other for the first time.

        In a thread: it may wait for one that has ended. Raises ValueError, in one sentence, where one ends, or does not come.
        """
        met: Future[T] = Future()

        def work() -> None:
            try:
                met.set_result(meet())
            except (OSError, RuntimeError) as error:  # torch's, of who does not come and of connections that end
                met.set_exception(error)

        over, ends = started_thread("ranks-meet", work), [rank.ended for rank in self._ranks]
        wait([over, *ends], return_when=FIRST_COMPLETED)
        if not met.done() or met.exception():
            wait(ends, END_TIMEOUT_S, FIRST_COMPLETED)  # a connection ends a little before its process has
        for rank in self._ranks:
            if rank.ended.done():
                raise ValueError(f"--tp: rank {rank.number} ended while it loaded: {how_it_ended(rank.process)}")
        if not met.done():
            raise RuntimeError("the thread in which the ranks met has ended")  # and has said of what
        if error := met.exception():
            raise ValueError(f"--tp: the ranks did not meet: {str(error).partition(chr(10))[0]}")
        return met.result()

    def close(self) -> None:
        """End them: who does not end with its pipe is killed."""
        for rank in self._ranks:
            with suppress(BrokenPipeError):  # what it did not read any more
                rank.steps.close()
        wait([rank.ended for rank in self._ranks], END_TIMEOUT_S)
        self._kills = True
        for rank in self._ranks:
            rank.process.kill()  # does nothing to who has ended
            rank.ended.result()
            rank.answers.close()
        os.close(self._meeting)


def _answer(rank: _Rank) -> str:
    """What it says once it has loaded, or cannot; "" if it ends before. Raises ValueError: it hangs."""
    pid, answers, said = rank.process.pid, select.poll(), b""
    answers.register(rank.answers, select.POLLIN)
    computed, idle_s = computed_s(pid), 0.0
    while not said.endswith(b"\n"):
        if answers.poll(_LOOK_S * 1000):
            if not (more := os.read(rank.answers.fileno(), _MAX_ANSWER_BYTES)):
                break
            said += more
        elif (now := computed_s(pid)) > computed:
            computed, idle_s = now, 0.0
        else:
            idle_s += _LOOK_S  # looks, and not what the clock says: this process may have been stopped with it
        if idle_s >= HANGS_S:
            raise ValueError(f"--tp: rank {rank.number} hangs as it loads: it has computed nothing for {HANGS_S:g} s")
    return said.decode().strip()


def how_it_ended(process: subprocess.Popen[bytes]) -> str:
    """In words; of one that has ended."""
    code = process.returncode
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
