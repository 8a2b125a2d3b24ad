"""The cluster that the directed tests break, and the answers that they compare with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from bench.fleet import wait_until
from bench.namespaces import Network, network, why_not
from tests.chaos.answers import Told, Verdict, ask, judge, undisturbed
from tests.e2e.conftest import made_model, tiny_model
from tests.e2e.slow_steps import SlowableFleet

__all__ = ["made_model", "tiny_model"]

NAMES: Final = ("router", "router-1", "prefill-0", "prefill-1", "decode-0", "decode-1")
CHUNK_TOKENS: Final = 16  # a long prompt takes as many steps as a fault needs to hit it
SIZES: Final = ("--block-size", "8", "--max-num-seqs", "16", "--max-num-batched-tokens", str(CHUNK_TOKENS))
# Twice the default: what a last node has to finish takes 8 s, and a busy machine's time.
PATIENT: Final = ("--drain-timeout-s", "50")


class Broken:
    """A fleet that tests break, and requests under way on it."""

    def __init__(self, fleet: SlowableFleet, net: Network | None, threads: ThreadPoolExecutor) -> None:
        self.fleet = fleet
        self.net = net
        self._threads = threads
        self._client = httpx.Client(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))

    def send(self, bodies: Sequence[dict[str, Any]], router: str = "router") -> list[Future[Told]]:
        """Ask all of them, every second one streamed; returns when the router has them all."""
        before = self.fleet.metric("requests_total", router=router) + self.fleet.metric("live_requests", router=router)
        url = self.fleet.url_of(router)
        asked = [
            self._threads.submit(ask, self._client, url, body, number % 2 == 0) for number, body in enumerate(bodies)
        ]

        def has_all() -> bool:
            names = ("requests_total", "live_requests")
            return sum(self.fleet.metric(name, router=router) for name in names) >= before + len(bodies)

        wait_until("the router has them", has_all)
        return asked

    def told(self, asked: Sequence[Future[Told]]) -> list[Told]:
        """What clients got, once all of them have it."""
        return [each.result() for each in asked]

    def mend(self) -> None:
        """Undo what was done to the fleet; nothing of any request may be left then, anywhere."""
        self.fleet.restore()
        for router in self.fleet.routers:
            for name in ("queued_requests", "live_requests", "node_prefilling", "node_branches"):
                assert self.fleet.metric(name, router=router) == 0, (router, name)
        assert all(self.fleet.state(node)["leases"] == 0 for node in self.fleet.nodes)

    def verdicts(self, told: Sequence[Told], bodies: Sequence[dict[str, Any]]) -> list[Verdict]:
        """Compare with the answers of the mended fleet. They come afterwards: before, they would have filled its caches."""
        different = {json.dumps(body): body for body in bodies}
        answers = self._threads.map(lambda body: undisturbed(self._client, self.fleet.url, body), different.values())
        references = dict(zip(different, answers, strict=True))
        return [judge(each, references[json.dumps(body)]) for each, body in zip(told, bodies, strict=True)]

    def assert_equal(self, asked: Sequence[Future[Told]], bodies: Sequence[dict[str, Any]]) -> None:
        """Every answer is the fault-free one, and nothing is left of any."""
        told = self.told(asked)
        self.mend()
        verdicts = self.verdicts(told, bodies)
        assert {verdict.kind for verdict in verdicts} == {"equal"}, verdicts

    def running(self, node: str) -> int:
        """Sequences that hold a slot there."""
        number: int = self.fleet.state(node)["running"]
        return number

    def close(self) -> None:
        """Hang up."""
        self._client.close()


@contextmanager
def started_town(
    model: Path,
    folder: Path,
    names: Sequence[str],
    of_routers: Sequence[str] = (),
    of_nodes: Sequence[str] = (*SIZES, *PATIENT),
) -> Iterator[Broken]:
    """A cluster of these processes, each a host of its own where that can be."""
    with ExitStack() as stack:
        net = None if why_not() else stack.enter_context(network(names))
        flags = {name: of_routers if name.startswith("router") else of_nodes for name in names}
        fleet = stack.enter_context(SlowableFleet.started(model, folder, flags, net))
        threads = stack.enter_context(ThreadPoolExecutor(16))
        broken = Broken(fleet, net, threads)
        stack.callback(broken.close)
        yield broken


@pytest.fixture(scope="module")
def shared_town(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broken]:
    """Two of each."""
    with started_town(tiny_model, tmp_path_factory.mktemp("chaos"), NAMES) as town:
        yield town


@pytest.fixture
def town(shared_town: Broken) -> Broken:
    """The shared one, with whatever the last test's fault has left put right."""
    shared_town.mend()
    return shared_town
