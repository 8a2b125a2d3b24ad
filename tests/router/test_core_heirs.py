"""What a client has of an answer is gone on with by the model that began it, whatever else is served beside it."""

from __future__ import annotations

import pytest

from proto import baton_pb2 as pb
from router.events import Failed, Finished, SessionLost
from router.heirs import heirs
from tests.router.core_world import CoreWorld, node_entry, ref

_ROLES = {"p": pb.ROLE_PREFILL, "d": pb.ROLE_DECODE, "l": pb.ROLE_DECODE, "m": pb.ROLE_MIXED}


def entry(name: str, weights: str, kernels: str = "cpu", block_size: int = 16, max_num_seqs: int = 4) -> pb.NodeEntry:
    """A node of a model."""
    made = node_entry(name, _ROLES[name[0]], weights=weights, max_num_seqs=max_num_seqs, local_prefill=name[0] == "l")
    made.fingerprint.kernels, made.fingerprint.block_size = kernels, block_size
    return made


def begun(*more: pb.NodeEntry, **config: object) -> CoreWorld:
    """A stream that an old pair has said two tokens of; others come then."""
    world = CoreWorld(**config)  # type: ignore[arg-type]
    world.join(entry("p-old", "old"))
    world.join(entry("d-old", "old"))
    world.submit("a")
    world.tokens_from("d-old", "a", 0, [5, 6])
    for each in more:
        world.join(each)
    return world


def lose(world: CoreWorld, *names: str) -> None:
    """Their processes end."""
    for name in names:
        world.feed(SessionLost(ref(name), has_died=True))


def pairs(world: CoreWorld, request_id: str = "a") -> list[tuple[str, str]]:
    """Where its attempts ran."""
    return [(name, dispatch.target.node.name) for name, dispatch in world.dispatches(request_id)]


@pytest.mark.covers("R10", "R23")
@pytest.mark.parametrize("others", [("p-new", "d-new"), ("m-new",), ("l-new",)], ids=["pair", "mixed", "local"])
@pytest.mark.parametrize("lost", [("d-old",), ("p-old", "d-old")])
def test_another_models_nodes_never_go_on_with_a_stream(others: tuple[str, ...], lost: tuple[str, ...]) -> None:
    world = begun(*(entry(name, "new") for name in others), local_prefill_max_tokens=100, max_nodes_lost=9)
    for attempt in (1, 2):
        lose(world, *lost)
        world.pass_time(8.0)
        assert len(pairs(world)) == attempt and not world.ends
        for name in lost:  # is there again, within a grace
            world.join(entry(name, "old"))
        assert pairs(world) == [("p-old", "d-old")] * (attempt + 1)
    world.pass_time(20.0)
    world.tokens_from("d-old", "a", 2, [7], pb.FINISH_STOP, 2)
    assert world.tokens["a"] == [5, 6, 7]
    world.assert_nothing_is_left()


@pytest.mark.covers("R08", "R23")
def test_who_has_no_node_of_its_model_any_more_is_handed_up_with_what_it_has() -> None:
    world = begun(entry("p-new", "new"), entry("d-new", "new"))
    lose(world, "d-old", "p-old")
    world.pass_time(9.9)
    assert not world.ends
    world.pass_time(0.2)
    end = world.ends["a"]
    assert isinstance(end, Finished) and (end.finish_reason, end.token_ids) == ("pd_reschedule", (5, 6))
    world.assert_nothing_is_left()
    world.submit("b", generated=[5, 6])  # whoever sends it again has read that it may have another author
    assert pairs(world, "b") == [("p-new", "d-new")]


def test_while_no_model_is_served_at_all_a_stream_waits_and_its_grace_begins_with_the_other_model() -> None:
    world = begun()
    lose(world, "d-old", "p-old")
    world.pass_time(60.0)
    world.join(entry("m-new", "new"))
    world.pass_time(9.9)
    assert not world.ends
    world.pass_time(0.2)
    assert isinstance(world.ends["a"], Finished)
    world.assert_nothing_is_left()


@pytest.mark.covers("R08", "R23")
def test_a_grace_that_another_model_began_is_over_where_that_one_has_gone_too() -> None:
    world = begun(entry("p-new", "new"), entry("d-new", "new"))
    lose(world, "d-old", "p-old")
    world.pass_time(5.0)
    lose(world, "d-new", "p-new")
    world.pass_time(60.0)
    assert not world.ends, "nobody is there, and whoever comes will be asked"
    world.join(entry("m-new", "new"))
    world.pass_time(9.9)
    assert not world.ends
    world.pass_time(0.2)
    assert isinstance(world.ends["a"], Finished)


def test_who_has_nothing_yet_goes_anywhere() -> None:
    world = CoreWorld()
    world.join(entry("m-old", "old"))
    world.submit("a")
    world.join(entry("m-new", "new"))
    lose(world, "m-old")
    assert pairs(world) == [("m-old", "m-old"), ("m-new", "m-new")]


def test_the_author_of_a_prompts_logprobs_is_the_answers() -> None:
    world = CoreWorld()
    world.join(entry("m-old", "old"))
    world.submit("a", wants_prompt_logprobs=True, num_logprobs=0)
    scored = [pb.TokenLogprobs(logprob=-1.0)] * 2
    world.tokens_from("m-old", "a", 0, [], prompt_logprobs=scored, from_receiver=True)
    world.join(entry("m-new", "new"))
    lose(world, "m-old")
    assert len(pairs(world)) == 1
    world.pass_time(10.1)
    end = world.ends["a"]
    assert isinstance(end, Failed) and (end.status, end.code) == (503, "NODE_LOST")
    world.assert_nothing_is_left()


def test_the_same_back_end_goes_on_if_there_is_one_and_else_the_same_weights_on_another() -> None:
    others = entry("m-gpu", "old", "gpu"), entry("m-new", "new"), entry("m-small", "old", block_size=8)
    world = begun(*others, max_nodes_lost=9)
    lose(world, "d-old", "p-old")
    assert pairs(world)[1:] == [("m-small", "m-small")]
    lose(world, "m-small")
    world.pass_time(3.0)
    assert pairs(world)[2:] == [("m-gpu", "m-gpu")]
    lose(world, "m-gpu")  # nobody has said anything since the first pair did
    world.join(entry("m-gpu2", "old", "gpu"))
    world.join(entry("m-small2", "old", block_size=8))
    world.pass_time(3.0)
    assert pairs(world)[3:] == [("m-small2", "m-small2")]


def test_who_waits_for_its_models_nodes_holds_up_nobody_at_others_and_is_overtaken_at_none() -> None:
    world = CoreWorld()
    world.join(entry("m-old1", "old", max_num_seqs=1))
    world.submit("a")
    world.tokens_from("m-old1", "a", 0, [5], from_receiver=True)
    world.join(entry("m-old2", "old", max_num_seqs=1))
    world.submit("b")
    world.tokens_from("m-old2", "b", 0, [5], from_receiver=True)
    lose(world, "m-old1")  # a waits for room at m-old2
    world.submit("c")  # waits behind it
    world.join(entry("m-new", "new", max_num_seqs=1))
    assert (len(pairs(world, "a")), pairs(world, "c")) == (1, [("m-new", "m-new")])
    world.submit("d")
    world.tokens_from("m-old2", "b", 1, [6], pb.FINISH_STOP, from_receiver=True)
    assert (pairs(world, "a")[1:], pairs(world, "d")) == ([("m-old2", "m-old2")], [])


def test_of_its_model_the_least_bad_node_is_used_though_others_are_sound() -> None:
    world = CoreWorld(breaker_failures=1)
    world.join(entry("m-old", "old"))
    world.submit("a")
    world.tokens_from("m-old", "a", 0, [5], from_receiver=True)
    world.join(entry("m-new", "new"))
    world.error_from("m-old", "a", pb.INTERNAL)
    world.pass_time(0.5)
    assert pairs(world) == [("m-old", "m-old")] * 2


def test_a_fingerprints_heirs_differ_from_it_in_block_size_or_else_in_all_but_the_weights() -> None:
    def made(**fields: object) -> bytes:
        whole = {"architecture": "llama", "dtype": "bf16", "weights": "w", "kernels": "cpu", "block_size": 16}
        return pb.Fingerprint(**(whole | fields)).SerializeToString(deterministic=True)  # type: ignore[arg-type]

    same = {made(), made(block_size=32)}
    alike = {made(kernels="gpu"), made(dtype="fp32", block_size=8)}
    others = {made(weights="v"), made(architecture="qwen")}
    assert heirs(made(), same | alike | others) == (same, same | alike)
    assert heirs(made(weights="x"), same | alike | others) == (set(), set())
