"""The keys by which clients are known: reading their file, and finding whose key a request shows. Pure.

One key a line, then what is said of it, in any order:

    sk-3f9c2b7d1e5a4c60  name=alice requests_per_minute=60 tokens_per_minute=100000
    sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0bc2d2e7c1c0b4d5f5b6a7  name=bob
    # a comment; empty lines are nothing

A key is 16 to 256 visible ASCII characters, or the SHA-256 of one in hex, so that the file need not hold it. Several keys may have
one name: a new one beside the old one while clients change over; what is said of them must be equal, since they share one limit.
A key without a name is called by a hash of itself: the same in every process, wherever its line is.

Only keyed hashes are kept. A key is found by its hash under a secret that this process has drawn, so the time that it takes says
nothing about any key. No sentence here quotes a key.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

MAX_KEYS: Final = 100_000
MAX_FILE_BYTES: Final = 64 << 20
_MOST_PER_MINUTE: Final = 10**12
_KEY: Final = re.compile(rb"[\x21-\x7e]{16,256}")
_HASHED: Final = re.compile(rb"sha256:([0-9a-fA-F]{64})")
_NAME: Final = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_LIMITS: Final = ("requests_per_minute", "tokens_per_minute")


class KeyFileError(ValueError):
    """The file cannot be used; the message is one sentence that names the line and quotes no key."""


@dataclass(frozen=True, slots=True)
class Client:
    """Who a key belongs to, and what it may do."""

    name: str  # for the log, the metrics and errors
    requests_per_minute: int | None = None  # None: as many as there are
    tokens_per_minute: int | None = None  # of prompts and completions together


class ApiKeys:
    """All keys of one file."""

    def __init__(self, clients: Mapping[bytes, Client], secret: bytes) -> None:
        """`clients`: by the SHA-256 of their keys."""
        self._secret = secret
        self._clients = {self._keyed(digest): client for digest, client in clients.items()}
        self.names = frozenset(client.name for client in clients.values())  # once: the gate asks time and again

    def __len__(self) -> int:
        return len(self._clients)

    def find(self, authorization: bytes) -> Client | None:
        """Whose key the header `Authorization: Bearer KEY` shows; None: nobody's."""
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        return self._clients.get(self._keyed(hashlib.sha256(key.strip(b" \t")).digest()))

    def _keyed(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


def read_keys(content: bytes, secret: bytes) -> ApiKeys:
    """The keys of a file, to be kept under this process's secret. Raises KeyFileError."""
    if len(content) > MAX_FILE_BYTES:
        raise KeyFileError(f"the file has more than {MAX_FILE_BYTES >> 20} MiB")
    clients: dict[bytes, Client] = {}
    by_name: dict[str, Client] = {}
    for number, line in enumerate(content.split(b"\n"), 1):
        words = line.split()
        if not words or words[0].startswith(b"#"):
            continue
        try:
            digest = _digest(words[0])
            client = _client(words[1:], digest)
        except ValueError as problem:
            raise KeyFileError(f"line {number}: {problem}") from None
        if digest in clients:
            raise KeyFileError(f"line {number}: this key is there twice")
        if by_name.setdefault(client.name, client) != client:
            raise KeyFileError(f"line {number}: {client.name} has other limits on an earlier line")
        clients[digest] = client
        if len(clients) > MAX_KEYS:
            raise KeyFileError(f"line {number}: there are more than {MAX_KEYS} keys")
    if not clients:
        raise KeyFileError("there is no key in it")
    return ApiKeys(clients, secret)


def _digest(word: bytes) -> bytes:
    if (hashed := _HASHED.fullmatch(word)) is not None:
        return bytes.fromhex(hashed[1].decode())
    if word.startswith(b"sha256:") or not _KEY.fullmatch(word):
        raise ValueError("a key must be 16 to 256 visible ASCII characters, or sha256: and 64 hex digits")
    return hashlib.sha256(word).digest()


def _client(words: Iterable[bytes], digest: bytes) -> Client:
    said: dict[str, str] = {}
    for word in words:
        name, equals, value = word.decode("ascii", "replace").partition("=")
        if not equals or name not in ("name", *_LIMITS):
            raise ValueError(f"behind the key there may be name=, {'=, '.join(_LIMITS)}= and nothing else")
        if name in said:
            raise ValueError(f"{name}= is there twice")
        said[name] = value
    shown = said.get("name", _name_of(digest))
    if not _NAME.fullmatch(shown):
        raise ValueError("name= must be 1 to 64 letters, digits, '.', '_', '@' or '-'")
    return Client(shown, *(_limit(name, said.get(name)) for name in _LIMITS))


def _name_of(digest: bytes) -> str:
    """Too little of a hash to find a key by, and enough that no two of MAX_KEYS are likely to be called the same."""
    return f"key-{hashlib.sha256(b'name of ' + digest).hexdigest()[:12]}"


def _limit(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,13}", text) or not 1 <= int(text) <= _MOST_PER_MINUTE:
        raise ValueError(f"{name}= must be a whole number, at least 1")
    return int(text)
