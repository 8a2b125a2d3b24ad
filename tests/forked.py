"""Processes of ours that tests start, forked from one that has loaded what they load: as subprocess and asyncio have them.

Such a process is a child of this one, with the variables, descriptors, folder and network namespace that it is given; what it lacks
is a start of its own. Tests of starts, of what is imported meanwhile, of flags of Python's use subprocess itself. Not here: what
is forked (fork_server.py).
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import inspect
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest.mock import patch

from deploy.cli import COMMANDS, ROLES
from tests.fork_server import MAX_DESCRIPTORS, MAX_REQUEST_BYTES, ONE_THREAD

_BATON: Final = str(Path(sys.executable).with_name("baton"))
_SERVER: Final = Path(__file__).with_name("fork_server.py")
_NETWORK: Final = "/proc/thread-self/ns/net"
_PR_SET_CHILD_SUBREAPER: Final = 36  # linux/prctl.h
_MAX_ANSWER_BYTES: Final = 16
# `ps` shows a process's words where its first ones were, and behind them, where its variables were.
_ROOM: Final = {"ROOM_FOR_ARGUMENTS": " " * 4096}
_POPEN: Final = subprocess.Popen  # create_process has another one stand in for it meanwhile
_SIGNATURE: Final = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
_PIPES: Final = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
# What starts clusters, or others of our processes; not here: who measures how long that takes.
_STARTING_OTHERS: Final = {
    f"bench.{name}" for name in ("failover", "local_prefill", "peers", "pressure", "router", "token_path", "transport")
}
# What each option of Popen is by itself.
_USUAL: Final = {
    "executable": None,
    "preexec_fn": None,
    "close_fds": True,
    "shell": False,
    "restore_signals": True,
    "gid": None,
    "gids": None,
    "uid": None,
    "umask": -1,
    "start_new_session": False,
}


class Program(NamedTuple):
    """What Python is told to run: a module, or code."""

    module: str | None
    code: str | None
    arguments: Sequence[str]
    is_safe_path: bool  # -P: the current directory is none where modules are looked for
    has_children_forked: bool = False  # whichever can be

    @property
    def words(self) -> list[str]:
        """The whole command line."""
        what = ("-m", self.module) if self.code is None else ("-c", self.code)
        return [sys.executable, *(["-P"] if self.is_safe_path else []), *map(str, what), *self.arguments]


def program_of(words: Sequence[str]) -> Program:
    """What this command line of Python's or of `baton` runs. ValueError: it asks for more than that."""
    match words:
        case [command, *rest] if command == _BATON:
            for name, target in COMMANDS.items():
                if tuple(rest[: len(name)]) == name:
                    module, *before = target if name[0] in ROLES else ("deploy.quiet_stop", *target)
                    return Program(module, None, [*before, *rest[len(name) :]], True, name == ("up",))
        case [sys.executable, "-P", "-m", module, *arguments]:
            return Program(module, None, arguments, True)
        case [sys.executable, "-m", module, *arguments]:
            return Program(module, None, arguments, False, module in _STARTING_OTHERS or "--workers" in arguments)
        case [sys.executable, "-c", code, *arguments]:
            return Program(None, code, arguments, False)
    raise ValueError(f"{words[:4]}: is no program that can be forked; use subprocess")


class _Server:
    """The process that is forked; one for this process, from the first time that it is needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._libc = ctypes.CDLL(None)

    def fork(self, asked: dict[str, Any], descriptors: Sequence[int]) -> int:
        """The pid of a child of this process."""
        request = json.dumps(asked).encode()
        assert len(request) <= MAX_REQUEST_BYTES and len(descriptors) <= MAX_DESCRIPTORS
        with self._lock:
            if self._control is None:
                self._control = self._start()
            # Who is orphaned meanwhile, and a descendant of this process, becomes its child.
            self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._control, [request], list(descriptors))
                answer = self._control.recv(_MAX_ANSWER_BYTES)
            finally:
                self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)
        assert answer, "the process that tests fork has ended: what it said is above"
        return int(answer)

    def _start(self) -> socket.socket:
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = _POPEN(
                [sys.executable, "-P", _SERVER, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | ONE_THREAD | _ROOM,
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self._end)
        return own

    def adopt(self, control: socket.socket) -> None:
        """Ask at this end from now on, of a process that somebody else has started."""
        self._control = control

    def _end(self) -> None:
        assert self._control is not None and self._process is not None
        self._control.close()
        self._process.wait()


_SERVER_OF_THIS: Final = _Server()


class Popen(subprocess.Popen[Any]):
    """As subprocess's, of a program of ours; ValueError for what only a start of its own could have.

    Its libraries compute with one thread, unless the program says otherwise.
    """

    def _execute_child(self, *given: Any) -> None:
        """What subprocess's own calls when pipes are there, to fork and execute."""
        options = _SIGNATURE.bind(self, *given).arguments
        group = options["process_group"]
        unusual = {name: options[name] for name, usual in _USUAL.items() if options[name] != usual}
        if unusual:
            raise ValueError(f"{unusual}: is not for who is forked; use subprocess")
        if group not in (-1, 0):
            raise ValueError(f"process_group={group}: is not for who is forked; use subprocess")
        program = program_of([os.fspath(word) for word in options["args"]])
        network = os.open(_NETWORK, os.O_RDONLY)
        try:
            pipes = [options[name] for name in ("p2cread", "c2pwrite", "errwrite")]
            own = [number if pipe == -1 else pipe for number, pipe in enumerate(pipes)]
            asked = {
                **program._asdict(),
                "words": program.words,
                "environment": dict(os.environ if options["env"] is None else options["env"]) | ONE_THREAD,
                "has_own_group": group == 0,
                "cwd": os.fspath(options["cwd"] or Path.cwd()),
                "descriptors": [*range(3), *options["pass_fds"]],
            }
            self.pid = _SERVER_OF_THIS.fork(asked, [*own, *options["pass_fds"], network])
        finally:
            os.close(network)
        self._child_created = True
        self._close_pipe_fds(*(options[name] for name in _PIPES))  # type: ignore[attr-defined]


class _AnyPopen(Popen):
    """Likewise, and what cannot be forked is executed."""

    def _execute_child(self, *given: Any) -> None:
        try:
            super()._execute_child(*given)
        except ValueError:
            _POPEN._execute_child(self, *given)  # type: ignore[attr-defined]


def have_children_forked(control: socket.socket) -> None:
    """What this process starts is forked, if it can be, from the process that is asked at `control`: a launcher's children, say."""
    _SERVER_OF_THIS.adopt(control)
    patch("subprocess.Popen", _AnyPopen).start()


def run(
    words: Sequence[str], *, timeout: float, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """As subprocess's, with what the process has said, and whatever its exit code is."""
    pipe = subprocess.PIPE
    with Popen(words, stdout=pipe, stderr=pipe, text=True, cwd=cwd, env=env) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)


async def create_process(*words: str, **options: Any) -> asyncio.subprocess.Process:
    """As asyncio's create_subprocess_exec."""
    with patch("subprocess.Popen", Popen):
        return await asyncio.create_subprocess_exec(*words, **options)
