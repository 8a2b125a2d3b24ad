"""The link between a router's parent and a worker, over a real socket: who hangs is given up, who is slow is not."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from proto import baton_pb2 as pb
from router import worker_end, worker_link
from router.config import RouterConfig
from router.rate_limit import Taken
from router.worker_end import WorkerEnd
from router.worker_link import WorkerLink
from runtime.config import to_json
from runtime.session import Peer


class Nobody:
    """Hears of no nodes."""

    def on_listed(self, entry: pb.NodeEntry) -> None: ...

    def on_missed(self, node: Peer) -> None: ...

    def on_unlisted(self, node: Peer) -> None: ...


class Uncounted:
    """What a worker counts for its parent."""

    def refused_grpc(self, number: int) -> None: ...

    def count_registry(self, name: str, number: int) -> None: ...


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


def test_who_is_slow_and_reads_all_the_while_is_not_given_up_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        clock, hung = Clock(monkeypatch), list[int]()
        link, theirs = await opened(hung)
        with theirs:
            for _ in range(20):
                link.send(BIG)
            for clock.now in (4.0, 8.0, 12.0, 16.0):  # it reads a page, and two more come
                await received(theirs, len(worker_link.framed(BIG)))
                link.send(BIG)
                link.send(BIG)
            assert not hung
            for _ in range(50):
                link.send(BIG)
            for clock.now in (18.0, 20.0):
                await received(theirs, len(worker_link.framed(BIG)))
                link.send(BIG)
            assert not hung
            clock.now = 21.5
            link.send(BIG)
            assert hung, "memory is not for all"

    asyncio.run(run())


def test_however_many_ask_for_a_page_the_parent_is_asked_once_and_once_more_for_who_came_meanwhile() -> None:
    async def run() -> None:
        parents, workers = socket.socketpair()
        settings = pb.WorkerSettings(index=1, config=to_json(RouterConfig(model=Path("m"))))
        parents.sendall(worker_link.framed(pb.ToWorker(settings=settings)))
        async with AsyncExitStack() as started:
            end = WorkerEnd(started.enter_context(socket.socket()), workers)
            await end.open(Nobody(), Uncounted(), lambda page: f"own {page}", started)
            parent = await WorkerLink[pb.FromWorker, pb.ToWorker].opened(pb.FromWorker.FromString, parents)
            started.callback(parent.close)
            first = [asyncio.create_task(end.page_of_all("metrics")) for _ in range(50)]
            asked = await parent.read()
            later = [asyncio.create_task(end.page_of_all("metrics")) for _ in range(50)]
            for number in (1, 2):
                assert asked is not None and asked.want_page.question == number
                parent.send(pb.ToWorker(pages=pb.WorkerPages(question=number, texts={0: f"page {number}"})))
                if number == 1:
                    asked = await parent.read()
            assert {tuple(each.items()) for each in await asyncio.gather(*first)} == {((0, "page 1"),)}
            assert {tuple(each.items()) for each in await asyncio.gather(*later)} == {((0, "page 2"),)}
            assert not end.num_remembered, "clients name pages as they like"

    asyncio.run(run())


def test_what_clients_have_in_some_milliseconds_is_told_as_one_sum_and_waits_for_a_parent_that_reads_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each was a message, which the parent made anew for every worker, and what it did not read lay in a worker's memory."""
    monkeypatch.setattr(worker_end, "_MOST_UNREAD_BYTES", 1 << 16)
    num_clients, num_rounds = 1000, 40

    async def run() -> None:
        parents, workers = socket.socketpair()
        parents.sendall(
            worker_link.framed(pb.ToWorker(settings=pb.WorkerSettings(config=to_json(RouterConfig(model=Path("m"))))))
        )
        async with AsyncExitStack() as started:
            end = WorkerEnd(started.enter_context(socket.socket()), workers)
            await end.open(Nobody(), Uncounted(), str, started)
            for _ in range(num_rounds):
                for number in range(num_clients):
                    end.tell(Taken(f"client-{number}", "tokens", 3, 1000))
                    end.tell(Taken(f"client-{number}", "tokens", 4, 1000))
                end.tell(Taken("client-0", "requests", 1, 10))
                await asyncio.sleep(0.02)
            had, num_messages = Counter[tuple[str, bool]](), 0
            parent = await WorkerLink[pb.FromWorker, pb.ToWorker].opened(pb.FromWorker.FromString, parents)
            started.callback(parent.close)
            while had["client-0", True] < 7 * num_rounds or had["client-0", False] < num_rounds:
                message = await parent.read()
                assert message is not None and message.took.limit == (1000 if message.took.tokens else 10)
                had[message.took.name, message.took.tokens] += message.took.amount
                num_messages += 1
            assert had["client-0", True] == 7 * num_rounds and had["client-0", False] == num_rounds, "nothing is lost"
            assert num_messages < num_rounds * num_clients / 2

    asyncio.run(run())


async def received(end: socket.socket, num_bytes: int) -> None:
    while num_bytes:
        part = await asyncio.get_running_loop().sock_recv(end, num_bytes)
        assert part, "the link was closed"
        num_bytes -= len(part)
