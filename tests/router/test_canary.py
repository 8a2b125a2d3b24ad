"""The deep look with nodes that a test scripts: right tokens, wrong ones, failures, silence, and who asks for a second look."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proto import baton_pb2 as pb
from router.canary import DeepLook, pairs_of
from router.node_state import Node
from router.text import ModelText
from tests.router.core_world import node_entry, ref
from tests.router.live_router import LiveRouter
from tests.router.scripted_nodes import Script, ScriptedAttempt
from tests.router.test_api import play
from tests.router.test_metrics import measured
from tests.router.tiny_model import write_model_text

TOKENS = (70, 71, 72, 73)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_text(tmp_path_factory.mktemp("model"))


def scored(token_id: int) -> pb.TokenLogprobs:
    top = pb.TopLogprob(token_id=token_id, logprob=-0.5)
    return pb.TokenLogprobs(logprob=-0.5, top=[top])


def computing(told: tuple[int, ...] = TOKENS) -> Script:
    """A model that always says TOKENS, and a decode node that says `told` of them."""

    async def script(attempt: ScriptedAttempt) -> None:
        dispatch, sampling = attempt.dispatch, attempt.dispatch.sampling
        if not sampling.prompt_logprobs:
            assert attempt.dispatch.target.node.name == "decode"
            attempt.prefill_says(0, TOKENS[:1])
            attempt.decode_says(0, told, pb.FINISH_LENGTH)
            return
        num_said = sampling.max_tokens * 3
        prompt = dispatch.prompt_token_ids
        scores = [scored(each) for each in (*prompt[1:-num_said], *TOKENS[:3])]
        last = pb.BranchTokens(
            key=attempt.key,
            token_ids=TOKENS[3:],
            finish=pb.FINISH_LENGTH,
            logprobs=[scored(TOKENS[3])],
            prompt_logprobs=scores,
        )
        attempt.prefill.send(attempt.prefill.router, pb.NodeMessage(tokens=pb.TokenBatch(branches=[last])))

    return script


async def deep(router: LiveRouter) -> tuple[int, dict[str, Any]]:
    answer = await router.client.get("/ready?deep=1")
    return answer.status_code, answer.json()


@pytest.mark.covers("O01")
def test_canaries_are_no_clients_requests(model: Path) -> None:
    """Nor are their times: a look at many pairs would make a quiet router's medians its own."""

    async def scenario(router: LiveRouter) -> None:
        before = await measured(router)
        status, _ = await deep(router)
        after = await measured(router)
        assert status == 200 and after["dispatches_total handoff"] > before["dispatches_total handoff"]
        of_clients = ("requests_total", "choices_total", "tokens_total", "request_seconds_count", "time_to_first_token")
        assert {name for name in after if name.startswith(of_clients) and after[name] != before.get(name, 0.0)} == set()

    play(model, scenario, computing())


@pytest.mark.covers("O06")
def test_a_pair_that_gives_the_right_tokens_is_well(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        prompts = set()
        for _ in range(2):
            status, content = await deep(router)
            (pair,) = content["pairs"]
            assert status == 200 and content["ready"] and pair["ok"] and pair["problem"] is None
            assert (pair["prefill"], pair["decode"]) == ("prefill", "decode")
            canary, alone = router.pair.prefill.dispatches[-2:]
            assert len(canary.prompt_token_ids) == 33 and canary.sampling.max_tokens == 4, "two blocks and a bit"
            assert (
                list(alone.prompt_token_ids) == [*canary.prompt_token_ids, *TOKENS[:3]]
                and alone.sampling.max_tokens == 1
            )
            prompts.add(tuple(canary.prompt_token_ids))
        assert len(prompts) == 2, "each time blocks that nobody has"
        assert "pairs" not in (await router.client.get("/ready")).json()

    play(model, scenario, computing())


@pytest.mark.covers("O06")
@pytest.mark.parametrize("position", [1, 2, 3])
def test_a_pair_that_gives_another_token_is_named(model: Path, position: int) -> None:
    wrong = tuple(99 if index == position else token for index, token in enumerate(TOKENS))

    async def scenario(router: LiveRouter) -> None:
        status, content = await deep(router)
        (pair,) = content["pairs"]
        assert status == 503 and not content["ready"] and not content["missing"]
        assert (
            pair["problem"]
            == f"decode gave another token than follows from the KV of prefill, at position {position} of 4"
        )

    play(model, scenario, computing(wrong))


@pytest.mark.covers("O06")
def test_a_pair_that_fails_is_named_at_once_and_not_tried_again(model: Path) -> None:
    async def refusing(attempt: ScriptedAttempt) -> None:
        attempt.prefill_fails(pb.TRANSFER_FAILED)

    async def breaking(attempt: ScriptedAttempt) -> None:
        attempt.prefill_says(0, TOKENS[:1])
        attempt.prefill_fails(pb.CHECKSUM)

    for script, sentence in ((refusing, "PD Error TRANSFER_FAILED: as scripted"), (breaking, "CHECKSUM")):

        async def scenario(router: LiveRouter, sentence: str = sentence) -> None:
            status, content = await deep(router)
            assert status == 503 and sentence in content["pairs"][0]["problem"]
            assert len(router.pair.prefill.dispatches) == 1

        play(model, scenario, script)


@pytest.mark.covers("O06")
def test_a_silent_pair_is_named_in_time_holds_up_nobody_and_a_second_look_is_refused(model: Path) -> None:
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def script(attempt: ScriptedAttempt) -> None:
        if len(attempt.dispatch.prompt_token_ids) > 10:
            asked.set()
            await may_answer.wait()
        await computing()(attempt)

    async def scenario(router: LiveRouter) -> None:
        first = asyncio.create_task(deep(router))
        await asked.wait()
        second = await router.client.get("/ready?deep=1")
        assert second.status_code == 429 and int(second.headers["Retry-After"]) >= 1
        assert (await router.post(max_tokens=4)).status_code == 200, "nobody waits for a canary"
        may_answer.set()
        assert (await first)[0] == 200
        assert (await deep(router))[0] == 200, "the next one may look"
        may_answer.clear()
        look = DeepLook(router.shell, ModelText(model), pair_s=0.3, all_s=60.0)
        async with asyncio.timeout(60):
            (pair,), num_left_out = await look.look()
        assert num_left_out == 0
        assert pair.problem is not None and ("no answer within " in pair.problem or "deadline" in pair.problem)
        assert pair.seconds > 0.2

    play(model, scenario, script)


@pytest.mark.covers("O06")
@given(
    st.lists(st.tuples(st.sampled_from(["PREFILL", "DECODE", "MIXED"]), st.sampled_from("ab")), max_size=12),
    st.integers(0, 60),
)
def test_of_too_many_pairs_some_are_left_out_and_no_node_as_long_as_there_is_room_for_all(
    drawn: list[tuple[str, str]], most: int
) -> None:
    nodes = [
        Node(ref(f"n{number}"), node_entry(f"n{number}", pb.Role.Value(f"ROLE_{role}")), kind.encode())
        for number, (role, kind) in enumerate(drawn)
    ]
    right = {
        (one.ref, other.ref)
        for one in nodes
        for other in nodes
        if one.prefills and other.decodes and one.ref != other.ref and one.fingerprint == other.fingerprint
    }
    every, none_left_out = pairs_of(nodes, len(right) + 1)
    assert (none_left_out, len(every)) == (0, len(right)) and {(p.ref, d.ref) for p, d in every} == right
    some, num_left_out = pairs_of(nodes, most)
    assert some == every[:most] and len(some) + num_left_out == len(right)
    if "MIXED" not in dict(drawn):
        first = pairs_of(nodes, 2 * len(nodes))[0]
        assert {node.ref for pair in first for node in pair} == {node for pair in right for node in pair}
