"""The link between a router's parent and a worker, over a real socket: who hangs is given up, who is slow is not."""

from __future__ import annotations

import asyncio
import socket

import pytest

from proto import baton_pb2 as pb
from router import worker_link
from router.worker_link import WorkerLink

Link = WorkerLink[pb.FromWorker, pb.ToWorker]
BIG = pb.ToWorker(pages=pb.WorkerPages(texts={0: "x" * (1 << 20)}))


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(worker_link, "_now", lambda: self.now)


async def opened(hung: list[int]) -> tuple[Link, socket.socket]:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    return await Link.opened(pb.FromWorker.FromString, ours, hung.append), theirs


def test_who_reads_nothing_is_given_up_and_nothing_more_is_kept_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        clock, hung = Clock(monkeypatch), list[int]()
        link, theirs = await opened(hung)
        with theirs:
            for _ in range(30):  # at once: much more than the bound, as a page may be
                link.send(BIG)
            assert not hung
            clock.now = 4.9
            link.send(BIG)
            assert not hung, "it may have been busy"
            clock.now = 5.1
            for _ in range(3):
                link.send(BIG)
            (unread_bytes,) = hung
            assert 29 << 20 < unread_bytes < 32 << 20
            assert await link.read() is None

    asyncio.run(run())


def test_who_has_caught_up_meanwhile_has_its_whole_time_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        clock, hung = Clock(monkeypatch), list[int]()
        link, theirs = await opened(hung)
        with theirs:
            for clock.now in (0.0, 4.0, 8.0, 12.0):
                for _ in range(12):
                    link.send(BIG)
                for _ in range(11):  # it reads while the next ones are on their way
                    await received(theirs, len(worker_link.framed(BIG)))
                link.send(BIG)
                for _ in range(2):
                    await received(theirs, len(worker_link.framed(BIG)))
            assert not hung
            link.close()

    asyncio.run(run())


async def received(end: socket.socket, num_bytes: int) -> None:
    while num_bytes:
        part = await asyncio.get_running_loop().sock_recv(end, num_bytes)
        assert part, "the link was closed"
        num_bytes -= len(part)
