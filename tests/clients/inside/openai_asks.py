"""The openai package, in its own words: sync, async, streams, errors."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import openai


def gathered(chunks: Any, is_chat: bool) -> dict[str, Any]:
    """A stream put together as a user would."""
    begun, at_s, usage = time.monotonic(), [], None
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    logprobs: list[float] = []
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text = choice.delta.content if is_chat else choice.text
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
            if text:
                at_s.append(time.monotonic() - begun)
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
            if is_chat and choice.logprobs and choice.index == 0:
                logprobs += [token.logprob for token in choice.logprobs.content or ()]
    return told(texts, reasons, usage, logprobs) | {"chunks_at_s": at_s}


def told(texts: dict[int, str], reasons: dict[int, str], usage: Any, logprobs: list[float]) -> dict[str, Any]:
    return {
        "texts": [texts[index] for index in sorted(texts)],
        "finish_reasons": [reasons[index] for index in sorted(reasons)],
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "logprobs": logprobs,
    }


def asked(client: openai.OpenAI, model: str, ask: dict[str, Any]) -> dict[str, Any]:
    is_chat = ask["path"] == "chat"
    create: Any = client.chat.completions.create if is_chat else client.completions.create
    if ask["stream"]:
        return gathered(
            create(model=model, stream=True, stream_options={"include_usage": True}, **ask["body"]), is_chat
        )
    answer = create(model=model, **ask["body"])
    logprobs: list[float] = []
    first = answer.choices[0]
    if first.logprobs:
        listed = [token.logprob for token in first.logprobs.content] if is_chat else first.logprobs.token_logprobs
        logprobs = [each for each in listed if each is not None]
    texts = {choice.index: choice.message.content if is_chat else choice.text for choice in answer.choices}
    return told(texts, {choice.index: choice.finish_reason for choice in answer.choices}, answer.usage, logprobs)


async def at_once(url: str, model: str, body: dict[str, Any]) -> bool:
    """Whether eight calls at once of the async client get the same."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        calls = [client.chat.completions.create(model=model, **body) for _ in range(8)]
        return len({answer.choices[0].message.content for answer in await asyncio.gather(*calls)}) == 1


def name_of_error(create: Any, **body: Any) -> str:
    try:
        create(**body)
    except openai.APIStatusError as error:
        return f"{type(error).__name__} {error.status_code}"
    return "none"


def main() -> None:
    """Ask what stdin says."""
    url, model = sys.argv[1:]
    asks = json.load(sys.stdin)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answers = {ask["name"]: asked(client, model, ask) for ask in asks}
        create, body = client.chat.completions.create, asks[0]["body"]
        with client.chat.completions.stream(model=model, **(body | {"stop": ["e", "1"], "max_tokens": 64})) as stream:
            streamed = "".join(event.delta for event in stream if event.type == "content.delta")
        facts = {
            "models": [each.id for each in client.models.list()] == [model],
            "model": client.models.retrieve(model).id == model,
            "the helper's stream": streamed == answers["chat, stop string"]["texts"][0],
            "eight at once": asyncio.run(at_once(url, model, body)),
            "an unknown model": name_of_error(create, **(body | {"model": "nobody"})),
            "a bad parameter": name_of_error(create, model=model, **(body | {"temperature": 9})),
            "no messages": name_of_error(create, model=model, **(body | {"messages": []})),
        }
        sent_back = [*body["messages"], create(model=model, **body).choices[0].message]
        again = create(model=model, **(body | {"messages": [*sent_back, body["messages"][-1]]}))
        facts["its answer can be sent back"] = bool(again.choices[0].message.content)
    sys.stdout.write(json.dumps({"version": openai.__version__, "answers": answers, "facts": facts}) + "\n")


if __name__ == "__main__":
    main()
