"""The process that nodes are forked from, asked as the launcher asks it. With nodes that serve: tests/e2e/test_launch_forker.py."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import psutil
import pytest

from deploy.forker import ForkedProcess, Forker
from tests.architecture.source_tree import DEMO_MODEL

# Read by Python as it starts, in the forker as in any process of its environment.
NO_MORE_PROCESSES: Final = """
import errno, os
def fork():
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
os.fork = fork
"""
NO_TORCH: Final = "import sys; sys.modules['torch'] = None"
# A node that says what it has of the forker, and waits.
TOLD: Final = """
import os, signal, sys
from deploy import node_process
def main(arguments):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    print(*arguments, "torch" in sys.modules, os.getpgrp() == os.getpid(), len(os.listdir("/proc/self/fd")), flush=True)
    print(signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getsignal(signal.SIGINT), file=sys.stderr, flush=True)
    while True:
        signal.pause()
node_process.main = main
"""


@asynccontextmanager
async def running(folder: Path, site: str = "") -> AsyncIterator[tuple[Forker, list[int]]]:
    """A forker, and the pids of those that have ended by themselves. `site`: run by it before anything else."""
    environment: Mapping[str, str] = {"HOME": os.environ["HOME"]}  # a title has no room there
    if site:
        (folder / "sitecustomize.py").write_text(site)
        environment = {**environment, "PYTHONPATH": str(folder)}
    ended: list[int] = []
    forker = Forker(folder / "forker.log", environment, ended.append)
    try:
        async with asyncio.timeout(100):
            yield forker, ended
    finally:
        await forker.close()


async def forked(forker: Forker, log: Path, *arguments: str) -> ForkedProcess:
    """A node that writes there."""
    with log.open("ab") as file:
        return await forker.fork(arguments, file.fileno())


async def lines_of(log: Path, number: int) -> list[str]:
    """The first lines of a log, once it has so many."""
    lines: list[str] = []
    while len(lines) < number:
        await asyncio.sleep(0.01)
        lines = log.read_text().splitlines()  # noqa: ASYNC240 - nobody waits beside it
    return lines


def test_a_copy_has_torch_a_group_and_a_log_of_its_own_and_nothing_else_of_the_forker(tmp_path: Path) -> None:
    log = tmp_path / "node.log"

    async def run() -> None:
        async with running(tmp_path, TOLD) as (forker, _):
            names = ("--a", "--" + "b" * 2000)
            nodes = [await forked(forker, log, "decode", name) for name in names]
            said = await lines_of(log, 4)
            told = f"--parent-pid {forker.pid} True True"
            for name in names:
                # Three standard streams, and the folder that is being read; not the other node's descriptor, nor the socket.
                assert f"decode {name} {told} 4" in said
            assert said.count("set() 0") == 2  # no signal waits, and the first one ends it
            assert psutil.Process(forker.pid).num_threads() == 1
            assert {psutil.Process(node.pid).ppid() for node in nodes} == {forker.pid}
            for name, node in zip(names, nodes, strict=True):
                words = psutil.Process(node.pid).cmdline()
                assert " ".join(words).strip() == f"baton decode {name} --parent-pid {forker.pid}"

    asyncio.run(run())


def test_how_a_copy_ends_is_told_as_of_any_process(tmp_path: Path) -> None:
    """Its own exit code, a signal's number; a signal for one that has ended reaches nobody."""
    log = tmp_path / "node.log"

    async def run() -> None:
        async with running(tmp_path) as (forker, _):
            wrong = await forked(forker, log, "encode")
            assert await wrong.wait() == wrong.returncode == 2
            assert log.read_text() == "baton: encode: must be prefill, decode or mixed\n"
            wrong.send_signal(signal.SIGTERM)
            wrong.kill()
            helped = await forked(forker, tmp_path / "help.log", "decode", "--help")
            assert await helped.wait() == 0
            assert "--num-blocks" in (tmp_path / "help.log").read_text()

    asyncio.run(run())


def test_a_node_of_whose_words_one_is_no_utf8_is_started(tmp_path: Path) -> None:
    """Paths are bytes."""

    async def run() -> None:
        async with running(tmp_path) as (forker, _):
            node = await forked(forker, tmp_path / "node.log", "decode", "--help", "--ready-file", "/run/\udcfc")
            assert await node.wait() == 0

    asyncio.run(run())


def test_signals_for_every_process_there_is_are_for_the_nodes(tmp_path: Path) -> None:
    """A service manager sends them to all: who loses the forker loses every node in the middle of its work."""

    async def run() -> None:
        async with running(tmp_path, TOLD) as (forker, ended):
            log = tmp_path / "node.log"
            nodes = [await forked(forker, log, "decode") for _ in range(2)]
            await lines_of(log, 4)
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
                os.kill(forker.pid, number)
            nodes[0].send_signal(signal.SIGTERM)
            assert await nodes[0].wait() == 7
            nodes[1].send_signal(signal.SIGINT)
            assert await nodes[1].wait() == -signal.SIGINT
            assert not ended

    asyncio.run(run())


def test_who_loses_the_forker_loses_its_nodes_hears_of_it_and_has_another_one_for_the_next(tmp_path: Path) -> None:
    """Two who ask at once have the same one; who had asked before has none."""

    async def run() -> None:
        async with running(tmp_path, TOLD) as (forker, ended):
            log = tmp_path / "node.log"
            node = await forked(forker, log, "decode")
            there, lost = psutil.Process(node.pid), forker.pid
            await lines_of(log, 2)
            os.kill(lost, signal.SIGSTOP)
            asked = asyncio.create_task(forked(forker, log, "decode"))
            await asyncio.sleep(0)
            os.kill(lost, signal.SIGKILL)
            assert await node.wait() == -signal.SIGKILL
            with pytest.raises(OSError, match="loads torch for all nodes has ended"):
                await asked
            assert ended == [lost]
            with suppress(psutil.NoSuchProcess):
                there.wait(60)
            nodes = await asyncio.gather(*(forked(forker, log, "decode") for _ in range(2)))
            assert {psutil.Process(each.pid).ppid() for each in nodes} == {forker.pid} != {lost}

    asyncio.run(run())


def test_a_limit_of_processes_is_told_to_who_asks_and_ends_nobody(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, NO_MORE_PROCESSES) as (forker, ended):
            for _ in range(2):
                with pytest.raises(OSError) as caught:
                    await forked(forker, tmp_path / "node.log", "decode")
                assert caught.value.errno == errno.EAGAIN
            assert not ended

    asyncio.run(run())


def test_a_node_says_itself_that_there_is_no_torch(tmp_path: Path) -> None:
    """In its own log, where its user looks; the forker has nothing to fork from, and forks."""

    async def run() -> None:
        async with running(tmp_path, NO_TORCH) as (forker, ended):
            log = tmp_path / "node.log"
            node = await forked(forker, log, "decode", "--model", str(DEMO_MODEL), "--router", "127.0.0.1:9")
            assert await node.wait() == 1
            assert "import of torch halted" in log.read_text()
            assert not ended

    asyncio.run(run())


def test_a_node_that_nobody_waits_for_any_more_is_killed(tmp_path: Path) -> None:
    """Ctrl-C while torch is loaded: what was asked for before comes all the same."""

    async def run() -> None:
        async with running(tmp_path, TOLD) as (forker, _):
            log = tmp_path / "node.log"
            await forker.open()
            asked = asyncio.create_task(forked(forker, log, "decode", "--unwanted"))
            await asyncio.sleep(0)
            asked.cancel()
            wanted = await forked(forker, log, "decode", "--wanted")
            children = [wanted.pid, 0]
            while children != [wanted.pid]:
                await asyncio.sleep(0.01)
                children = [child.pid for child in psutil.Process(forker.pid).children()]
            assert wanted.returncode is None

    asyncio.run(run())
