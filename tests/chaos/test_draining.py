"""Nodes that drain under load: what they run moves, nobody notices, nothing is computed twice, everybody ends with 0."""

from __future__ import annotations

import random
import re
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from bench.cluster import BATON
from bench.fleet import wait_until
from tests.chaos.answers import Told, ask
from tests.chaos.conftest import Broken, started_town
from tests.chaos.test_real_faults import MAX_TOKENS, SLOW_S, long_requests
from tests.plain_http import NO_CERTIFICATES

NUM_CLIENTS: Final = 4
NUM_BODIES: Final = 6
SHORT_TOKENS: Final = 120  # with slow steps a second
DRAIN_BOUND_S: Final = 60.0  # longer than nodes take before they give up what is left
_MISSED: Final = re.compile(r"session_lost node=(\S+) .*nothing came for")


def prefilled(town: Broken, *nodes: str) -> float:
    """Token positions that these nodes have computed of prompts."""
    return sum(town.fleet.node_metric(node, "tokens_computed_total", 'phase="prefill"') for node in nodes)


def is_all_prefilled(town: Broken) -> bool:
    """Whether every request is past its prompt, as the router knows."""
    return not town.fleet.metric("node_prefilling") + town.fleet.metric("queued_requests")


def wait_until_it_works(town: Broken, node: str) -> None:
    """A decode node has sequences; a prefill node, which has most of these prompts in its cache and is done with one in a moment,
    has computed of one just now."""
    before = prefilled(town, node)

    def has_work() -> bool:
        return town.running(node) > 0 or (node.startswith("prefill") and prefilled(town, node) > before)

    wait_until(f"{node} has work", has_work)


class Losses:
    """What the routers lost with one node, from when it is touched until the next one is."""

    def __init__(self, town: Broken) -> None:
        self._fleet = town.fleet
        self.begin("")

    def begin(self, touched: str) -> None:
        """From now on it is this node."""
        self._touched = touched
        self._num_retries_before = self._num_retries()
        self._sizes = {router: len(self._fleet.log_text(router)) for router in self._fleet.routers}

    def was_starved(self) -> bool:
        """Whether a router missed another node, which nobody has touched: this host had no time for it."""
        return bool(self._missed() - {self._touched})

    def assert_none(self) -> None:
        """No router missed the node that was touched (what runs on one that drains would cost no retry), and none had to retry."""
        if not self.was_starved():
            assert not self._missed(), "it was silent"
            assert self._num_retries() == self._num_retries_before, f"something was lost with {self._touched}"

    def _missed(self) -> set[str]:
        new = [self._fleet.log_text(router)[size:] for router, size in self._sizes.items()]
        return {name for text in new for name in _MISSED.findall(text)}

    def _num_retries(self) -> float:
        return sum(self._fleet.metric("retries_total", router=router) for router in self._fleet.routers)


@pytest.mark.covers("D08", "C03", "R19")
def test_what_a_draining_decode_node_runs_moves_without_a_prefill_and_the_last_one_lets_it_finish(
    town: Broken, fresh_seed: int
) -> None:
    fleet = town.fleet
    bodies, moved, losses = long_requests(fresh_seed), fleet.metric("moves_total", "done"), Losses(town)
    with fleet.slow_steps(SLOW_S):
        asked = town.send(bodies)
        wait_until("nothing is prefilled", lambda: is_all_prefilled(town))
        assert town.running("decode-0"), "there is nothing to move"
        computed = prefilled(town, "prefill-0", "prefill-1", "decode-1")
        losses.begin("decode-0")
        fleet.terminate("decode-0")
        wait_until("something moves", lambda: fleet.metric("moves_total", "done") > moved)
    assert fleet.wait_for_end("decode-0", DRAIN_BOUND_S) == 0
    town.told(asked)
    is_computed_once = prefilled(town, "prefill-0", "prefill-1", "decode-1") == computed
    assert is_computed_once or losses.was_starved(), "something was computed again"
    losses.assert_none()

    with fleet.slow_steps(SLOW_S):
        more = town.send(bodies)
        wait_until("nothing is prefilled", lambda: is_all_prefilled(town))
        assert town.running("decode-1"), "there is nothing to wait for"
        losses.begin("decode-1")
        fleet.terminate("decode-1")
    assert fleet.wait_for_end("decode-1", DRAIN_BOUND_S) == 0
    town.told(more)
    losses.assert_none()
    town.assert_equal([*asked, *more], bodies * 2)


@pytest.mark.covers("D08", "C03", "H15", "R19")
def test_what_a_draining_mixed_node_runs_moves_what_it_began_is_computed_and_the_last_one_lets_it_finish(
    tiny_model: Path, tmp_path: Path, fresh_seed: int
) -> None:
    with started_town(tiny_model, tmp_path, ("router", "mixed-0", "mixed-1")) as town:
        fleet, losses = town.fleet, Losses(town)
        bodies, begun = long_requests(fresh_seed, 4), long_requests(fresh_seed + 1, 2, prompt_tokens=500)
        for body in bodies:  # seconds of work, and room for all of it on either node
            body |= {"max_tokens" if "max_tokens" in body else "max_completion_tokens": 200, "n": 1}
        with fleet.slow_steps(SLOW_S):
            asked = town.send(bodies)
            wait_until("nothing is prefilled", lambda: is_all_prefilled(town))
            assert town.running("mixed-0"), "there is nothing to move"
            computed = prefilled(town, "mixed-0")
            asked += town.send(begun)
            wait_until("it computes a prompt", lambda: prefilled(town, "mixed-0") > computed)
            losses.begin("mixed-0")
            fleet.terminate("mixed-0")
            wait_until("something moves", lambda: fleet.metric("moves_total", "done") >= 1)
        assert fleet.wait_for_end("mixed-0", DRAIN_BOUND_S) == 0
        assert "was_cut_short=False" in fleet.log_text("mixed-0")
        town.told(asked)
        losses.assert_none()
        with fleet.slow_steps(SLOW_S):
            more = town.send(bodies)
            wait_until("nothing is prefilled", lambda: is_all_prefilled(town))
            assert town.running("mixed-1"), "there is nothing to wait for"
            losses.begin("mixed-1")
            fleet.terminate("mixed-1")
        assert fleet.wait_for_end("mixed-1", DRAIN_BOUND_S) == 0
        assert "was_cut_short=False" in fleet.log_text("mixed-1")
        town.told(more)
        losses.assert_none()
        town.assert_equal([*asked, *more], [*bodies, *begun, *bodies])


class SteadyClients:
    """So many clients, each asking one request after the other until it is told to stop; what they got."""

    def __init__(self, bodies: Sequence[dict[str, Any]]) -> None:
        self._bodies = bodies
        self._stopping = threading.Event()
        self.told: list[tuple[dict[str, Any], Told]] = []

    def run(self, url: str, rng: random.Random) -> None:
        """One client, of the router there."""
        with httpx.Client(trust_env=False, verify=NO_CERTIFICATES) as client:
            while not self._stopping.is_set():
                body = rng.choice(self._bodies)
                self.told.append((body, ask(client, url, body, is_stream=rng.random() < 0.6)))

    def stop(self) -> None:
        """Nothing new is asked."""
        self._stopping.set()


@contextmanager
def steady_clients(town: Broken, seed: int, *routers: str, max_tokens: int = MAX_TOKENS) -> Iterator[SteadyClients]:
    """Clients that ask, of these routers in turn (none: of the first), until the block ends; then their last answers are there."""
    clients = SteadyClients(long_requests(seed, NUM_BODIES, max_tokens=max_tokens))
    urls = [town.fleet.url_of(router) for router in routers] or [town.fleet.url]
    threads = [
        threading.Thread(
            target=clients.run, args=(urls[number % len(urls)], random.Random(f"{seed} {number}")), daemon=True
        )
        for number in range(NUM_CLIENTS)
    ]
    for thread in threads:
        thread.start()
    try:
        yield clients
    finally:
        clients.stop()
        for thread in threads:
            thread.join(DRAIN_BOUND_S)
    assert not any(thread.is_alive() for thread in threads), "requests hang"


def drain_by_command(town: Broken, node: str) -> None:
    """`baton drain`; the node's process has gone when it comes back."""
    command = [BATON, "drain", node, "--router", town.fleet.registry_of("router"), "--timeout-s", "30"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DRAIN_BOUND_S, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.splitlines()[-1] == f"baton drain: {node} has drained"


@pytest.mark.covers("C07", "D08", "H15", "C03", "P08", "R19")
def test_every_node_restarted_in_turn_under_load_fails_no_request(town: Broken, fresh_seed: int) -> None:
    fleet = town.fleet
    moved, losses = fleet.metric("moves_total", "done"), Losses(town)
    with fleet.slow_steps(0.01), steady_clients(town, fresh_seed, max_tokens=SHORT_TOKENS) as clients:
        for node in fleet.nodes:
            wait_until_it_works(town, node)
            losses.assert_none()
            losses.begin(node)
            if node == "prefill-1":
                drain_by_command(town, node)
            else:
                fleet.terminate(node)
            assert fleet.wait_for_end(node, DRAIN_BOUND_S) == 0
            assert "was_cut_short=False" in fleet.log_text(node)
            num_told = len(clients.told)
            wait_until("the others serve", lambda num_told=num_told: len(clients.told) > num_told)  # type: ignore[misc]
            fleet.start(node)
            fleet.wait_until_ready()
    assert fleet.metric("moves_total", "done") >= moved + 2, "nothing moved"
    losses.assert_none()
    town.mend()
    bodies, told = [body for body, _ in clients.told], [each for _, each in clients.told]
    verdicts = town.verdicts(told, bodies)
    assert {verdict.kind for verdict in verdicts} == {"equal"}, [each for each in verdicts if each.kind != "equal"]
