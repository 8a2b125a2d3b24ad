"""What a process owes the operating system: end on signals, end with its parent, end with one clear line.

SIGTERM is what systemd, docker and Kubernetes send: whoever serves requests finishes or hands over what is here, and then ends.
SIGINT is Ctrl-C: end now, in good order. A second signal of either kind ends the process where it stands, and so does SIGTERM while
it loads: it has nothing to hand over yet.

Not here: what is stopped on the way out (each entry does that once `first_signal` has come).
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import errno
import ipaddress
import json
import logging
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from runtime.logs import log_event

_LOG: Final = logging.getLogger(__name__)
_STDIN: Final = 0
_STDERR: Final = 2
_LOOK_EVERY_S: Final = 1.0
EXIT_USAGE: Final = 2  # the user can mend it: wrong flag, model directory, taken port
EXIT_NOT_NOW: Final = 75  # what may pass by itself; sysexits.h: EX_TEMPFAIL
_TRIAL: Final = bytes(4096)  # as much as a ready file has at most: a full disk takes files, and nothing in them
_OF_AN_ADDRESS: Final = (errno.EADDRNOTAVAIL, socket.EAI_AGAIN)  # as a machine starts
PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
_Result = TypeVar("_Result")


class CannotWrite(ValueError):
    """A file that the user has named cannot be written; the message names flag, path and reason."""


class NotNow(ValueError):
    """What cannot be used, and perhaps can in a while: who starts processes may start this one again."""


def fatal(message: str, error: BaseException | None = None) -> NoReturn:
    """End the process with one line on stderr and exit code 2: something that the user can mend.

    Code 75 where it is of an `error` that may pass by itself: memory that another process still has, an address that is not up yet.
    """
    sys.stderr.write(" ".join(message.split()) + "\n")
    cause = None if error is None else error.__cause__
    may_pass = isinstance(error, NotNow) or (isinstance(cause, OSError) and cause.errno in _OF_AN_ADDRESS)
    raise SystemExit(EXIT_NOT_NOW if may_pass else EXIT_USAGE)


def end_process(main: Callable[[], object]) -> NoReturn:
    """End the process with what `main` returns or exits with, as `sys.exit` does, but leave its memory to the kernel.

    Python would free what it has loaded object by object, which takes a second of a core behind torch. Who has registered with
    atexit is called; threads that still run end where they stand. What else `main` raises is Python's to tell of.
    """
    try:
        code = main()
    except SystemExit as end:
        code = end.code
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code or 0)


def hold_standard_streams() -> None:
    """Open what the shell or a service manager has closed of stdin, stdout and stderr, on nothing; before anything else is opened.

    Else a connection gets that number, which is sent what libraries say on stderr, and with whose end uvloop aborts the process.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    if getattr(sys, "stderr", None) is None:
        sys.stderr = open(_STDERR, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - open to the end


def end_while_loading() -> None:
    """Have SIGINT and SIGTERM end this process at once until `first_signal` is called: there is nothing to undo or say.

    The kernel does it, whatever runs meanwhile. Not to process 1 of a container: to that one it hands no signal that it has no
    handler for (pid_namespaces(7)), and Python's run between two instructions only.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _exit_of if os.getpid() == 1 else signal.SIG_DFL)


def _exit_of(number: int, _: object) -> None:
    os._exit(128 + number)


def run_async(
    main: Coroutine[Any, Any, _Result], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> _Result:
    """As `asyncio.run`: its result. Ctrl-C is KeyboardInterrupt whenever it comes.

    asyncio.Runner (Python 3.11) forgets one that comes between its taking of the signal and its setting of the count to nought, and
    raises the CancelledError that `main` ended with. Nothing else cancels what is run here.
    """
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        try:
            return runner.run(main)
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


def first_signal(*, or_hangup: bool = False) -> asyncio.Future[signal.Signals]:
    """The first SIGINT or SIGTERM; call it inside the running loop. A second one ends the process at once.

    `or_hangup`: or that its terminal was closed, unless that is ignored (nohup). Shell and kernel both may say so, or neither: a
    second time ends nothing.
    """
    loop = asyncio.get_running_loop()
    first: asyncio.Future[signal.Signals] = loop.create_future()

    def on_signal(number: signal.Signals) -> None:
        if first.done():
            os._exit(128 + number)  # no clean-up: the user has asked twice
        first.set_result(number)

    def on_hangup() -> None:
        if not first.done():
            first.set_result(signal.SIGHUP)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    if or_hangup and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        loop.add_signal_handler(signal.SIGHUP, on_hangup)
        closed = asyncio.create_task(_terminal_closed())
        closed.add_done_callback(lambda task: None if task.cancelled() else on_hangup())
        first.add_done_callback(lambda _: closed.cancel())
    return first


async def _terminal_closed() -> None:
    """Wait until the terminal is closed that is stdin, and in whose foreground this process was a moment before.

    The kernel tells the leader of the terminal's session alone, who need not pass it on: `ssh -t HOST make up` is a make that waits
    for whom it has started.
    """
    poll = select.poll()
    poll.register(_STDIN, 0)
    was_in_front = is_in_front = _is_in_front()
    while not (was_in_front or is_in_front) or not any(event & select.POLLHUP for _, event in poll.poll(0)):
        await asyncio.sleep(_LOOK_EVERY_S)
        was_in_front, is_in_front = is_in_front, _is_in_front()


def _is_in_front() -> bool:
    try:
        return os.tcgetpgrp(_STDIN) == os.getpgrp()
    except OSError:  # no terminal
        return False


def ignore_hangups(*, of_a_terminal: bool = False) -> None:
    """Have SIGHUP end nothing: a service manager's reload sends it, whether or not there is a file to read again.

    Unless this is a terminal's: that sends it when it is closed, and nobody would know of who stays. `of_a_terminal`: then, too.
    """
    if of_a_terminal or not os.isatty(0):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the one with `parent_pid` dies, also by SIGKILL; 0 asks for nothing.

    Linux sends the signal when the parent *thread* ends, so a launcher starts its children from its main thread. The check
    behind the call closes the race with a parent that died before it.
    """
    if not parent_pid:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        fatal(f"--parent-pid {parent_pid}: is not the process that started this one, or has ended")


def computed_s(pid: int) -> float:
    """Seconds that all processors have computed for a process; 0 for one that has ended, and for nobody's number."""
    if pid <= 0:
        return 0.0
    try:
        return time.clock_gettime((~pid << 3) | 2)  # its clock: linux/posix-timers.h
    except OSError:
        return 0.0


def write_atomically(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON so that a reader sees the whole file or none; used for ready files and cluster.json."""
    unfinished = _unfinished(path)
    try:
        unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)  # what a full disk left of it
        raise


def check_writable(flag: str, path: Path | None) -> None:
    """Raise CannotWrite if `write_atomically` could not write there: before anybody is told of this process."""
    if path is None:
        return
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        try:
            _unfinished(path).write_bytes(_TRIAL)
        finally:
            _unfinished(path).unlink(missing_ok=True)
    except OSError as error:
        raise _cannot_write(flag, path, error) from None


def write_ready_file(path: Path | None, content: Mapping[str, Any]) -> None:
    """Tell whoever has started this process where it is, if anybody asked. Raises CannotWrite."""
    if path is not None:
        try:
            write_atomically(path, content)
        except OSError as error:  # the disk has become full since `check_writable`, say
            raise _cannot_write("--ready-file", path, error) from None


def _cannot_write(flag: str, path: Path, error: OSError) -> CannotWrite:
    return CannotWrite(f"{flag} {path}: cannot be written: {error.strerror}")


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that binds to `host`."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def is_everywhere(host: str) -> bool:
    """Whether a server that binds to `host` listens on every address, so that the host has another name for those who dial."""
    try:
        return not host or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def reached_here(host: str) -> str:
    """The host by which this machine itself reaches a server that binds to `host`; certificates have that, and none has 0.0.0.0."""
    if not is_everywhere(host):
        return host
    return "::1" if ":" in host else "127.0.0.1"


def listening_socket(host: str, port: int, backlog: int) -> socket.socket:
    """A socket that listens there; at `::` for IPv4, too, as gRPC and zmq do it. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = family == socket.AF_INET6 and is_everywhere(host) and socket.has_dualstack_ipv6()
    try:
        host.encode("idna")
    except UnicodeError:  # which create_server would not raise as an OSError
        raise socket.gaierror(socket.EAI_NONAME, "is no host name") from None
    return socket.create_server((host, port), family=family, backlog=backlog, dualstack_ipv6=both)


def why_not_listening(error: OSError, flag: str, host: str, port: int, host_flag: str = "--host") -> str:
    """What `listening_socket` found, as a sentence that names the flag which is to blame; `flag` is the port's."""
    if (error.errno or 0) < 0:  # getaddrinfo's, which create_server hands on as any other
        return f"{host_flag} {host}: is no address and no name that this machine knows"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host_flag} {host}: is no address of this machine"
    why = os.strerror(error.errno) if error.errno else error.strerror  # create_server's own text says the address again
    return f"{flag} {port}: cannot listen on {host}: {why}; give another one"


def warn_if_exposed(host: str, what: str, missing: Mapping[str, str]) -> None:
    """Log a warning when `what` listens beyond this machine without credentials; `missing`: flag -> what it would prevent."""
    if missing and not is_loopback(host):
        told = "; ".join(f"without {flag} {risk}" for flag, risk in missing.items())
        log_event(_LOG, logging.WARNING, "exposed", listener=what, host=host, risk=told)


def allow_descriptors(number: int) -> int:
    """Raise this process's limit of open files to so many, as far as the system lets it: connections are files. The limit then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number if hard == resource.RLIM_INFINITY else min(number, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return number if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
