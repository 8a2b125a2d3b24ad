"""`/tokenize` and `/detokenize`: the ids that generation would use, the way back, and refusals in one sentence."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.router.live_router import MAX_MODEL_LEN, MODEL_NAME, LiveRouter, live_router
from tests.router.tiny_model import BOS_ID, EOS_ID, TURN_ID, VOCAB_SIZE, write_model_text

Scenario = Callable[[LiveRouter], Awaitable[None]]
HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_text(tmp_path_factory.mktemp("model"))


def play(model: Path, scenario: Scenario) -> None:
    """Run a scenario against a live router; no node hears of anything."""

    async def run() -> None:
        async with live_router(model) as router:
            await scenario(router)

    asyncio.run(run())


@pytest.mark.covers("A13")
def test_a_text_and_a_chat_have_the_token_ids_that_nodes_are_sent(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        prompt = (await router.post("/tokenize", prompt="hi")).json()
        assert prompt == {"count": 3, "max_model_len": MAX_MODEL_LEN, "tokens": [BOS_ID, 104, 105], "token_strs": None}
        chat = (await router.post("/tokenize", messages=HI)).json()
        assert not router.pair.prefill.dispatches
        await router.post(prompt="hi", max_tokens=5)
        await router.post("/v1/chat/completions", messages=HI, max_tokens=5)
        first, second = router.pair.prefill.dispatches
        assert prompt["tokens"] == list(first.prompt_token_ids)
        assert chat["tokens"] == list(second.prompt_token_ids)

    play(model, scenario)


@pytest.mark.covers("A13")
def test_special_tokens_the_generation_prompt_and_strings_come_as_asked(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        plain = (await router.post("/tokenize", prompt="hi", add_special_tokens=False, return_token_strs=True)).json()
        assert (plain["tokens"], plain["token_strs"]) == ([104, 105], ["h", "i"])
        ended = (await router.post("/tokenize", messages=HI, add_generation_prompt=False)).json()
        assert ended["tokens"][-1] == TURN_ID
        twice = (await router.post("/tokenize", messages=HI, add_special_tokens=True)).json()
        assert twice["tokens"][:2] == [BOS_ID, BOS_ID]
        shown = (await router.post("/detokenize", tokens=[BOS_ID, 104, 105, EOS_ID])).json()
        assert shown == {"prompt": "<s>hi</s>"}
        assert (await router.client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}

    play(model, scenario)


@pytest.mark.covers("A13", "M03")
def test_a_chat_template_hears_what_the_client_tells_it(model: Path) -> None:
    told: Any = {"tone": "dry"}

    async def scenario(router: LiveRouter) -> None:
        chat = (await router.post("/tokenize", messages=HI, chat_template_kwargs=told)).json()
        assert bytes(each for each in chat["tokens"] if each < BOS_ID).endswith(b"assistant: (dry) ")
        await router.post("/v1/chat/completions", messages=HI, max_tokens=5, chat_template_kwargs=told)
        assert chat["tokens"] == list(router.pair.prefill.dispatches[0].prompt_token_ids)
        for nothing in (dict[str, Any](), None):
            plain = (await router.post("/tokenize", messages=HI, chat_template_kwargs=nothing)).json()
            assert bytes(each for each in plain["tokens"] if each < BOS_ID).endswith(b"assistant: ")

    play(model, scenario)


@pytest.mark.covers("A13")
def test_every_text_comes_back(model: Path) -> None:
    draw = random.Random(5)
    ranges = [(0x20, 0x7F), (0xA0, 0x2FF), (0x4E00, 0x9FFF), (0x1F300, 0x1F6FF), (0, 0x1F)]
    texts = [
        "".join(chr(draw.randint(*draw.choice(ranges))) for _ in range(draw.choice([0, 1, 3, 20, 300])))
        for _ in range(60)
    ]

    async def scenario(router: LiveRouter) -> None:
        for text in texts:
            told = (await router.post("/tokenize", prompt=text, add_special_tokens=False)).json()
            assert told["count"] == len(told["tokens"])
            assert (await router.post("/detokenize", tokens=told["tokens"])).json() == {"prompt": text}

    play(model, scenario)


NESTED: Any = {}
for _ in range(65):
    NESTED = {"x": NESTED}
BAD: list[tuple[str, dict[str, Any], int, str]] = [
    ("/tokenize", {"model": MODEL_NAME}, 400, "prompt: give either prompt or messages"),
    ("/tokenize", {"prompt": "a", "messages": HI}, 400, "prompt: give either prompt or messages"),
    ("/tokenize", {"prompt": 5}, 400, "prompt: must be a text, not 5"),
    ("/tokenize", {"prompt": "\ud800"}, 400, "half a surrogate pair"),
    ("/tokenize", {"messages": [{"role": "tool", "content": "x"}]}, 400, "the chat template refuses the messages"),
    ("/tokenize", {"prompt": "a", "continue_final_message": True}, 400, "continue_final_message: needs messages"),
    ("/tokenize", {"prompt": "a", "chat_template_kwargs": {"x": 1}}, 400, "chat_template_kwargs: needs messages"),
    *(
        ("/tokenize", {"messages": HI, "chat_template_kwargs": given}, 400, f"chat_template_kwargs: {words}")
        for given, words in (
            ({"tools": []}, "tools is not told here: the request's other fields, the model or the router do"),
            ({"x": 1, "bos_token": ""}, "bos_token is not told here"),
            ({"x": "a" * (64 << 10)}, "must have at most 65536 bytes, not 65545"),
            (NESTED, "must be nested at most 64 deep"),
            ({"x": "\ud800"}, "holds half a surrogate pair"),
            ([], "must be an object"),
        )
    ),
    ("/tokenize", {"prompt": "a", "colour": 1}, 400, "colour: unknown parameter"),
    ("/tokenize", {"prompt": "a", "model": "other"}, 404, 'model: this router serves tiny, not "other"'),
    ("/tokenize", {"prompt": "a" * (1 << 20)}, 413, "larger than 1048576 bytes"),
    ("/detokenize", {"tokens": [1, VOCAB_SIZE]}, 400, f"tokens: token id {VOCAB_SIZE} is not between 0 and"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens: token id -1"),
    ("/detokenize", {"tokens": "ab"}, 400, "tokens: must be a list"),
    ("/detokenize", {}, 400, "tokens: is required"),
]


@pytest.mark.covers("A13", "A11")
def test_a_bad_request_is_one_sentence(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        for path, body, status, words in BAD:
            answer = await router.client.post(path, content=json.dumps(body), headers={"X-Request-Id": "mine"})
            assert (answer.status_code, answer.headers["X-Request-Id"]) == (status, "mine"), answer.text
            error = answer.json()["error"]
            assert words in error["message"]
            assert "\n" not in error["message"]

    play(model, scenario)


@pytest.mark.covers("A13", "A04")
def test_the_description_names_both(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        told = (await router.client.get("/openapi.json")).json()
        for path, name in (("/tokenize", "TokenizeBody"), ("/detokenize", "DetokenizeBody")):
            content = told["paths"][path]["post"]["requestBody"]["content"]["application/json"]
            assert content["schema"]["$ref"].endswith(name)
            assert name in told["components"]["schemas"]

    play(model, scenario)
