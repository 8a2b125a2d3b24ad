"""langchain-openai: ChatOpenAI and OpenAI, invoked and streamed, with tools, by responses, and with structured output."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import langchain_openai
import pydantic

if TYPE_CHECKING:
    from tests.clients.inside.pieces import Pieces
else:  # run by its path
    from pieces import Pieces


class Answer(pydantic.BaseModel):
    """What a user would have read for them."""

    is_baton: bool
    colour: Literal["red", "green"]


def asked(url: str, model: str, ask: dict[str, Any]) -> dict[str, Any]:
    where = {"model": model, "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
    body = dict(ask["body"])
    if ask["path"] == "completion":
        prompt = body.pop("prompt")
        return of_text(langchain_openai.OpenAI(**where, **body), prompt, Pieces(url) if ask["stream"] else None)
    body |= {"stream_usage": True} if ask["path"] == "chat" else {}
    messages = body.pop("messages" if ask["path"] == "chat" else "input")
    names = ("tools", "tool_choice", "parallel_tool_calls")
    tools, choice, parallel = (body.pop(name, None) for name in names)
    bound = {name: body.pop(name) for name in ("response_format", "text") if name in body}
    if ask["path"] == "response":  # which have no seed in OpenAI's words
        body |= {"max_tokens": body.pop("max_output_tokens"), "extra_body": {"seed": body.pop("seed")}}
    chat: Any = langchain_openai.ChatOpenAI(**where, **body, use_responses_api=ask["path"] == "response")
    if tools:
        chat = chat.bind_tools(tools, tool_choice=choice, parallel_tool_calls=parallel)
    return of_chat(chat.bind(**bound) if bound else chat, messages, Pieces(url) if ask["stream"] else None)


def of_chat(chat: Any, messages: list[Any], counted: Pieces | None) -> dict[str, Any]:
    if counted:
        message: Any = None
        for chunk in chat.stream(messages):
            message = chunk if message is None else message + chunk
            if chunk.content or chunk.tool_call_chunks:
                counted.count()
    else:
        message = chat.invoke(messages)
    about = message.response_metadata
    return {
        "texts": [message.text],
        "finish_reasons": [about.get("finish_reason") or about["status"]],
        "prompt_tokens": message.usage_metadata["input_tokens"],
        "completion_tokens": message.usage_metadata["output_tokens"],
        "logprobs": None,
        "calls": [[call["id"], call["name"], call["args"]] for call in message.tool_calls],
    } | (counted.told() if counted else {})


def of_text(text: Any, prompt: str, counted: Pieces | None) -> dict[str, Any]:
    pieces = []
    if counted:
        for piece in text.stream(prompt):
            pieces.append(piece)
            if piece:
                counted.count()
    else:
        pieces.append(text.invoke(prompt))
    told = {"finish_reasons": None, "prompt_tokens": None, "completion_tokens": None, "logprobs": None}
    return {"texts": ["".join(pieces)], **told, "calls": []} | (counted.told() if counted else {})


async def at_once(url: str, model: str, body: dict[str, Any]) -> list[str]:
    """What eight calls at once get, each thing once."""
    settings = dict(body)
    messages = settings.pop("messages")
    chat = langchain_openai.ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none", **settings)
    answers = await chat.abatch([messages] * 8)
    return list({answer.text for answer in answers})


def goes_on(url: str, model: str, body: dict[str, Any]) -> bool:
    """Whether a conversation goes on behind a call and its result."""
    chat = langchain_openai.ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none", seed=7, max_tokens=200)
    called = chat.bind_tools(body["tools"], tool_choice=body["tool_choice"]).invoke(body["messages"])
    result = {"role": "tool", "content": "Rain.", "tool_call_id": called.tool_calls[0]["id"]}
    return bool(chat.bind_tools(body["tools"]).invoke([*body["messages"], called, result]).text)


def parsed(url: str, model: str, schema: dict[str, Any]) -> dict[str, Any]:
    """`with_structured_output`, in its ways."""
    where: dict[str, Any] = {"model": model, "base_url": f"{url}/v1", "api_key": "none"}
    chat = langchain_openai.ChatOpenAI(**where, seed=5)
    titled = schema | {"title": "answer", "description": "What it is."}
    responses = langchain_openai.ChatOpenAI(**where, extra_body={"seed": 5}, use_responses_api=True)
    of_class = [each.with_structured_output(Answer).invoke("Is it one?") for each in (chat, responses)]
    return {
        "json_schema": chat.with_structured_output(titled, method="json_schema").invoke("Is it one?"),
        "function_calling": chat.with_structured_output(titled, method="function_calling").invoke("Is it one?"),
        "a pydantic class": of_class[0].model_dump(),
        "a response": of_class[1].model_dump(),
    }


def main() -> None:
    """Ask what the one file says, and write what came of it to the other."""
    url, model, asked_at, told_at = sys.argv[1:]
    asks = json.loads(Path(asked_at).read_text())
    bodies = {ask["name"]: ask["body"] for ask in asks}
    answers = {ask["name"]: asked(url, model, ask) for ask in asks}
    facts = {
        "eight at once": asyncio.run(at_once(url, model, bodies["chat"])) == answers["chat"]["texts"],
        "a call and its result can be sent back": goes_on(url, model, bodies["a named call"]),
    }
    schema = bodies["structured"]["response_format"]["json_schema"]["schema"]
    version = importlib.metadata.version("langchain-openai")
    told = {"version": version, "answers": answers, "facts": facts, "parsed": parsed(url, model, schema)}
    Path(told_at).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
