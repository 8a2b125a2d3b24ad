"""A stream reads like the whole answer, whatever is asked and however the nodes group their tokens."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any, Final

import openai
import pytest
from tokenizers import AddedToken, normalizers

from proto import baton_pb2 as pb
from router.choice_text import TextRules
from router.events import RESCHEDULED
from router.stop_strings import Stops
from router.text import ModelText
from tests.router.live_router import MODEL_NAME, LiveRouter
from tests.router.scripted_nodes import Script, ScriptedAttempt, replying
from tests.router.test_api import events, play
from tests.router.test_stop_strings import first_stop
from tests.router.test_text import byte_fallback_tokenizer
from tests.router.tiny_model import EOS_ID, TURN_ID, write_model_text

NUM_REQUESTS: Final = 100
MAX_TOKENS: Final = 24
PIECES: Final = ["a", "b", "ab", "STOP", "ST", "€", "é", "😀", " ", "th", "\n"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_text(tmp_path_factory.mktemp("model"))


def completion(dispatch: pb.Dispatch) -> tuple[list[int], pb.FinishReason.ValueType]:
    """What a model would draw: it follows from prompt, seed and index, and now and then is no text."""
    sampling, branch = dispatch.sampling, dispatch.branches[0]
    rng = random.Random(f"{branch.seed} {list(dispatch.prompt_token_ids)}")
    tokens: list[int] = []
    while len(tokens) < sampling.max_tokens:
        tokens += rng.choice([list(rng.choice(PIECES).encode())] * 12 + [[0xFF], [0xE2], [TURN_ID], [EOS_ID], [300]])
    tokens = tokens[: sampling.max_tokens]
    for index, token_id in enumerate(tokens):
        if token_id in sampling.stop_token_ids:
            if index >= sampling.min_tokens:
                return tokens[: index + 1], pb.FINISH_STOP
            tokens[index] = ord("m")
    return tokens, pb.FINISH_LENGTH


def grouping(rng: random.Random) -> Script:
    """Complete, in batches of any size, some of which repeat what is known."""

    async def script(attempt: ScriptedAttempt) -> None:
        tokens, finish = completion(attempt.dispatch)
        first = attempt.num_generated
        is_only = len(tokens) == first + 1
        attempt.prefill_says(first, tokens[first : first + 1], finish if is_only else pb.FINISH_UNSPECIFIED)
        end = first if not is_only else len(tokens)
        while end < len(tokens):
            start, end = max(first, end - rng.randint(0, 2)), min(end + rng.randint(1, 6), len(tokens))
            attempt.decode_says(start, tokens[start:end], finish if end == len(tokens) else pb.FINISH_UNSPECIFIED)
            if rng.random() < 0.5:
                await asyncio.sleep(0)

    return script


def drawn_prompt(rng: random.Random) -> Any:
    text = "".join(rng.choices(PIECES, k=rng.randint(1, 6)))
    return rng.choice([text, list(text.encode()), [text, text + "x"], [list(text.encode()), [1]]])


def drawn_body(rng: random.Random, is_chat: bool) -> dict[str, Any]:
    """A request with any of its parameters."""
    body: dict[str, Any] = {
        "seed": rng.getrandbits(50),
        "max_tokens": rng.randint(1, MAX_TOKENS),
        "n": rng.choice([1, 1, 1, 2, 3]),
        "temperature": rng.uniform(0, 2),
        "top_p": rng.uniform(0.1, 1),
        "top_k": rng.randint(-1, 50),
        "min_p": rng.random(),
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "repetition_penalty": rng.uniform(0.5, 2),
        "logit_bias": {str(rng.randrange(300)): rng.uniform(-100, 100)},
        "stop": rng.choice([None, "STOP", ["STOP", "ab"], ["b", "€", "TO", "\n "]]),
        "stop_token_ids": rng.choice([[], [300], [ord("b")]]),
        "ignore_eos": rng.random() < 0.3,
        "return_token_ids": rng.random() < 0.5,
        "user": "me",
    }
    body["min_tokens"] = rng.choice([0, 0, rng.randint(0, body["max_tokens"])])
    if is_chat:
        body["messages"] = [{"role": "user", "content": "".join(rng.choices(PIECES, k=4))}]
        body["logprobs"] = rng.random() < 0.5
        body["top_logprobs"] = rng.randint(0, 4) if body["logprobs"] else 0
        return body
    body["prompt"] = drawn_prompt(rng)
    body["logprobs"] = rng.choice([None, 0, 3])
    body["echo"] = rng.random() < 0.5
    if body["echo"] and rng.random() < 0.3:
        body["max_tokens"] = body["min_tokens"] = 0
    return body


def joined(text: str) -> dict[str, Any]:
    """A stream put together, in the shape of a whole answer."""
    *chunks, done = events(text)
    assert done == "[DONE]", text
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            content = part.pop("delta", None)
            part["text"] = part.get("text", "") if content is None else content["content"]
            whole = choices.setdefault(part["index"], {"text": "", "logprobs": None})
            assert whole.get("finish_reason") is None, "a chunk behind the end"
            for name, value in part.items():
                if name == "completion_token_ids" and part["finish_reason"] == RESCHEDULED:
                    assert (part.get("text"), value[-len(whole.get(name) or value) :]) == ("", whole.get(name) or value)
                    whole[name] = value
                elif name in ("text", "completion_token_ids"):
                    whole[name] = whole.get(name, type(value)()) + value
                elif name == "logprobs" and value is not None:
                    known = whole["logprobs"] or {}
                    merged = {key: known.get(key, []) + entry for key, entry in value.items() if entry is not None}
                    whole["logprobs"] = dict.fromkeys(value) | merged
                elif name != "logprobs":
                    whole[name] = value
    return {"choices": [choices[index] for index in sorted(choices)], "usage": _counted(chunks[-1]["usage"])}


def flattened(answer: dict[str, Any]) -> dict[str, Any]:
    """A whole answer, a chat's message taken for a text."""
    for choice in answer["choices"]:
        if "message" in choice:
            choice["text"] = choice.pop("message")["content"]
    return {"choices": answer["choices"], "usage": _counted(answer["usage"])}


def _counted(usage: dict[str, Any]) -> dict[str, int]:
    """What is the same each time: not how much a node had cached."""
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
    return {name: count for name, count in usage.items() if name != "prompt_tokens_details"}


@pytest.mark.covers("A02", "A03", "A07", "A08", "A09")
def test_streamed_text_ids_logprobs_and_usage_equal_the_whole_answers(model: Path, fresh_seed: int) -> None:
    rng = random.Random(fresh_seed)
    stopped = 0

    async def compare(router: LiveRouter, number: int) -> None:
        nonlocal stopped
        path = "/v1/chat/completions" if number % 2 else "/v1/completions"
        body = drawn_body(rng, is_chat=number % 2 == 1)
        whole = await router.post(path, **body)
        stream = await router.post(path, **body, stream=True, stream_options={"include_usage": True})
        assert whole.status_code == stream.status_code == 200, (body, whole.text, stream.text)
        answer = whole.json()
        assert joined(stream.text) == flattened(answer), body
        stopped += sum(choice["finish_reason"] == "stop" for choice in answer["choices"])

    async def scenario(router: LiveRouter) -> None:
        await asyncio.gather(*(compare(router, number) for number in range(NUM_REQUESTS)))

    play(model, scenario, grouping(rng))
    assert stopped > NUM_REQUESTS // 10, "the parameters that end a text were there"


@pytest.mark.covers("A05", "A07", "A08", "A09", "R09")
def test_whatever_a_client_has_of_a_completion_its_resubmission_is_the_rest(model: Path, fresh_seed: int) -> None:
    rng, text = random.Random(fresh_seed), ModelText(model)

    async def compare(router: LiveRouter) -> None:
        body = drawn_body(rng, is_chat=False) | {"prompt": "p", "n": 1, "echo": False, "logprobs": 2}
        body |= {"max_tokens": rng.randint(2, MAX_TOKENS), "return_token_ids": True}
        body["min_tokens"] = min(body["min_tokens"], body["max_tokens"])
        answer = (await router.post(**body)).json()
        [whole] = answer["choices"]
        ids = whole["completion_token_ids"]
        cut = rng.randint(0, len(ids))
        stream: dict[str, Any] = (
            {"stream": True, "stream_options": {"include_usage": True}} if rng.random() < 0.5 else {}
        )
        resumed = await router.post(**body, **stream, generated_token_ids=ids[:cut])
        rest_of = joined(resumed.text) if stream else resumed.json()
        [rest] = rest_of["choices"]
        ends = set(body["stop_token_ids"]) | (set() if body["ignore_eos"] else set(text.stop_token_ids))
        stops = [body["stop"]] if isinstance(body["stop"], str) else body["stop"] or []
        before = text.choice_text(TextRules(ends, Stops(stops), body["min_tokens"])).push(ids[:cut]).text
        if not body["min_tokens"]:
            assert whole["text"] == first_stop(text.decode([each for each in ids if each not in ends]), stops)[0]
        assert before + rest["text"] == whole["text"], (body, ids, cut)
        assert rest["completion_token_ids"] == ids[cut:]
        assert rest_of["usage"]["completion_tokens"] == len(ids) - cut
        assert (rest["finish_reason"], rest["seed"]) == (whole["finish_reason"], whole["seed"])
        assert rest["logprobs"]["token_logprobs"] == whole["logprobs"]["token_logprobs"][cut:]
        offsets = [len(before) + offset for offset in rest["logprobs"]["text_offset"]]
        assert offsets == whole["logprobs"]["text_offset"][cut:]

    async def scenario(router: LiveRouter) -> None:
        await asyncio.gather(*(compare(router) for _ in range(NUM_REQUESTS // 2)))

    play(model, scenario, grouping(rng))


def backwards(num_choices: int) -> Script:
    """Each choice says its number, but none before the one behind it has begun."""
    has_begun: dict[str, list[asyncio.Event]] = {}

    async def script(attempt: ScriptedAttempt) -> None:
        all_of_it = has_begun.setdefault(attempt.dispatch.request_id, [asyncio.Event() for _ in range(num_choices)])
        choice = attempt.dispatch.branches[0].choice
        if choice + 1 < num_choices:
            await all_of_it[choice + 1].wait()
            await asyncio.sleep(0.05)  # so that it is read by itself
        tokens = [*f"{choice} is €".encode(), TURN_ID]
        attempt.prefill_says(0, tokens[:1])
        all_of_it[choice].set()
        attempt.decode_says(0, tokens, pb.FINISH_STOP)

    return script


@pytest.mark.covers("A01", "A08")
def test_the_openai_client_puts_choices_together_whichever_speaks_first(model: Path) -> None:
    """It numbers them as they first appear, and takes a first chunk's logprobs twice, unless that is the stream's first."""

    async def scenario(router: LiveRouter) -> None:
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{router.port}/v1", api_key="none") as client:
            for num_top in (0, 2):
                asked: dict[str, Any] = {"n": 3, "seed": 1, "logprobs": True, "top_logprobs": num_top}
                asked |= {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hi"}]}
                whole = await client.chat.completions.create(**asked)
                async with client.chat.completions.stream(**asked) as stream:
                    async for _ in stream:
                        pass
                    streamed = await stream.get_final_completion()
                assert [choice.index for choice in streamed.choices] == [0, 1, 2]
                for of_whole, of_stream in zip(whole.choices, streamed.choices, strict=True):
                    assert of_stream.message.content == of_whole.message.content
                    assert of_stream.message.role == "assistant"
                    assert of_stream.finish_reason == of_whole.finish_reason
                    assert of_stream.logprobs == of_whole.logprobs

    play(model, scenario, backwards(3))


# ---------------------------------------------------------------- a decoder that strips a text's first blank

WORDS: Final = [1, 2, 3, 4, 1, *(5 + byte for byte in "é".encode()), 2]  # see byte_fallback_tokenizer
SAID: Final = " the cats  theé cat"
OFFSETS: Final = [0, 4, 8, 9, 10, 14, 14, 15]  # behind a prompt


@pytest.fixture(scope="module")
def stripping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As Llama 2's; BOS and a marker that ends a turn are special."""
    directory = write_model_text(tmp_path_factory.mktemp("stripping"))
    tokenizer = byte_fallback_tokenizer()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in ("<s>", "</s>", "<turn>")])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.covers("A02", "A07", "A08", "A09")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"], ids=["completion", "chat"])
def test_a_completion_keeps_its_first_blank_and_all_that_is_told_of_it_agrees(stripping: Path, path: str) -> None:
    is_chat = path != "/v1/completions"
    body: dict[str, Any] = {"max_tokens": len(WORDS), "seed": 7}
    body |= {"messages": [{"role": "user", "content": "s"}]} if is_chat else {"prompt": "s"}

    async def scenario(router: LiveRouter) -> None:
        async def told(**more: Any) -> dict[str, Any]:
            whole = flattened((await router.post(path, **body | more)).json())
            options = {"stream": True, "stream_options": {"include_usage": True}}
            assert joined((await router.post(path, **body | more, **options)).text) == whole
            return whole

        for choice in (await told(n=2, logprobs=is_chat or 0))["choices"]:
            assert choice["text"] == SAID
            assert is_chat or choice["logprobs"]["text_offset"] == OFFSETS
        for given in ([], WORDS[:1]):
            [stopped] = (await told(stop=[" t"], generated_token_ids=given))["choices"]
            assert (stopped["text"], stopped["finish_reason"]) == ("", "stop")
        for cut in range(1, len(WORDS)):
            [rest] = (await told(generated_token_ids=WORDS[:cut], logprobs=is_chat or 0))["choices"]
            assert rest["text"] == SAID[OFFSETS[cut] :], cut
            start = OFFSETS[cut]
            assert is_chat or rest["logprobs"]["text_offset"] == [offset - start for offset in OFFSETS[cut:]]
        if not is_chat:
            for prompt, text in (("s", "s"), ([1, 3], "thes"), ([2, 263], "cat"), ([261], ""), ([4], "")):
                [echoed] = (await told(prompt=prompt, echo=True, logprobs=0))["choices"]
                said = SAID.lstrip() if prompt == [261] else SAID
                assert echoed["text"] == text + said
                lacking = len(SAID) - len(said)
                offsets = [len(text) + max(offset - lacking, 0) for offset in OFFSETS]
                assert echoed["logprobs"]["text_offset"][-len(WORDS) :] == offsets

    play(stripping, scenario, replying(WORDS))


@pytest.mark.covers("A02")
def test_offsets_of_an_echo_belong_to_the_text_that_is_echoed_though_it_spells_special_tokens(model: Path) -> None:
    prompt = "<turn>hi</s>x"

    async def scenario(router: LiveRouter) -> None:
        answer = await router.post(prompt=prompt, echo=True, logprobs=0, max_tokens=20)
        choice = answer.json()["choices"][0]
        told = choice["logprobs"]
        assert choice["text"].startswith(prompt)
        assert told["text_offset"][:7] == [0, 0, 6, 7, 8, 12, 13], "BOS, <turn>, h, i, </s>, x, and what was said"

    play(model, scenario)
