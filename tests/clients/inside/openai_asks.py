"""The openai package, in its own words: sync, async, streams, tool calls, responses, its own parsing, errors."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import openai
import pydantic

if TYPE_CHECKING:
    from tests.clients.inside.pieces import Pieces
else:  # run by its path
    from pieces import Pieces


class Answer(pydantic.BaseModel):
    """What a user would have read for them."""

    is_baton: bool
    colour: Literal["red", "green"]


def gathered(chunks: Any, is_chat: bool, counted: Pieces) -> dict[str, Any]:
    """A stream put together as a user would."""
    usage = None
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    logprobs: list[float] = []
    calls: dict[int, list[str]] = {}  # of choice 0
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text = choice.delta.content if is_chat else choice.text
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
            pieces = (choice.delta.tool_calls or ()) if is_chat else ()
            for piece in pieces:
                call = calls.setdefault(piece.index, ["", "", ""])
                function = piece.function
                for place, more in enumerate((piece.id, function.name, function.arguments)):
                    call[place] += more or ""
            if text or pieces:
                counted.count()
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
            if is_chat and choice.logprobs and choice.index == 0:
                logprobs += [token.logprob for token in choice.logprobs.content or ()]
    made = [[made, name, json.loads(arguments)] for made, name, arguments in calls.values()]
    return told(texts, reasons, usage, logprobs) | {"calls": made} | counted.told()


def told(texts: dict[int, str], reasons: dict[int, str], usage: Any, logprobs: list[float]) -> dict[str, Any]:
    return {
        "texts": [texts[index] for index in sorted(texts)],
        "finish_reasons": [reasons[index] for index in sorted(reasons)],
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "logprobs": logprobs,
    }


def calls_of(message: Any) -> list[list[Any]]:
    return [[call.id, call.function.name, json.loads(call.function.arguments)] for call in message.tool_calls or ()]


def asked(client: openai.OpenAI, url: str, model: str, ask: dict[str, Any]) -> dict[str, Any]:
    if ask["path"] == "response":
        return responded(client, url, model, ask)
    is_chat = ask["path"] == "chat"
    create: Any = client.chat.completions.create if is_chat else client.completions.create
    if ask["stream"]:
        chunks = create(model=model, stream=True, stream_options={"include_usage": True}, **ask["body"])
        return gathered(chunks, is_chat, Pieces(url))
    answer = create(model=model, **ask["body"])
    logprobs: list[float] = []
    first = answer.choices[0]
    if first.logprobs:
        listed = [token.logprob for token in first.logprobs.content] if is_chat else first.logprobs.token_logprobs
        logprobs = [each for each in listed if each is not None]
    texts = {choice.index: (choice.message.content or "") if is_chat else choice.text for choice in answer.choices}
    calls = [call for choice in answer.choices if is_chat for call in calls_of(choice.message)]
    reasons = {choice.index: choice.finish_reason for choice in answer.choices}
    return told(texts, reasons, answer.usage, logprobs) | {"calls": calls}


def in_its_words(body: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's responses have no seed."""
    return {name: value for name, value in body.items() if name != "seed"} | {"extra_body": {"seed": body["seed"]}}


def responded(client: openai.OpenAI, url: str, model: str, ask: dict[str, Any]) -> dict[str, Any]:
    counted, deltas = Pieces(url), ""
    response: Any = client.responses.create(model=model, stream=ask["stream"], **in_its_words(ask["body"]))
    if ask["stream"]:
        events, response = response, None
        for event in events:
            if event.type in ("response.output_text.delta", "response.function_call_arguments.delta"):
                counted.count()
                deltas += event.delta
            elif event.type in ("response.completed", "response.incomplete"):
                response = event.response
    calls = [item for item in response.output if item.type == "function_call"]
    if ask["stream"] and deltas != response.output_text + "".join(call.arguments for call in calls):
        raise AssertionError(f"the deltas were {deltas!r}, the response at the end {response!r}")
    return {
        "texts": [response.output_text],
        "finish_reasons": [response.status],
        "prompt_tokens": response.usage.input_tokens,
        "completion_tokens": response.usage.output_tokens,
        "logprobs": None,
        "calls": [[call.call_id, call.name, json.loads(call.arguments)] for call in calls],
    } | counted.told()


async def at_once(url: str, model: str, body: dict[str, Any]) -> list[str | None]:
    """What eight calls at once of the async client get, each thing once."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        calls = [client.chat.completions.create(model=model, **body) for _ in range(8)]
        return list({answer.choices[0].message.content for answer in await asyncio.gather(*calls)})


def name_of_error(create: Any, **body: Any) -> str:
    try:
        create(**body)
    except openai.APIStatusError as error:
        return f"{type(error).__name__} {error.status_code}"
    return "none"


def parsed(client: openai.OpenAI, model: str) -> dict[str, Any]:
    """What the package reads into a class of its user's."""
    chat: Any = {"model": model, "messages": [{"role": "user", "content": "Is it one?"}], "seed": 5}
    said = client.chat.completions.parse(**chat, response_format=Answer).choices[0].message.parsed
    tool = openai.pydantic_function_tool(Answer, name="answer")
    forced: Any = client.chat.completions.parse(**chat, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    (call,) = forced.choices[0].message.tool_calls
    response: Any = {"model": model, "input": "Is it one?", "extra_body": {"seed": 5}}
    text = client.responses.parse(**response, text_format=Answer).output_parsed
    choice: Any = {"type": "function", "name": "answer"}
    flat: Any = {"type": "function", **tool["function"]}
    item: Any = client.responses.parse(**response, tools=[flat], tool_choice=choice).output[0]
    found: dict[str, Any] = {
        "a chat, parsed": said,
        "a call, parsed": call.function.parsed_arguments,
        "a response, parsed": text,
        "a call of a response, parsed": Answer.model_validate_json(item.arguments),
    }
    return {what: value.model_dump() for what, value in found.items() if isinstance(value, Answer)}


def of_calls(client: openai.OpenAI, model: str, call: dict[str, Any], response: dict[str, Any]) -> dict[str, object]:
    """The stream helpers, and conversations that go on behind a call."""
    create: Any = client.chat.completions.create
    whole = create(model=model, **call).choices[0].message
    with client.chat.completions.stream(model=model, **call) as stream:
        deltas = [each.arguments_delta for each in stream if each.type == "tool_calls.function.arguments.delta"]
        streamed = stream.get_final_completion().choices[0].message
    result = {"role": "tool", "tool_call_id": whole.tool_calls[0].id, "content": "Rain."}
    again = create(model=model, **(call | {"messages": [*call["messages"], whole, result], "tool_choice": "auto"}))
    bound = in_its_words(response)
    respond: Any = client.responses.create
    first = respond(model=model, **bound)
    with client.responses.stream(model=model, **bound) as events:
        num_deltas = sum(each.type == "response.function_call_arguments.delta" for each in events)
        last: Any = events.get_final_response()
    output: Any = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "Rain."}
    behind = {"input": [*response["input"], *first.output, output], "tool_choice": "auto"}
    second = respond(model=model, **(bound | behind))
    return {
        "the helper's stream of a call": calls_of(streamed) == calls_of(whole)
        and "".join(deltas) == whole.tool_calls[0].function.arguments,
        "the helper's stream of a response": num_deltas > 3 and last.output[0].arguments == first.output[0].arguments,
        "a call and its result can be sent back": bool(again.choices[0].message.content),
        "a response and its call's result can be sent back": bool(second.output_text),
    }


def main() -> None:
    """Ask what the one file says, and write what came of it to the other."""
    url, model, asked_at, told_at = sys.argv[1:]
    asks = json.loads(Path(asked_at).read_text())
    bodies = {ask["name"]: ask["body"] for ask in asks}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answers = {ask["name"]: asked(client, url, model, ask) for ask in asks}
        create, body = client.chat.completions.create, asks[0]["body"]
        with client.chat.completions.stream(model=model, **(body | {"stop": ["e", "1"], "max_tokens": 64})) as stream:
            streamed = "".join(event.delta for event in stream if event.type == "content.delta")
        facts = {
            "models": [each.id for each in client.models.list()] == [model],
            "model": client.models.retrieve(model).id == model,
            "the helper's stream": streamed == answers["chat, stop string"]["texts"][0],
            "eight at once": asyncio.run(at_once(url, model, body)) == answers["chat"]["texts"],
            "an unknown model": name_of_error(create, **(body | {"model": "nobody"})),
            "a bad parameter": name_of_error(create, model=model, **(body | {"temperature": 9})),
            "no messages": name_of_error(create, model=model, **(body | {"messages": []})),
            "a choice among no tools": name_of_error(create, model=model, **body, tool_choice="required"),
            "a response that goes on from another": name_of_error(
                client.responses.create, model=model, input="And?", previous_response_id="resp_1"
            ),
        }
        sent_back = [*body["messages"], create(model=model, **body).choices[0].message]
        again = create(model=model, **(body | {"messages": [*sent_back, body["messages"][-1]]}))
        facts["its answer can be sent back"] = bool(again.choices[0].message.content)
        facts |= of_calls(client, model, bodies["a named call"], bodies["call of a response"])
        read = parsed(client, model)
    said = {"version": openai.__version__, "answers": answers, "facts": facts, "parsed": read}
    Path(told_at).write_text(json.dumps(said))


if __name__ == "__main__":
    main()
