"""Certificates as other authorities than `baton certs make` sign them: a company's own, openssl's, cert-manager's.

A case says what is unlike one that works; what it does not say is P-256 and SHA-256, for 127.0.0.1, both usages, in its time.
"""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

BOTH_WAYS = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
_Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey


def new_key() -> ec.EllipticCurvePrivateKey:
    """One that everybody takes."""
    return ec.generate_private_key(ec.SECP256R1())


@dataclass(frozen=True, slots=True)
class Signed:
    """A certificate and its key, which may sign further ones."""

    name: str = "root"
    key: _Key = field(default_factory=new_key)
    signer: Signed | None = None  # None: itself
    is_authority: bool = True
    usages: tuple[x509.ObjectIdentifier, ...] = ()
    may_sign_handshakes: bool = True
    path_length: int | None = None
    ends_in: datetime.timedelta = datetime.timedelta(1)

    def pem(self) -> bytes:
        """The certificate."""
        now, signer = datetime.datetime.now(datetime.UTC), self.signer or self
        builder = x509.CertificateBuilder(_name(signer.name), _name(self.name), self.key.public_key(), 1)
        builder = builder.not_valid_before(now - datetime.timedelta(2)).not_valid_after(now + self.ends_in)
        length = self.path_length if self.is_authority else None
        builder = builder.add_extension(x509.BasicConstraints(self.is_authority, length), critical=True)
        if not self.is_authority:
            address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
            builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
            used: dict[str, Any] = dict.fromkeys(
                "content_commitment key_encipherment data_encipherment key_agreement key_cert_sign crl_sign encipher_only "
                "decipher_only".split(),
                False,
            )
            used |= {"digital_signature": self.may_sign_handshakes, "key_encipherment": True}
            builder = builder.add_extension(x509.KeyUsage(**used), critical=True)
        if self.usages:
            builder = builder.add_extension(x509.ExtendedKeyUsage(self.usages), critical=False)
        is_ed25519 = isinstance(signer.key, ed25519.Ed25519PrivateKey)
        done = builder.sign(signer.key, None if is_ed25519 else hashes.SHA256())
        return done.public_bytes(serialization.Encoding.PEM)


def host(signer: Signed, **unlike: Any) -> Signed:
    """A host's, as it should be but for what is said."""
    return Signed(**{"name": "host", "signer": signer, "is_authority": False, "usages": BOTH_WAYS, **unlike})


def write(directory: Path, authorities: list[Signed], chain: list[Signed]) -> Path:
    """As a --tls-dir; the first of the chain is the host's own."""
    directory.mkdir(exist_ok=True)
    (directory / "ca.crt").write_bytes(b"".join(each.pem() for each in authorities))
    (directory / "tls.crt").write_bytes(b"".join(each.pem() for each in chain))
    key = chain[0].key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (directory / "tls.key").write_bytes(key)
    return directory


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
