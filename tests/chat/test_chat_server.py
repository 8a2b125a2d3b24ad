"""What other people's servers send, and is an event of a chat all the same."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from deploy.chat_server import ChatServer
from tests.bench.scripted_server import scripted_server, stream_head
from tests.chat.test_chat import BOUND_S, answering


def events_of(data: bytes) -> list[dict[str, Any]]:
    """What a stream of these bytes holds."""

    def ask(url: str) -> list[dict[str, Any]]:
        with ChatServer(url, None, None, BOUND_S) as server:
            return list(server.events("m", [{"role": "user", "content": "hi"}], {}))

    async def run() -> list[dict[str, Any]]:
        async with asyncio.timeout(BOUND_S), scripted_server(answering(stream_head() + data, bodies=[])) as url:
            return await asyncio.to_thread(ask, url)

    return asyncio.run(run())


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_only_a_newline_ends_a_line_whatever_else_pythons_own_way_takes_for_one(end: str) -> None:
    told = [{"choices": [{"delta": {"content": f"a{each}b"}}]} for each in "\u2028\u2029\x85\x7f"]
    data = "".join(f"data: {json.dumps(each, ensure_ascii=False)}{end}{end}" for each in told)
    assert events_of(data.encode() + b"data: [DONE]") == told


def test_who_names_each_field_of_an_event_names_no_error_by_null() -> None:
    told = {"choices": [{"delta": {"content": "a"}}], "error": None}
    assert events_of(f"data: {json.dumps(told)}\n\ndata: [DONE]\n\n".encode()) == [told]
