"""What `baton up` can be asked: only by who has the token, one line each way, and whatever else comes is hung up on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.control import MAX_LINE, Control, read_order
from router.launcher_link import LauncherGone, LauncherLink

TOKEN = "the-token"


@pytest.mark.covers("X02")
@given(
    st.one_of(
        st.binary(max_size=200), st.dictionaries(st.text(), st.text()).map(lambda each: json.dumps(each).encode())
    )
)
def test_without_the_token_there_is_no_order(line: bytes) -> None:
    assert read_order(line, TOKEN) is None


def test_an_order_names_a_node() -> None:
    assert read_order(json.dumps({"token": TOKEN, "kill": "decode-0"}).encode(), TOKEN) == "decode-0"
    for wrong in (
        {"token": TOKEN},
        {"kill": "d"},
        {"token": TOKEN + "x", "kill": "d"},
        {"token": 1, "kill": "d"},
        [TOKEN],
    ):
        assert read_order(json.dumps(wrong).encode(), TOKEN) is None
    assert read_order(json.dumps({"token": "\ud800", "kill": "d"}).encode(), TOKEN) is None
    assert read_order(b"[" * 100_000, TOKEN) is None


def played(kill: Callable[[str], Awaitable[str | None]], scenario: Callable[[str], Awaitable[None]]) -> None:
    """Run the scenario with the address of a control."""

    async def run() -> None:
        control = Control(kill)
        try:
            await scenario(await control.open())
        finally:
            await control.close()

    asyncio.run(run())


@pytest.mark.covers("X02")
def test_a_router_is_answered_and_a_stranger_is_not() -> None:
    killed: list[str] = []

    async def kill(name: str) -> str | None:
        killed.append(name)
        return None if name == "decode-0" else f"There is no node {name}."

    async def scenario(address: str) -> None:
        link = LauncherLink(address)
        assert await link.kill("decode-0") is None
        assert await link.kill("x") == "There is no node x."
        place, _, token = address.partition("/")
        with pytest.raises(LauncherGone):
            await LauncherLink(f"{place}/{token[:-1]}").kill("decode-0")
        host, _, port = place.rpartition(":")
        for sent in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"x" * (2 * MAX_LINE), b""):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            writer.write_eof()
            with suppress(ConnectionResetError):  # hung up on with bytes unread
                assert await reader.read() == b""
            writer.close()
        assert killed == ["decode-0", "x"]

    played(kill, scenario)


def test_a_launcher_that_has_gone_is_a_sentence() -> None:
    async def kill(name: str) -> str | None:
        raise AssertionError(name)

    async def run() -> None:
        control = Control(kill)
        address = await control.open()
        await control.close()
        with pytest.raises(LauncherGone, match="does not answer"):
            await LauncherLink(address).kill("decode-0")

    asyncio.run(run())
    for wrong in ("", "host", "host:1", "host:x/y", ":1/t"):
        with pytest.raises(ValueError, match=r"."):
            LauncherLink(wrong)
