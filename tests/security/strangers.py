"""Certificates of a cluster, those of another one, and what strangers can try on a TLS port."""

from __future__ import annotations

import datetime
import socket
import ssl
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from deploy import certs

GARBAGE: Final = (
    b"GET / HTTP/1.1\r\nhost: a\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00" * 100,  # gRPC as it is without TLS
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xff" * 600,  # the beginning of a handshake, and then not
    b"\x00" * 5000,
)


def make_certificates(folder: Path, *hosts: str) -> Path:
    """As a user makes them; the --tls-dir of the first host."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    flags = ["--hosts", ",".join(hosts)] if hosts else []
    assert certs.main([str(folder), *flags]) == 0
    return folder / (hosts[0].partition("/")[0] if hosts else "localhost")


def expire(directory: Path, authority: Path) -> None:
    """Sign the certificate that is there anew, to have ended yesterday."""
    sign_anew(directory, authority, -datetime.timedelta(2), -datetime.timedelta(1))


def sign_anew(directory: Path, authority: Path, begins_in: datetime.timedelta, ends_in: datetime.timedelta) -> None:
    """Sign the certificate that is there once more, for this time from now."""
    found = x509.load_pem_x509_certificate((directory / "tls.crt").read_bytes())
    issuer = x509.load_pem_x509_certificate((authority / "ca.crt").read_bytes())
    key = serialization.load_pem_private_key((authority / "ca.key").read_bytes(), None)
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(issuer.subject, found.subject, found.public_key(), found.serial_number)
    builder = builder.not_valid_before(now + begins_in).not_valid_after(now + ends_in)
    for extension in found.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    again = builder.sign(key, hashes.SHA256())  # type: ignore[arg-type]
    (directory / "tls.crt").write_bytes(again.public_bytes(serialization.Encoding.PEM))


def stranger_channels(address: str, ours: Path, others: Path) -> dict[str, grpc.aio.Channel]:
    """Every way in which gRPC can be called wrongly. `ours`: a directory of the cluster; `others`: of another one."""
    ca, other_ca = (ours / "ca.crt").read_bytes(), (others / "ca.crt").read_bytes()
    key, certificate = (others / "tls.key").read_bytes(), (others / "tls.crt").read_bytes()
    plain_text = grpc.aio.insecure_channel(address)
    return {
        "plain text": plain_text,
        "no certificate": grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca)),
        "another authority's": grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca, key, certificate)),
        "a stranger to itself": grpc.aio.secure_channel(
            address, grpc.ssl_channel_credentials(other_ca, key, certificate)
        ),
    }


def say(address: str, garbage: bytes) -> bytes:
    """What a TLS port answers to this, until it closes."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=20) as connection:
        answer = b""
        try:
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(4096):
                answer += data
        except ConnectionError:
            return answer
        return answer


def members_context(directory: Path) -> ssl.SSLContext:
    """For a client that trusts the authority of this directory."""
    return ssl.create_default_context(cafile=str(directory / "ca.crt"))
