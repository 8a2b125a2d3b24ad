"""Processes killed, stopped and cut off in the middle of streams, whole answers and transfers: every answer is the fault-free one.

Bounds are ten times what the design allows; how fast it is, bench.failover measures.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any, Final

import pytest

from bench.fleet import BOUND_S, wait_until
from bench.namespaces import why_not
from tests.chaos.answers import drawn_request
from tests.chaos.conftest import Broken
from tests.chaos.faults import found, now
from tests.thorough import IS_THOROUGH

NUM_REQUESTS: Final = 8 if IS_THOROUGH else 6
HALF: Final = NUM_REQUESTS // 2
MAX_TOKENS: Final = 100  # with slow steps, more than are said until a fault comes
SLOW_S: Final = 0.04  # each of them
WHY_NOT: Final = why_not()
needs_network = pytest.mark.skipif(WHY_NOT is not None, reason=f"{WHY_NOT}")


def long_requests(
    seed: int, number: int = NUM_REQUESTS, prompt_tokens: int = 0, max_tokens: int = MAX_TOKENS
) -> list[dict[str, Any]]:
    """Requests of every kind that nothing ends before they have said a lot; with prompts that long, if it is said."""
    rng = random.Random(seed)
    bodies = [drawn_request(rng, max_tokens) for _ in range(number)]
    for body in bodies:
        name = "max_tokens" if "max_tokens" in body else "max_completion_tokens"
        body |= {
            name: rng.randint(max_tokens * 2 // 3, max_tokens),
            "min_tokens": 0,
            "n": rng.randint(1, 2),
            "best_of": None,
        }
        body |= {"ignore_eos": True, "stop": None, "stop_token_ids": [], "structured_outputs": None}
        if "messages" in body:
            del body["best_of"]
        if prompt_tokens and "messages" in body:
            body["messages"] = [{"role": "user", "content": "".join(rng.choices("abcdefgh ", k=prompt_tokens))}]
            body["continue_final_message"] = False
        elif prompt_tokens:
            body |= {"prompt": [rng.randrange(256) for _ in range(prompt_tokens)], "echo": False}
    return bodies


@pytest.mark.covers("R03", "R05", "R09", "R10", "R20", "C03", "C05")
def test_a_killed_decode_nodes_requests_go_on_elsewhere_to_their_fault_free_ends(town: Broken, fresh_seed: int) -> None:
    bodies = long_requests(fresh_seed)
    retries = town.fleet.metric("retries_total", "NODE_LOST")
    with town.fleet.slow_steps(SLOW_S):
        asked = town.send(bodies)
        wait_until("the node decodes", lambda: town.running("decode-0") >= 2)
        since = now()
        town.fleet.kill("decode-0")
    assert "refuses connections" in found(town.fleet, "decode-0", since, "session_lost").why, "it was found by silence"
    town.told(asked)
    assert town.fleet.metric("retries_total", "NODE_LOST") >= retries + 2, "nothing was on it"
    others = [name for name in (*town.fleet.routers, *town.fleet.nodes) if name != "decode-0"]
    assert all(town.fleet.exit_code(name) is None for name in others)
    town.assert_equal(asked, bodies)


@pytest.mark.covers("R11", "C03", "C05", "P08")
def test_a_prefill_node_killed_while_it_transfers_is_replaced_and_its_leases_are_released(
    town: Broken, fresh_seed: int
) -> None:
    bodies = long_requests(fresh_seed, 4, prompt_tokens=1000)
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

    retries = town.fleet.metric("retries_total")
    with town.fleet.slow_steps(SLOW_S):
        asked = town.send(bodies)
        wait_until("a lease is half written", is_half_written)
        town.fleet.kill(victims[0])
    town.told(asked)
    assert town.fleet.metric("retries_total") > retries
    for name in before:
        assert town.fleet.state(name)["counters"]["leases_expired"] == before[name]["counters"]["leases_expired"]
    town.assert_equal(asked, bodies)


@pytest.mark.covers("C03", "C10", "R10", "R11", "R13")
@pytest.mark.parametrize("victim", ["decode-1", "prefill-0"])
def test_a_stopped_nodes_requests_go_on_elsewhere_and_it_is_taken_back_as_it_is(
    town: Broken, fresh_seed: int, victim: str
) -> None:
    bodies = long_requests(fresh_seed, prompt_tokens=500 if victim == "prefill-0" else 0)
    incarnation = town.fleet.state(victim)["incarnation"]
    retries = town.fleet.metric("retries_total", "NODE_LOST")
    with town.fleet.slow_steps(SLOW_S):
        asked = town.send(bodies[:HALF])
        wait_until("it has work", lambda: town.running(victim) >= 1)
        since = now()
        town.fleet.freeze(victim)
        asked += town.send(bodies[HALF:])
    assert found(town.fleet, victim, since, "session_lost").after_s < BOUND_S
    town.told(asked)
    assert town.fleet.metric("retries_total", "NODE_LOST") > retries, "nothing was on it"
    town.fleet.thaw(victim)
    town.fleet.wait_until_ready()
    assert town.fleet.state(victim)["incarnation"] == incarnation
    town.assert_equal(asked, bodies)


@pytest.mark.covers("C03", "C09", "P08")
def test_a_killed_routers_clients_lose_their_connections_and_nobody_else_anything(
    town: Broken, fresh_seed: int
) -> None:
    bodies = long_requests(fresh_seed)
    with town.fleet.slow_steps(SLOW_S):
        lost, kept = town.send(bodies[:HALF], "router-1"), town.send(bodies[HALF:])
        wait_until("both work", lambda: town.running("decode-0") + town.running("decode-1") >= 2)
        town.fleet.kill("router-1")
    told = town.told(lost)
    assert all(each.broke for each in told), "they had ended before"
    town.told(kept)
    town.fleet.wait_until_nothing_is_held(*town.fleet.nodes)
    town.assert_equal(kept, bodies[HALF:])
    assert {verdict.kind for verdict in town.verdicts(told, bodies[:HALF])} == {"broken"}


@pytest.mark.covers("C03", "R12")
def test_a_stopped_router_goes_on_with_its_streams_when_it_wakes_long_after_the_nodes_gave_it_up(
    town: Broken, fresh_seed: int
) -> None:
    bodies = long_requests(fresh_seed, 2)
    for body in bodies:  # many seconds of work, or the nodes would have finished it before they miss the router
        body |= {"max_tokens" if "max_tokens" in body else "max_completion_tokens": 300, "n": 1}
    retries = town.fleet.metric("retries_total", router="router-1")
    with town.fleet.slow_steps(0.12):
        asked = town.send(bodies, "router-1")
        town.fleet.freeze("router-1")
        town.fleet.wait_until_nothing_is_held(*town.fleet.nodes)  # of its work, too
        town.fleet.thaw("router-1")
    town.told(asked)
    assert town.fleet.metric("retries_total", router="router-1") > retries, "nothing was under way"
    town.assert_equal(asked, bodies)


def test_what_is_broken_is_really_broken(town: Broken) -> None:
    """A kill ends the process, a stop stops it: the kernel's own words."""
    pid = town.fleet.pid("decode-0")
    town.fleet.freeze("decode-0")
    assert Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "T"
    town.fleet.kill("decode-0")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    town.mend()


@needs_network
@pytest.mark.covers("C03", "C04", "R10", "R13")
def test_a_router_cut_off_from_a_decode_node_finds_it_and_goes_on_elsewhere_until_healed(
    town: Broken, fresh_seed: int
) -> None:
    """The other router still uses it."""
    assert town.net is not None
    bodies = long_requests(fresh_seed)
    incarnation = town.fleet.state("decode-0")["incarnation"]
    retries = [town.fleet.metric("retries_total", router=router) for router in town.fleet.routers]
    with town.fleet.slow_steps(SLOW_S):
        asked = town.send(bodies[:HALF]) + town.send(bodies[HALF:], "router-1")
        wait_until("it has work", lambda: town.fleet.metric("node_branches", 'node="decode-0"') >= 1)
        since = now()
        town.net.cut("router", "decode-0")
        assert not town.net.reaches("router", "decode-0") and not town.net.reaches("decode-0", "router")
    assert town.net.reaches("router-1", "decode-0") and town.net.reaches("prefill-0", "decode-0")
    assert found(town.fleet, "decode-0", since, "session_lost").after_s < BOUND_S
    town.told(asked)
    now_retried = [town.fleet.metric("retries_total", router=router) for router in town.fleet.routers]
    assert now_retried[0] > retries[0] and now_retried[1] == retries[1]
    town.net.heal("router", "decode-0")
    assert found(town.fleet, "decode-0", since, "session_up").after_s > 0
    town.fleet.wait_until_ready()
    assert town.fleet.state("decode-0")["incarnation"] == incarnation
    town.assert_equal(asked, bodies)


@needs_network
@pytest.mark.covers("C03", "C04", "P04", "R03")
def test_nodes_cut_off_from_each_other_in_the_middle_of_a_transfer_cost_a_retry_and_no_token(
    town: Broken, fresh_seed: int
) -> None:
    """The router hears both: nobody is lost, but KV does not get across."""
    assert town.net is not None
    bodies = long_requests(fresh_seed, prompt_tokens=500)
    with town.fleet.slow_steps(SLOW_S):
        asked = town.send(bodies[:HALF])
        for prefill in ("prefill-0", "prefill-1"):
            town.net.cut(prefill, "decode-0")
            assert not town.net.reaches(prefill, "decode-0")
        asked += town.send(bodies[HALF:])  # half of them are placed across the cut
    town.told(asked)
    assert town.fleet.metric("retries_total", "TRANSFER_FAILED") > 0
    assert town.fleet.metric("node_up") == len(town.fleet.nodes)
    town.net.mend()
    again = town.send(bodies)
    town.told(again)
    town.assert_equal([*asked, *again], [*bodies, *bodies])


@needs_network
@pytest.mark.covers("C03", "C04")
def test_a_node_without_its_cable_is_missed_by_both_routers_and_comes_back_with_it(
    town: Broken, fresh_seed: int
) -> None:
    assert town.net is not None
    bodies = long_requests(fresh_seed)
    with town.fleet.slow_steps(SLOW_S):
        asked = town.send(bodies[:HALF]) + town.send(bodies[HALF:], "router-1")
        since = now()
        town.net.unplug("decode-1")
    for router in town.fleet.routers:
        assert found(town.fleet, "decode-1", since, "session_lost", router).after_s < BOUND_S
    town.told(asked)
    town.net.plug("decode-1")
    town.fleet.wait_until_ready()
    town.assert_equal(asked, bodies)
