"""Certificates as cryptography sees them: making a private authority and what it signs, and saying what is wrong with a pair.

Loads cryptography, so only processes that use certificates import it. Keys are P-256, signatures SHA-256: what every TLS library
takes, and a handshake costs little. Not here: files and where they lie (credentials.py, deploy/certs.py).
"""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes, CertificatePublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, PublicKeyAlgorithmOID

_SKEW: Final = datetime.timedelta(minutes=5)  # hosts' clocks differ
# What cryptography raises of certificates that it can read only in part, beside ValueError.
_NOT_SUPPORTED: Final = (
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)
_RSA_PSS: Final = PublicKeyAlgorithmOID.RSASSA_PSS
_MIN_RSA_BITS: Final = 2048  # fewer OpenSSL refuses
_SHOWN_CURVES: Final = (
    ec.SECP256R1,
    ec.SECP384R1,
)  # in certificates that a handshake is signed with, to gRPC's BoringSSL
_SIGNING_CURVES: Final = (*_SHOWN_CURVES, ec.SECP224R1, ec.SECP521R1)  # in those of authorities
_GLUED: Final = re.compile(
    rb"[^\r\n]-----BEGIN "
)  # by `cat`, say, behind a file without a newline at its end; or a BOM


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


def earliest_end(ca: bytes, certificate: bytes) -> datetime.datetime:
    """When this host's certificate is good no more, in UTC: with its own end, or that of what has signed it.

    Of several authorities in `ca` that may have, while one follows another, the last to end.
    """
    chain = _load_all(certificate, "tls.crt")
    signers = [each for each in _load_all(ca, "ca.crt") if _has_signed(each, chain[-1])]
    ends = [each.not_valid_after_utc for each in chain]
    return min([*ends, *([max(each.not_valid_after_utc for each in signers)] if signers else [])])


def check_pair(ca: bytes, certificate: bytes, key: bytes, host: str | None) -> None:
    """Raise CertificateError if the authority has not signed it, the key is another's, it is out of date, not for `host`, or not
    for both directions, or if gRPC's TLS takes no such key: it says of a handshake only that it failed.

    The clock is the host's own, as it will be for every peer that checks.
    """
    try:
        _check_pair(ca, certificate, key, host)
    except _NOT_SUPPORTED as error:
        raise CertificateError(f"ca.crt, tls.crt or tls.key has what is not supported here: {error}") from None


def _check_pair(ca: bytes, certificate: bytes, key: bytes, host: str | None) -> None:
    for what, pem in (("ca.crt", ca), ("tls.crt", certificate), ("tls.key", key)):
        if _GLUED.search(pem) is not None:
            raise CertificateError(
                f"{what} has something before a '-----BEGIN' on its line, which not all of TLS reads"
            )
    authorities = _load_all(ca, "ca.crt")
    chain = _load_all(certificate, "tls.crt")
    found, own_key = chain[0], _load_key(key, "tls.key")
    if _public(found.public_key()) != _public(own_key.public_key()):
        raise CertificateError("tls.key is not the key of tls.crt")
    signers = [each for each in authorities if _has_signed(each, chain[-1])]
    if not signers:
        raise CertificateError("tls.crt is not signed by ca.crt")
    _check_keys(found, signers)
    _check_usages(found)
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


def _check_keys(found: x509.Certificate, signers: Sequence[x509.Certificate]) -> None:
    """What BoringSSL and OpenSSL both take: a certificate is shown to either."""
    key = found.public_key()
    is_rsa = isinstance(key, rsa.RSAPublicKey)
    if not is_rsa and not (isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, _SHOWN_CURVES)):
        raise CertificateError(
            f"tls.crt has a key of the kind {_kind(key)}, which gRPC does not take: RSA, P-256, P-384 it does"
        )
    for what, certificate in (("tls.crt", found), *(("ca.crt", signer) for signer in signers)):
        each = certificate.public_key()
        if isinstance(each, ed448.Ed448PublicKey) or certificate.public_key_algorithm_oid == _RSA_PSS:
            kind = "Ed448" if isinstance(each, ed448.Ed448PublicKey) else "RSA-PSS"
            raise CertificateError(f"{what} has a key of the kind {kind}, which gRPC does not take")
        if isinstance(each, rsa.RSAPublicKey) and each.key_size < _MIN_RSA_BITS:
            raise CertificateError(
                f"{what} has a key of {each.key_size} bits, too few for RSA: {_MIN_RSA_BITS} at least"
            )
        if isinstance(each, ec.EllipticCurvePublicKey) and not isinstance(each.curve, _SIGNING_CURVES):
            raise CertificateError(f"{what} has a key of the kind {_kind(each)}, which gRPC does not take")


def _kind(key: CertificatePublicKeyTypes) -> str:
    return (
        key.curve.name if isinstance(key, ec.EllipticCurvePublicKey) else type(key).__name__.removesuffix("PublicKey")
    )


def _check_usages(found: x509.Certificate) -> None:
    """Extensions that are not there forbid nothing (RFC 5280, sections 4.2.1.3 and 4.2.1.12)."""
    for extension in found.extensions:
        if isinstance(usages := extension.value, x509.ExtendedKeyUsage):
            wanted = {"server auth": ExtendedKeyUsageOID.SERVER_AUTH, "client auth": ExtendedKeyUsageOID.CLIENT_AUTH}
            if missing := [name for name, usage in wanted.items() if usage not in usages]:
                told = "' and '".join(missing)
                raise CertificateError(
                    f"tls.crt is not for '{told}', which its extended key usage must name: it is shown both ways"
                )
        if isinstance(extension.value, x509.KeyUsage) and not extension.value.digital_signature:
            raise CertificateError("tls.crt is not for 'digital signature', which its key usage must name")


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
