"""Certificates that other authorities have signed: what members would refuse of one another is said at the start, not found out."""

from __future__ import annotations

import asyncio
import datetime
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID

from runtime.credentials import Credentials, CredentialsError
from tests.security.foreign_authority import Signed, host, write
from tests.security.member_server import code_of, grpc_server

_Both = tuple[list[Signed], list[Signed]]  # ca.crt and tls.crt


def _by_an_intermediate(**unlike: object) -> _Both:
    root = Signed()
    between = Signed(name="between", signer=root, **unlike)  # type: ignore[arg-type]
    return [root], [host(between), between]


def _by_a_root(**unlike: object) -> _Both:
    root = Signed(**unlike)  # type: ignore[arg-type]
    return [root], [host(root)]


def _of_a_host(**unlike: object) -> _Both:
    root = Signed()
    return [root], [host(root, **unlike)]


def _with_the_authority_of_another() -> _Both:
    root = Signed()
    return [root], [host(Signed(name="another")), root]


REFUSED: dict[str, tuple[Callable[[], _Both], str]] = {
    "of a server alone": (
        lambda: _of_a_host(usages=(ExtendedKeyUsageOID.SERVER_AUTH,)),
        "tls.crt is not for 'client auth', which its extended key usage must name: it is shown both ways",
    ),
    "of neither": (
        lambda: _of_a_host(usages=(ExtendedKeyUsageOID.CODE_SIGNING,)),
        "tls.crt is not for 'server auth' and 'client auth', which its extended key usage must name: it is shown both ways",
    ),
    "of no signatures": (
        lambda: _of_a_host(may_sign_handshakes=False),
        "tls.crt is not for 'digital signature', which its key usage must name",
    ),
    "ed25519": (
        lambda: _of_a_host(key=ed25519.Ed25519PrivateKey.generate()),
        "tls.crt has a key of the kind Ed25519, which gRPC does not take: RSA, P-256, P-384 it does",
    ),
    "p-521": (
        lambda: _of_a_host(key=ec.generate_private_key(ec.SECP521R1())),
        "tls.crt has a key of the kind secp521r1, which gRPC does not take: RSA, P-256, P-384 it does",
    ),
    "a short key": (
        lambda: _of_a_host(key=rsa.generate_private_key(65537, 1024)),
        "tls.crt has a key of 1024 bits, too few for RSA: 2048 at least",
    ),
    "signed with a short key": (
        lambda: _by_a_root(key=rsa.generate_private_key(65537, 1024)),
        "ca.crt has a key of 1024 bits, too few for RSA: 2048 at least",
    ),
    "signed on an odd curve": (
        lambda: _by_a_root(key=ec.generate_private_key(ec.SECP256K1())),
        "ca.crt has a key of the kind secp256k1, which gRPC does not take",
    ),
    "by no authority": (
        lambda: _by_a_root(is_authority=False),
        "tls.crt is refused by its own ca.crt: invalid CA certificate",
    ),
    "by an intermediate that has ended": (
        lambda: _by_an_intermediate(ends_in=-datetime.timedelta(1)),
        "tls.crt is refused by its own ca.crt: certificate has expired",
    ),
    "by an intermediate that is no authority": (
        lambda: _by_an_intermediate(is_authority=False),
        "tls.crt is refused by its own ca.crt: invalid CA certificate",
    ),
    "by another, ours behind it": (
        _with_the_authority_of_another,
        "tls.crt is refused by its own ca.crt: unable to get local issuer certificate",
    ),
}


@pytest.mark.covers("X03")
@pytest.mark.parametrize("case", REFUSED)
def test_what_members_would_refuse_is_one_sentence_at_the_start(case: str, tmp_path: Path) -> None:
    """gRPC says of such a handshake only that it failed: a node would ask for ever, and its peers count a stranger."""
    make, sentence = REFUSED[case]
    directory = write(tmp_path / "certs", *make())
    with pytest.raises(CredentialsError) as caught:
        Credentials(directory, "127.0.0.1")
    assert str(caught.value) == f"--tls-dir {directory}: {sentence}"


def _with_an_intermediate_alone() -> _Both:
    _, chain = _by_an_intermediate()
    return [chain[1]], [chain[0]]


@pytest.mark.covers("X03")
@pytest.mark.parametrize(
    "make",
    [
        lambda: _of_a_host(usages=()),
        lambda: _of_a_host(key=rsa.generate_private_key(65537, 2048)),
        lambda: _of_a_host(key=ec.generate_private_key(ec.SECP384R1())),
        lambda: _by_a_root(key=ed25519.Ed25519PrivateKey.generate()),
        lambda: _by_a_root(key=ec.generate_private_key(ec.SECP521R1())),
        _by_an_intermediate,
        _with_an_intermediate_alone,
    ],
    ids=["no usage", "rsa", "p-384", "by ed25519", "by p-521", "by an intermediate", "its root unknown"],
)
def test_what_is_not_refused_at_the_start_is_taken_by_members(make: Callable[[], _Both], tmp_path: Path) -> None:
    async def run() -> None:
        mine = Credentials(write(tmp_path / "certs", *make()), "127.0.0.1")
        assert mine.http_context(lambda: None) is not None
        async with grpc_server(mine) as (address, _):
            assert await code_of(mine.channel(address)) is grpc.StatusCode.OK

    asyncio.run(run())


@pytest.mark.covers("X03")
@pytest.mark.parametrize("spoil", [b"\xef\xbb\xbf%b", b"%b%b", b"  %b"], ids=["marked", "glued", "indented"])
def test_a_file_that_only_some_libraries_read_is_one_sentence(spoil: bytes, tmp_path: Path) -> None:
    """An editor's mark, `cat` behind a file without a newline at its end, a YAML's blanks: the gRPC port could not be bound."""
    directory = write(tmp_path / "certs", *_of_a_host())
    once = (directory / "ca.crt").read_bytes().strip()
    (directory / "ca.crt").write_bytes(spoil % ((once,) * spoil.count(b"%b")))
    with pytest.raises(CredentialsError, match=r"ca\.crt has something before a '-----BEGIN' on its line"):
        Credentials(directory)


@pytest.mark.covers("X03")
def test_a_renewed_certificate_that_members_would_refuse_leaves_the_old_one_in_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    root = Signed()
    directory = write(tmp_path / "mine", [root], [host(root)])
    peer = Credentials(shutil.copytree(directory, tmp_path / "peers"))

    async def run() -> None:
        mine = Credentials(directory)
        async with grpc_server(mine) as (address, _):
            write(directory, [root], [host(root, usages=(ExtendedKeyUsageOID.SERVER_AUTH,))])
            async with asyncio.timeout(60):
                while "certificates_kept" not in caplog.text:
                    await mine.channel("127.0.0.1:9").close()
                    await asyncio.sleep(0.05)
            assert await code_of(peer.channel(address)) is grpc.StatusCode.OK
            async with grpc_server(peer) as (theirs, _):
                assert await code_of(mine.channel(theirs)) is grpc.StatusCode.OK

    asyncio.run(run())
    assert "tls.crt is not for 'client auth'" in caplog.text
