"""The queue: who finds no room keeps its place and its claims, and holds up nobody who could never use what it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proto import baton_pb2 as pb
from router.events import Action, Emitted, Event, FromNode, LoadReported, NodeUnlisted, SessionLost, ToNode
from tests.router.core_world import CoreWorld, node_entry, ref
from tests.router.test_core_draining import drain
from tests.thorough import examples

SIZES = {"d1": 256, "d2": 64, "d3": 20}  # the longest sequence that each can hold
MAX_NUM_SEQS = 2


def uneven_cluster(*names: str) -> CoreWorld:
    world = CoreWorld.with_nodes("p1")
    for name in names:
        world.join(node_entry(name, pb.ROLE_DECODE, max_model_len=SIZES[name], max_num_seqs=MAX_NUM_SEQS))
    return world


def target_of(world: CoreWorld, request_id: str) -> str | None:
    """Where the newest attempt was sent, if there is one."""
    found = world.dispatches(request_id)
    return found[-1][1].target.node.name if found else None


@pytest.mark.covers("A12", "S16")
def test_one_node_with_a_long_retry_after_holds_up_only_who_could_use_it() -> None:
    world = uneven_cluster("d1", "d3")
    world.submit("large", max_tokens=200)
    world.error_from("p1", "large", pb.NO_BLOCKS, node_id="d1", retry_after_ms=2000)
    for name in ("also large", "small", "small too", "one too many"):
        world.submit(name, max_tokens=200 if name == "also large" else 4)
    assert [target_of(world, name) for name in ("small", "small too")] == ["d3", "d3"]
    assert not world.dispatches("also large"), "it is not for those behind to try what was refused"
    assert not world.dispatches("one too many"), "d1 is what the large ones wait for"
    world.pass_time(2.1)
    assert len(world.dispatches("large")) == 2 and target_of(world, "also large") == "d1"


@pytest.mark.covers("S16", "A12")
@settings(deadline=None, max_examples=examples(80, 3))
@given(st.lists(st.tuples(st.sampled_from("ssrfw"), st.sampled_from([4, 40, 200]), st.integers(0, 99)), max_size=40))
def test_nobody_goes_where_somebody_before_waits_to_go_and_who_could_go_does_not_wait(
    events: Sequence[tuple[str, int, int]],
) -> None:
    """Requests come, are refused for two seconds, and end; after each event the whole queue is read by the rule."""
    world, lengths = uneven_cluster(*SIZES), dict[str, int]()  # in the order of arrival
    held: dict[tuple[str, str], float] = {}  # until when a node is not asked again

    def fitting(name: str) -> set[str]:
        return {node for node, size in SIZES.items() if lengths[name] <= size}

    for number, (what, max_tokens, which) in enumerate(events):
        running = [name for name in lengths if not world.has_ended(name) and phase_of(world, name) != "Waiting"]
        num_sent = len(world.sent)
        if what == "s":
            lengths[f"r{number}"] = 3 + max_tokens
            world.submit(f"r{number}", max_tokens=max_tokens)
        elif what == "w":
            world.pass_time((0.3, 1.1, 2.1)[which % 3])
        elif running:
            name = running[which % len(running)]
            attempt = world.dispatches(name)[-1][1].attempt
            if what == "r":
                node = target_of(world, name)
                assert node is not None
                held[name, node] = world.now + 2.0
                world.error_from("p1", name, pb.NO_BLOCKS, attempt, node_id=node, retry_after_ms=60_000)
            else:
                world.tokens_from("p1", name, 0, [7], pb.FINISH_STOP, attempt)
        waiting = [name for name in lengths if not world.has_ended(name) and phase_of(world, name) == "Waiting"]
        for _, message in world.sent[num_sent:]:
            if message.HasField("dispatch"):
                before = list(lengths)[: list(lengths).index(message.dispatch.request_id)]
                target = message.dispatch.target.node.name
                assert not any(target in fitting(name) for name in waiting if name in before)
        claimed: set[str] = set()
        for name in waiting:
            free = {node for node in fitting(name) - claimed if world.node(node)["branches"] < MAX_NUM_SEQS}
            assert all(held.get((name, node), 0.0) > world.now for node in free)
            claimed |= fitting(name)


def phase_of(world: CoreWorld, request_id: str) -> str:
    """Of its only choice."""
    requests: Any = world.core.snapshot()["requests"]
    phase: str = requests[request_id][0]["phase"]
    return phase


def circuit_of(world: CoreWorld, name: str) -> str:
    circuits: Any = world.core.snapshot()["circuits"]
    return str(circuits[name])


@pytest.mark.covers("R18")
def test_the_end_of_a_nodes_rest_is_heard_by_who_waits_though_nothing_else_happens() -> None:
    world = CoreWorld.with_nodes("p1", "d1", breaker_failures=2, preempt_retry_count=50)
    world.join(node_entry("d2", pb.ROLE_DECODE, max_num_seqs=1))
    for name in ("stays", "a", "b", "c"):
        world.submit(name)
        if target_of(world, name) == "d2":
            world.tokens_from("d2", name, 0, [1])
    failing = [name for name in ("stays", "a", "b", "c") if target_of(world, name) == "d1"]
    for name in failing:
        world.error_from("d1", name, pb.INTERNAL)
    waiting = [name for name in failing if phase_of(world, name) == "Waiting"]
    assert circuit_of(world, "d1") == "open" and waiting
    num_sent = sum(len(world.dispatches(name)) for name in waiting)
    world.pass_time(1.1)
    assert circuit_of(world, "d1") == "probing", "one of them tries it"
    assert sum(len(world.dispatches(name)) for name in waiting) == num_sent + 1


@pytest.mark.covers("A12")
def test_who_comes_back_to_the_queue_when_its_nodes_were_given_up_is_answered_as_newcomers_are() -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("untold")
    world.submit("told")
    world.tokens_from("d1", "told", 0, [1])
    drain(world, "p1")
    world.pass_time(11.0)
    world.submit("new")
    assert world.failure("new").code == "NO_NODES" and not world.has_ended("untold")
    world.error_from("p1", "untold", pb.DRAINING)
    world.error_from("d1", "told", pb.PREEMPTED, 0)
    assert world.failure("untold").status == 503 and world.failure("untold").code == "NO_NODES"
    assert not world.has_ended("told") and phase_of(world, "told") == "Waiting", "its client has got something"


@pytest.mark.covers("R10")
@pytest.mark.parametrize(("num_tokens", "most"), [(3, 8), (2000, 8), (5000, 4), (9000, 2)])
def test_a_turn_places_few_of_the_streams_that_a_node_leaves_and_others_go_on_between_them(
    num_tokens: int, most: int
) -> None:
    world = CoreWorld.with_nodes(max_inflight_prefills=100)
    names = [f"r{number}" for number in range(40)]
    large: dict[str, Any] = {"max_model_len": 10_000, "num_blocks": 1000, "max_num_seqs": 100}
    world.join(node_entry("p1", pb.ROLE_PREFILL, **large))
    for decode, its_names in (("d1", names), ("d2", ["other"])):
        world.join(node_entry(decode, pb.ROLE_DECODE, **large))
        for name in its_names:
            world.submit(name, prompt=range(num_tokens))
            world.tokens_from("p1", name, 0, [7])
            world.tokens_from(decode, name, 0, [7])
    placed: list[list[str]] = []

    def turn(event: Event | None) -> list[Action]:
        """As a shell's: what is due first."""
        actions = world.core.tick(world.now) + ([] if event is None else world.core.receive(event, world.now))
        messages = [action.message for action in actions if isinstance(action, ToNode)]
        placed.append([message.dispatch.request_id for message in messages if message.HasField("dispatch")])
        return actions

    turn(SessionLost(ref("d1")))
    said = pb.BranchTokens(key=pb.AttemptKey(request_id="other"), first_index=1, token_ids=[8])
    batch = pb.TokenBatch(branches=[said], from_receiver=True)
    actions = turn(FromNode(ref("d2"), pb.NodeMessage(tokens=batch)))
    assert any(isinstance(action, Emitted) for action in actions), "it waits for one turn, not for all"
    while world.core.next_deadline() == world.now:
        turn(LoadReported(ref("d2"), pb.LoadReport()))
    assert [name for each in placed for name in each] == names, (
        "in the order of their arrival, and before any time has passed"
    )
    assert max(map(len, placed)) == most and len(placed) <= 2 + 40 // most


@pytest.mark.covers("A12", "R10")
@pytest.mark.parametrize("goes", ["is lost", "drains"])
def test_what_only_a_node_that_has_gone_could_hold_waits_for_it_and_is_too_long_only_when_it_has_been_gone_for_long(
    goes: str,
) -> None:
    world = uneven_cluster("d1", "d2")
    world.submit("begun", max_tokens=200)
    world.tokens_from("d1", "begun", 0, [7])
    if goes == "drains":
        drain(world, "d1")
    world.feed(SessionLost(ref("d1"), has_died=True))
    for name, max_tokens in (("large", 200), ("small", 40)):
        world.submit(name, max_tokens=max_tokens)
    assert target_of(world, "small") == "d2" and not world.has_ended("large")
    world.pass_time(9.9)
    assert not world.has_ended("large")
    world.pass_time(0.2)
    assert (world.failure("large").status, world.failure("large").code) == (503, "NO_NODES")
    assert "hold the 203 tokens" in world.failure("large").message and world.failure("large").retry_after_s
    world.submit("large too", max_tokens=200)
    assert world.failure("large too").code == "NO_NODES", "at once: there was time enough"
    world.submit("longer than any", max_tokens=254)
    assert world.failure("longer than any").code == "context_length_exceeded"
    assert world.core.max_total_tokens == 256 and world.core.max_total_tokens_now == 64
    assert not world.has_ended("begun"), "it waits to its deadline, as where no node is left"
    world.pass_time(570.0)
    world.submit("late", max_tokens=200, timeout_s=60.0)
    assert world.failure("late").code == "NO_NODES"
    world.pass_time(30.0)
    world.submit("later", max_tokens=200)
    assert world.failure("later").code == "context_length_exceeded" and world.core.max_total_tokens == 64


@pytest.mark.covers("A12", "R10")
def test_who_waits_for_the_longest_node_goes_on_there_when_it_is_back() -> None:
    world = uneven_cluster("d1", "d2")
    world.submit("begun", max_tokens=200)
    world.tokens_from("d1", "begun", 0, [7])
    world.feed(SessionLost(ref("d1"), has_died=True))
    world.submit("large", max_tokens=200)
    world.pass_time(8.0)
    world.join(node_entry("d1", pb.ROLE_DECODE, max_model_len=SIZES["d1"], max_num_seqs=MAX_NUM_SEQS, incarnation=2))
    assert target_of(world, "large") == target_of(world, "begun") == "d1"
    world.pass_time(20.0)
    assert not world.has_ended("large"), "what it waited for is over"
    world.feed(SessionLost(ref("d1", 2), has_died=True))
    world.pass_time(9.0)
    assert not world.has_ended("large"), "its patience begins anew"
    world.pass_time(1.1)
    assert world.failure("large").code == "NO_NODES"


@pytest.mark.covers("A12", "R10")
def test_a_choice_that_has_said_nothing_waits_as_long_as_the_one_beside_it_that_has() -> None:
    world = uneven_cluster("d1", "d2")
    world.submit("a", max_tokens=200, num_choices=2)
    world.tokens_from("d1", "a", 0, [7])
    world.feed(SessionLost(ref("d1"), has_died=True))
    world.pass_time(40.0)
    assert not world.has_ended("a")
    world.join(node_entry("d1", pb.ROLE_DECODE, max_model_len=SIZES["d1"], max_num_seqs=MAX_NUM_SEQS, incarnation=2))
    assert {each.choice for _, sent in world.dispatches("a")[1:] for each in sent.branches} == {0, 1}


@pytest.mark.covers("A02")
def test_prompts_that_could_come_at_once_a_moment_ago_still_may() -> None:
    world = CoreWorld(max_queue=8, max_inflight_prefills=512)
    world.join_all("p1")
    world.join(node_entry("d1", pb.ROLE_DECODE, max_num_seqs=256))
    assert world.core.most_prompts(1) == 264 and world.core.most_prompts(2) == 132
    world.feed(SessionLost(ref("d1"), has_died=True))
    world.feed(NodeUnlisted(ref("d1")))
    assert world.core.most_prompts(1) == 264
    world.join(node_entry("d1", pb.ROLE_DECODE, max_num_seqs=100, incarnation=2))
    assert world.core.most_prompts(1) == 264
    world.pass_time(601.0)
    world.submit("a")
    assert world.core.most_prompts(1) == 108


@pytest.mark.covers("A02")
@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("nodes", ["p1 d1", "p1 p2 d1 d2", "m1", "m1 p1 d1"])
@pytest.mark.parametrize("slots", [4, 64])
def test_as_many_prompts_as_are_said_to_come_at_once_do_and_no_more(num_choices: int, nodes: str, slots: int) -> None:
    world = CoreWorld(max_queue=8, max_inflight_prefills=5)
    for name in nodes.split():
        role = {"p": pb.ROLE_PREFILL, "d": pb.ROLE_DECODE, "m": pb.ROLE_MIXED}[name[0]]
        world.join(node_entry(name, role, max_num_seqs=slots, num_blocks=4096))
    most = world.core.most_prompts(num_choices)
    for number in range(most + 1):
        world.submit(f"r{number}", num_choices=num_choices)
    refused = [number for number in range(most + 1) if world.has_ended(f"r{number}")]
    assert refused == [most] and world.failure(f"r{most}").code == "OVERLOADED"


def with_one_large_node(max_num_seqs: int, *small: str) -> CoreWorld:
    world = CoreWorld.with_nodes("p1")
    world.join(node_entry("d1", pb.ROLE_DECODE, max_model_len=256, max_num_seqs=max_num_seqs))
    for name in small:
        world.join(node_entry(name, pb.ROLE_DECODE, max_model_len=64, max_num_seqs=8))
    return world


@pytest.mark.covers("P07")
@pytest.mark.parametrize("num_waiting", [16, 17, 100])
def test_however_many_wait_for_one_large_node_who_fits_elsewhere_does_not_wait(num_waiting: int) -> None:
    world = with_one_large_node(2, "d2", "d3")
    for index in range(2 + num_waiting):
        world.submit(f"long{index}", max_tokens=200)
    for index in range(2):  # they decode, and the prefill node is idle
        world.tokens_from("p1", f"long{index}", 0, [1])
        world.tokens_from("d1", f"long{index}", 0, [1])
    world.submit("short", max_tokens=4)
    ((_, dispatch),) = world.dispatches("short")
    assert dispatch.target.node.name in ("d2", "d3")
    assert not world.dispatches("long2")


@pytest.mark.covers("A12", "P07")
def test_nobody_is_too_late_for_nodes_that_are_free_because_others_wait_long_for_another() -> None:
    world = with_one_large_node(1, "d2")
    for name in ("long0", "long1"):
        world.submit(name, max_tokens=200, timeout_s=3600)
    world.tokens_from("p1", "long0", 0, [1])
    world.tokens_from("d1", "long0", 0, [1])  # it decodes for minutes
    for index in range(12):
        world.pass_time(0.5 if index < 10 else 300.0)
        world.submit(f"s{index}", max_tokens=4, timeout_s=30)
        assert world.dispatches(f"s{index}"), world.ends
        world.tokens_from("p1", f"s{index}", 0, [99], pb.FINISH_STOP)
