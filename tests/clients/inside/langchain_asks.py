"""langchain-openai: ChatOpenAI and OpenAI, invoked and streamed."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import sys
import time
from typing import Any

import langchain_openai


def asked(url: str, model: str, ask: dict[str, Any]) -> dict[str, Any]:
    where = {"model": model, "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
    body = dict(ask["body"])
    if ask["path"] == "chat":
        messages = body.pop("messages")
        return of_chat(langchain_openai.ChatOpenAI(**where, **body), messages, ask["stream"])
    prompt = body.pop("prompt")
    return of_text(langchain_openai.OpenAI(**where, **body), prompt, ask["stream"])


def of_chat(chat: Any, messages: list[Any], is_stream: bool) -> dict[str, Any]:
    begun, at_s = time.monotonic(), []
    if is_stream:
        message: Any = None
        for chunk in chat.stream(messages, stream_usage=True):
            message = chunk if message is None else message + chunk
            if chunk.content:
                at_s.append(time.monotonic() - begun)
    else:
        message = chat.invoke(messages)
    return {
        "texts": [message.content],
        "finish_reasons": [message.response_metadata["finish_reason"]],
        "prompt_tokens": message.usage_metadata["input_tokens"],
        "completion_tokens": message.usage_metadata["output_tokens"],
        "logprobs": None,
        "chunks_at_s": at_s,
    }


def of_text(text: Any, prompt: str, is_stream: bool) -> dict[str, Any]:
    begun, at_s, pieces = time.monotonic(), [], []
    if is_stream:
        for piece in text.stream(prompt):
            pieces.append(piece)
            if piece:
                at_s.append(time.monotonic() - begun)
    else:
        pieces.append(text.invoke(prompt))
    told = {"finish_reasons": None, "prompt_tokens": None, "completion_tokens": None, "logprobs": None}
    return {"texts": ["".join(pieces)], **told, "chunks_at_s": at_s}


async def at_once(url: str, model: str, body: dict[str, Any]) -> bool:
    settings = dict(body)
    messages = settings.pop("messages")
    chat = langchain_openai.ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none", **settings)
    answers = await chat.abatch([messages] * 8)
    return len({answer.content for answer in answers}) == 1


def main() -> None:
    """Ask what stdin says."""
    url, model = sys.argv[1:]
    asks = json.load(sys.stdin)
    answers = {ask["name"]: asked(url, model, ask) for ask in asks}
    facts = {"eight at once": asyncio.run(at_once(url, model, asks[0]["body"]))}
    version = importlib.metadata.version("langchain-openai")
    sys.stdout.write(json.dumps({"version": version, "answers": answers, "facts": facts}) + "\n")


if __name__ == "__main__":
    main()
