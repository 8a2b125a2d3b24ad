"""A process that writes blocks into a directory until it is killed: `python -m tests.kv_pool.file_writer ROOT BLOCK_BYTES MAX`.

For each line on its stdin it forks a child that writes until it is killed, prints the child's id, and reaps it once it has ended,
so that a round costs no start of Python. The block of key n is `content(n)`. Imports no numpy, and starts no thread.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Final

from connector.file_store import FileStore
from connector.kv_record import KvRecords
from connector.kv_store import KvStoreLimits

NUM_KEYS: Final = 64


def key_of(number: int) -> bytes:
    """The key of block `number`."""
    return hashlib.sha256(b"key %d" % number).digest()


def content(number: int, block_bytes: int) -> bytes:
    """The bytes of block `number`."""
    return hashlib.shake_128(b"block %d" % number).digest(1024) * (block_bytes // 1024)


def main() -> None:
    """Fork a writer for each line."""
    root, block_bytes, max_bytes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    blocks = [(key_of(number), memoryview(content(number, block_bytes))) for number in range(NUM_KEYS)]
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            store = FileStore(root, KvRecords(block_bytes), KvStoreLimits(max_bytes=max_bytes))
            while True:  # there is room for some of them only, so that one is always missing
                for block in blocks:
                    store.write([block])
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()
        os.waitpid(child, 0)
        sys.stdout.write("ended\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
