"""Clients that leave at whatever moment: their requests are forgotten at once, and no node goes on with them."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import pytest

from proto import baton_pb2 as pb
from router import streaming
from router.entrance import RouterCoreConfig
from tests.router.live_router import MODEL_NAME, LiveRouter, live_router, until
from tests.router.scripted_nodes import ScriptedAttempt, replying
from tests.router.test_api import play
from tests.router.tiny_model import write_model_text

ALLOWED_S: Final = 60.0  # for the second within which the last block is to be free: the machine may hold us up for some


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_text(tmp_path_factory.mktemp("model"))


async def begin(router: LiveRouter, *, stream: bool) -> asyncio.StreamWriter:
    """Send a request on a connection of its own."""
    _, writer = await asyncio.open_connection("127.0.0.1", router.port)
    body = json.dumps({"model": MODEL_NAME, "prompt": "hi", "stream": stream, "n": 2})
    writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    return writer


def phases(router: LiveRouter) -> set[str]:
    """Where the choices of all requests are."""
    requests = router.shell.snapshot()["requests"]
    assert isinstance(requests, dict)
    return {branch["phase"] for branches in requests.values() for branch in branches}


async def refused(attempt: ScriptedAttempt) -> None:
    """There is no room; the router asks again and again."""
    attempt.prefill_fails(pb.NO_BLOCKS, retry_after_ms=60_000)


async def broken(attempt: ScriptedAttempt) -> None:
    """Every attempt fails; the router rests before the next."""
    attempt.prefill_says(attempt.num_generated, b"a")
    attempt.prefill_fails(pb.CHECKSUM)


async def unanswered(attempt: ScriptedAttempt) -> None:
    """The Commit was sent, and nobody knows what became of it."""
    attempt.prefill_fails(pb.TRANSFER_FAILED, commit_unanswered=True)


async def silent(attempt: ScriptedAttempt) -> None:
    """Nothing is ever generated."""


@pytest.mark.covers("A10", "R15")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "phase"),
    [(silent, "Prefilling"), (refused, "Waiting"), (broken, "Waiting"), (unanswered, "CommitUnknown")],
)
def test_a_client_that_leaves_is_forgotten_in_every_phase_and_its_last_attempt_is_fenced(
    model: Path, script: Callable[[ScriptedAttempt], Awaitable[None]], phase: str, stream: bool
) -> None:
    async def scenario(router: LiveRouter) -> None:
        writer = await begin(router, stream=stream)
        nodes = (router.pair.prefill, router.pair.decode)
        least = 2 if script is broken else 0
        await until(lambda: any(each.attempt >= least for each in router.pair.prefill.dispatches))
        await until(lambda: phases(router) == {phase})
        writer.close()
        await until(lambda: not router.shell.snapshot()["requests"], timeout_s=ALLOWED_S)

        def is_fenced() -> bool:
            newest = max(each.attempt for each in router.pair.prefill.dispatches)  # the last may still be on its way
            return all(any(each.key.attempt == newest for each in node.cancels) for node in nodes)

        await until(is_fenced, timeout_s=ALLOWED_S)
        assert router.shell.snapshot()["queued"] == router.shell.snapshot()["timers"] == 0

    slow = RouterCoreConfig(
        max_refusal_wait_s=60.0, commit_unknown_grace_s=60.0, preempt_retry_count=100, min_backoff_s=0.5
    )
    play(model, scenario, script, core_config=slow)


@pytest.mark.covers("A10", "A12")
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_it_is_queued_gives_its_place_to_the_next_and_no_node_hears_of_it(
    model: Path, stream: bool
) -> None:
    async def scenario(router: LiveRouter) -> None:
        first = await begin(router, stream=stream)
        await until(lambda: bool(router.pair.prefill.dispatches))
        writers = [await begin(router, stream=stream) for _ in range(3)]
        await until(lambda: router.shell.snapshot()["queued"] == 6)
        for writer in writers:
            writer.close()
        await until(lambda: router.shell.snapshot()["queued"] == 0, timeout_s=ALLOWED_S)
        assert len(router.pair.prefill.dispatches) == 1
        assert not router.pair.prefill.cancels
        first.close()
        await until(lambda: not router.shell.snapshot()["requests"], timeout_s=ALLOWED_S)
        await until(lambda: len(router.pair.decode.cancels) == 2, timeout_s=ALLOWED_S)

    play(model, scenario, silent, core_config=RouterCoreConfig(max_inflight_prefills=1))


@pytest.mark.covers("A10")
def test_a_client_that_does_not_read_is_cut_off_behind_its_deadline(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "LAST_WRITE_S", 0.2)
    create_server = socket.create_server

    def with_little_room(address: tuple[str, int]) -> socket.socket:
        listener = create_server(address)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # of each connection
        return listener

    monkeypatch.setattr(socket, "create_server", with_little_room)
    prompts, n = ["\x01" * 900] * 8, 16  # six bytes each in JSON

    async def run() -> None:
        async with live_router(model, replying(b"hello"), max_model_len=1024) as router:
            for timeout_s in (6, 30, 120):  # until one is enough for this machine to have the answer
                with socket.socket() as client:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
                    client.connect(("127.0.0.1", router.port))
                    body = {"prompt": prompts, "n": n, "echo": True, "max_tokens": 5, "model": MODEL_NAME}
                    encoded = json.dumps(body | {"timeout_s": timeout_s}).encode()
                    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(encoded)}\r\n\r\n"
                    await asyncio.to_thread(client.sendall, head.encode() + encoded)
                    port = client.getsockname()[1]
                    assert is_open(router.port, port)
                    begun = await asyncio.to_thread(client.recv, 12, socket.MSG_PEEK)
                    if begun == b"HTTP/1.1 504":
                        continue
                    assert begun == b"HTTP/1.1 200"
                    await until(lambda port=port: not is_open(router.port, port), timeout_s + 60)  # type: ignore[misc]
                    return
            raise AssertionError("there was no answer in time")

    asyncio.run(run())


def is_open(own_port: int, client_port: int) -> bool:
    """Whether the server's end of a connection is, as the kernel has it."""
    ends = [line.split()[1:4] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(
        (int(own[-4:], 16), int(other[-4:], 16), state) == (own_port, client_port, "01") for own, other, state in ends
    )
