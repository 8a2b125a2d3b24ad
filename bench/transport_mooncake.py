"""`PYTHON -m bench.transport_mooncake`: Mooncake's transfer engine alone, beside bench.transport; PYTHON's environment has it.

    bench.transport ──JSON lines──► sender ──JSON lines──► receiver, a process of the same kind
                                      └──TCP, Mooncake's own, all blocks in one request──► the same memory

The engine listens on every address, so the two live in a network namespace of their own, in which only the loopback device is up:
nobody else gets there. Its request is over when the sender has given the last byte away; a transfer here, as everywhere in
bench/transport.py, when the receiver has seen the last bytes of each piece in place and said so.
Imports nothing of ours: the environment is the peer's.
Source: https://kvcache-ai.github.io/Mooncake/python-api-reference/transfer-engine.html
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib
import json
import os
import socket
import struct
import subprocess
import sys
import time
from typing import Any, Final

import numpy as np
import numpy.typing as npt

_PIECE_BYTES: Final = 1 << 20  # as raw TCP's messages
_STAMP_BYTES: Final = 8
_PATIENCE_S: Final = 60.0
_CLONE_NEWUSER: Final = 0x10000000  # linux/sched.h
_CLONE_NEWNET: Final = 0x40000000
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
_SIOCSIFFLAGS: Final = 0x8914  # linux/sockios.h
_IFF_UP: Final = 1  # linux/if.h


class _Failed(Exception):
    """The message is what the user reads."""


class _End:
    """Memory, and an engine that may touch it."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.memory: npt.NDArray[np.uint8] = np.ones((num_blocks, block_bytes), np.uint8)
        self.address: int = self.memory.ctypes.data
        begins = [(block, begin) for block in range(num_blocks) for begin in range(0, block_bytes, _PIECE_BYTES)]
        self.offsets = [block * block_bytes + begin for block, begin in begins]
        self.lengths = [min(_PIECE_BYTES, block_bytes - begin) for _, begin in begins]
        self._ends = np.add(self.offsets, self.lengths)[:, None] - np.arange(_STAMP_BYTES, 0, -1)
        self.engine = importlib.import_module("mooncake.engine").TransferEngine()
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise _Failed("Mooncake's engine does not start")
        if self.engine.register_memory(self.address, self.memory.nbytes) != 0:
            raise _Failed("Mooncake's engine does not take the memory")

    def stamp(self, number: int) -> None:
        """Have every piece end in this number."""
        self.memory.reshape(-1)[self._ends] = np.frombuffer(struct.pack("<q", number), np.uint8)

    def awaits(self, number: int) -> bool:
        """Wait until every piece ends in this number; False if it does not come to that."""
        wanted = np.frombuffer(struct.pack("<q", number), np.uint8)
        until = time.monotonic() + _PATIENCE_S
        flat = self.memory.reshape(-1)
        while not (flat[self._ends] == wanted).all():
            if time.monotonic() > until:
                return False
        return True

    def digest(self) -> str:
        return hashlib.blake2b(self.memory.reshape(-1).data).hexdigest()


class _Receiver(_End):
    """Says what has arrived."""

    def do(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["do"] == "await":
            return {"is_whole": self.awaits(asked["number"])}
        return {"digest": self.digest()} if asked["do"] == "look" else {"cpu_s": time.process_time()}

    def hello(self) -> dict[str, Any]:
        return {"session": f"127.0.0.1:{self.engine.get_rpc_port()}", "address": self.address}


class _Sender(_End):
    """Gives transfers away, and asks its receiver about them."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        super().__init__(num_blocks, block_bytes)
        self.memory[:] = np.random.default_rng(1).integers(0, 256, self.memory.shape, np.uint8)
        command = [sys.executable, "-m", "bench.transport_mooncake"]
        self._receiver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._peer = self._ask({"role": "receiver", "num_blocks": num_blocks, "block_bytes": block_bytes})
        self._number = 0

    def hello(self) -> dict[str, Any]:
        return {}

    def do(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["do"] == "check":
            self._transfer()
            return {"is_same": self._ask({"do": "look"})["digest"] == self.digest()}
        cpu_before_s = self._cpu_s()
        seconds = self._transfer()
        return {"seconds": seconds, "cpu_s": self._cpu_s() - cpu_before_s}

    def _transfer(self) -> float:
        self._number += 1
        self.stamp(self._number)
        sources = [self.address + offset for offset in self.offsets]
        targets = [self._peer["address"] + offset for offset in self.offsets]
        began = time.perf_counter()
        if self.engine.batch_transfer_sync_write(self._peer["session"], sources, targets, self.lengths) != 0:
            raise _Failed("Mooncake's engine says that the transfer failed")
        if not self._ask({"do": "await", "number": self._number})["is_whole"]:
            raise _Failed(f"not all of it arrived within {_PATIENCE_S:.0f} s")
        return time.perf_counter() - began

    def _cpu_s(self) -> float:
        return float(self._ask({"do": "cpu"})["cpu_s"]) + time.process_time()

    def _ask(self, content: dict[str, Any]) -> dict[str, Any]:
        assert self._receiver.stdin is not None and self._receiver.stdout is not None
        self._receiver.stdin.write(json.dumps(content) + "\n")
        self._receiver.stdin.flush()
        if not (line := self._receiver.stdout.readline()):
            raise _Failed("its receiver has ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise _Failed(answer["error"])
        return answer


def _move_into_own_network() -> None:
    """Leave the host's network for one of which nothing but the loopback device is there; raises _Failed."""
    flags = _CLONE_NEWNET | (0 if os.geteuid() == 0 else _CLONE_NEWUSER)
    if ctypes.CDLL(None, use_errno=True).unshare(flags) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise _Failed(f"no network namespace for Mooncake, which listens on every address: {reason}")
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


def main() -> None:
    """Serve until stdin ends."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")  # whatever else prints goes to stderr
    os.dup2(2, 1)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 9)

    def say(content: dict[str, Any]) -> None:
        out.write(json.dumps(content) + "\n")
        out.flush()

    setup = json.loads(sys.stdin.readline())
    try:
        make: type[_Sender] | type[_Receiver] = _Receiver
        if setup["role"] != "receiver":
            make = _Sender
            _move_into_own_network()
        end = make(setup["num_blocks"], setup["block_bytes"])
        say(end.hello())
        for line in sys.stdin:
            say(end.do(json.loads(line)))
    except (_Failed, ImportError) as problem:
        say({"error": str(problem)})


if __name__ == "__main__":
    main()
