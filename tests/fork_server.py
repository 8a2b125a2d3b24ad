"""`python tests/fork_server.py FD`: has loaded what processes of Baton load, and is forked for each that tests start.

    Popen of tests/forked.py ──program, variables, descriptors──► this ──fork──► one that ends at once ──fork──► the program
            ^                                                                                                        │
            '──── its parent, as it is of a process that it starts itself: the one in between has orphaned it ───────'

Loading torch is most of a process's start, two seconds of a core, and a run of all tests starts some hundreds. `baton up` does the
same for its nodes (deploy/node_forker.py). Here it is any program of ours, as `python -c` or `python -m` would have run it. This
one has no threads, and has opened nothing of gRPC's or torch's: a copy is what a process is that has loaded the same. Not here:
which processes are started so (forked.py).
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import importlib.util
import json
import os
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from setproctitle import setproctitle

MAX_REQUEST_BYTES: Final = 1 << 18
MAX_DESCRIPTORS: Final = 64
# Which libraries read as they are loaded.
ONE_THREAD: Final = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
_MAX_PID_BYTES: Final = 16
_CLONE_NEWNET: Final = 0x40000000  # linux/sched.h
_NETWORK: Final = "/proc/self/ns/net"
_ASKING: Final = "tests.forked"


def main(control_fd: int) -> None:
    """Be forked until the socket ends; in a copy, be the program."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's, which is for those who ask
    setproctitle("what tests fork")  # the room for a title is found where variables are still as they were
    _load()
    control: socket.socket | None = socket.socket(fileno=control_fd)
    while control is not None:
        asked, descriptors = _be_forked(control)
        _enter(descriptors.pop())
        _place(descriptors, asked["descriptors"])
        control = _for_children() if asked["has_children_forked"] else None

    def program() -> None:
        try:
            _become(asked)
        finally:
            threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as Python does

    sys.modules["runtime.process"].end_process(program)


def _load() -> None:
    from runtime.collecting import loading
    from runtime.config import set_grpc_environment

    set_grpc_environment()  # gRPC reads it as it is imported
    with loading():
        for module in ("router.process", "node.process"):
            importlib.import_module(module)
        importlib.import_module("deploy.node_process").load()
        sys.path.append(str(Path(__file__).parents[1]))
        importlib.import_module(_ASKING)
        sys.path.pop()
        del sys.modules["deploy.node_process"]  # loaded anew where it is what runs
    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, f"{len(threads)} threads: a copy would lack all but one"


def _be_forked(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """What this copy is to be, and the descriptors that came with it; only copies return."""
    while True:
        data, ancillary, _, _ = control.recvmsg(MAX_REQUEST_BYTES, socket.CMSG_SPACE(MAX_DESCRIPTORS * 4))
        if not data:
            os._exit(0)
        descriptors = array.array("i")
        for _, _, content in ancillary:
            descriptors.frombytes(content)
        orphaned, orphan = os.pipe()
        read, write = os.pipe()
        between = os.fork()
        if not between:
            if pid := os.fork():
                os.write(write, str(pid).encode())
                os._exit(0)
            os.close(orphan)
            os.read(orphaned, 1)  # until then, its parent is the one in between
            for each in (control.detach(), orphaned, read, write):
                os.close(each)
            return json.loads(data), descriptors.tolist()
        os.waitpid(between, 0)
        control.send(os.read(read, _MAX_PID_BYTES))
        for each in (orphan, orphaned, read, write, *descriptors):
            os.close(each)


def _for_children() -> socket.socket | None:
    """Of another copy, which is forked for whatever this one starts, the end to be asked at; None in this one."""
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        sys.modules[_ASKING].have_children_forked(own)
        return None
    own.detach()
    null = os.open(os.devnull, os.O_RDWR)
    _place([null, null, null, theirs.detach()], [*range(4)])
    return socket.socket(fileno=3)


def _become(asked: dict[str, Any]) -> None:
    """Run the program, as Python would that has just been started with these words; SystemExit and errors are its own."""
    if asked["has_own_group"]:
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.orig_argv[:] = asked["words"]
    setproctitle(os.fsencode(" ".join(asked["words"])).decode(errors="replace"))
    code, module, arguments = asked["code"], asked["module"], asked["arguments"]
    if path := os.environ.get("PYTHONPATH"):
        sys.path[:0] = path.split(os.pathsep)
        sys.modules.pop("sitecustomize", None)
        if importlib.util.find_spec("sitecustomize"):
            importlib.import_module("sitecustomize")
    if not asked["is_safe_path"]:
        sys.path.insert(0, str(Path.cwd()) if code is None else "")
    sys.argv[:] = [module or "-c", *arguments]
    if code is None:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        file = os.memfd_create("code")
        os.write(file, code.encode())
        runpy.run_path(f"/proc/self/fd/{file}", run_name="__main__")


def _enter(network: int) -> None:
    """Be in this network namespace."""
    if os.fstat(network).st_ino != Path(_NETWORK).stat().st_ino and ctypes.CDLL(None).setns(network, _CLONE_NEWNET):
        raise OSError("setns failed")
    os.close(network)


def _place(given: Sequence[int], wanted: Sequence[int]) -> None:
    """Have these descriptors, at these numbers, and no others."""
    behind = max(*given, *wanted) + 1
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, behind) for each in given]
    os.closerange(0, behind)
    for each, number in zip(moved, wanted, strict=True):
        os.dup2(each, number)
        os.close(each)


if __name__ == "__main__":
    main(int(sys.argv[1]))
