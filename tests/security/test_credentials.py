"""Certificates made, looked over and used: members talk, strangers are refused on every channel, and nobody is held up by them."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest
import uvloop
from fastapi import FastAPI

from bench.free_port import free_port
from deploy import certs
from runtime.certificates import names_of
from runtime.credentials import NO_CREDENTIALS, Credentials, CredentialsError
from runtime.http_protocol import HttpBounds
from runtime.http_server import HttpServer
from runtime.redis_address import registry_problem
from runtime.redis_store import RedisStore
from runtime.registry_client import RegistryUnreachable
from tests.architecture.source_tree import DEMO_MODEL
from tests.security.member_server import code_of, grpc_server
from tests.security.strangers import GARBAGE, expire, make_certificates, members_context, say, stranger_channels

# ---------------------------------------------------------------- files


@pytest.mark.covers("X03")
def test_each_host_gets_a_directory_that_its_owner_alone_can_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "certs"
    assert certs.main([str(folder), "--hosts", "node-a/10.0.0.5/*.example.org,10.0.0.6", "--days", "3"]) == 0
    told = capsys.readouterr().out
    assert f"--tls-dir {folder}/node-a for node-a, 10.0.0.5, *.example.org, localhost, 127.0.0.1, ::1, until 20" in told
    assert f"keep {folder}/ca.key off the hosts" in told
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert files == ["10.0.0.6/ca.crt", "10.0.0.6/tls.crt", "10.0.0.6/tls.key", "ca.crt", "ca.key"] + [
        f"node-a/{name}" for name in ("ca.crt", "tls.crt", "tls.key")
    ]
    for path in (folder, *folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    for host in ("node-a", "NODE-A", "10.0.0.5", "x.example.org", "localhost", "127.0.0.1", "::1"):
        assert Credentials(folder / "node-a", host).is_encrypted
    for host in ("node-b", "10.0.0.6", "x.y.example.org", "example.org", "127.0.0.2"):
        with pytest.raises(CredentialsError, match=r"tls\.crt is for node-a, .*, not for .*, by which"):
            Credentials(folder / "node-a", host)


@pytest.mark.covers("X03")
def test_a_host_is_added_by_the_same_authority_and_nothing_is_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "certs"
    make_certificates(folder, "a")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    make_certificates(folder, "b")
    assert {path: path.read_bytes() for path in before} == before
    assert (folder / "b/ca.crt").read_bytes() == (folder / "ca.crt").read_bytes()
    with pytest.raises(SystemExit) as ended:
        certs.main([str(folder), "--hosts", "c,b"])
    assert ended.value.code == 2
    assert "b: is there already; delete it first to make it anew" in capsys.readouterr().err
    assert not (folder / "c").exists()
    assert names_of((folder / "b/tls.crt").read_bytes()) == ["b", "localhost", "127.0.0.1", "::1"]


@pytest.mark.covers("X03")
def test_certificates_are_not_made_where_a_file_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "keys").write_text("")
    with pytest.raises(SystemExit) as ended:
        certs.main([str(tmp_path / "keys")])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"baton certs make: {tmp_path / 'keys'}: is no directory\n"


# A file that grows beyond so many bytes ends the process, or is an error as on a full disk: the authority's key is in it by then.
ON_A_FULL_DISK = """
import resource, signal, sys
from deploy import certs
signal.signal(signal.SIGXFSZ, getattr(signal, sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
certs.main(sys.argv[3:])
"""


@pytest.mark.covers("X03")
@pytest.mark.parametrize("room", [0, 300])
@pytest.mark.parametrize("then", ["SIG_IGN", "SIG_DFL"])
def test_a_call_that_a_full_disk_or_a_kill_has_ended_is_simply_made_again(tmp_path: Path, then: str, room: int) -> None:
    folder = tmp_path / "certs"
    command = [sys.executable, "-c", ON_A_FULL_DISK, then, str(room), str(folder), "--hosts", "a"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if then == "SIG_IGN":
        assert (ended.returncode, ended.stderr) == (2, f"baton certs make: {folder}: File too large\n")
        assert list(folder.iterdir()) == []
    else:
        assert (ended.returncode, ended.stderr) == (-signal.SIGXFSZ, "")
    assert len((make_certificates(folder, "a") / "tls.key").read_bytes()) > 200


@pytest.mark.covers("X03")
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--hosts", "a b"], "a b is no host name and no address"),
        (["--hosts", "a/10.0.0.500"], "10.0.0.500 is no host name and no address"),
        (["--hosts", "a//b"], "nothing is no host name"),
        (["--hosts", "../etc"], ".. is no host name"),
        (["--hosts", "*.example.org"], "cannot begin with *"),
        (
            ["--hosts", "b,ca.key/a"],
            "--hosts ca.key/a: the first name is its directory's, and ca.key is the authority's",
        ),
        (["--hosts", "a,a/b"], "--hosts a: is there twice"),
        (["--days", "0"], "--days 0: must be a whole number between 1 and 3650"),
    ],
)
def test_what_cannot_be_made_is_one_line(
    flags: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        certs.main([str(tmp_path / "certs"), *flags])
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert told in line
    assert line.count("\n") == 1
    assert not (tmp_path / "certs").exists()


@pytest.mark.covers("X03")
def test_what_is_wrong_with_a_directory_is_one_sentence(ours: Path, others: Path, tmp_path: Path) -> None:
    def spoiled(spoil: Callable[[Path], object]) -> str:
        directory = shutil.copytree(ours, tmp_path / f"spoiled{len(list(tmp_path.iterdir()))}")
        spoil(directory)
        with pytest.raises(CredentialsError) as caught:
            Credentials(directory)
        sentence = str(caught.value)
        assert sentence.startswith(f"--tls-dir {directory}: ")
        return sentence.removeprefix(f"--tls-dir {directory}: ")

    def replace_by_others(name: str) -> Callable[[Path], object]:
        return lambda directory: (directory / name).write_bytes((others / name).read_bytes())

    assert spoiled(lambda directory: (directory / "ca.crt").unlink()).startswith("ca.crt cannot be read: No such file")
    assert spoiled(lambda directory: (directory / "tls.crt").write_text("x")) == "tls.crt holds no certificate in PEM"
    assert spoiled(lambda directory: (directory / "tls.key").write_text("x")).startswith("tls.key holds no private key")
    assert spoiled(replace_by_others("ca.crt")) == "tls.crt is not signed by ca.crt"
    assert spoiled(replace_by_others("tls.key")) == "tls.key is not the key of tls.crt"
    assert spoiled(lambda directory: expire(directory, ours.parent)).startswith("tls.crt has ended at 20")
    assert spoiled(unknown_curve).startswith("ca.crt, tls.crt or tls.key has what is not supported here: Curve")


def unknown_curve(directory: Path) -> None:
    """One bit of the object identifier of P-256 in the authority's certificate."""
    der = ssl.PEM_cert_to_DER_cert((directory / "ca.crt").read_text())
    oid = bytes.fromhex("2a8648ce3d030107")
    changed = oid[:4] + bytes([oid[4] ^ 1]) + oid[5:]
    (directory / "ca.crt").write_text(ssl.DER_cert_to_PEM_cert(der.replace(oid, changed, 1)))


@pytest.mark.covers("X03")
@pytest.mark.parametrize("command", [("router", "--port", "0"), ("deploy.node_process", "decode", "--router", "a:1")])
def test_a_process_does_not_start_with_a_certificate_for_another_host(command: tuple[str, ...], ours: Path) -> None:
    words = [*command, "--model", str(DEMO_MODEL), "--host", "127.0.0.9", "--tls-dir", str(ours)]
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    names = "localhost, 127.0.0.1, ::1"
    told = rf"baton (router|decode): --tls-dir \S+: tls.crt is for {names}, not for 127.0.0.9, by which others dial this host\n"
    assert re.fullmatch(told, done.stderr)


@pytest.mark.covers("X03", "R13")
def test_a_registry_in_redis_is_reached_over_its_own_tls_by_members_only(ours: Path, tmp_path: Path) -> None:
    """A Redis that asks for a certificate of the same authority; skipped where there is no redis-server with TLS."""
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server")
    port = free_port()
    files = [f"--tls-{what}-file {ours / name}" for what, name in (("cert", "tls.crt"), ("key", "tls.key"))]
    flags = f"--port 0 --tls-port {port} --tls-ca-cert-file {ours / 'ca.crt'} {' '.join(files)} --dir {tmp_path}"
    options = f"ssl_ca_certs={ours / 'ca.crt'}"
    member = f"{options}&ssl_certfile={ours / 'tls.crt'}&ssl_keyfile={ours / 'tls.key'}"

    async def look(query: str) -> int:
        url = f"rediss://localhost:{port}/0?{query}"
        assert registry_problem(url, None) is None
        store = RedisStore(url, "tls", 1.5)
        try:
            return len((await store.read()).rows)
        finally:
            await store.hang_up()

    async def run() -> None:
        async with asyncio.timeout(100):
            while True:
                try:
                    assert await look(member) == 0
                    break
                except RegistryUnreachable:
                    assert server.poll() is None
                    await asyncio.sleep(0.05)
        for query in (options, ""):
            with pytest.raises(RegistryUnreachable):
                await look(query)

    with subprocess.Popen(["redis-server", *flags.split()], stdout=subprocess.PIPE, text=True) as server:
        try:
            asyncio.run(run())
        finally:
            server.terminate()


# ---------------------------------------------------------------- gRPC


@pytest.mark.covers("X03")
def test_grpc_answers_members_and_nobody_else(ours: Path, others: Path) -> None:
    async def run() -> None:
        credentials = Credentials(ours, "127.0.0.1")
        async with grpc_server(credentials) as (address, asked):
            assert await code_of(credentials.channel(address)) is grpc.StatusCode.OK
            for what, channel in stranger_channels(address, ours, others).items():
                assert await code_of(channel) is not grpc.StatusCode.OK, what
            for garbage in GARBAGE:
                await asyncio.to_thread(say, address, garbage)
            assert asked.times == 1
            assert await code_of(credentials.channel(address)) is grpc.StatusCode.OK
            assert await code_of(NO_CREDENTIALS.channel(address)) is grpc.StatusCode.UNAVAILABLE

    asyncio.run(run())


@pytest.mark.covers("X03")
def test_a_member_does_not_talk_to_strangers_nor_to_a_member_under_another_name(
    ours: Path, others: Path, tmp_path: Path
) -> None:
    async def run() -> None:
        me = Credentials(ours)
        async with grpc_server(Credentials(others)) as (address, asked):
            assert await code_of(me.channel(address)) is grpc.StatusCode.UNAVAILABLE
            assert asked.times == 0
        async with grpc_server(NO_CREDENTIALS) as (address, asked):
            assert await code_of(me.channel(address)) is not grpc.StatusCode.OK
            assert asked.times == 0
        async with grpc_server(me, "0.0.0.0") as (address, asked):
            elsewhere = f"127.0.0.2:{address.rpartition(':')[2]}"
            assert await code_of(me.channel(elsewhere)) is grpc.StatusCode.UNAVAILABLE
            assert asked.times == 0
            assert await code_of(me.channel(address)) is grpc.StatusCode.OK

    asyncio.run(run())


# ---------------------------------------------------------------- HTTPS


SHARED = pytest.mark.parametrize("is_shared", [False, True])  # its listener, with other processes


@SHARED
@pytest.mark.covers("X03")
def test_https_answers_who_trusts_the_authority_and_counts_failed_handshakes(
    ours: Path, others: Path, is_shared: bool
) -> None:
    async def run() -> None:
        num_refused = 0

        def refuse() -> None:
            nonlocal num_refused
            num_refused += 1

        app = FastAPI()
        app.add_api_route("/health", lambda: {"status": "ok"})
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        http = HttpServer(app, listener, is_shared=is_shared, tls=Credentials(ours).http_context(refuse))
        serving = asyncio.create_task(http.run())
        url = f"https://localhost:{port}/health"
        async with httpx.AsyncClient(verify=members_context(ours), trust_env=False) as client:
            assert (await client.get(url)).json() == {"status": "ok"}
            assert num_refused == 0
            async with httpx.AsyncClient(verify=members_context(others), trust_env=False) as wrong:
                with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                    await wrong.get(url)
            for garbage in GARBAGE:
                answer = await asyncio.to_thread(say, f"127.0.0.1:{port}", garbage)
                assert b"HTTP" not in answer
            old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
            old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asyncio.open_connection("127.0.0.1", port, ssl=old)
            with socket.create_connection(("127.0.0.1", port)):
                pass  # a probe is no stranger
            assert (await client.get(url)).status_code == 200
            assert num_refused >= 3
        http.stop()
        await serving

    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        uvloop.run(run())


@SHARED
@pytest.mark.covers("X03")
def test_who_connects_and_begins_no_handshake_is_not_waited_for_longer_than_for_a_head(
    ours: Path, is_shared: bool
) -> None:
    async def run() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        bounds = HttpBounds(head_timeout_s=0.2)
        tls = Credentials(ours).http_context(lambda: None)
        http = HttpServer(FastAPI(), listener, is_shared=is_shared, bounds=bounds, tls=tls)
        serving = asyncio.create_task(http.run())
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        async with asyncio.timeout(30):  # the loop's own patience is a minute
            assert await reader.read() == b""
        writer.close()
        http.stop()
        await serving

    uvloop.run(run())
