"""Work shared out among forked processes: what one takes is an index, what it says of it is a line.

    this process --indices, all at once--> pipe --4 bytes at a time, whoever is free--> processes --lines--> pipe --> this process

A process that is forked has all that this one had then, so nothing else is sent. It must fork before it uses CUDA: a context is of
one process. Pipes hand out 4 bytes, and take a line, in one piece (man 7 pipe, PIPE_BUF).
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Final, NoReturn

_INDEX_BYTES: Final = 4
_MAX_ITEMS: Final = (64 << 10) // _INDEX_BYTES  # that a pipe takes while nobody reads
_MAX_TOLD: Final = 300  # characters of a line, which JSON may write as 12 bytes each; PIPE_BUF is 4096
_READ_BYTES: Final = 64 << 10


def forked(
    work: Callable[[int], str], num_items: int, num_processes: int, within_s: float
) -> Iterator[tuple[int, str]]:
    """What `work` says of each item, in the order in which they end; of what has not ended in time, nothing.

    A process that dies takes its item with it. When the iterator ends, or is closed, so have all processes.
    """
    if num_items > _MAX_ITEMS:
        raise ValueError(f"{num_items} items are more than a pipe takes: {_MAX_ITEMS}")
    end = time.monotonic() + within_s
    taken_from, handed_out = os.pipe()
    read_from, told = os.pipe()
    os.write(handed_out, b"".join(index.to_bytes(_INDEX_BYTES, "little") for index in range(num_items)))
    os.close(handed_out)
    processes = []
    for _ in range(min(num_processes, num_items)):
        process = os.fork()
        if process == 0:
            _work_off(work, taken_from, told)
        processes.append(process)
    os.close(taken_from)
    os.close(told)
    try:
        yield from map(_parsed, _lines(read_from, end))
    finally:
        os.close(read_from)
        for process in processes:
            os.kill(process, signal.SIGKILL)  # it is a zombie at least, for nobody else waits for it
            os.waitpid(process, 0)


def _work_off(work: Callable[[int], str], taken_from: int, told: int) -> NoReturn:
    """In a process of its own: item by item. Ctrl-C is the parent's, which ends this."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while taken := os.read(taken_from, _INDEX_BYTES):
            index = int.from_bytes(taken, "little")
            os.write(told, json.dumps([index, work(index)[:_MAX_TOLD]]).encode() + b"\n")
    finally:
        if (error := sys.exc_info()[1]) is not None:
            traceback.print_exception(error)
        os._exit(0)


def _lines(read_from: int, end: float) -> Iterator[bytes]:
    """Until nobody can write any more, or time is over."""
    rest = b""
    while select.select([read_from], [], [], max(0.0, end - time.monotonic()))[0]:
        read = os.read(read_from, _READ_BYTES)
        if not read:
            return
        *whole, rest = (rest + read).split(b"\n")
        yield from whole


def _parsed(line: bytes) -> tuple[int, str]:
    index, said = json.loads(line)
    return index, said
