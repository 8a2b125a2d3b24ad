"""A real redis-server of the test's own: on a free port, with nothing on disk, killed at the end.

Where there is none, what needs one fails in CI, which must not be green without it, and is skipped elsewhere.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import redis

from bench.free_port import free_port

PROGRAM: Final = shutil.which("redis-server")
_START_BOUND_S: Final = 60.0


class RedisServer:
    """One server, which can be killed, stopped and started again at its address; made by `started_redis`."""

    def __init__(self, folder: Path, flags: Sequence[str], url: str, host: str) -> None:
        self._folder = folder
        self._flags = flags
        self._host = host
        self.port = free_port()
        self.url = url.format(host=host, port=self.port)
        self._process: subprocess.Popen[bytes] | None = None
        # What others write into it. Untyped: the client's own types allow for every version of every answer.
        self.client: Any = redis.Redis.from_url(self.url, socket_timeout=_START_BOUND_S)

    def start(self) -> None:
        """Start it, its memory empty, and wait until it answers."""
        assert PROGRAM is not None
        command = [PROGRAM, "--bind", self._host, "--port", str(self.port), "--save", "", "--dir", str(self._folder)]
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *(flag.format(port=self.port) for flag in self._flags)], stdout=log, stderr=log
            )
        started_at = time.monotonic()
        while not self._is_answering():
            assert self._process.poll() is None, (self._folder / "redis.log").read_text()[-2000:]
            assert time.monotonic() - started_at < _START_BOUND_S
            time.sleep(0.005)

    def kill(self) -> None:
        """SIGKILL; returns when it has ended of it."""
        assert self._process is not None
        self._process.kill()
        assert self._process.wait(_START_BOUND_S) == -signal.SIGKILL, "it had ended before"

    def freeze(self) -> None:
        """SIGSTOP; returns when it has stopped."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        stopped = os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert stopped is not None and stopped.si_code == os.CLD_STOPPED, "it had ended before"

    def thaw(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End it."""
        self.client.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait(_START_BOUND_S)

    def _is_answering(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.ConnectionError:
            return False


@contextmanager
def started_redis(
    folder: Path, *flags: str, url: str = "redis://{host}:{port}/0", host: str = "127.0.0.1"
) -> Iterator[RedisServer]:
    """A server that answers, at `host`; `url` is where and as whom the test looks."""
    need_redis()
    server = RedisServer(folder, flags, url, host)
    try:
        server.start()
        yield server
    finally:
        server.close()


def need_redis() -> None:
    """Fail or skip where there is no redis-server."""
    if PROGRAM is not None:
        return
    reason = "there is no redis-server: make test-setup installs it as root where there is apt (Debian or Ubuntu)"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
