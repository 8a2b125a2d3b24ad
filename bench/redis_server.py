"""A redis-server for a benchmark: of its own, on a free port of 127.0.0.1, with nothing on disk, ended with the context."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from redis import Redis
from redis.exceptions import RedisError

from bench.free_port import free_port

_START_BOUND_S: Final = 20.0


@contextmanager
def started_redis(folder: Path) -> Iterator[str | None]:
    """Its URL once it answers; None: there is no such program, or it does not start."""
    program = shutil.which("redis-server")
    if program is None:
        yield None
        return
    port = free_port()
    url = f"redis://127.0.0.1:{port}/0"
    command = [program, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            yield url if _answers(server, url) else None
        finally:
            server.kill()


def _answers(server: subprocess.Popen[bytes], url: str) -> bool:
    client = Redis.from_url(url)
    started_at = time.monotonic()
    while server.poll() is None and time.monotonic() - started_at < _START_BOUND_S:
        try:
            return bool(client.ping())
        except RedisError:
            time.sleep(0.01)
    return False
