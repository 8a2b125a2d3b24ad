"""The file of keys: what a line may say, whose key is found, and that no sentence quotes one."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api_keys import MAX_FILE_BYTES, ApiKeys, Client, KeyFileError, read_keys
from router.key_file import KeyFile
from tests.router.live_router import until

SECRET = b"s" * 32
KEY = "sk-0123456789abcdef"
HASHED = "sha256:" + hashlib.sha256(b"a-key-that-no-file-holds").hexdigest()


def read(*lines: str) -> ApiKeys:
    return read_keys("\n".join(lines).encode(), SECRET)


def shown(keys: ApiKeys, key: str) -> Client | None:
    return keys.find(f"Bearer {key}".encode())


@pytest.mark.covers("X02")
def test_each_key_is_found_with_what_its_line_says() -> None:
    keys = read(
        "# who may ask",
        "",
        f"{KEY}  name=alice requests_per_minute=60 tokens_per_minute=1000",
        f"  {KEY}-new\tname=alice tokens_per_minute=1000 requests_per_minute=60\r",
        f"{HASHED} name=bob",
        "another-key-of-nobody",
    )
    assert len(keys) == 4
    unnamed = shown(keys, "another-key-of-nobody")
    assert unnamed is not None
    assert keys.names == {"alice", "bob", unnamed.name}
    assert keys.names is keys.names, "not made anew for each word of another process"
    assert shown(keys, KEY) == shown(keys, f"{KEY}-new") == Client("alice", 60, 1000)
    assert shown(keys, "a-key-that-no-file-holds") == Client("bob")


@pytest.mark.covers("X02")
def test_a_key_without_a_name_is_called_by_itself_wherever_its_line_is() -> None:
    unnamed, hashed = "another-key-of-nobody", "a-key-that-no-file-holds"
    once = read(f"{unnamed} requests_per_minute=1", HASHED)
    moved = read_keys("\n".join(["# new", KEY, HASHED, f"{unnamed} requests_per_minute=1"]).encode(), b"t" * 32)
    for key in (unnamed, hashed):
        client = shown(once, key)
        assert client is not None and client == shown(moved, key), "also in another process: workers share limits"
        digest = hashlib.sha256(key.encode()).hexdigest()
        assert client.name.removeprefix("key-") not in digest and client.name.removeprefix("key-") not in key
    plain = [f"key-number-{number:08}" for number in range(2000)]
    assert len(read(*plain).names) == len(plain)


@pytest.mark.covers("X02")
@pytest.mark.parametrize(
    "header",
    [
        b"",
        KEY.encode(),
        b"Bearer",
        b"Bearer ",
        b"Basic " + KEY.encode(),
        f"Bearer {KEY}x".encode(),
        f"Bearer {KEY[:-1]}".encode(),
        f"Bearer {KEY.upper()}".encode(),
        f"Bearer {HASHED}".encode(),  # the hash of a key is no key
        b"Bearer " + hashlib.sha256(KEY.encode()).digest(),
        b"Bearer \xff\x00" * 1000,
    ],
)
def test_nothing_else_is_anybodys(header: bytes) -> None:
    assert read(KEY, HASHED).find(header) is None


@pytest.mark.covers("X02")
def test_the_scheme_may_be_written_in_any_case_and_spaces_around_the_key_are_nothing() -> None:
    keys = read(f"{KEY} name=alice")
    assert keys.find(b"bearer   " + KEY.encode() + b" ") == keys.find(b"BEARER " + KEY.encode()) == Client("alice")


@pytest.mark.covers("X02")
@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ((), "there is no key in it"),
        (("# nobody",), "there is no key in it"),
        (("too-short",), "line 1: a key must be 16 to 256 visible ASCII characters"),
        (("x" * 257,), "line 1: a key must be"),
        (("schlüssel-schlüssel",), "line 1: a key must be"),
        (("sha256:12",), "line 1: a key must be"),
        (("# one", KEY, KEY), "line 3: this key is there twice"),
        ((f"{KEY} alice",), "line 1: behind the key there may be name="),
        ((f"{KEY} rpm=3",), "line 1: behind the key there may be name="),
        ((f"{KEY} name=a name=b",), "line 1: name= is there twice"),
        ((f"{KEY} name=",), "line 1: name= must be 1 to 64 letters"),
        ((f"{KEY} name=a/b",), "line 1: name= must be 1 to 64 letters"),
        ((f"{KEY} requests_per_minute=0",), "line 1: requests_per_minute= must be a whole number, at least 1"),
        ((f"{KEY} tokens_per_minute=1e3",), "line 1: tokens_per_minute= must be a whole number"),
        ((f"{KEY} tokens_per_minute={'9' * 5000}",), "line 1: tokens_per_minute= must be a whole number"),
        ((f"{KEY} name=a", f"{KEY}2 name=a requests_per_minute=1"), "line 2: a has other limits on an earlier line"),
    ],
)
def test_a_bad_line_is_named_and_its_key_is_not_quoted(lines: tuple[str, ...], told: str) -> None:
    with pytest.raises(KeyFileError) as caught:
        read(*lines)
    assert str(caught.value).startswith(told)
    assert not any(word in str(caught.value) for line in lines for word in line.split()[:1] if len(word) > 1)


@pytest.mark.covers("X02", "X05")
@given(
    st.binary(max_size=400)
    | st.lists(st.sampled_from([KEY, "name=a", "=", "sha256:", "#", "\n", " "])).map("".join).map(str.encode)
)
def test_any_file_is_keys_or_one_sentence(content: bytes) -> None:
    try:
        keys = read_keys(content, SECRET)
    except KeyFileError as error:
        assert "\n" not in str(error)
    else:
        assert len(keys) > 0


@pytest.mark.covers("X02")
def test_a_file_without_end_is_refused() -> None:
    with pytest.raises(KeyFileError, match="more than"):
        read_keys(b"x" * (MAX_FILE_BYTES + 1), SECRET)


@pytest.mark.covers("X02")
def test_no_key_can_be_read_out_of_what_is_kept() -> None:
    keys = read(KEY, HASHED)
    kept = [each for value in vars(keys).values() for each in ([*value] if isinstance(value, dict) else [value])]
    assert SECRET in kept
    for known in (KEY.encode(), hashlib.sha256(KEY.encode()).digest()):
        assert not any(known in each for each in kept)


@asynccontextmanager
async def watched(path: Path) -> AsyncIterator[KeyFile]:
    file = KeyFile(path)
    file.start(lambda: None)
    try:
        yield file
    finally:
        await file.close()


@pytest.mark.covers("X02")
def test_a_file_counts_once_it_is_written_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.key_file._LOOK_S", 0.2)
    path = tmp_path / "keys"
    whole = f"{KEY} name=alice requests_per_minute=60\n{HASHED} name=bob\n"
    path.write_text(whole)

    async def run() -> None:
        async with watched(path) as file:
            half = f"{KEY} name=alice requests_per_minute=6"
            for length in range(40):
                path.write_text(f"# {'and more ' * length}\n{half}")
                await asyncio.sleep(0.02)
                assert file.keys.names == {"alice", "bob"}
                assert shown(file.keys, KEY) == Client("alice", 60)
            await until(lambda: shown(file.keys, KEY) == Client("alice", 6))  # no newline, and it stays so
            path.write_text(whole)
            os.kill(os.getpid(), signal.SIGHUP)
            path.write_text(whole.replace("=60", "=70"))
            await until(lambda: shown(file.keys, KEY) == Client("alice", 70))

    asyncio.run(run())


@pytest.mark.covers("X02")
def test_what_was_written_to_while_it_was_read_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("router.key_file._LOOK_S", 0.1)
    path = tmp_path / "keys"
    path.write_text(f"{KEY} name=old\n")
    read_counts: list[int] = []

    def read_and_write(content: bytes, secret: bytes) -> ApiKeys:
        keys = read_keys(content, secret)
        read_counts.append(len(keys))
        if "half" in keys.names:
            path.write_text(f"{KEY} name=new\n{HASHED} name=bob\n")
        return keys

    monkeypatch.setattr("router.key_file.read_keys", read_and_write)

    async def run() -> None:
        async with watched(path) as file:
            path.write_text(f"{KEY} name=half\n")
            await until(lambda: file.keys.names != {"old"})
            assert file.keys.names == {"new", "bob"}

    asyncio.run(run())
    assert read_counts == [1, 1, 2]
    assert sum(message.startswith("api_keys_read") for message in caplog.messages) == 2
