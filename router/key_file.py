"""The file of API keys, read again when it changes: looked at each second, and on SIGHUP.

A file that cannot be read, or in which something is wrong, leaves the keys as they were and logs one line, once for each change. A
half-written file must lock nobody out, and may be without fault as far as it goes: unasked, a file counts only when two looks in a
row, and one after reading, find it unchanged. Whoever the new file does not name is refused from then on; what runs ends as it
would have.

Not here: what a line means (api_keys.py).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

from router.api_keys import MAX_FILE_BYTES, ApiKeys, KeyFileError, read_keys
from runtime.logs import log_event
from runtime.session_driver import surface

_LOG: Final = logging.getLogger(__name__)
_LOOK_S: Final = 1.0

_Mark = tuple[int, int, int, int] | None  # what changes when the file does, or who may read it; None: it is not there


class KeyFile:
    """The keys of one file, as it was when it was last good."""

    def __init__(self, path: Path) -> None:
        """Reads it; raises KeyFileError, with the path, if it cannot be used."""
        self._path = path
        self._secret = secrets.token_bytes(32)
        self._mark = _mark(path)
        self._fault = ""  # that keeps what has this mark from being read: it may pass, and the file be as it is
        self._hung_up = asyncio.Event()
        self._hangup_before = signal.getsignal(signal.SIGHUP)
        self._task: asyncio.Task[None] | None = None
        try:
            self.keys = self._read()
        except KeyFileError as error:
            raise KeyFileError(f"--api-keys {path}: {error}") from None
        self._say_what_is_there()

    def start(self, on_change: Callable[[], None]) -> None:
        """Watch it, on the running loop; `on_change` is called whenever there are new keys."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._hung_up.set)
        self._task = asyncio.create_task(self._watch(on_change), name="watch of the key file")
        self._task.add_done_callback(surface)

    async def close(self) -> None:
        """Watch it no more."""
        if self._task is not None:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
            signal.signal(signal.SIGHUP, self._hangup_before)  # not what asyncio leaves: that ends the process
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _watch(self, on_change: Callable[[], None]) -> None:
        seen = self._mark  # at the last look
        while True:
            try:
                async with asyncio.timeout(_LOOK_S):
                    await self._hung_up.wait()
            except TimeoutError:
                if _mark(self._path) == self._mark and not self._fault:
                    continue
            is_asked = self._hung_up.is_set()
            self._hung_up.clear()
            before, seen = seen, _mark(self._path)  # first: what changes while it is read is read again
            if not is_asked and seen != before:
                continue  # somebody may be writing it
            known = None if is_asked else (self._mark, self._fault)
            try:
                keys = await asyncio.to_thread(self._read)
            except KeyFileError as error:
                self._mark, self._fault = seen, str(error)
                if known != (self._mark, self._fault):
                    log_event(_LOG, logging.ERROR, "api_keys_kept", file=self._path, keys=len(self.keys), reason=error)
                continue
            if not is_asked and _mark(self._path) != seen:
                continue  # the same
            self.keys, self._mark, self._fault = keys, seen, ""
            self._say_what_is_there()
            on_change()

    def _read(self) -> ApiKeys:
        try:
            with self._path.open("rb") as file:
                return read_keys(file.read(MAX_FILE_BYTES + 1), self._secret)
        except OSError as error:
            raise KeyFileError(f"cannot be read: {error.strerror}") from None

    def _say_what_is_there(self) -> None:
        log_event(_LOG, logging.INFO, "api_keys_read", file=self._path, keys=len(self.keys))
        try:
            mode = self._path.stat().st_mode
        except OSError:
            return  # gone meanwhile; the next look says so
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            mend = f"chmod 600 {self._path}"
            log_event(_LOG, logging.WARNING, "api_keys_exposed", file=self._path, mode=f"{mode & 0o777:o}", mend=mend)


def _mark(path: Path) -> _Mark:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino
