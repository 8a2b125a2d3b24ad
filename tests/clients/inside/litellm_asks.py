"""litellm, as its users call a server of OpenAI's API: completion, text_completion, streams, async, errors."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import sys
import time
from typing import Any

import litellm

litellm.telemetry = False
litellm.suppress_debug_info = True


def asked(url: str, model: str, ask: dict[str, Any]) -> dict[str, Any]:
    is_chat = ask["path"] == "chat"
    call: Any = litellm.completion if is_chat else litellm.text_completion
    provider = "openai" if is_chat else "text-completion-openai"
    where = {"model": f"{provider}/{model}", "api_base": f"{url}/v1", "api_key": "none", "num_retries": 0}
    if not ask["stream"]:
        answer = call(**where, **ask["body"])
        choices = answer.choices
        return {
            "texts": [choice.message.content if is_chat else choice.text for choice in choices],
            "finish_reasons": [choice.finish_reason for choice in choices],
            "prompt_tokens": answer.usage.prompt_tokens,
            "completion_tokens": answer.usage.completion_tokens,
            "logprobs": None,
        }
    begun, at_s, text, reason, usage = time.monotonic(), [], "", None, None
    for chunk in call(**where, **ask["body"], stream=True, stream_options={"include_usage": True}):
        usage = getattr(chunk, "usage", None) or usage
        for choice in chunk.choices:
            more = choice.delta.content if is_chat else choice.text
            if more:
                text += more
                at_s.append(time.monotonic() - begun)
            reason = choice.finish_reason or reason
    counts = (usage.prompt_tokens, usage.completion_tokens) if usage else (-1, -1)
    return {
        "texts": [text],
        "finish_reasons": [reason],
        "prompt_tokens": counts[0],
        "completion_tokens": counts[1],
        "logprobs": None,
        "chunks_at_s": at_s,
    }


async def at_once(url: str, model: str, body: dict[str, Any]) -> bool:
    where = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none"}
    answers: list[Any] = await asyncio.gather(*(litellm.acompletion(**where, **body) for _ in range(8)))
    return len({answer.choices[0].message.content for answer in answers}) == 1


def name_of_error(url: str, model: str, body: dict[str, Any]) -> str:
    try:
        litellm.completion(model=f"openai/{model}", api_base=f"{url}/v1", api_key="none", num_retries=0, **body)
    except Exception as error:  # of litellm's own classes, which are what is asked for
        return type(error).__name__
    return "none"


def main() -> None:
    """Ask what stdin says."""
    url, model = sys.argv[1:]
    asks = json.load(sys.stdin)
    body = asks[0]["body"]
    answers = {ask["name"]: asked(url, model, ask) for ask in asks}
    facts = {
        "eight at once": asyncio.run(at_once(url, model, body)),
        "an unknown model": name_of_error(url, "nobody", body),
        "a bad parameter": name_of_error(url, model, body | {"temperature": 9}),
    }
    version = importlib.metadata.version("litellm")
    sys.stdout.write("\n" + json.dumps({"version": version, "answers": answers, "facts": facts}) + "\n")


if __name__ == "__main__":
    main()
