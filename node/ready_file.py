"""What a node tells whoever has started it, once it takes work. Not here: who waits for it (deploy/child_process.py)."""

from __future__ import annotations

import os
from pathlib import Path

from node.roles import RoleName
from proto import baton_pb2 as pb
from runtime.process import write_atomically


def write_ready_file(path: Path | None, role: RoleName, entry: pb.NodeEntry, *, is_encrypted: bool) -> None:
    """Write what the registry has of the node, and its process, unless nobody wants it."""
    if path is not None:
        scheme = "https://" if is_encrypted else ""
        content = {"node_id": entry.node.name, "role": role, "pid": os.getpid()}
        write_atomically(path, content | {"http": scheme + entry.http_address, "grpc": entry.grpc_address})
