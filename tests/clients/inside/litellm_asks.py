"""litellm, as its users call a server of OpenAI's API: completion, text_completion, tool calls, streams, async, errors."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import litellm

if TYPE_CHECKING:
    from tests.clients.inside.pieces import Pieces
else:  # run by its path
    from pieces import Pieces

litellm.telemetry = False
litellm.suppress_debug_info = True


def asked(url: str, model: str, ask: dict[str, Any]) -> dict[str, Any]:
    is_chat = ask["path"] == "chat"
    create: Any = litellm.completion if is_chat else litellm.text_completion
    provider = "openai" if is_chat else "text-completion-openai"
    where = {"model": f"{provider}/{model}", "api_base": f"{url}/v1", "api_key": "none", "num_retries": 0}
    if not ask["stream"]:
        answer = create(**where, **ask["body"])
        choices = answer.choices
        return {
            "texts": [(choice.message.content or "") if is_chat else choice.text for choice in choices],
            "finish_reasons": [choice.finish_reason for choice in choices],
            "prompt_tokens": answer.usage.prompt_tokens,
            "completion_tokens": answer.usage.completion_tokens,
            "logprobs": None,
            "calls": [call for choice in choices if is_chat for call in calls_of(choice.message)],
        }
    counted, text, reason, usage = Pieces(url), "", None, None
    calls: dict[int, list[str]] = {}
    for chunk in create(**where, **ask["body"], stream=True, stream_options={"include_usage": True}):
        usage = getattr(chunk, "usage", None) or usage
        for choice in chunk.choices:
            more = choice.delta.content if is_chat else choice.text
            pieces = (choice.delta.tool_calls or ()) if is_chat else ()
            for piece in pieces:
                call = calls.setdefault(piece.index, ["", "", ""])
                for place, part in enumerate((piece.id, piece.function.name, piece.function.arguments)):
                    call[place] += part or ""
            if more or pieces:
                text += more or ""
                counted.count()
            reason = choice.finish_reason or reason
    counts = (usage.prompt_tokens, usage.completion_tokens) if usage else (-1, -1)
    return {
        "texts": [text],
        "finish_reasons": [reason],
        "prompt_tokens": counts[0],
        "completion_tokens": counts[1],
        "logprobs": None,
        "calls": [[made, name, json.loads(arguments)] for made, name, arguments in calls.values()],
    } | counted.told()


def calls_of(message: Any) -> list[list[Any]]:
    return [[call.id, call.function.name, json.loads(call.function.arguments)] for call in message.tool_calls or ()]


def goes_on(url: str, model: str, body: dict[str, Any]) -> bool:
    """Whether a conversation goes on behind a call and its result."""
    where = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none"}
    called = litellm.completion(**where, **body).choices[0].message
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "Rain."}
    behind = body | {"messages": [*body["messages"], called, result], "tool_choice": "auto"}
    return bool(litellm.completion(**where, **behind).choices[0].message.content)


async def at_once(url: str, model: str, body: dict[str, Any]) -> list[str | None]:
    """What eight calls at once get, each thing once."""
    where = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none"}
    answers: list[Any] = await asyncio.gather(*(litellm.acompletion(**where, **body) for _ in range(8)))
    return list({answer.choices[0].message.content for answer in answers})


def name_of_error(url: str, model: str, body: dict[str, Any]) -> str:
    try:
        litellm.completion(model=f"openai/{model}", api_base=f"{url}/v1", api_key="none", num_retries=0, **body)
    except Exception as error:  # of litellm's own classes, which are what is asked for
        return type(error).__name__
    return "none"


def main() -> None:
    """Ask what the one file says, and write what came of it to the other."""
    url, model, asked_at, told_at = sys.argv[1:]
    asks = json.loads(Path(asked_at).read_text())
    body, bodies = asks[0]["body"], {ask["name"]: ask["body"] for ask in asks}
    answers = {ask["name"]: asked(url, model, ask) for ask in asks}
    facts = {
        "eight at once": asyncio.run(at_once(url, model, body)) == answers["chat"]["texts"],
        "an unknown model": name_of_error(url, "nobody", body),
        "a bad parameter": name_of_error(url, model, body | {"temperature": 9}),
        "a call and its result can be sent back": goes_on(url, model, bodies["a named call"]),
    }
    version = importlib.metadata.version("litellm")
    Path(told_at).write_text(json.dumps({"version": version, "answers": answers, "facts": facts}))


if __name__ == "__main__":
    main()
