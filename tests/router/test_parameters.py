"""Every parameter of the API over real sockets: what reaches the nodes, and what the client gets for it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from proto import baton_pb2 as pb
from router.entrance import RouterCoreConfig
from router.seeds import branch_seed
from tests.router.live_router import MODEL_NAME, LiveRouter, until
from tests.router.scripted_nodes import Script, ScriptedAttempt, replying
from tests.router.test_api import HI, events, play
from tests.router.tiny_model import BOS_ID, EOS_ID, TURN_ID, write_model_text

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_text(tmp_path_factory.mktemp("model"))


def echoing(finish: pb.FinishReason.ValueType = pb.FINISH_LENGTH) -> Script:
    """Each choice of each prompt completes to the prompt's last token and its own number."""

    async def script(attempt: ScriptedAttempt) -> None:
        tokens = [attempt.dispatch.prompt_token_ids[-1], ord("0") + attempt.key.choice]
        await replying(tokens, finish)(attempt)

    return script


@pytest.mark.covers("A02")
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_every_sampling_parameter_reaches_the_node(model: Path, path: str) -> None:
    async def scenario(router: LiveRouter) -> None:
        prompt = {"messages": HI} if path == CHAT else {}
        await router.post(
            path,
            max_tokens=9,
            min_tokens=3,
            temperature=0.75,
            top_p=0.5,
            top_k=7,
            min_p=0.25,
            presence_penalty=-0.5,
            frequency_penalty=1.5,
            repetition_penalty=1.25,
            logit_bias={"65": -100, "300": 2.5},
            stop_token_ids=[33, EOS_ID],
            seed=11,
            **prompt,
        )
        sampling = router.pair.prefill.dispatches[0].sampling
        biases = [pb.LogitBias(token_id=65, bias=-100), pb.LogitBias(token_id=300, bias=2.5)]
        assert sampling == pb.Sampling(
            max_tokens=9,
            min_tokens=3,
            temperature=0.75,
            top_p=0.5,
            top_k=7,
            min_p=0.25,
            presence_penalty=-0.5,
            frequency_penalty=1.5,
            repetition_penalty=1.25,
            logit_bias=biases,
            stop_token_ids=[EOS_ID, TURN_ID, 33],
        )

    play(model, scenario)


@pytest.mark.covers("A02")
def test_what_asks_for_nothing_is_off_on_the_wire(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        await router.post(top_p=1, top_k=-1, min_p=0, repetition_penalty=1, stop=None, logprobs=None, user="me")
        await router.post(top_p=1e-50, repetition_penalty=1e-50, ignore_eos=True, stop_token_ids=[7])
        await router.post(top_p=0)
        first, second, third = (dispatch.sampling for dispatch in router.pair.prefill.dispatches)
        assert first == pb.Sampling(temperature=1, max_tokens=16, stop_token_ids=[EOS_ID, TURN_ID])
        assert 0 < second.top_p < 1e-5, "0 would be off"
        assert third.top_p == second.top_p, "the likeliest token alone"
        assert 0 < second.repetition_penalty < 1e-5
        assert list(second.stop_token_ids) == [7]

    play(model, scenario)


@pytest.mark.covers("M03")
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_what_a_client_leaves_out_is_as_the_models_generation_config_says(tmp_path: Path, path: str) -> None:
    directory = write_model_text(tmp_path)
    defaults: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 20,
        "min_p": 0.25,
        "repetition_penalty": 1.25,
    }
    said = {"eos_token_id": EOS_ID, "do_sample": True, "max_length": 9} | defaults
    (directory / "generation_config.json").write_text(json.dumps(said))
    prompt = {"messages": HI} if path == CHAT else {}

    async def scenario(router: LiveRouter) -> None:
        await router.post(path, **prompt, max_tokens=2, top_k=None)
        await router.post(path, **prompt, max_tokens=2, temperature=1, top_p=1, top_k=0, min_p=0, repetition_penalty=1)
        first, second = (dispatch.sampling for dispatch in router.pair.prefill.dispatches)
        assert first == pb.Sampling(max_tokens=2, stop_token_ids=[EOS_ID], **defaults)
        assert second == pb.Sampling(temperature=1, max_tokens=2, stop_token_ids=[EOS_ID]), "the client's word counts"

    play(directory, scenario)


@pytest.mark.covers("A03")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [["hi", "yo", "!"], [[*b"hi"], [*b"yo"], [*b"!"]]])
def test_a_list_of_prompts_is_one_answer_numbered_prompt_by_prompt(model: Path, stream: bool, prompt: Any) -> None:
    async def scenario(router: LiveRouter) -> None:
        answer = await router.post(
            prompt=prompt, n=2, max_tokens=2, stream=stream, stream_options={"include_usage": True}
        )
        texts, reasons, usage = read(answer.text, stream)
        assert texts == {0: "i0", 1: "i1", 2: "o0", 3: "o1", 4: "!0", 5: "!1"}
        assert set(reasons.values()) == {"length"}
        num_prompt = 5 + 3 * isinstance(prompt[0], str)
        assert usage.pop("prompt_tokens_details") == {"cached_tokens": 0}
        assert usage == {"prompt_tokens": num_prompt, "completion_tokens": 12, "total_tokens": num_prompt + 12}
        sent = [(each.request_id, [b.choice for b in each.branches]) for each in router.pair.prefill.dispatches]
        assert [choices for _, choices in sent] == [[0, 1]] * 3
        assert len({request_id for request_id, _ in sent}) == 3

    play(model, scenario, echoing())


@pytest.mark.covers("A03")
def test_one_prompt_in_any_form_is_the_same_request(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        for prompt in ("hi", ["hi"], [BOS_ID, *b"hi"], [[BOS_ID, *b"hi"]]):
            assert (await router.post(prompt=prompt)).json()["choices"][0]["text"] == "hello"
        assert {tuple(each.prompt_token_ids) for each in router.pair.prefill.dispatches} == {(BOS_ID, *b"hi")}

    play(model, scenario)


@pytest.mark.covers("A03", "A06")
def test_one_prompt_that_fails_fails_the_answer_and_cancels_the_others(model: Path) -> None:
    async def script(attempt: ScriptedAttempt) -> None:
        if attempt.dispatch.prompt_token_ids[-1] == ord("!"):
            await until(lambda: len(attempt.prefill.dispatches) % 3 == 0)
            attempt.prefill_fails(pb.INCOMPATIBLE, retryable=False)

    async def scenario(router: LiveRouter) -> None:
        for stream in (False, True):
            answer = await router.post(prompt=["a", "!", "b"], stream=stream)
            assert (answer.status_code, answer.json()["error"]["code"]) == (502, "INCOMPATIBLE")
        ids = {each.request_id for each in router.pair.prefill.dispatches}
        await until(lambda: {each.key.request_id for each in router.pair.decode.cancels} == ids)

    play(model, scenario, script)


@pytest.mark.covers("A03", "A06")
def test_a_failure_of_one_prompt_after_the_first_byte_is_an_event_and_cancels_the_others(model: Path) -> None:
    text = ""

    async def script(attempt: ScriptedAttempt) -> None:
        attempt.prefill_says(0, b"x")
        if attempt.dispatch.prompt_token_ids[-1] == ord("!"):
            await until(lambda: text.count('"text":"x"') == 2)
            attempt.prefill_fails(pb.INTERNAL, retryable=False)

    async def scenario(router: LiveRouter) -> None:
        nonlocal text
        body = {"model": MODEL_NAME, "prompt": ["a", "!"], "stream": True}
        async with router.client.stream("POST", COMPLETIONS, json=body) as answer:
            assert answer.status_code == 200
            async for part in answer.aiter_text():
                text += part
        *chunks, error = events(text)
        assert {chunk["choices"][0]["index"] for chunk in chunks} == {0, 1}
        assert error["error"]["code"] == "INTERNAL"
        await until(lambda: len({each.key.request_id for each in router.pair.prefill.cancels}) == 2)

    play(model, scenario, script)


@pytest.mark.covers("A02")
@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_names_the_seed_with_which_it_can_be_drawn_again(model: Path, stream: bool) -> None:
    async def scenario(router: LiveRouter) -> None:
        answer = await router.post(n=3, best_of=3, seed=41, stream=stream)
        chunks = events(answer.text)[:-1] if stream else [answer.json()]
        seeds = {each["index"]: each["seed"] for chunk in chunks for each in chunk["choices"] if "seed" in each}
        assert seeds == {choice: branch_seed(41, choice) for choice in range(3)}
        (dispatch,) = router.pair.prefill.dispatches
        assert {branch.choice: branch.seed for branch in dispatch.branches} == seeds

    play(model, scenario)


@pytest.mark.covers("A02", "A07", "A09")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stop_string_ends_the_text_before_it_and_the_branch_at_the_nodes(
    model: Path, path: str, stream: bool
) -> None:
    async def script(attempt: ScriptedAttempt) -> None:
        attempt.prefill_says(0, b"a")
        attempt.decode_says(0, "a€S".encode())
        attempt.decode_says(5, b"TOSTOPxyz")
        await until(lambda: bool(attempt.decode.cancels))
        attempt.decode_says(14, b"late", pb.FINISH_LENGTH)

    async def scenario(router: LiveRouter) -> None:
        asked: dict[str, Any] = {"messages": HI} if path == CHAT else {}
        options = {"include_usage": True}
        answer = await router.post(path, stop=["STOP", "no"], stream=stream, stream_options=options, **asked)
        texts, reasons, usage = read(answer.text, stream)
        assert (texts, reasons) == ({0: "a€STO"}, {0: "stop"})
        assert usage["completion_tokens"] == len("a€STOSTOP".encode())
        await until(lambda: bool(router.pair.prefill.cancels))

    play(model, scenario, script)


@pytest.mark.covers("A02", "A09")
def test_a_choice_that_is_stopped_is_cancelled_while_the_others_go_on(model: Path) -> None:
    async def script(attempt: ScriptedAttempt) -> None:
        attempt.prefill_says(0, b"a")
        if attempt.key.choice == 0:
            attempt.decode_says(0, b"aSTOPb")
            return
        await until(lambda: bool(attempt.decode.cancels))
        attempt.decode_says(0, b"ago on", pb.FINISH_LENGTH)

    async def scenario(router: LiveRouter) -> None:
        texts, reasons, usage = read((await router.post(n=2, stop="STOP")).text, False)
        assert (texts, reasons) == ({0: "a", 1: "ago on"}, {0: "stop", 1: "length"})
        assert usage["completion_tokens"] == len("aSTOP") + len("ago on")
        assert {each.key.choice for each in router.pair.decode.cancels} == {0}
        assert 'choices_total{finish_reason="stop"} 1.0' in router.shell.metrics.render().decode()

    play(model, scenario, script)


@pytest.mark.covers("A05", "A07", "A08")
@pytest.mark.parametrize("stream", [False, True])
def test_a_resubmission_goes_on_where_the_given_tokens_end(model: Path, stream: bool) -> None:
    tokens = [*"a€b".encode()]

    async def scenario(router: LiveRouter) -> None:
        options = {"include_usage": True}
        answer = await router.post(
            generated_token_ids=tokens[:2],
            max_tokens=5,
            seed=3,
            stream=stream,
            stream_options=options,
            return_token_ids=True,
        )
        texts, _, usage = read(answer.text, stream)
        assert texts == {0: "€b"}
        assert usage["completion_tokens"] == 3
        chunks = events(answer.text)[:-2] if stream else [answer.json()]
        ids = [each for chunk in chunks for each in chunk["choices"][0]["completion_token_ids"]]
        assert ids == tokens[2:]
        [dispatch] = router.pair.prefill.dispatches
        assert list(dispatch.branches[0].generated_token_ids) == tokens[:2]
        assert (dispatch.sampling.max_tokens, dispatch.branches[0].seed) == (5, 3)

    play(model, scenario, replying(tokens))


@pytest.mark.covers("A02")
def test_echo_with_logprobs_scores_the_prompt_as_lm_eval_asks(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        asked: dict[str, Any] = {"prompt": "hé", "echo": True, "logprobs": 1, "temperature": 0}
        for max_tokens, completion in ((0, ""), (1, "B")):
            answer = (await router.post(max_tokens=max_tokens, **asked)).json()
            [choice] = answer["choices"]
            assert (choice["text"], choice["finish_reason"]) == ("hé" + completion, "length")
            assert answer["usage"]["completion_tokens"] == max_tokens
            scores = choice["logprobs"]
            assert scores["tokens"] == ["<s>", "h", r"bytes:\xc3", r"bytes:\xa9", *completion]
            assert scores["token_logprobs"] == [None, -0.25, -8.0, -8.0, -0.25][: 4 + max_tokens]
            assert scores["text_offset"] == [0, 0, 1, 1, 2][: 4 + max_tokens]
            assert scores["top_logprobs"][:3] == [None, {"h": -0.25}, {"": -0.25, r"bytes:\xc3": -8.0}]
        sampling = router.pair.prefill.dispatches[0].sampling
        assert (sampling.max_tokens, sampling.num_logprobs, sampling.prompt_logprobs) == (1, 1, True)

    play(model, scenario, replying(b"B"))


@pytest.mark.covers("A02")
@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_in_front_of_every_choice(model: Path, stream: bool) -> None:
    async def scenario(router: LiveRouter) -> None:
        for prompt in ("hi", [BOS_ID, *b"hi"]):
            answer = await router.post(prompt=prompt, echo=True, n=2, max_tokens=2, stream=stream)
            assert read(answer.text, stream)[0] == {0: "hii0", 1: "hii1"}
        assert not any(each.sampling.prompt_logprobs for each in router.pair.prefill.dispatches)

    play(model, scenario, echoing())


@pytest.mark.covers("A01", "A02")
def test_the_openai_client_reads_logprobs_choices_stops_seeds_and_usage(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{router.port}/v1", api_key="none") as client:
            completion = await client.completions.create(
                model=MODEL_NAME, prompt="hi", max_tokens=5, n=2, logprobs=2, stop="lo", seed=4, logit_bias={"65": 1}
            )
            assert [choice.text for choice in completion.choices] == ["hel", "hel"]
            assert [choice.finish_reason for choice in completion.choices] == ["stop", "stop"]
            scores = completion.choices[1].logprobs
            assert scores is not None and scores.tokens == [*"hello"] and scores.text_offset == [0, 1, 2, 3, 4]
            assert completion.usage is not None and completion.usage.completion_tokens == 10

            chat = await client.chat.completions.create(
                model=MODEL_NAME, messages=HI, logprobs=True, top_logprobs=1, n=2, seed=4, top_p=0.5
            )
            assert [choice.message.content for choice in chat.choices] == ["hello", "hello"]
            scored = chat.choices[0].logprobs
            content = scored.content if scored is not None else None
            assert content is not None and [entry.token for entry in content] == [*"hello"]
            assert content[0].bytes == [ord("h")] and content[0].top_logprobs[0].logprob == -0.25

            stream = await client.chat.completions.create(
                model=MODEL_NAME, messages=HI, logprobs=True, stream=True, n=2, stop=["lo"], seed=4
            )
            texts, tokens = {0: "", 1: ""}, {0: "", 1: ""}
            async for chunk in stream:
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
                    if choice.logprobs is not None and choice.logprobs.content is not None:
                        tokens[choice.index] += "".join(entry.token for entry in choice.logprobs.content)
            assert (texts, tokens) == ({0: "hel", 1: "hel"}, {0: "hello", 1: "hello"})

    play(model, scenario)


def test_when_more_prompts_are_asked_than_may_wait_the_answer_is_429_and_nothing_is_left(model: Path) -> None:
    async def never(attempt: ScriptedAttempt) -> None:
        await asyncio.Event().wait()

    async def scenario(router: LiveRouter) -> None:
        other = asyncio.create_task(router.post(prompt="a"))
        await until(lambda: len(router.pair.prefill.dispatches) == 1)
        answer = await router.post(prompt=["a"] * 3)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "OVERLOADED")
        answer = await router.post(prompt=["a"] * 2, timeout_s=0.05)  # for whom there is room again
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "DEADLINE")
        assert not other.done()
        other.cancel()
        await until(lambda: len(router.pair.prefill.cancels) == 1)

    play(model, scenario, never, core_config=RouterCoreConfig(max_queue=2, max_inflight_prefills=1))


@pytest.mark.covers("A12")
def test_prompts_that_could_never_be_let_in_together_are_refused_for_good_and_choices_are_taken_whole(
    model: Path,
) -> None:
    async def scenario(router: LiveRouter) -> None:
        answer = await router.post(prompt=["a"] * 900)
        assert answer.status_code == 400 and "Retry-After" not in answer.headers
        assert "900 prompts with n = 1 never find room at once: at most " in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "prompt"
        assert (await router.post(prompt="a", n=16)).status_code == 200

    play(model, scenario, core_config=RouterCoreConfig(max_queue=2, max_inflight_prefills=1))


def read(text: str, is_stream: bool) -> tuple[dict[int, str], dict[int, str], dict[str, Any]]:
    """Texts and finish reasons by choice, and the usage."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    usage: dict[str, Any] = {}
    *chunks, done = events(text) if is_stream else [json.loads(text), "[DONE]"]
    assert done == "[DONE]"
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for each in chunk["choices"]:
            index, part = each["index"], each["text"] if "text" in each else each.get("delta", each.get("message"))
            assert index not in reasons, "a chunk behind the end"
            texts[index] = texts.get(index, "") + (part if isinstance(part, str) else part["content"])
            if each["finish_reason"] is not None:
                reasons[index] = each["finish_reason"]
    return texts, reasons, usage
