"""`python -m deploy.node_forker FD PARENT_PID`: loads torch once, and is forked for each node of `baton up`.

    launcher ──what to run, its log──► this ──fork──► a node, which goes on as any other (deploy/node_process.py)
        '◄──────── its pid; its end ────'

Loading torch is most of a node's start, a second and more of a core. Here that is done once, while the router starts, and what it
leaves in memory is there once. This one has no threads, so that a fork has all there is, and has opened no device and no socket of
gRPC's. It ends with the launcher's end of its socket, and the kernel kills its copies when it ends. Not here: who asks (forker.py).
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NoReturn

from setproctitle import setproctitle

from deploy import node_process
from runtime.collecting import loading
from runtime.process import die_with_parent, end_process, end_while_loading

_MAX_REQUEST_BYTES: Final = 1 << 17
_STDOUT: Final = 1
_STDERR: Final = 2
_OF_NODES: Final = (signal.SIGINT, signal.SIGTERM)


def main(control_fd: int, parent_pid: int) -> int:
    """Be forked until the socket ends; in a copy, run the node and return its exit code."""
    # Of a service manager, which sends them to every process there is: they are for the nodes, who then hand over what they have.
    for number in _OF_NODES:
        signal.signal(number, signal.SIG_IGN)
    on_hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    die_with_parent(parent_pid)
    setproctitle("baton forker")
    with suppress(ImportError), loading():  # a node finds the same, and says it in its log
        node_process.load()
    arguments = _Forker(socket.socket(fileno=control_fd)).be_forked()
    signal.signal(signal.SIGHUP, on_hangup)
    end_while_loading()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_NODES)
    setproctitle(os.fsencode(f"baton {' '.join(arguments)}").decode(errors="replace"))  # a path need not be UTF-8
    return node_process.main(arguments)


class _Forker:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._pids: dict[int, int] = {}  # by the descriptor that tells of its end

    def be_forked(self) -> Sequence[str]:
        """What this copy is to run; only copies return."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._control:
                    self._bury(key.fd)
                elif (arguments := self._fork()) is not None:
                    return arguments

    def _fork(self) -> Sequence[str] | None:
        """What to run, in the copy."""
        data, descriptors, _, _ = socket.recv_fds(self._control, _MAX_REQUEST_BYTES, 1)
        if not data:
            _end()
        parent_pid = os.getpid()
        # A signal that comes before the copy has its own way with them waits for that.
        signal.pthread_sigmask(signal.SIG_BLOCK, _OF_NODES)
        try:
            pid = os.fork()
        except OSError as error:  # a limit of processes, or of memory
            self._tell({"errno": error.errno})
            pid = -1
        if not pid:
            return self._become(json.loads(data), descriptors[0], parent_pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_NODES)
        os.close(descriptors[0])
        if pid > 0:
            ended = os.pidfd_open(pid)
            self._pids[ended] = pid
            self._selector.register(ended, selectors.EVENT_READ)
            self._tell({"forked": pid}, ended)
        return None

    def _become(self, asked: dict[str, Any], log_fd: int, parent_pid: int) -> Sequence[str]:
        """Have of the forker what it has loaded, and nothing else."""
        self._selector.close()
        self._control.close()
        for descriptor in self._pids:
            os.close(descriptor)
        os.setpgid(0, 0)
        os.dup2(log_fd, _STDOUT)
        os.dup2(log_fd, _STDERR)
        os.close(log_fd)
        arguments: list[str] = asked["arguments"]
        return [*arguments, "--parent-pid", str(parent_pid)]

    def _bury(self, descriptor: int) -> None:
        """Tell how the process of that descriptor has ended."""
        self._selector.unregister(descriptor)
        pid = self._pids.pop(descriptor)
        _, status = os.waitpid(pid, 0)
        os.close(descriptor)
        self._tell({"ended": pid, "exit_code": os.waitstatus_to_exitcode(status)})

    def _tell(self, what: dict[str, Any], *descriptors: int) -> None:
        try:
            socket.send_fds(self._control, [json.dumps(what).encode()], descriptors)
        except OSError:  # the launcher has gone
            _end()


def _end() -> NoReturn:
    os._exit(0)  # there is nothing to undo, and torch takes a while for it


if __name__ == "__main__":
    end_process(lambda: main(int(sys.argv[1]), int(sys.argv[2])))
