"""A Redis that asks who is there: passwords, users, databases, TLS. No secret is ever logged."""

from __future__ import annotations

import asyncio
import logging
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from runtime.redis_store import RedisStore
from runtime.registry_client import RegistryUnreachable
from runtime.unanswered import why_no_redis
from tests.registry.redis_server import RedisServer, started_redis
from tests.registry.test_listing import entry
from tests.registry.test_redis_registry import running_node, running_router
from tests.session.ends import until

PASSWORD = "correct horse@#/?"
ENCODED = "correct%20horse%40%23%2F%3F"
TTL_S = PATIENCE_S = 20.0  # on any machine


def registered(url: str) -> list[str]:
    """Names of the nodes that are there, once one has registered there."""

    async def scenario() -> list[str]:
        store = RedisStore(url, "test", TTL_S, PATIENCE_S)
        try:
            assert await store.register(entry()) == ""
            return [row.entry.node.name for row in (await store.read()).rows]
        finally:
            await store.hang_up()

    return asyncio.run(scenario())


@pytest.mark.covers("R13")
def test_a_user_of_its_own_with_the_rights_that_the_docs_name_is_enough(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In database 3; a wrong password is a registry that cannot be reached."""
    rights = (
        "~baton:* +eval +evalsha +script|load +type +del +time +hget +hset +hdel +hstrlen +zadd +zrem +zscore +zcount"
    )
    rights += " +zrangebyscore +zremrangebyscore +zremrangebyrank +pexpire +set +select"
    url = f"redis://:{ENCODED}@127.0.0.1:{{port}}/3"
    with started_redis(tmp_path, "--requirepass", PASSWORD, url=url) as redis, caplog.at_level(logging.DEBUG):
        redis.client.execute_command("ACL", "SETUSER", "baton", "on", f">{PASSWORD}", *rights.split())
        assert registered(f"redis://baton:{ENCODED}@127.0.0.1:{redis.port}/3") == ["decode-0"]
        assert redis.client.dbsize() > 0, "it is in database 3"
        for wrong in ("", ":wrong@", f"nobody:{ENCODED}@"):
            with pytest.raises(RegistryUnreachable) as raised:
                registered(f"redis://{wrong}127.0.0.1:{redis.port}/3")
            assert str(raised.value).startswith("Authentication")
        for secret in (PASSWORD, ENCODED, "wrong"):
            assert secret not in caplog.text


@pytest.mark.covers("R13")
def test_a_unix_socket_will_do(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    with started_redis(tmp_path, "--unixsocket", str(path)):
        assert registered(f"unix://{path}?db=1") == ["decode-0"]


@pytest.mark.covers("R13")
def test_over_tls_the_certificate_is_checked(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    command += ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no openssl to make a certificate with")
    trusting = f"rediss://127.0.0.1:{{port}}/0?ssl_ca_certs={certificate}"
    # The last --port wins: nothing is served but TLS.
    flags = ["--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-auth-clients", "no"]
    with started_redis(tmp_path, *flags, "--tls-port", "{port}", "--port", "0", url=trusting) as redis:
        assert registered(redis.url) == ["decode-0"]
        over_tls = f"rediss://127.0.0.1:{redis.port}/0"
        for url, sentence in (
            (over_tls, "its certificate is refused here; the option ssl_ca_certs names the authority that signed it"),
            (f"{over_tls}?ssl_ca_certs={key}", "the file of its option ssl_ca_certs holds no certificate, as PEM"),
            (f"redis://127.0.0.1:{redis.port}/0", "who listens there hangs up; is it rediss://?"),
        ):
            with pytest.raises(RegistryUnreachable) as failure:
                registered(url)
            assert why_no_redis(str(failure.value)) == sentence


async def delayed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Hand on what comes, so much later."""
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            await asyncio.sleep(delay_s)
            writer.write(data)
    writer.close()


@pytest.mark.covers("R13")
def test_a_redis_with_a_seventh_of_a_second_of_round_trip_is_written_and_read(tmp_path: Path) -> None:
    """Half a second was for connecting, the password, the database and the script together: it was down for ever."""

    async def scenario(redis: RedisServer) -> None:
        async def hand_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            theirs_in, theirs_out = await asyncio.open_connection("127.0.0.1", redis.port)
            await asyncio.gather(delayed(reader, theirs_out, 0.07), delayed(theirs_in, writer, 0.07))

        async with await asyncio.start_server(hand_on, "127.0.0.1", 0) as proxy:
            url = f"redis://:{ENCODED}@127.0.0.1:{proxy.sockets[0].getsockname()[1]}/3"
            writing, reading = RedisStore(url, "test", TTL_S), RedisStore(url, "test", TTL_S)
            for _ in range(2):
                assert await writing.register(entry()) == ""
                assert [row.entry.node.name for row in (await reading.read()).rows] == ["decode-0"]
            await writing.hang_up()
            await reading.hang_up()

    with started_redis(tmp_path, "--requirepass", PASSWORD, url=f"redis://:{ENCODED}@127.0.0.1:{{port}}/3") as redis:
        asyncio.run(scenario(redis))


@pytest.mark.covers("R13")
def test_another_reason_why_a_redis_cannot_be_read_is_logged_too_and_none_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is down at first, then it asks for a password: a router and a node say both."""

    def told() -> list[str]:
        lines = [each.getMessage() for each in caplog.records if "registry_unreachable" in each.getMessage()]
        return sorted(line.rpartition("reason=")[2].split()[0] for line in lines)

    async def scenario(redis: RedisServer) -> None:
        url = f"redis://127.0.0.1:{redis.port}/0"
        async with running_router(url) as router, running_node(url, entry()):
            await until(lambda: len(told()) == 2, PATIENCE_S)
            assert told()[0] == told()[1] == "ConnectionError"
            await asyncio.to_thread(redis.start)
            await until(lambda: len(told()) == 4, PATIENCE_S)
            assert set(told()) == {"ConnectionError", "AuthenticationError", "ResponseError"}, (
                "one is of a script's call"
            )
            num_looks = router.counts["failed_reads"]
            await until(lambda: router.counts["failed_reads"] > num_looks + 3, PATIENCE_S)
            assert len(told()) == 4

    with (
        started_redis(tmp_path, "--requirepass", PASSWORD, url=f"redis://:{ENCODED}@127.0.0.1:{{port}}/0") as redis,
        caplog.at_level(logging.WARNING),
    ):
        redis.kill()
        asyncio.run(scenario(redis))
