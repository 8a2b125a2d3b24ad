"""Where the cluster's KV pool is: a URL, checked before anything is started, and shown without its secrets.

`file:///PATH` a directory, on a local disk or a shared file system; `redis://…`, `rediss://…`, `unix://…` a Redis, as
redis_address.py takes them; `memory://` inside the process, which shares with nobody. What has a meaning in a URL is
percent-encoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from runtime import redis_address

_MEMORY: Final = "memory://"


@dataclass(frozen=True, slots=True)
class MemoryPool:
    """In this process."""


@dataclass(frozen=True, slots=True)
class FilePool:
    """In a directory; its parent must exist."""

    path: Path


@dataclass(frozen=True, slots=True)
class RedisPool:
    """In a Redis, with user and password where it has them: not to be shown."""

    url: str

    def __repr__(self) -> str:
        return f"RedisPool({redis_address.shown(self.url)})"


KvPoolAddress = MemoryPool | FilePool | RedisPool


def read_kv_pool_address(text: str) -> KvPoolAddress:
    """Read `--kv-pool`. Raises ValueError with one sentence without secrets."""
    if text == _MEMORY:
        return MemoryPool()
    if text.startswith("file:"):
        return FilePool(_file_path(text))
    problem = redis_address.url_problem(text, "file:///PATH, memory://, ") or redis_address.file_problem(text)
    if problem is not None:
        raise ValueError(f"--kv-pool {shown(text)}: {problem}")
    return RedisPool(text)


def shown(text: str) -> str:
    """The same for a log or an error: without user and password."""
    return text if text == _MEMORY or text.startswith("file:") else redis_address.shown(text)


def _file_path(text: str) -> Path:
    try:
        url = urlsplit(text)
        path = unquote(url.path, errors="strict")
    except ValueError:
        raise ValueError(f"--kv-pool {text}: is no URL") from None
    if not text.startswith("file:///") or not text.isprintable() or not path.isprintable():
        raise ValueError(f"--kv-pool {text}: must be file:///PATH, with an absolute path")
    if url.query or url.fragment or text.endswith(("?", "#")):
        raise ValueError(f"--kv-pool {text}: must not have a '?' nor a '#': write %3F and %23 for them")
    if not path.strip("/"):
        raise ValueError(f"--kv-pool {text}: must name a directory")
    return Path(path)
