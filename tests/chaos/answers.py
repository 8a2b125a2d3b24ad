"""Requests of every kind, their fault-free answers, and whether what a client got under faults is that answer.

The fault-free answer comes from a cluster that nothing happens to. Equal means equal: text, token ids, logprobs as floats, finish
reasons, seeds, usage; a stream is put together first, and must have ended with [DONE] and nothing behind it.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from tests.e2e.drawn_requests import drawn_body
from tests.e2e.test_tools_and_responses import TOOLS
from tests.router.test_stream_equals_whole import flattened, joined

MAX_TOKENS: Final = 256
PATIENCE_S: Final = (
    120.0  # without a word of the answer, which of a whole one is all its work: far beyond what any fault may cost
)
AGAIN: Final = (429, 503)  # come back later: nothing was generated
# Grammars of each kind, some of them compiled in a while, and with ends that come soon or late.
_NAMES: Final = {"type": "array", "items": {"type": "string", "minLength": 2, "maxLength": 6}, "minItems": 3}
_SCHEMA: Final = {"type": "object", "properties": {"kind": {"enum": ["red", "世界"]}, "names": _NAMES}}
_BOUND: Final[tuple[dict[str, Any], ...]] = (
    {"json": _SCHEMA | {"required": ["kind", "names"]}, "disable_any_whitespace": True},
    {"json_object": True},
    {"choice": ["yes, of course €", "no é", "世界" * 5]},
    {"grammar": 'root ::= item{4,60}\nitem ::= "(" [a-e]{1,3} ")" | "é"'},
)
# A template that has tools, and says of them no more than their names: prompts are short.
CHAT_TEMPLATE: Final = (
    "{% if tools %}<tool_call>{% for tool in tools %}{{ tool.function.name }},{% endfor %}{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% if message.tool_call_id %}({{ message.tool_call_id }}){% endif %}|{% endfor %}assistant: "
)


def drawn_from_all(rng: random.Random) -> dict[str, Any]:
    """As drawn_request, and some are bound by any kind of grammar, must call tools, have many choices, or a prompt of many chunks.

    Of a model with CHAT_TEMPLATE.
    """
    body = drawn_request(rng)
    kind = rng.random()
    if kind < 0.1:
        body["n"] = rng.randint(4, 12)
        body |= {"best_of": body["n"]} if "best_of" in body else {}
    elif kind < 0.2 and "prompt" in body and (body.get("max_tokens") or 0) > 0:
        body["prompt"] = [rng.randrange(256) for _ in range(rng.randint(100, 240))]
    elif kind < 0.4 and body.get("max_tokens", body.get("max_completion_tokens")):
        body |= {"ignore_eos": False, "min_tokens": 0, "stop_token_ids": [], "structured_outputs": None}
        if "messages" in body and rng.random() < 0.5:
            name = {"type": "function", "function": {"name": rng.choice(TOOLS)["function"]["name"]}}
            body |= {"tools": TOOLS, "tool_choice": rng.choice(["required", name]), "parallel_tool_calls": kind < 0.3}
        else:
            body["structured_outputs"] = rng.choice(_BOUND)
    return body


def drawn_request(rng: random.Random, max_tokens: int = MAX_TOKENS) -> dict[str, Any]:
    """A request with any parameter of either endpoint; most go on for long, or no fault would find them under way."""
    body = drawn_body(rng, is_chat=rng.random() < 0.5)
    name = "max_tokens" if "max_tokens" in body else "max_completion_tokens"
    if body[name]:
        body[name] = rng.randint(1, max_tokens)
        body["min_tokens"] = min(body["min_tokens"], body[name])
    if rng.random() < 0.7:
        body |= {"ignore_eos": True, "stop": None, "stop_token_ids": [], "structured_outputs": None}
    return body


@dataclass(slots=True)
class Told:
    """What a client got."""

    status: int = 0  # 0: no answer at all
    retry_after: str | None = None
    is_stream: bool = False
    text: str = ""
    broke: str | None = None  # what went wrong with the connection
    heard_at: list[float] = field(default_factory=list)  # by time.monotonic: each part of the body


def ask(client: httpx.Client, url: str, body: dict[str, Any], is_stream: bool) -> Told:
    """Send one request and take its answer to the end, or to where it breaks."""
    told = Told(is_stream=is_stream)
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    fields = body | ({"stream": True, "stream_options": {"include_usage": True}} if is_stream else {})
    parts: list[bytes] = []
    try:
        with client.stream("POST", url + path, json=fields, timeout=PATIENCE_S) as response:
            told.status = response.status_code
            told.retry_after = response.headers.get("Retry-After")
            for part in response.iter_raw():
                told.heard_at.append(time.monotonic())
                parts.append(part)
    except httpx.TransportError as error:
        told.broke = f"{type(error).__name__} {error}"
    told.text = _spelled_out(b"".join(parts).decode(errors="replace"), is_stream)
    return told


def _spelled_out(text: str, is_stream: bool) -> str:
    """The body of an answer with each chat's tool calls in its content, so that they are compared like all that it says."""
    if is_stream:
        *events, rest = text.split("\n\n")  # the rest is the half of one that broke
        spelled = [
            each if '"delta"' not in each else "data: " + _with_calls(each.removeprefix("data: ")) for each in events
        ]
        return "\n\n".join([*spelled, rest])
    return _with_calls(text) if '"message"' in text and text.endswith("}") else text


def _with_calls(text: str) -> str:
    content = json.loads(text)
    for choice in content.get("choices", ()):
        said = choice["delta"] if "delta" in choice else choice.get("message", {})
        calls = said.pop("tool_calls", ())
        begun = [f"\n{call['id']} {call['function']['name']} " if "id" in call else "" for call in calls]
        told = [beginning + call["function"]["arguments"] for beginning, call in zip(begun, calls, strict=True)]
        said["content"] = (said.get("content") or "") + "".join(told)
    return json.dumps(content)


def undisturbed(client: httpx.Client, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The fault-free answer, flattened; of a router that nothing happens to."""
    told = ask(client, url, body, is_stream=False)
    assert told.status == 200, (body, told)
    return flattened(json.loads(told.text))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an answer is worth."""

    kind: str  # "equal"; "refused", "broken", or an error's code: it may end so where a fault allows; "wrong": never
    num_tokens: int = 0  # that were right
    detail: str = ""


def judge(told: Told, reference: dict[str, Any]) -> Verdict:
    """Compare an answer with the fault-free one; what is not the whole of it must be a beginning of it."""
    if told.status in AGAIN and told.broke is None:
        kind = "refused" if told.retry_after is not None else "wrong"
        return Verdict(kind, 0, f"{told.status} {_error(json.loads(told.text))}")
    if told.status not in (0, 200):
        return Verdict("wrong", 0, f"status {told.status}: {told.text[:300]}")
    if not told.is_stream:
        if told.broke is not None:
            return Verdict("broken", 0, told.broke)
        return _compared(flattened(json.loads(told.text)), reference)
    events = [line.removeprefix("data: ") for line in told.text.split("\n\n") if line.startswith("data: ")]
    if told.broke is not None:
        events = events[: told.text.count("\n\n")]  # the last one may be half of one
    if events and events[-1] == "[DONE]":
        try:
            return _compared(joined(told.text), reference)
        except AssertionError as unsound:
            return Verdict("wrong", 0, f"not a sound stream: {str(unsound)[:300]}")
    error = _error(json.loads(events.pop())) if events and "error" in json.loads(events[-1]) else None
    num_tokens = _num_beginning(events, reference)
    if num_tokens is None:
        return Verdict("wrong", 0, f"not a beginning of its fault-free answer: {told.text[-600:]}")
    if error is not None:
        return Verdict(str(error["code"]), num_tokens, str(error["message"]))
    if told.broke is None:
        return Verdict("wrong", num_tokens, f"ended without [DONE] and without an error: {told.text[-300:]}")
    return Verdict("broken", num_tokens, told.broke)


def _compared(answer: dict[str, Any], reference: dict[str, Any]) -> Verdict:
    if answer != reference:
        return Verdict("wrong", 0, _first_difference(answer, reference))
    return Verdict("equal", sum(len(choice["completion_token_ids"]) for choice in answer["choices"]))


def _num_beginning(events: list[str], reference: dict[str, Any]) -> int | None:
    """Tokens of a stream that ended too soon; None if they and their text do not begin the right answer."""
    token_ids: dict[int, list[int]] = {}
    texts: dict[int, str] = {}
    for choice in (choice for event in events for choice in json.loads(event)["choices"]):
        index = choice["index"]
        content = choice["delta"]["content"] if "delta" in choice else choice.get("text", "")
        texts[index] = texts.get(index, "") + (content or "")
        token_ids.setdefault(index, []).extend(choice.get("completion_token_ids", ()))
    whole = {choice["index"]: choice for choice in reference["choices"]}
    for index, ids in token_ids.items():
        if whole[index]["completion_token_ids"][: len(ids)] != ids or not whole[index]["text"].startswith(texts[index]):
            return None
    return sum(map(len, token_ids.values()))


def _error(content: dict[str, Any]) -> dict[str, Any]:
    """The error of an answer or of an event, checked to have OpenAI's shape."""
    assert set(content) == {"error"}, content
    error: dict[str, Any] = content["error"]
    assert set(error) == {"message", "type", "param", "code"}, content
    return error


def _first_difference(answer: Any, reference: Any, path: str = "") -> str:
    """Where two answers part, for whoever has to find out why."""
    if isinstance(answer, dict) and isinstance(reference, dict) and answer.keys() == reference.keys():
        different = [name for name in answer if answer[name] != reference[name]]
        return _first_difference(answer[different[0]], reference[different[0]], f"{path}.{different[0]}")
    if isinstance(answer, list) and isinstance(reference, list):
        for index, (ours, theirs) in enumerate(zip(answer, reference, strict=False)):
            if ours != theirs:
                return _first_difference(ours, theirs, f"{path}[{index}]")
        return f"{path}: {len(answer)} entries where {len(reference)} were right, the shorter is the other's beginning"
    return f"{path}: {str(answer)[:300]} where {str(reference)[:300]} was right"
