"""The cluster that the directed tests break, and the answers that they compare with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from bench.fleet import Fleet, wait_until
from bench.namespaces import Network, network, why_not
from tests.chaos.answers import Told, Verdict, ask, judge, undisturbed

NAMES: Final = ("router", "router-1", "prefill-0", "prefill-1", "decode-0", "decode-1")
CHUNK_TOKENS: Final = 16  # a prompt of some hundred tokens takes as many steps as a fault needs to hit it
SIZES: Final = ("--block-size", "8", "--max-num-seqs", "16", "--max-num-batched-tokens", str(CHUNK_TOKENS))
LEASE: Final = ("--lease-life-s", "120")  # a lease that ends within a test's bounds was released, it did not expire


class Broken:
    """A fleet that tests break, and requests under way on it."""

    def __init__(self, fleet: Fleet, net: Network | None, threads: ThreadPoolExecutor) -> None:
        self.fleet = fleet
        self.net = net
        self._threads = threads
        self._client = httpx.Client(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))

    def fault_free(self, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Their answers, while nothing happens."""
        return list(self._threads.map(lambda body: undisturbed(self._client, self.fleet.url, body), bodies))

    def send(self, bodies: Sequence[dict[str, Any]], router: str = "router") -> list[Future[Told]]:
        """Ask all of them, every second one streamed; one by one, so that they are placed in turn."""
        asked = []
        before = self.fleet.metric("live_requests", router=router)
        for number, body in enumerate(bodies):
            url = self.fleet.url_of(router)
            asked.append(self._threads.submit(ask, self._client, url, body, number % 2 == 0))
            wait_until(
                "it is placed",
                lambda n=number: self.fleet.metric("live_requests", router=router) > before + n,  # type: ignore[misc]
            )
        return asked

    def verdicts(self, asked: Sequence[Future[Told]], references: Sequence[dict[str, Any]]) -> list[Verdict]:
        """What became of them."""
        return [judge(each.result(), reference) for each, reference in zip(asked, references, strict=True)]

    def running(self, node: str) -> int:
        """Sequences that hold a slot there."""
        number: int = self.fleet.state(node)["running"]
        return number

    def assert_nothing_is_left(self) -> None:
        """Of any request, anywhere, once every process is back."""
        self.fleet.restore()
        for router in self.fleet.routers:
            for name in ("queued_requests", "live_requests", "node_prefilling", "node_branches"):
                assert self.fleet.metric(name, router=router) == 0, (router, name)
        assert all(self.fleet.state(node)["leases"] == 0 for node in self.fleet.nodes)

    def close(self) -> None:
        """Hang up."""
        self._client.close()


@pytest.fixture(scope="package")
def town(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broken]:
    """Two of each, each a host of its own where that can be; whoever uses it mends it."""
    with ExitStack() as stack:
        net = None if why_not() else stack.enter_context(network(NAMES))
        flags = {name: () if name.startswith("router") else (*SIZES, *LEASE) for name in NAMES}
        fleet = stack.enter_context(Fleet.started(tiny_model, tmp_path_factory.mktemp("chaos"), flags, net))
        threads = stack.enter_context(ThreadPoolExecutor(16))
        broken = Broken(fleet, net, threads)
        stack.callback(broken.close)
        yield broken
