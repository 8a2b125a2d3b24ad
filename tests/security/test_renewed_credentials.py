"""Certificates that are renewed, authorities that follow one another, and how members are dialled with them."""

from __future__ import annotations

import asyncio
import logging
import shutil
import ssl
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import grpc
import grpc.aio
import pytest

from runtime import credentials
from runtime.credentials import NO_CREDENTIALS, Credentials, CredentialsError
from tests.security.member_server import code_of, grpc_server
from tests.security.strangers import expire, sign_anew
from tests.without_root import without_root


@pytest.mark.covers("X03")
def test_certificates_that_are_renewed_count_without_a_restart(
    ours: Path, others: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a server and of a client; a bad file in between changes nothing."""
    caplog.set_level(logging.INFO)
    directory = shutil.copytree(ours, tmp_path / "mine")

    async def becomes(is_met: Callable[[], object], channel: Callable[[], grpc.aio.Channel]) -> None:
        async with asyncio.timeout(100):
            while await code_of(channel(), 1) is not grpc.StatusCode.OK or not is_met():  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.05)

    async def run() -> None:
        mine, old, new = Credentials(directory), Credentials(ours), Credentials(others)
        context = mine.http_context(lambda: None)
        assert context is not None
        async with grpc_server(mine) as (address, _):
            assert await code_of(old.channel(address)) is grpc.StatusCode.OK
            (directory / "tls.key").write_text("half a k")
            await becomes(lambda: "certificates_kept" in caplog.text, lambda: old.channel(address))
            for name in ("ca.crt", "tls.crt", "tls.key"):
                (directory / name).write_bytes((others / name).read_bytes())
            await becomes(lambda: "certificates_read" in caplog.text, lambda: new.channel(address))
            assert await code_of(old.channel(address)) is not grpc.StatusCode.OK
        async with grpc_server(new) as (address, _):
            assert await code_of(mine.channel(address)) is grpc.StatusCode.OK

    asyncio.run(run())
    assert "tls.key holds no private key" in caplog.text


@pytest.mark.covers("X03")
def test_the_first_https_handshake_behind_a_renewal_shows_the_new_certificate(
    ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a port with few clients the old one may have ended since the last one came."""
    directory = shutil.copytree(ours, tmp_path / "mine")
    context = Credentials(directory).http_context(lambda: None)
    assert context is not None

    def shown() -> str:
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.load_verify_locations(directory / "ca.crt")
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = [client.wrap_bio(back, there, server_hostname="localhost")]
        ends.append(context.wrap_bio(there, back, server_side=True))
        for _ in range(4):
            for end in ends:
                with suppress(ssl.SSLWantReadError):
                    end.do_handshake()
        return ssl.DER_cert_to_PEM_cert(ends[0].getpeercert(binary_form=True) or b"")

    assert shown() == leaf(directory)
    monkeypatch.setattr(credentials, "_LOOK_S", 0.0)
    sign_anew(directory, ours.parent, timedelta(-1), timedelta(1))
    assert leaf(directory) != leaf(ours)
    assert shown() == leaf(directory)


def leaf(directory: Path) -> str:
    return ssl.DER_cert_to_PEM_cert(ssl.PEM_cert_to_DER_cert((directory / "tls.crt").read_text()))


@pytest.mark.covers("X03")
def test_a_renewed_key_that_nobody_may_read_counts_once_its_mode_is_mended(
    ours: Path, others: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Root copies, and only then gives it away: neither what is in it nor when it was written changes any more."""
    caplog.set_level(logging.INFO)
    directory = shutil.copytree(ours, tmp_path / "mine")
    shutil.copytree(others, directory / "new")

    def renew() -> None:
        for new in Path("new").iterdir():
            new.replace(new.name)

    async def run() -> None:
        mine = Credentials(Path())

        async def becomes(told: str) -> None:
            async with asyncio.timeout(100):
                while told not in caplog.text:
                    await mine.channel("127.0.0.1:9").close()
                    await asyncio.sleep(0.05)

        renew()
        set_mode(0)
        await becomes("tls.key cannot be read: Permission denied")
        set_mode(0o600)
        await becomes("certificates_read")

    set_mode = Path("tls.key").chmod
    with without_root(directory):
        asyncio.run(run())


@pytest.mark.covers("X03")
def test_a_renewed_certificate_that_this_hosts_clock_finds_too_early_counts_once_it_has_begun(
    ours: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its signer's clock is ahead; the files do not change again, and the old ones are about to end."""
    caplog.set_level(logging.INFO)
    directory = shutil.copytree(ours, tmp_path / "mine")

    async def run() -> None:
        mine = Credentials(directory)
        sign_anew(directory, ours.parent, timedelta(seconds=4), timedelta(1))
        async with asyncio.timeout(60):
            while "certificates_read" not in caplog.text:
                await mine.channel("127.0.0.1:9").close()
                await asyncio.sleep(0.05)

    asyncio.run(run())
    assert caplog.text.count("certificates_kept") == 1 and "tls.crt begins only at 20" in caplog.text


@pytest.mark.covers("X03")
def test_of_two_authorities_the_one_that_has_signed_counts(ours: Path, others: Path, tmp_path: Path) -> None:
    """While one follows another both are in the file, and the older, which comes first, ends one day."""
    directory = shutil.copytree(ours, tmp_path / "mine")
    ended = shutil.copytree(others, tmp_path / "others")
    shutil.copy(others / "ca.crt", ended / "tls.crt")
    expire(ended, others.parent)
    bundle = (ended / "tls.crt").read_bytes() + (ours / "ca.crt").read_bytes()
    (directory / "ca.crt").write_bytes(bundle)

    async def run() -> None:
        mine = Credentials(directory, "127.0.0.1")
        async with grpc_server(mine) as (address, _):
            assert await code_of(mine.channel(address)) is grpc.StatusCode.OK
            assert await code_of(Credentials(ours).channel(address)) is grpc.StatusCode.OK

    asyncio.run(run())
    shutil.copy(ended / "tls.crt", ended / "ca.crt")
    with pytest.raises(CredentialsError, match=r"ca\.crt has ended at 20"):
        Credentials(signed_again(ended, others))


def signed_again(directory: Path, by: Path) -> Path:
    """With the certificate and key of a host of this authority."""
    for name in ("tls.crt", "tls.key"):
        shutil.copy(by / name, directory / name)
    return directory


@pytest.mark.covers("X03")
@pytest.mark.parametrize("is_encrypted", [False, True])
def test_members_are_dialled_directly_on_a_host_that_has_a_proxy(
    is_encrypted: bool, ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Companies set it for what goes out into the world, and gRPC alone would send the cluster's own words there, too."""
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)

    async def run() -> None:
        mine = Credentials(ours, "127.0.0.1") if is_encrypted else NO_CREDENTIALS
        async with grpc_server(mine) as (address, _):
            assert await code_of(mine.channel(address)) is grpc.StatusCode.OK

    asyncio.run(run())
