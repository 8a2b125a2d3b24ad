"""Parties that cannot hear each other, in a network of namespaces: found, lived with, and healed without a restart."""

from __future__ import annotations

import pytest

from bench.fleet import BOUND_S
from bench.namespaces import why_not
from tests.chaos.conftest import Broken
from tests.chaos.faults import found_after_s, now
from tests.chaos.test_processes import NUM_REQUESTS, long_requests

REASON = why_not()
HALF = NUM_REQUESTS // 2
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"{REASON}")


@pytest.mark.covers("C03", "C04", "R10", "R13")
def test_a_router_cut_off_from_a_decode_node_finds_it_and_goes_on_elsewhere_until_healed(
    town: Broken, fresh_seed: int
) -> None:
    """The other router still uses it."""
    assert town.net is not None
    bodies = long_requests(fresh_seed)
    incarnation = town.fleet.state("decode-0")["incarnation"]
    retries = [town.fleet.metric("retries_total", router=router) for router in town.fleet.routers]
    asked = town.send(bodies[:HALF]) + town.send(bodies[HALF:], "router-1")
    since = now()
    town.net.cut("router", "decode-0")
    assert not town.net.reaches("router", "decode-0") and not town.net.reaches("decode-0", "router")
    assert town.net.reaches("router-1", "decode-0") and town.net.reaches("prefill-0", "decode-0")
    assert found_after_s(town.fleet, "decode-0", since, "session_lost") < BOUND_S
    town.told(asked)
    now_retried = [town.fleet.metric("retries_total", router=router) for router in town.fleet.routers]
    assert now_retried[0] > retries[0] and now_retried[1] == retries[1]
    town.net.heal("router", "decode-0")
    assert found_after_s(town.fleet, "decode-0", since, "session_up") > 0
    town.fleet.wait_until_ready()
    assert town.fleet.state("decode-0")["incarnation"] == incarnation
    town.assert_equal(asked, bodies)


@pytest.mark.covers("C03", "C04", "P04", "R03")
def test_nodes_cut_off_from_each_other_in_the_middle_of_a_transfer_cost_a_retry_and_no_token(
    town: Broken, fresh_seed: int
) -> None:
    """The router hears both: nobody is lost, but KV does not get across."""
    assert town.net is not None
    bodies = long_requests(fresh_seed, prompt_tokens=1000)
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


@pytest.mark.covers("C03", "C04")
def test_a_node_without_its_cable_is_missed_by_both_routers_and_comes_back_with_it(
    town: Broken, fresh_seed: int
) -> None:
    assert town.net is not None
    bodies = long_requests(fresh_seed)
    asked = town.send(bodies[:HALF]) + town.send(bodies[HALF:], "router-1")
    since = now()
    town.net.unplug("decode-1")
    for router in town.fleet.routers:
        assert found_after_s(town.fleet, "decode-1", since, "session_lost", router) < BOUND_S
    town.told(asked)
    town.net.plug("decode-1")
    town.fleet.wait_until_ready()
    town.assert_equal(asked, bodies)
