"""Processes killed and stopped in the middle of streams, whole answers and transfers: every answer is the fault-free one.

Bounds are ten times what the design allows; how fast it is, bench.failover measures.
"""

from __future__ import annotations

import os
import random
from typing import Any, Final

import pytest

from bench.fleet import BOUND_S, wait_until
from tests.chaos.answers import drawn_request
from tests.chaos.conftest import CHUNK_TOKENS, Broken
from tests.chaos.faults import found_after_s, now

NUM_REQUESTS: Final = 8
MAX_TOKENS: Final = 300  # more than are said until a fault comes


def long_requests(seed: int, number: int = NUM_REQUESTS) -> list[dict[str, Any]]:
    """Requests of every kind that nothing ends before they have said a lot."""
    rng = random.Random(seed)
    bodies = [drawn_request(rng, MAX_TOKENS) for _ in range(number)]
    for body in bodies:
        name = "max_tokens" if "max_tokens" in body else "max_completion_tokens"
        body |= {name: rng.randint(MAX_TOKENS // 2, MAX_TOKENS), "min_tokens": 0}
        body |= {"ignore_eos": True, "stop": None, "stop_token_ids": []}
    return bodies


@pytest.mark.covers("R03", "R05", "R09", "R10", "R20", "C03", "C05")
def test_a_killed_decode_nodes_requests_go_on_elsewhere_to_their_fault_free_ends(town: Broken, fresh_seed: int) -> None:
    bodies = long_requests(fresh_seed)
    references = town.fault_free(bodies)
    retries = town.fleet.metric("retries_total", "NODE_LOST")
    asked = town.send(bodies)
    wait_until("the node decodes", lambda: town.running("decode-0") >= 2)
    since = now()
    town.fleet.kill("decode-0")
    assert found_after_s(town.fleet, "decode-0", since, "session_lost") < BOUND_S
    verdicts = town.verdicts(asked, references)
    assert {verdict.kind for verdict in verdicts} == {"equal"}, verdicts
    assert town.fleet.metric("retries_total", "NODE_LOST") > retries, "nothing was on it"
    others = [name for name in (*town.fleet.routers, *town.fleet.nodes) if name != "decode-0"]
    assert all(town.fleet.exit_code(name) is None for name in others)
    town.assert_nothing_is_left()


@pytest.mark.covers("R11", "C03", "C05", "P08")
def test_a_prefill_node_killed_while_it_transfers_is_replaced_and_its_leases_are_released(
    town: Broken, fresh_seed: int
) -> None:
    rng = random.Random(fresh_seed)
    bodies = long_requests(fresh_seed, 4)
    for body in bodies:  # a long prompt for each
        if "messages" in body:
            body["messages"] = [{"role": "user", "content": "".join(rng.choices("abcdefgh ", k=60 * CHUNK_TOKENS))}]
        else:
            body |= {"prompt": [rng.randrange(256) for _ in range(60 * CHUNK_TOKENS)], "echo": False}
    references = town.fault_free(bodies)
    town.fleet.restore()
    for name in ("prefill-0", "prefill-1"):  # or its cache would have all of it
        town.fleet.kill(name)
    town.fleet.restore()
    before = {name: town.fleet.state(name) for name in ("decode-0", "decode-1")}

    victims: list[str] = []

    def is_half_written() -> bool:
        """Whether some prefill node has written into a lease that it has not committed."""
        for name, old in before.items():
            state = town.fleet.state(name)
            if "RESERVED" in state["attempts"]["leases_by_state"]:
                received = state["kv_bytes_received"]
                victims.extend(peer for peer in received if received[peer] > old["kv_bytes_received"].get(peer, 0))
        return bool(victims)

    asked = town.send(bodies)
    wait_until("a lease is half written", is_half_written)
    town.fleet.kill(victims[0])
    verdicts = town.verdicts(asked, references)
    assert {verdict.kind for verdict in verdicts} == {"equal"}, verdicts
    for name in before:
        counters = town.fleet.state(name)["counters"]
        assert counters["leases_expired"] == before[name]["counters"]["leases_expired"]
    town.assert_nothing_is_left()


@pytest.mark.covers("C03", "C10", "R10", "R11", "R13")
@pytest.mark.parametrize("victim", ["decode-1", "prefill-0"])
def test_a_stopped_nodes_requests_go_on_elsewhere_and_it_is_taken_back_as_it_is(
    town: Broken, fresh_seed: int, victim: str
) -> None:
    bodies = long_requests(fresh_seed)
    references = town.fault_free(bodies)
    incarnation = town.fleet.state(victim)["incarnation"]
    asked = town.send(bodies[: NUM_REQUESTS // 2])
    since = now()
    town.fleet.freeze(victim)
    asked += town.send(bodies[NUM_REQUESTS // 2 :])
    assert found_after_s(town.fleet, victim, since, "session_lost") < BOUND_S
    verdicts = town.verdicts(asked, references)
    assert {verdict.kind for verdict in verdicts} == {"equal"}, verdicts
    town.fleet.thaw(victim)
    town.fleet.wait_until_ready()
    assert town.fleet.state(victim)["incarnation"] == incarnation
    town.assert_nothing_is_left()


@pytest.mark.covers("C03", "C09", "P08")
def test_a_killed_routers_clients_lose_their_connections_and_nobody_else_anything(
    town: Broken, fresh_seed: int
) -> None:
    bodies = long_requests(fresh_seed)
    references = town.fault_free(bodies)
    half = NUM_REQUESTS // 2
    lost, kept = town.send(bodies[:half], "router-1"), town.send(bodies[half:])
    wait_until("both work", lambda: town.running("decode-0") + town.running("decode-1") >= 2)
    town.fleet.kill("router-1")
    assert {verdict.kind for verdict in town.verdicts(lost, references[:half])} <= {"broken", "equal"}
    kept_verdicts = town.verdicts(kept, references[half:])
    assert {verdict.kind for verdict in kept_verdicts} == {"equal"}, kept_verdicts
    town.fleet.wait_until_nothing_is_held(*town.fleet.nodes)
    town.assert_nothing_is_left()


@pytest.mark.covers("C03", "R12")
def test_a_stopped_router_goes_on_with_its_streams_when_it_wakes_long_after_the_nodes_gave_it_up(
    town: Broken, fresh_seed: int
) -> None:
    bodies = long_requests(fresh_seed, 4)
    references = town.fault_free(bodies)
    asked = town.send(bodies, "router-1")
    town.fleet.freeze("router-1")
    town.fleet.wait_until_nothing_is_held(*town.fleet.nodes)  # of its work, too
    town.fleet.thaw("router-1")
    verdicts = town.verdicts(asked, references)
    assert {verdict.kind for verdict in verdicts} == {"equal"}, verdicts
    town.assert_nothing_is_left()


def test_what_is_broken_is_really_broken(town: Broken) -> None:
    """A kill ends the process, a stop stops it: the kernel's own words."""
    pid = town.fleet.pid("decode-0")
    town.fleet.freeze("decode-0")
    with open(f"/proc/{pid}/stat", encoding="ascii") as stat:  # noqa: PTH123
        assert stat.read().rpartition(")")[2].split()[0] == "T"
    town.fleet.kill("decode-0")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    town.assert_nothing_is_left()
