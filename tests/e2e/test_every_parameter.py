"""Every parameter of the API through real processes: a stream says what the whole answer says, and both what one engine alone says.

Requests are drawn afresh in each run. The engine runs in this process with what each parameter should mean to it, so what is
compared crossed everything between: HTTP, dispatch, prefill, the wire, decode, the text's way back.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import httpx
import pytest
from tokenizers import Tokenizer

from engine.plan import TokenLogprobs
from router.chat_types import ChatBody
from router.openai_types import CompletionBody
from tests.e2e.cluster import Cluster, started_cluster
from tests.e2e.drawn_requests import MULTI_BYTE, Expected, drawn_body, expected_choices, name_of
from tests.e2e.engine_alone import engine_alone
from tests.e2e.test_serving import wait_until_nothing_is_held
from tests.router.test_stop_strings import first_stop
from tests.router.test_stream_equals_whole import flattened, joined
from tests.thorough import examples

NUM_REQUESTS: Final = examples(100, 3)
NUM_RESUBMITTED: Final = 20
NUM_THREADS: Final = 12
# Of the bodies' fields, those that are not drawn: how a request is sent, and what has a test of its own below.
NOT_DRAWN: Final = {
    *("stream", "stream_options", "generated_token_ids", "response_format"),
    # This model's template has none of these.
    *("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"),
}

# What draws alone would give most times: nothing but the two bytes of a character, each less likely the more it was said.
TWO_BYTES: Final[dict[str, Any]] = {
    "structured_outputs": None,
    "logit_bias": {str(byte): 100 for byte in "é".encode()},
    "frequency_penalty": 2,
    "temperature": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "max_tokens": 12,
    "min_tokens": 0,
    "ignore_eos": True,
    "stop": None,
    "stop_token_ids": [],
}
# One letter for ever, so that a stop string is said.
STOPPED: Final = TWO_BYTES | {"logit_bias": {str(ord("e")): 100}, "frequency_penalty": 0, "stop": "ee"}

# No token is asked for: the prompt is scored.
SCORED: Final[dict[str, Any]] = {"echo": True, "max_tokens": 0, "min_tokens": 0}


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One of each role; prompts take several chunks and blocks."""
    flags = ("--block-size", "8", "--max-num-seqs", "24", "--max-num-batched-tokens", "32", "--max-model-len", "512")
    with started_cluster(tiny_model, tmp_path_factory.mktemp("parameters"), *flags) as running:
        yield running


@dataclass
class Said:
    """What the engine alone gives for one choice."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None


def alone(model: Path, choices: list[Expected]) -> list[Said]:
    """All of them, in one engine."""
    said = [Said() for _ in choices]
    for progress in engine_alone(model).run([choice.spec(index) for index, choice in enumerate(choices)]):
        each = said[cast(int, progress.sequence_id)]
        each.prompt_logprobs += progress.prompt_logprobs
        if progress.token_id is not None:
            each.token_ids.append(progress.token_id)
            each.logprobs.append(progress.logprobs)
            each.finish = progress.finish
    return said


def path_of(body: dict[str, Any]) -> str:
    """The endpoint that takes it."""
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


def through(cluster: Cluster, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers; each body is sent twice, and its stream put together is checked to be its answer."""

    def ask(client: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
        whole = client.post(path_of(body), json=body)
        stream = client.post(path_of(body), json=body | {"stream": True, "stream_options": {"include_usage": True}})
        assert whole.status_code == stream.status_code == 200, (body, whole.text, stream.text)
        assert stream.headers["content-type"].startswith("text/event-stream")
        if "request_id" in body:
            assert whole.headers["X-Request-Id"] == stream.headers["X-Request-Id"] == body["request_id"]
        answer = flattened(whole.json())
        assert joined(stream.text) == answer, body
        return answer

    with cluster.client() as client, ThreadPoolExecutor(NUM_THREADS) as threads:
        return list(threads.map(lambda body: ask(client, body), bodies))


def assert_is_what_was_said(
    body: dict[str, Any], choice: dict[str, Any], expected: Expected, said: Said, tokenizer: Tokenizer
) -> str:
    """Compare one choice with the engine's; what ended it."""
    token_ids: list[int] = choice["completion_token_ids"]
    end = said.finish or ""
    assert choice["seed"] == expected.seed and choice["prompt_token_ids"] == list(expected.prompt_ids)
    if expected.max_tokens == 0:
        token_ids, end = [], "scored"
        assert choice["completion_token_ids"] == [] and choice["finish_reason"] == "length"
    elif token_ids != said.token_ids or choice["finish_reason"] != said.finish:
        end = "stop string"
        assert choice["finish_reason"] == "stop" and token_ids == said.token_ids[: len(token_ids)], body
        assert len(token_ids) > body["min_tokens"]
    text = choice["text"]
    if body.get("echo"):
        assert text.startswith(expected.prompt_text), body
        text = text.removeprefix(expected.prompt_text)
    spoken = tokenizer.decode([each for each in token_ids if each not in expected.sampling.stop_token_ids])
    stops = [body["stop"]] if isinstance(body["stop"], str) else body["stop"] or []
    if end == "stop string":
        assert spoken.startswith(text) and any(spoken.startswith(text + stop) for stop in stops), body
    else:
        assert text == spoken, body
    if not body["min_tokens"]:
        assert (text, end == "stop string") == first_stop(spoken, stops), body
    assert_logprobs(body, choice["logprobs"], expected, said, len(token_ids))
    return end


def assert_logprobs(
    body: dict[str, Any], logprobs: dict[str, Any] | None, expected: Expected, said: Said, num_tokens: int
) -> None:
    """To the last bit: they are float32 numbers all the way."""
    if expected.sampling.num_logprobs is None:
        assert logprobs is None
        return
    assert logprobs is not None
    scored = list(zip(said.token_ids, said.logprobs, strict=True))[:num_tokens]
    if "messages" in body:
        content = logprobs["content"]
        assert [entry["logprob"] for entry in content] == [of.logprob for _, of in scored if of is not None]
        tops = [[(top["token"], top["logprob"]) for top in entry["top_logprobs"]] for entry in content]
        assert tops == [[(name_of(each), value) for each, value in of.top] for _, of in scored if of is not None]
        assert [entry["token"] for entry in content] == [name_of(token_id) for token_id, _ in scored]
        return
    if body["echo"]:
        prompt = expected.prompt_ids
        scored = [(prompt[0], None), *zip(prompt[1:], said.prompt_logprobs, strict=True), *scored]
    assert logprobs["tokens"] == [name_of(token_id) for token_id, _ in scored]
    assert logprobs["token_logprobs"] == [None if of is None else of.logprob for _, of in scored]
    named = [
        None if of is None else {name_of(each): value for each, value in (*of.top, (token_id, of.logprob))}
        for token_id, of in scored
    ]
    assert logprobs["top_logprobs"] == named


@pytest.mark.covers("A02", "A03", "A05", "A07", "A08", "A09", "D07", "M03")
def test_drawn_requests_streamed_and_whole_say_what_one_engine_alone_says(
    tiny_model: Path, cluster: Cluster, fresh_seed: int
) -> None:
    rng = random.Random(fresh_seed)
    bodies = [drawn_body(rng, is_chat=number % 2 == 1) for number in range(NUM_REQUESTS)]
    for body in bodies[:2]:  # what is rare is there, too
        body.setdefault("request_id", f"mine-{rng.getrandbits(32)}")
    for kind, drawn in ((CompletionBody, bodies[::2]), (ChatBody, bodies[1::2])):
        assert {name for body in drawn for name in body} == set(kind.model_fields) - NOT_DRAWN, (
            "every parameter is there"
        )
    bodies[0] |= TWO_BYTES
    bodies[2] |= STOPPED
    bodies[4] |= SCORED
    answers = through(cluster, bodies)
    choices = [expected_choices(body) for body in bodies]
    said = iter(alone(tiny_model, [each for of_body in choices for each in of_body]))
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    ends, texts = Counter[str](), ""
    for body, answer, of_body in zip(bodies, answers, choices, strict=True):
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(of_body)))
        for choice, expected in zip(answer["choices"], of_body, strict=True):
            ends[assert_is_what_was_said(body, choice, expected, next(said), tokenizer)] += 1
            texts += choice["text"].removeprefix(expected.prompt_text)
        num_prompt = sum(len(each.prompt_ids) for each in of_body[:: body["n"]])
        num_completion = sum(len(choice["completion_token_ids"]) for choice in answer["choices"])
        assert answer["usage"] == {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
        }
    assert set(ends) == {"stop", "length", "stop string", "scored"}, ends
    assert any(character in texts for character in MULTI_BYTE), "a character of several tokens was generated"
    wait_until_nothing_is_held(cluster)
    (prefill,), (decode,) = cluster.nodes_of("prefill"), cluster.nodes_of("decode")
    received = sum(cluster.state(decode)["kv_bytes_received"].values())
    # What a stop string ends with its first token is cancelled on its way.
    assert 0 < received <= sum(cluster.state(prefill)["kv_bytes_sent"].values())


@pytest.mark.covers("A05", "A07", "A08")
def test_drawn_answers_cut_anywhere_and_resubmitted_go_on_with_what_was_there(
    cluster: Cluster, fresh_seed: int
) -> None:
    rng = random.Random(fresh_seed)
    bodies = [
        drawn_body(rng, is_chat=False)
        | {"prompt": "Grüß €", "n": 1, "best_of": None, "echo": False, "stop": None, "max_tokens": rng.randint(8, 24)}
        | {"min_tokens": 4, "logprobs": 2}
        for _ in range(NUM_RESUBMITTED)
    ]
    answers = zip(bodies, (answer["choices"][0] for answer in through(cluster, bodies)), strict=True)
    # A grammar may leave nothing to begin with but stop tokens, which end an answer there whatever min_tokens says.
    longer = [(body, whole) for body, whole in answers if len(whole["completion_token_ids"]) > 1]
    assert len(longer) > len(bodies) // 2
    bodies, wholes = [body for body, _ in longer], [whole for _, whole in longer]
    cuts = [rng.randrange(1, len(whole["completion_token_ids"])) for whole in wholes]
    resumed = [
        body | {"generated_token_ids": whole["completion_token_ids"][:cut]}
        for body, whole, cut in zip(bodies, wholes, cuts, strict=True)
    ]
    for whole, cut, rest in zip(wholes, cuts, through(cluster, resumed), strict=True):
        (choice,) = rest["choices"]
        assert choice["completion_token_ids"] == whole["completion_token_ids"][cut:]
        assert whole["text"].endswith(choice["text"]) and choice["finish_reason"] == whole["finish_reason"]
        for name in ("tokens", "token_logprobs", "top_logprobs"):
            assert choice["logprobs"][name] == whole["logprobs"][name][cut:]
        assert rest["usage"]["completion_tokens"] == len(whole["completion_token_ids"]) - cut
