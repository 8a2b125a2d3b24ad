"""What a router's parent process knows of nodes, and tells its workers: those that run, and those that are started later.

A node that the registry misses may well live, and serve at those that have its session (the registry cannot be reached from there,
say). So it is kept until it is unlisted: who starts is told of it as if it were listed and, once it had the time to dial it, that
it is missed, by which it forgets whom it has not reached. Not here: who finds nodes (registry_server.py, redis_reader.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from proto import baton_pb2 as pb
from router.worker_link import WorkerLink
from runtime.session import Peer

MISSED_KEPT_S: Final = 3600.0  # as Redis keeps a silent node's entry
# The latest ones: nodes whose names are drawn anew at each start leave one each time that they are killed.
MAX_MISSED: Final = 256

Link = WorkerLink[pb.FromWorker, pb.ToWorker]


class NodeRelay:
    """RegistryHandler of the parent, and who tells one worker what one of them must count."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.links: dict[int, Link] = {}  # by worker
        self._now = now
        self._entries: dict[Peer, pb.NodeEntry] = {}
        self._missed: dict[Peer, tuple[pb.NodeEntry, float]] = {}  # and since when, the earliest first

    @property
    def knows_nodes(self) -> bool:
        """Whether somebody who starts is told of any."""
        self._forget_old()
        return bool(self._entries or self._missed)

    def on_listed(self, entry: pb.NodeEntry) -> None:
        """RegistryHandler."""
        for peer, (missed, _) in list(self._missed.items()):
            # This process is back, or another has its name or its address.
            if peer.name == entry.node.name or missed.grpc_address == entry.grpc_address:
                del self._missed[peer]
        self._entries[Peer(entry.node.name, entry.node.incarnation)] = entry
        self._tell(pb.ToWorker(listed=entry))

    def on_missed(self, node: Peer) -> None:
        """RegistryHandler."""
        if (entry := self._entries.pop(node, None)) is not None:
            self._missed[node] = (entry, self._now())
            if len(self._missed) > MAX_MISSED:
                del self._missed[next(iter(self._missed))]
        self._tell(pb.ToWorker(missed=node.to_proto()))

    def on_unlisted(self, node: Peer) -> None:
        """RegistryHandler."""
        self._entries.pop(node, None)
        self._missed.pop(node, None)
        self._tell(pb.ToWorker(unlisted=node.to_proto()))

    def news(self) -> Iterable[pb.ToWorker]:
        """All that somebody new must hear at once."""
        self._forget_old()
        known = [*(entry for entry, _ in self._missed.values()), *self._entries.values()]
        return [pb.ToWorker(listed=entry) for entry in known]

    def later_news(self) -> Iterable[pb.ToWorker]:
        """What it must hear once it had the time to dial them."""
        return [pb.ToWorker(missed=node.to_proto()) for node in self._missed]

    def refused_grpc(self) -> None:
        """Have a worker count it, whichever: the parent has no page of its own. Without one nobody does."""
        self._tell_one(pb.ToWorker(refused_grpc=1))

    def count_registry(self, what: str, number: int) -> None:
        """The same for what was met in a shared registry."""
        self._tell_one(pb.ToWorker(registry=pb.RegistryCount(what=what, number=number)))

    def _forget_old(self) -> None:
        kept_since = self._now() - MISSED_KEPT_S
        self._missed = {peer: known for peer, known in self._missed.items() if known[1] >= kept_since}

    def _tell(self, message: pb.ToWorker) -> None:
        for link in self.links.values():
            link.send(message)

    def _tell_one(self, message: pb.ToWorker) -> None:
        for link in list(self.links.values())[:1]:
            link.send(message)
