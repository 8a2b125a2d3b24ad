"""Certificates as cryptography sees them: making a private authority and what it signs, and saying what is wrong with a pair.

Loads cryptography, so only processes that use certificates import it. Keys are P-256, signatures SHA-256: what every TLS library
takes, and a handshake costs little. Not here: files and where they lie (credentials.py, deploy/certs.py).
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes, CertificatePublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_SKEW: Final = datetime.timedelta(minutes=5)  # hosts' clocks differ


class CertificateError(ValueError):
    """Certificates cannot be used as they are; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, both in PEM."""

    certificate: bytes
    key: bytes


def make_authority(days: int) -> Pair:
    """A new private certificate authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Baton cluster authority")])
    usage = _key_usage(key_cert_sign=True, crl_sign=True)
    certificate = (
        _builder(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Pair(certificate.public_bytes(serialization.Encoding.PEM), _key_pem(key))


def sign_host(authority: Pair, names: Sequence[str], days: int) -> Pair:
    """A certificate for a host that is known by these names and addresses, as server and as client."""
    issuer = _load(authority.certificate, "ca.crt")
    issuer_key = _load_key(authority.key, "ca.key")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        _builder(subject, issuer.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
        .sign(issuer_key, hashes.SHA256())
    )
    return Pair(certificate.public_bytes(serialization.Encoding.PEM), _key_pem(key))


def ends_at(certificate: bytes, what: str = "tls.crt") -> datetime.datetime:
    """When it ends, in UTC."""
    return _load(certificate, what).not_valid_after_utc


def check_pair(ca: bytes, certificate: bytes, key: bytes, host: str | None) -> None:
    """Raise CertificateError if the authority has not signed it, the key is another's, it is out of date, or not for `host`.

    The clock is the host's own, as it will be for every peer that checks.
    """
    authorities = _load_all(ca, "ca.crt")
    chain = _load_all(certificate, "tls.crt")
    found, own_key = chain[0], _load_key(key, "tls.key")
    if _public(found.public_key()) != _public(own_key.public_key()):
        raise CertificateError("tls.key is not the key of tls.crt")
    signers = [each for each in authorities if _has_signed(each, chain[-1])]
    if not signers:
        raise CertificateError("tls.crt is not signed by ca.crt")
    now = datetime.datetime.now(datetime.UTC)
    in_time = [each for each in signers if each.not_valid_before_utc <= now <= each.not_valid_after_utc]
    for what, each in (("tls.crt", found), ("ca.crt", (in_time or signers)[0])):
        if now > each.not_valid_after_utc:
            raise CertificateError(f"{what} has ended at {each.not_valid_after_utc:%Y-%m-%d %H:%M} UTC")
        if now < each.not_valid_before_utc:
            raise CertificateError(f"{what} begins only at {each.not_valid_before_utc:%Y-%m-%d %H:%M} UTC")
    names = names_of(certificate)
    if host is not None and not any(_covers(name, host) for name in names):
        raise CertificateError(
            f"tls.crt is for {', '.join(names) or 'nobody'}, not for {host}, by which others dial this host"
        )


def names_of(certificate: bytes) -> list[str]:
    """The names and addresses that it is for."""
    try:
        extension = _load_all(certificate, "tls.crt")[0].extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return [str(each.value) for each in extension.value if isinstance(each, x509.DNSName | x509.IPAddress)]


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _key_usage(**used: bool) -> x509.KeyUsage:
    every = (
        "digital_signature content_commitment key_encipherment data_encipherment key_agreement key_cert_sign "
        "crl_sign encipher_only decipher_only"
    )
    return x509.KeyUsage(**{name: used.get(name, False) for name in every.split()})


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _load(pem: bytes, what: str) -> x509.Certificate:
    return _load_all(pem, what)[0]


def _load_all(pem: bytes, what: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise CertificateError(f"{what} holds no certificate in PEM") from None


def _load_key(pem: bytes, what: str) -> CertificateIssuerPrivateKeyTypes:
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it wants a password
        raise CertificateError(f"{what} holds no private key in PEM without a password") from None
    if not isinstance(key, rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey):
        raise CertificateError(f"{what} is of a kind that TLS does not take")
    return key


def _public(key: CertificatePublicKeyTypes) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _has_signed(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _covers(name: str, host: str) -> bool:
    """RFC 6125: a wildcard stands for one whole first label; addresses by their value."""
    try:
        return ipaddress.ip_address(name) == ipaddress.ip_address(host)
    except ValueError:
        name, host = name.lower(), host.lower()
        return name == host or (name.startswith("*.") and name[1:] == "." + host.partition(".")[2])
