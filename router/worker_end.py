"""A worker's end of the link to its parent: what a router process has from the parent instead of making it itself.

    listening socket  inherited: every worker takes connections from the same queue, so who hangs or dies keeps nobody waiting
    nodes             told by the parent, whose registry they announce themselves to; from Redis each worker reads by itself
    /metrics          of all workers, whoever is asked: the parent asks the others

`python -m router.worker_end LISTENER LINK`, two inherited descriptors; started by workers.py and by nobody else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Final

from proto import baton_pb2 as pb
from router.config import RouterConfig
from router.worker_link import WorkerLink, read_blocking
from router.worker_metrics import merged
from runtime.config import from_json, silence_grpc
from runtime.listing import Listed, Missed, Unlisted
from runtime.logs import log_event
from runtime.registry_server import RegistryHandler, report
from runtime.session import Peer
from runtime.session_driver import surface

_LOG: Final = logging.getLogger(__name__)
_METRICS_S: Final = 3.0  # for the parent to answer, which itself gives the others a second


class WorkerEnd:
    """One worker's link, from its first message on."""

    def __init__(self, listener: socket.socket, end: socket.socket) -> None:
        settings = read_blocking(end).settings
        self.index = settings.index
        self.listener = listener
        self.config = from_json(RouterConfig, settings.config)
        self.registry = settings.registry
        self._end = end
        self._link: WorkerLink[pb.ToWorker, pb.FromWorker] | None = None
        self._handler: RegistryHandler | None = None
        self._own_metrics: Callable[[], bytes] = bytes
        self._questions: dict[int, asyncio.Future[str]] = {}
        self._num_questions = 0

    async def open(self, handler: RegistryHandler, own_metrics: Callable[[], bytes], started: AsyncExitStack) -> None:
        """Listen to the parent from now on."""
        self._handler, self._own_metrics = handler, own_metrics
        self._link = await WorkerLink[pb.ToWorker, pb.FromWorker].opened(pb.ToWorker.FromString, self._end)
        task = asyncio.create_task(self._read(), name="link to the parent")
        task.add_done_callback(surface)
        started.callback(self._link.close)
        started.callback(task.cancel)

    def say_up(self) -> None:
        """Connections are taken."""
        self._send(pb.FromWorker(up=True))

    async def metrics_of_all(self, own: bytes) -> bytes:
        """Every worker's; of those only that answer in time."""
        self._num_questions += 1
        question, text = self._num_questions, own.decode()
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._questions[question] = answer
        self._send(pb.FromWorker(want_metrics=pb.WorkerMetrics(question=question, text=text)))
        try:
            whole = await asyncio.wait_for(answer, _METRICS_S)
            return whole.encode()
        except TimeoutError:
            log_event(_LOG, logging.WARNING, "metrics_of_one_worker_only", worker=self.index)
            return merged({self.index: text}).encode()
        finally:
            del self._questions[question]

    def _send(self, message: pb.FromWorker) -> None:
        assert self._link is not None
        self._link.send(message)

    async def _read(self) -> None:
        """Until the parent has gone; then the kernel ends this process."""
        assert self._link is not None
        while (message := await self._link.read()) is not None:
            match message.WhichOneof("kind"):
                case "tell_metrics":
                    answer = pb.WorkerMetrics(question=message.tell_metrics, text=self._own_metrics().decode())
                    self._send(pb.FromWorker(metrics=answer))
                case "metrics":
                    waiter = self._questions.get(message.metrics.question)
                    if waiter is not None and not waiter.done():
                        waiter.set_result(message.metrics.text)
                case _:
                    self._hear_of_node(message)

    def _hear_of_node(self, message: pb.ToWorker) -> None:
        assert self._handler is not None
        match message.WhichOneof("kind"):
            case "listed":
                report(self._handler, [Listed(message.listed)])
            case "missed":
                report(self._handler, [Missed(_peer(message.missed))])
            case "unlisted":
                report(self._handler, [Unlisted(_peer(message.unlisted))])


def _peer(node: pb.PeerId) -> Peer:
    return Peer(node.name, node.incarnation)


def main(argv: Sequence[str]) -> int:
    """Run a worker until a signal."""
    silence_grpc()
    listener, end = (socket.socket(fileno=int(number)) for number in argv)
    for inherited in (listener, end):
        os.set_inheritable(inherited.fileno(), False)
    from router.process import run_router

    worker = WorkerEnd(listener, end)
    return run_router(worker.config, worker)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
