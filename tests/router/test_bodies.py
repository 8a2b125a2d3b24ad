"""How much of all bodies may be on its way, and of whom they are read."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from pathlib import Path

import pytest

from router.bodies import SMALL
from router.json_reading import LARGE, TURNS
from tests.router.live_router import MODEL_NAME, LiveRouter, live_router
from tests.router.tiny_model import write_model_text

KIB = 1 << 10
MAX_BODY = 1 << 20  # live_router's
NUM_AT_ONCE = 32  # of such


async def begin_body(router: LiveRouter, num_bytes: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request whose body has all but its last byte."""
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {num_bytes}"
    writer.write(head.encode() + b"\r\n\r\n" + b" " * (num_bytes - 1))
    await writer.drain()
    return reader, writer


@pytest.mark.covers("X05")
def test_so_much_of_large_bodies_is_on_its_way_at_once_and_small_ones_are_let_in_beside_them(tmp_path: Path) -> None:
    asyncio.run(_many_large_bodies(tmp_path))


async def _many_large_bodies(tmp_path: Path) -> None:
    async with live_router(write_model_text(tmp_path / "model")) as router:
        held = [await begin_body(router, MAX_BODY) for _ in range(NUM_AT_ONCE + 1)]  # of each a little is not counted
        held += [await begin_body(router, 3 * SMALL) for _ in range(NUM_AT_ONCE)]
        refused = [asyncio.create_task(reader.readline()) for reader, _ in held]
        done, _ = await asyncio.wait(refused, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        assert {task.result() for task in done} == {b"HTTP/1.1 503 Service Unavailable\r\n"}
        assert (await router.post(prompt="x" * 20)).status_code == 200
        text = (await router.client.get("/metrics")).text
        assert 'baton_router_turned_away_total{reason="too_many_bodies"}' in text
        for task in refused:
            task.cancel()
        for _, writer in held:
            writer.close()
        for _ in range(200):  # until the router has seen that they are gone
            late = await router.post(user="u" * (300 * KIB))
            if late.status_code != 503:
                break
            await asyncio.sleep(0.05)
        assert late.status_code in (200, 400), "what was counted is counted no more"


@pytest.mark.covers("X05")
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_bodies_that_wait_to_be_parsed_are_on_their_way_too_until_their_clients_go(tmp_path: Path, path: str) -> None:
    asyncio.run(_many_unparsed_bodies(tmp_path, path))


async def _many_unparsed_bodies(tmp_path: Path, path: str) -> None:
    content = json.dumps({"model": MODEL_NAME, "prompt": "x", "user": "u" * (MAX_BODY - KIB)}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
    has_turn, may_end = threading.Event(), threading.Event()

    def take_long() -> None:
        has_turn.set()
        may_end.wait(60)

    async with live_router(write_model_text(tmp_path / "model")) as router:
        holder = asyncio.create_task(asyncio.to_thread(TURNS.call, LARGE, take_long))
        try:
            await asyncio.to_thread(has_turn.wait)
            held = [await asyncio.open_connection("127.0.0.1", router.port) for _ in range(2 * (NUM_AT_ONCE - 4))]
            for number, (_, writer) in enumerate(held):
                if number == len(held) // 2:
                    await asyncio.sleep(0.5)  # those are read, fewer than there may be
                writer.write(head.encode() + b"\r\n\r\n" + content)
                await writer.drain()
            answers = [asyncio.create_task(reader.readline()) for reader, _ in held]
            done, _ = await asyncio.wait(answers, timeout=60, return_when=asyncio.FIRST_COMPLETED)
            assert {task.result() for task in done} == {b"HTTP/1.1 503 Service Unavailable\r\n"}
            for task in answers:
                task.cancel()
            for _, writer in held:
                writer.close()
            async with asyncio.timeout(60):  # until the router has seen that they are gone, though nobody had a turn
                while await is_answered(*await begin_body(router, MAX_BODY)):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        finally:
            may_end.set()
            await holder


async def is_answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Whether a request is, whose body has not come whole."""
    try:
        return bool(await asyncio.wait_for(reader.readline(), 0.5))
    except TimeoutError:
        return False
    finally:
        writer.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"])
def test_a_page_of_another_site_spends_nothing_here_unless_its_browser_asks_first(tmp_path: Path, path: str) -> None:
    asyncio.run(_pages_of_other_sites(tmp_path, path))


async def _pages_of_other_sites(tmp_path: Path, path: str) -> None:
    async with live_router(write_model_text(tmp_path / "model")) as router:
        body = json.dumps({"model": MODEL_NAME, "prompt": "hi", "input": "hi"}).encode()

        async def status(content_type: str, **headers: str) -> int:
            given = {"content-type": content_type} | headers
            return (await router.client.post(path, content=body, headers=given)).status_code

        for origin in ("http://evil.example", "null", f"http://127.0.0.1:{router.port + 1}", "http://["):
            for simple in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
                assert await status(simple, origin=origin) == 415
            assert await status("application/json", origin=origin) != 415, "who answers in front has let it ask"
        assert await status("text/plain", origin=f"http://127.0.0.1:{router.port}") != 415
        assert await status("application/x-www-form-urlencoded") != 415, "curl -d says no more"
        asked = await router.client.options(path, headers={"origin": "http://evil.example"})
        assert asked.status_code == 405 and "access-control-allow-origin" not in asked.headers


@pytest.mark.covers("A11")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"])
def test_a_packed_body_is_refused_by_the_name_of_its_packing_and_a_plain_one_may_say_that_it_is_plain(
    tmp_path: Path, path: str
) -> None:
    async def run() -> None:
        asked = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
        content = json.dumps({"model": MODEL_NAME} | ({"input": "x"} if path == "/v1/responses" else asked)).encode()
        async with live_router(write_model_text(tmp_path / "model")) as router:
            for encoding in ("gzip", "identity, br", "x" * 1000, "GZIP"):
                packed = gzip.compress(content)
                answer = await router.client.post(path, content=packed, headers={"Content-Encoding": encoding})
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (415, "content_encoding"), error
                name = encoding.removeprefix("identity, ")[:60]
                assert error["message"] == f"Content-Encoding: {name} is not taken; send the body plain."
            for plain in ("identity", "Identity", ""):
                answer = await router.client.post(path, content=content, headers={"Content-Encoding": plain})
                assert answer.status_code == 200, answer.text

    asyncio.run(run())
