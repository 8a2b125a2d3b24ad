"""A router process that is asked to end while answers are under way: SIGTERM lets them finish, Ctrl-C does not."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from proto import baton_pb2 as pb
from runtime.registry_client import EmbeddedRegistry, RegistryClient
from tests.plain_http import NO_CERTIFICATES
from tests.router.live_router import USUAL_TIMING, live_router, until
from tests.router.scripted_nodes import ScriptedAttempt, ScriptedNode, ScriptedPair
from tests.router.tiny_model import write_model_text

BODY = {"prompt": "hi", "max_tokens": 3, "ignore_eos": True, "stream": True}


@dataclass(slots=True)
class Scene:
    """A router process whose nodes have begun a stream, and end it when the test says so."""

    process: asyncio.subprocess.Process
    client: httpx.AsyncClient
    lines: AsyncIterator[str]
    may_finish: asyncio.Event
    nodes: tuple[ScriptedNode, ...]

    async def rest(self) -> list[Any]:
        """The events that are still to come, parsed but for [DONE]."""
        events = [line.removeprefix("data: ") async for line in self.lines if line]
        return [each if each == "[DONE]" else json.loads(each) for each in events]


@asynccontextmanager
async def streaming_router(folder: Path, *flags: str) -> AsyncIterator[Scene]:
    may_finish = asyncio.Event()

    async def script(attempt: ScriptedAttempt) -> None:
        attempt.prefill_says(0, b"a")
        attempt.decode_says(0, b"a")
        await may_finish.wait()
        attempt.decode_says(1, b"bc", pb.FINISH_LENGTH)

    model, ready_file = write_model_text(folder), folder / "ready.json"
    command = [sys.executable, "-m", "router", "--model", str(model), "--port", "0", "--ready-file", str(ready_file)]
    command += ["--session-grace-s", f"{USUAL_TIMING.grace_s:g}"]
    process = await asyncio.create_subprocess_exec(*command, *flags, env=os.environ)
    try:
        async with (
            asyncio.timeout(240),
            ScriptedNode("prefill", pb.ROLE_PREFILL, 256, USUAL_TIMING) as prefill,
            ScriptedNode("decode", pb.ROLE_DECODE, 256, USUAL_TIMING) as decode,
        ):
            await until(ready_file.exists, 120)
            ready = json.loads(ready_file.read_text())
            pair = ScriptedPair(prefill, decode, script)
            pair.start()
            registries = [EmbeddedRegistry(ready["registry"]) for _ in range(2)]
            registrations = [
                RegistryClient([registry], node.entry, refused)
                for registry, node in zip(registries, (prefill, decode), strict=True)
            ]
            for each in registrations:
                each.start()
            async with httpx.AsyncClient(base_url=ready["url"], timeout=120, verify=NO_CERTIFICATES) as client:
                await until_ready_says(client, 200)
                body = BODY | {"model": model.name}
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    lines = answer.aiter_lines()
                    assert (await anext(lines)).startswith("data: ")
                    yield Scene(process, client, lines, may_finish, (prefill, decode))
            await pair.close()
            for each in registrations:
                await each.deregister()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def until_ready_says(client: httpx.AsyncClient, status: int) -> httpx.Response:
    while (answer := await client.get("/ready")).status_code != status:  # noqa: ASYNC110 - another process's
        await asyncio.sleep(0.01)
    return answer


def refused(sentence: str) -> None:
    raise AssertionError(sentence)


@pytest.mark.covers("C03", "A12")
def test_a_draining_router_takes_nothing_new_and_ends_with_0_once_its_streams_have(tmp_path: Path) -> None:
    async def scene() -> None:
        async with streaming_router(tmp_path) as router:
            router.process.send_signal(signal.SIGTERM)
            ready = await until_ready_says(router.client, 503)
            assert (ready.json()["ready"], ready.json()["missing"]) == (False, ["the router is shutting down"])
            turned_away = await router.client.post(
                "/v1/completions", json=BODY | {"model": tmp_path.name}, headers={"X-Request-Id": "mine"}
            )
            assert turned_away.status_code == 503
            assert turned_away.json()["error"]["code"] == "SHUTTING_DOWN"
            assert turned_away.headers["Retry-After"] == "1" and turned_away.headers["X-Request-Id"] == "mine"
            assert turned_away.headers["Connection"] == "close", "who keeps its connections comes to somebody else"
            assert (await router.client.get("/health")).status_code == 200
            router.may_finish.set()
            *events, done = await router.rest()
            assert done == "[DONE]"
            assert "".join(each["choices"][0]["text"] for each in events if each["choices"]).endswith("bc")
            assert await router.process.wait() == 0

    asyncio.run(scene())


@pytest.mark.covers("C03")
def test_connections_that_clients_keep_for_later_are_closed_by_a_draining_router_and_no_others(tmp_path: Path) -> None:
    async def scene() -> None:
        async with streaming_router(tmp_path) as router, asyncio.timeout(60):
            host, port = router.client.base_url.host, router.client.base_url.port
            assert port is not None
            kept, begun, fresh = [await asyncio.open_connection(host, port) for _ in range(3)]
            get = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
            for reader, writer in (kept, begun):
                writer.write(get)
                assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(len(b'{"status":"ok"}'))
            begun[1].write(get[:-2])  # a request is on its way here
            await until_ready_says(router.client, 200)  # it has come
            router.process.send_signal(signal.SIGTERM)
            assert await kept[0].read() == b""
            begun[1].write(b"\r\n")
            fresh[1].write(get)
            for reader, _ in (begun, fresh):
                assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            router.may_finish.set()
            assert "[DONE]" in await router.rest()
            assert await router.process.wait() == 0
            for _, writer in (kept, begun, fresh):
                writer.close()

    asyncio.run(scene())


@pytest.mark.covers("A06", "C03")
@pytest.mark.parametrize(
    ("number", "flags"), [(signal.SIGTERM, ("--drain-timeout-s", "0.2")), (signal.SIGINT, ())], ids=["late", "ctrl_c"]
)
def test_when_the_time_is_over_and_at_ctrl_c_a_stream_ends_with_one_error_and_its_nodes_stop_at_once(
    tmp_path: Path, number: signal.Signals, flags: tuple[str, ...]
) -> None:
    async def scene() -> None:
        async with streaming_router(tmp_path, *flags) as router:
            router.process.send_signal(number)
            (error,) = await router.rest()
            assert error["error"]["code"] == "SHUTTING_DOWN"
            assert await router.process.wait() == 0
            for node in router.nodes:  # who hears nothing works on until the session's grace is over
                await until(lambda node=node: bool(node.cancels))  # type: ignore[misc]
                assert {cancel.key.attempt for cancel in node.cancels} == {0}, "again for a token that was on its way"

    asyncio.run(scene())


@pytest.mark.covers("C03")
def test_a_second_signal_ends_a_draining_router_now(tmp_path: Path) -> None:
    async def scene() -> None:
        async with streaming_router(tmp_path) as router:
            router.process.send_signal(signal.SIGTERM)
            await until_ready_says(router.client, 503)
            router.process.send_signal(signal.SIGTERM)
            assert await router.process.wait() == 128 + signal.SIGTERM
            with pytest.raises(httpx.TransportError):
                await router.rest()

    asyncio.run(scene())


@pytest.mark.covers("C03", "A06")
def test_a_request_that_comes_while_a_router_closes_is_told_so(tmp_path: Path) -> None:
    async def scene() -> None:
        async with live_router(write_model_text(tmp_path)) as router:
            await router.shell.close()
            for was_let_in in (False, True):  # it came before, and is through its tokenizer now
                router.shell.is_draining = not was_let_in
                answer = await router.post(max_tokens=3)
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "SHUTTING_DOWN")
                assert answer.headers["Retry-After"] == "1"

    asyncio.run(scene())
